"""What a rank of an examination does, in the order of the table: looks at its host, then at what it shares with others.

Facts come first, because they explain why a later look fails. Each look is asked of all ranks at once (together.py);
its answers become findings (looks.py, verdicts.py) on rank 0 alone, which prints them. A look that fails is a finding
that says on which rank and why; the looks behind it that do not need the same groups go on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.launch import Launch
from tpengine.doctor import groups, links, nvml, products, shared_directory, verdicts
from tpengine.doctor.facts import HostFacts, host_facts
from tpengine.doctor.finding import MachineFinding, change, places, unseen
from tpengine.doctor.gpu_facts import gpu_facts
from tpengine.doctor.hosts import MESSAGE_BYTES, clocks_apart, messages_between
from tpengine.doctor.looks import host_numbers, look_at_facts
from tpengine.doctor.measure.member import Member
from tpengine.doctor.measure.sizes import MeasuredSizes
from tpengine.doctor.together import Answer, Together

# The longest that a look may take; nothing here takes a tenth of it on a machine that works.
_SECONDS, _RATES_SECONDS = 120.0, 900.0
# A rank waits so long for another inside a product.
_PEER_SECONDS = 20.0
# Of the memory through which products are exchanged whose results are compared.
_ROOM_BYTES = 1 << 20
# A rank lets go of its connections a moment before it is gone.
_DYING_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    """What is examined.

    Attributes:
        sizes: of what is measured.
        dtype: of rates and products.
        directory: of runs, that all hosts should share.
        passes: how often rates are measured; the middle figures count.
        timed: (tokens, width) of fused products that are timed.
    """

    sizes: MeasuredSizes
    dtype: str
    directory: Path
    passes: int
    timed: tuple[tuple[int, int], ...]


@dataclass
class Record:
    """What is known so far; complete on rank 0.

    Attributes:
        findings: in the order of the table.
        facts: of the ranks that have answered.
        measured: what a machine is made of (planner/machine/found.py): rates by pass, messages, sums, fused, between.
        lost: how a rank was lost, in one line; empty while none is.
    """

    findings: list[MachineFinding] = field(default_factory=list)
    facts: list[HostFacts] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    lost: str = ""


class Examination:
    """One rank's examination.

    Args:
        launch: this rank's place.
        device: on which it computes.
        together: asks all ranks.
        store: where they have met.
        options: what is examined.
        record: what is found; written as it is.
        environ: of the process.
    """

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        together: Together,
        store: Any,
        options: Options,
        record: Record,
        environ: Mapping[str, str],
    ) -> None:
        self._launch, self._device, self._together, self._store = launch, device, together, store
        self._options, self._record, self._environ = options, record, environ
        self._hosts: dict[int, list[int]] = {}
        self._host_of: dict[int, int] = {}
        self._nccl: dist.ProcessGroup | None = None
        self._here: dist.ProcessGroup | None = None

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _ranks_of_a_host(self) -> int:
        """Ranks of each host; 0 if hosts have unequal numbers of them: all ranks must decide alike what to ask."""
        counts = {len(ranks) for ranks in self._hosts.values()}
        return counts.pop() if len(counts) == 1 else 0

    def run(self) -> None:
        """Take every look."""
        self._look_at_host()
        self._look_at_directory()
        if self._launch.world_size > 1:
            self._join()
            self._look_at_hosts()
            if self._ranks_of_a_host > 1:
                self._look_at_exchanges()
                self._look_at_products()
            else:
                why = "each has one rank" if self._ranks_of_a_host else "they have unequal numbers of ranks"
                self._say(unseen("within hosts", why, "torchrun --nproc-per-node 8 ..."))
        else:
            self._say(unseen("between ranks", "one rank alone", "tpengine doctor --nproc 2"))
        self._look_at_rates()

    def _say(self, *findings: MachineFinding) -> None:
        self._record.findings.extend(findings)

    def _ask(
        self, look: str, function: Callable[[], Any], *, seconds: float = _SECONDS, needs_all: bool = False
    ) -> list[Any] | None:
        """Ask all ranks; return their values where no rank failed, else None, and say who failed."""
        answers = self._together.ask(look, function, seconds=seconds, needs_all=needs_all)
        if answers is None:
            reason = self._record.lost or self._together.broken
            self._say(unseen(look, f"not tried: {reason}"))
            return None
        failed = {rank: answer for rank, answer in enumerate(answers) if answer.error}
        if not failed:
            return [answer.value for answer in answers]
        self._say(*failures(look, failed))
        if self._together.is_over:
            gone = [rank for rank, answer in failed.items() if answer.is_gone]
            self._record.lost = f"{places(gone)} {'was' if len(gone) == 1 else 'were'} lost in {look}"
        return None

    def _look_at_host(self) -> None:
        launch = self._launch

        def facts() -> dict[str, Any]:
            gpu = gpu_facts(self._device)
            return host_facts(launch.rank, launch.local_rank, launch.local_world_size, self._environ, gpu=gpu).to_json()

        answers = self._ask("facts", facts)
        if answers is None:
            self._together.is_over = True  # nothing below can be understood without
            return
        everyone = [HostFacts.of_json(answer) for answer in answers]
        numbers = host_numbers(everyone)
        self._host_of = {of.rank: numbers[of.host] for of in everyone}
        for rank, host in self._host_of.items():
            self._hosts.setdefault(host, []).append(rank)
        own = everyone[launch.rank].host
        self._together.know({of.rank: of.pid for of in everyone if of.host == own})
        self._record.facts = everyone
        self._say(*look_at_facts(everyone))
        if len({of.gpu is None for of in everyone}) > 1:
            without = [of.rank for of in everyone if of.gpu is None]
            remedy = "tpengine doctor --device cpu   # on all hosts; or leave these out"
            self._say(change("GPUs", "some ranks have none", remedy=remedy, where=places(without)))
            self._together.broken = "some ranks have no GPU"

    def _look_at_directory(self) -> None:
        firsts = [ranks[0] for ranks in self._hosts.values()]
        writes = self._launch.rank in firsts
        directory = self._options.directory
        tokens = self._ask("name of a mark in the run directory", lambda: secrets.token_hex(4))
        if tokens is None:
            return
        token = tokens[0]
        wrote = self._ask(
            "run directory",
            lambda: shared_directory.leave_mark(directory, token, self._launch.rank) if writes else None,
        )
        seen = self._ask(
            "run directory, seen", lambda: shared_directory.seen_marks(directory, token, firsts) if writes else None
        )
        self._ask("run directory, left", lambda: shared_directory.remove_mark(directory, token, self._launch.rank))
        if wrote is not None and seen is not None:
            free_bytes = min(wrote[first]["free_bytes"] for first in firsts)
            found = {first: seen[first] for first in firsts}
            self._say(*verdicts.judge_directory(str(directory), found, firsts, free_bytes, self._host_of))

    def _join(self) -> None:
        launch, is_one_host = self._launch, len(self._hosts) == 1
        sums = self._ask(
            "gloo",
            lambda: groups.join(launch, self._store, _SECONDS / 2, is_one_host=is_one_host),
            needs_all=True,
        )
        world = launch.world_size
        if sums is not None and set(sums) != {world * (world + 1) // 2}:
            self._say(change("gloo", f"sums of integers are {sums}", remedy="export GLOO_SOCKET_IFNAME=..."))
            self._together.broken = "gloo adds wrong"
        self._here = self._made("groups of hosts", lambda: groups.host_group(self._hosts, self._host_of[launch.rank]))
        cards = {(of.host, of.gpu["uuid"]) for of in self._record.facts if of.gpu}
        if len(cards) == world and dist.is_nccl_available():
            self._nccl = self._made("NCCL", lambda: groups.nccl_group(self._device))
        elif self._is_gpu:
            self._say(unseen("NCCL", "ranks share GPUs", f"tpengine doctor --nproc {len(cards)}"))
        else:
            self._say(unseen("NCCL", "ranks have no GPUs"))

    def _made(self, look: str, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup | None:
        """Return a group that all ranks make; None if one could not."""
        made: list[dist.ProcessGroup] = []

        def keep() -> bool:
            made.append(make())
            return True

        return made[0] if self._ask(look, keep, needs_all=True) is not None else None

    def _look_at_hosts(self) -> None:
        firsts = [ranks[0] for ranks in self._hosts.values()]
        if len(firsts) == 1:
            self._say(unseen("between hosts", "one host", "torchrun --nnodes 2 ... -m tpengine.cli doctor"))
            return
        apart = self._ask("clocks of hosts", lambda: clocks_apart(firsts), needs_all=True)
        if apart is not None:
            self._say(*verdicts.judge_clocks(apart[0], self._host_of))
        ways: list[tuple[str, dist.ProcessGroup | None, torch.device | None]] = [("gloo", None, None)]
        if self._nccl is not None:
            ways.append(("NCCL", self._nccl, self._device))
        for how, group, device in ways:
            pairs = self._neighbours(firsts, how, group, device)
            self._say(*verdicts.judge_network(pairs, any(of.infiniband for of in self._record.facts)))
            if pairs:
                slowest = max(pairs, key=lambda pair: pair["messages"][-1][1])
                self._record.measured["between"] = slowest["messages"]

    def _neighbours(
        self, firsts: Sequence[int], how: str, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> list[dict[str, Any]]:
        """Return messages between each host and the next."""
        following = [*firsts[1:], firsts[0]] if len(firsts) > 2 else list(firsts[1:])
        pairs = []
        for one, other in zip(firsts, following, strict=False):
            answers = self._ask(
                f"{how} between hosts {self._host_of[one]} and {self._host_of[other]}",
                lambda one=one, other=other: messages_between(  # type: ignore[misc]
                    one, other, MESSAGE_BYTES, group=group, device=device
                ),
                needs_all=True,
            )
            if answers is not None:
                hosts = [self._host_of[one], self._host_of[other]]
                wrong = [differs for _, differs in answers if differs]
                pairs.append({"hosts": hosts, "how": how, "messages": answers[one][0], "wrong": wrong})
        return pairs

    def _look_at_exchanges(self) -> None:
        if self._is_gpu:
            self._look_at_links()
            return
        member = Member("cpu", self._options.sizes)
        answers = self._ask("exchanges", lambda: member.exchanges(self._here), seconds=_RATES_SECONDS, needs_all=True)
        if answers is None:
            return
        found, num = answers[0], self._ranks_of_a_host
        self._say(*verdicts.judge_host_exchange(found, num))
        self._record.measured |= {"messages": found["messages"]}
        self._record.measured |= {name: {num: found[name]} for name in ("sums", "fused")}

    def _look_at_links(self) -> None:
        launch, device = self._launch, self._device
        own = self._hosts[self._host_of[launch.rank]]
        here = self._here
        if here is None:
            return
        answers = self._ask("GPU to GPU", lambda: links.pair_rates(own, here, device), needs_all=True)
        if answers is not None:
            refused = sorted({answer["refused"] for answer in answers if answer["refused"]})
            if refused:
                self._say(unseen("GPU to GPU, copies", refused[0], "nvidia-smi topo -p2p r"))
            self._say(*verdicts.judge_pairs(_copied(answers)))
        nccl = self._nccl
        if nccl is None:
            return
        answers = self._ask("GPU to GPU, NCCL", lambda: links.nccl_pairs(own, nccl, device), needs_all=True)
        if answers is not None:
            pairs = [pair for answer in answers for pair in answer]
            self._say(*verdicts.judge_pairs(_sent(pairs)))
            self._record.measured["messages"] = max((pair["messages"] for pair in pairs), key=lambda of: of[-1][1])
        self._look_at_sums(own)

    def _look_at_sums(self, own: Sequence[int]) -> None:
        """Measure NCCL's sums over blocks of 2, 4, ... GPUs of each host at the same time."""
        rates: dict[int, Any] = {}
        for parts in groups.blocks(own):
            size = len(parts[0])
            every = [block for host in self._hosts.values() for block in groups.blocks(host)[len(rates)]]

            def measured(every: Sequence[Sequence[int]] = every) -> Any:
                made = {tuple(ranks): dist.new_group(list(ranks), backend="nccl") for ranks in every}
                group = next(group for ranks, group in made.items() if self._launch.rank in ranks)
                assert isinstance(group, dist.ProcessGroup), "this rank is a member"
                return links.sum_rates(group, self._device)

            answers = self._ask(f"NCCL over {size} GPUs", measured, needs_all=True)
            if answers is None:
                break
            # The slowest block counts: a step waits for it.
            rates[size] = min(answers, key=lambda points: points[-1][1])
        self._say(*verdicts.judge_sums(rates))
        self._record.measured["sums"] = rates

    def _look_at_products(self) -> None:
        here, device, dtype = self._here, self._device, getattr(torch, self._options.dtype)
        if here is None:
            return
        group = here
        if self._is_gpu:
            if self._nccl is None:
                self._say(unseen("fused products", "ranks share GPUs, or NCCL failed"))
                return
            own = self._host_of[self._launch.rank]
            made = self._made("NCCL of hosts", lambda: groups.host_group(self._hosts, own, "nccl"))
            if made is None:
                return
            group = made

        strategy = "fused" if self._is_gpu else "auto"

        def wrong() -> dict[str, Any]:
            comm = Communicator(
                group, arena_bytes=_ROOM_BYTES, device=device, strategy=strategy, timeout_seconds=_PEER_SECONDS
            )
            found = products.wrong_products(comm, device, dtype)
            has_arena = comm.arena is not None or comm.device_arena is not None
            return {"wrong": found, "how": "through shared memory" if has_arena else "by collectives"}

        answers = self._ask("fused products", wrong, needs_all=True)
        if answers is not None:
            found = {rank: answer["wrong"] for rank, answer in enumerate(answers)}
            self._say(*verdicts.judge_products(found, answers[0]["how"]))
        timed = self._ask(
            "fused products, timed",
            lambda: products.gains(device, dtype, self._options.timed, group, strategy),
            needs_all=True,
        )
        if timed is not None:
            slowest = [max(of, key=lambda each: each["fused"]) for of in zip(*timed, strict=True)]
            self._say(*verdicts.judge_gains(slowest))
            if self._is_gpu:
                points = sorted((of["bytes"], of["bytes"] / _longer(of)) for of in slowest)
                self._record.measured["fused"] = {self._ranks_of_a_host: points}

    def _look_at_rates(self) -> None:
        dtype = self._options.dtype
        member = Member(self._device.type, self._options.sizes)

        def told(what: str, measure: Callable[[], Any]) -> Any:
            self._together.tell(what)
            return measure()

        def rates() -> dict[str, Any]:
            found = {
                "rates": {dtype: told("products and operators from memory", lambda: member.rates(dtype))},
                "cached": {dtype: told("products and operators from caches", lambda: member.cached_rates(dtype))},
                "cold": told("operators between which memory is touched", lambda: member.cold_shares(dtype)),
                "copies": told("copies", member.copies),
                "host": told("the host's time of operators", member.host),
            }
            clocks = {"at_work_mhz": nvml.clocks().processors_mhz, "most_mhz": nvml.most_mhz()}
            return {"found": found, "clocks": clocks}

        passes = []
        needs_all = self._launch.world_size > 1
        for number in range(self._options.passes):
            answers = self._ask(f"rates {number + 1}", rates, seconds=_RATES_SECONDS, needs_all=needs_all)
            if answers is None:
                return
            passes.append([answer["found"] for answer in answers])
            clocks = {rank: answer["clocks"] for rank, answer in enumerate(answers)}
        self._record.measured["passes"] = passes
        self._say(*verdicts.judge_rates(passes[-1][0], dtype, is_gpu=self._is_gpu))
        if self._is_gpu:
            self._say(*verdicts.judge_gpu_clocks(clocks))
        else:
            self._say(unseen("GPU clocks, links and launches", "this machine has no GPU"))


