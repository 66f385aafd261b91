"""What ranks tell each other before they make process groups: host, GPU, NCCL; and what of it cannot work. No torch.

What hosts tell each other was asked before (hosts.py); this is of ranks, once CUDA has begun on each. All then find the
same mistake, in one line, before any of them waits for another within NCCL, which would say it later and less plainly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpengine.distributed.nccl_limits import LEAST_LEFT, Axes

_NUM_NAMED = 8


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of itself.

    Attributes:
        host: its name.
        network: equal for two ranks only if they share a loopback (launch.network_identity).
        gpu: the GPU's name; empty on a CPU, as are the following.
        card: its identity, also in a container.
        processors: its streaming multiprocessors.
        nccl: NCCL's version; empty without.
        driver: the newest version of CUDA that the driver knows.
        users_limit: processors that the user's environment allows each of NCCL's groups; 0 for no limit.
    """

    host: str
    network: str
    gpu: str = ""
    card: str = ""
    processors: int = 0
    nccl: str = ""
    driver: str = ""
    users_limit: int = 0


def problem_of(facts: Sequence[RankFacts], axes: Axes, processors: Mapping[str, int], reserved: int) -> str:
    """Return what of the ranks' facts cannot work, in one line; empty if nothing is wrong.

    Args:
        facts: by rank.
        axes: of the layout; tp innermost.
        processors: that NCCL may take, by group (nccl_limits.processors_of_groups).
        reserved: that our kernels leave free for it.
    """
    with_gpu = [rank for rank, of in enumerate(facts) if of.gpu]
    if not with_gpu:
        return ""
    if len(with_gpu) < len(facts):
        others = [rank for rank, of in enumerate(facts) if not of.gpu]
        return (
            f"all ranks must compute on one kind of device: {_named(with_gpu, facts)} on GPUs, {_named(others, facts)} "
            "on CPUs: use --device cpu, or hosts that all have GPUs"
        )
    return _versions(facts) or _limits(facts) or _kinds(facts, axes) or _processors(facts, processors, reserved)


def cards(facts: Sequence[RankFacts]) -> set[tuple[str, str]]:
    """Return all ranks' GPUs: the number of a visible GPU does not tell whether it is shared."""
    return {(of.host, of.card) for of in facts}


def _versions(facts: Sequence[RankFacts]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, of in enumerate(facts):
        ranks_of.setdefault(of.nccl, []).append(rank)
    if len(ranks_of) == 1 or len(cards(facts)) < len(facts):
        return ""  # ranks that share a card do not use NCCL
    said = ", ".join(f"{nccl or 'none'} on {_named(ranks, facts)}" for nccl, ranks in ranks_of.items())
    return f"all hosts must have one version of NCCL: {said}: install the same torch and nvidia-nccl on all"


def _limits(facts: Sequence[RankFacts]) -> str:
    ranks_of: dict[int, list[int]] = {}
    for rank, of in enumerate(facts):
        ranks_of.setdefault(of.users_limit, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    said = ", ".join(f"{limit or 'none'} on {_named(ranks, facts)}" for limit, ranks in ranks_of.items())
    return (
        "all ranks must limit NCCL's processors alike, since kernels leave as many free on each: NCCL_MAX_CTAS or "
        f"NCCL_MAX_NCHANNELS is {said}: export the same on all hosts"
    )


def _kinds(facts: Sequence[RankFacts], axes: Axes) -> str:
    for first in range(0, len(facts), axes.tp):
        group = range(first, first + axes.tp)
        ranks_of: dict[str, list[int]] = {}
        for rank in group:
            ranks_of.setdefault(facts[rank].gpu, []).append(rank)
        if len(ranks_of) > 1:
            said = ", ".join(f"{gpu} on {_named(ranks, facts)}" for gpu, ranks in ranks_of.items())
            fewest = min(map(len, ranks_of.values()))
            return (
                f"the GPUs of a tp group must be of one kind, since all wait for the slowest: {said}: start the ranks "
                f"of a kind beside each other, or use --parallel.tp {fewest if axes.tp % fewest == 0 else 1}"
            )
    return ""


def _processors(facts: Sequence[RankFacts], processors: Mapping[str, int], reserved: int) -> str:
    for rank, of in enumerate(facts):
        if reserved and of.processors < reserved + LEAST_LEFT:
            held = ", ".join(f"{name} {num}" for name, num in processors.items())
            return (
                "a GPU must have processors for NCCL's groups and for kernels beside them: "
                f"{of.gpu} of {_named([rank], facts)} has {of.processors}, the groups may hold {reserved} ({held}) and "
                f"kernels need {LEAST_LEFT}: use fewer axes, whole GPUs (no MIG), or NCCL_MAX_CTAS 1"
            )
    return ""


def _named(ranks: Sequence[int], facts: Sequence[RankFacts]) -> str:
    hosts = list(dict.fromkeys(facts[rank].host for rank in ranks))
    return f"{some('rank', ranks)} ({some('host', hosts)})"


def some(what: str, of: Sequence[object]) -> str:
    """Return "ranks 0, 1 and 3 more"."""
    named = ", ".join(map(str, of[:_NUM_NAMED]))
    more = f" and {len(of) - _NUM_NAMED} more" if len(of) > _NUM_NAMED else ""
    return f"{what}{'s' if len(of) > 1 else ''} {named}{more}"
