"""The host's part of a step: reading its text, and starting what a GPU computes."""

from __future__ import annotations

from tpengine.advice.diagnose.baseline import Baseline, seconds_text
from tpengine.advice.diagnose.changes import evaluated
from tpengine.advice.diagnose.finding import Fault, Finding, percent

# A GPU that computes longer than its host takes to start it falls behind, and the host is done well before it.
_KEEPS_UP = 0.95


def slow_input(baseline: Baseline) -> Finding | None:
    """Return what it costs that a text is read too slowly: every rank waits for the slowest before its first action.

    A thread reads while steps compute. Removed: what is left to wait for. It lies before the plan.
    """
    ranks = baseline.evidence.profile.ranks
    reads = [rank.read for rank in ranks]
    slowest = reads.index(max(reads))
    if reads[slowest] <= 0.0:
        return None
    place = ranks[slowest]
    first = baseline.plan.actions[place.pp][0]
    evidence = (
        f"rank {slowest} reads its micro-batches slower than steps take them: it waits {seconds_text(reads[slowest])} "
        f"of {seconds_text(baseline.step)} for them before {first}, and all ranks wait for it"
    )
    return Finding(
        Fault.SLOW_INPUT,
        reads[slowest],
        evidence,
        "the file of --data.path on a disk of that host that is as fast as memory",
        reads[slowest],
    )


def host_bound(baseline: Baseline) -> Finding | None:
    """Return what it costs that a GPU waits for the host to start its kernels.

    Removed: half of the starts, with micro-batches of twice the size, whose actions take the host as long as before.
    What a GPU computes then takes at least as long as it does now, so this is the most that the change brings.
    """
    config, train = baseline.evidence.config, baseline.evidence.config.train
    issue = {key: action.issue for rank in baseline.ranks for key, action in rank.actions.items()}
    device, host = sum(baseline.seconds.values()), sum(issue.values())
    if config.device != "cuda" or host < _KEEPS_UP * device or train.num_micro_batches % 2:
        return None
    settings = {
        "num_micro_batches": train.num_micro_batches // 2,
        "micro_batch_size": train.micro_batch_size * 2,
    }
    found = evaluated(baseline, settings, settings, {key: seconds / 2 for key, seconds in baseline.seconds.items()})
    if found is None or found.brings <= 0.0:
        return None
    evidence = (
        f"the host takes {percent(host / device)} of the time of F and B to start them, so that the GPU never has work "
        "in advance"
    )
    return Finding(Fault.HOST, found.brings, evidence, f"{found.text()} at most", found.brings)