def failures(look: str, failed: Mapping[int, Answer]) -> list[MachineFinding]:
    """Return a finding for each way in which a look failed, with the ranks, the cause first."""
    ranks_of: dict[str, list[int]] = {}
    for rank, answer in failed.items():
        ranks_of.setdefault(answer.error, []).append(rank)
    remedy = "tpengine doctor ... 2>&1 | less   # what the rank printed; then that rank's host alone"
    # Others fail as a consequence, later; but a rank that is gone could not say when.
    first = sorted(ranks_of.items(), key=lambda item: min((not failed[r].is_gone, failed[r].seconds) for r in item[1]))
    return [change(look, error, remedy=remedy, where=places(ranks)) for error, ranks in first]


def leave_time() -> None:
    """Wait until what rank 0 has printed stands before what the launcher says."""
    time.sleep(_DYING_SECONDS)


def _longer(of: Mapping[str, float]) -> float:
    """Return what a fused product takes longer than alone, in seconds; never nothing."""
    return float(max(of["fused"] - of["alone"], 0.02 * of["alone"]))


def _copied(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs as verdicts.judge_pairs takes them, of what ranks have read."""
    names = {"engine": "copy engine", "kernel": "kernel"}
    return [
        {
            "ranks": (reader, pair["owner"]),
            "how": how,
            "rate": pair[name][-1][1],
            "latency_s": pair[name][0][0] / pair[name][0][1],
            "wrong": "bytes come wrong" if name in pair["wrong"] else "",
        }
        for name, how in names.items()
        for reader, answer in enumerate(answers)
        for pair in answer["pairs"]
    ]


def _sent(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs as verdicts.judge_pairs takes them, of NCCL's messages."""
    return [
        {
            "ranks": (pair["one"], pair["other"]),
            "how": "NCCL",
            "rate": pair["messages"][-1][0] / pair["messages"][-1][1],
            "latency_s": pair["messages"][0][1],
            "wrong": pair["wrong"],
        }
        for pair in pairs
    ]
