"""A record as programs: which stream each entry is on, what it waits for, and what it holds of the GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpkernels.processors import Budget

from support.nccl.machine import PROCESSORS
from support.nccl.program import COMPUTE, COPIES, HostWait, Launch, Program, Word
from support.nccl.record import Began, Called, Computed, Entry, HostWaited, Joined, Kernel, Record, Waited
from tpengine.config import ParallelConfig
from tpengine.distributed.mesh import Shape
from tpengine.distributed.nccl_limits import processors_of_groups, reserved_processors

# What NCCL takes at most where nothing limits it.
_MOST = 32
# Tiles of a product that is large enough to use every processor.
_MANY = 1 << 20


@dataclass(frozen=True)
class Holdings:
    """How many processors who holds.

    Attributes:
        total: of a GPU.
        limits: at most of an operation of NCCL, by the name of the group: from its beginning, so while it waits for its
            partners too. NCCL chooses by the size; here it is drawn.
        of_products: a plain product has programs for: it is persistent, and needs them all in turn.
        of_fused: a fused product has programs for: those that it has draw all tiles, and wait for other ranks.
    """

    total: int = PROCESSORS
    limits: Mapping[str, int] = field(default_factory=dict)
    of_products: int = PROCESSORS
    of_fused: int = PROCESSORS - 1

    @classmethod
    def as_engine(cls, parallel: ParallelConfig, kv_replicas: int = 1) -> Holdings:
        """Return what the engine lets NCCL hold in a layout, and leaves free for it and for copies."""
        limits = processors_of_groups(Shape.of(parallel), kv_replicas, spans_hosts=False)
        budget = Budget(PROCESSORS, reserved_processors(limits))
        return cls(limits=limits, of_fused=budget.programs(_MANY, beside_copies=True))

    def at_most(self, group: str) -> int:
        """Return the most processors that an operation of a group takes."""
        return self.limits.get(group) or _MOST


# Nothing is scarce: what hangs then, hangs by its order.
PLENTY = Holdings(total=1 << 20)


@dataclass(frozen=True)
class Durations:
    """Draws how long everything takes, over three orders of magnitude, and how many processors operations hold."""

    seed: int

    def processors(self, group: str, number: int, most: int) -> int:
        """Return what the operation of this number holds on every member."""
        return random.Random(f"{self.seed} {group} {number}").randint(1, most)

    def of(self, rank: int, place: int) -> float:
        """Return the duration of an entry."""
        return 10.0 ** random.Random(f"{self.seed} {rank} {place}").uniform(-2, 1)


def programs_of(
    records: Sequence[Record], holdings: Holdings = PLENTY, seed: int = 0, *, connected: bool = False
) -> list[list[Word]]:
    """The words of each rank.

    Args:
        holdings: who holds how many processors.
        seed: of the durations.
        connected: whether communicators and connections exist before the first entry.
    """
    durations = Durations(seed)
    return [_Written(rank, holdings, durations, connected).of(record) for rank, record in enumerate(records)]


class _Written:
    """Writes the program of one rank."""

    def __init__(self, rank: int, holdings: Holdings, durations: Durations, connected: bool) -> None:
        self._rank, self._holdings, self._durations = rank, holdings, durations
        self._program = Program(rank, connected)
        self._began = Began("starting")
        self._called: dict[int, int] = {}
        self._copies: list[int] = []
        # Of the newest gather, the flags by which fused kernels know its parts.
        self._gather: tuple[object, ...] = ()

    def of(self, record: Record) -> list[Word]:
        for place, entry in enumerate(record):
            self._write(entry, self._durations.of(self._rank, place))
        return self._program.words

    def _write(self, entry: Entry, seconds: float) -> None:
        action, program = self._began.action, self._program
        if isinstance(entry, Began):
            self._began = entry
        elif isinstance(entry, Computed):
            program.compute(action, seconds, self._holdings.of_products if entry.by_product else 1)
        elif isinstance(entry, Called):
            self._called[entry.key] = self._call(entry, seconds)
        elif isinstance(entry, Waited):
            program.wait(action, self._called[entry.key])
        elif isinstance(entry, HostWaited):
            program.add(HostWait(action))
        elif isinstance(entry, Kernel):
            self._kernel(entry, seconds)
        elif isinstance(entry, Joined):
            for launch in self._copies[-1:]:
                program.wait(action, launch)

    def _call(self, entry: Called, seconds: float) -> int:
        group, operation = f"{entry.name} {entry.group}", entry.calls[0].operation
        number = self._program.number("drawn", group)
        processors = self._durations.processors(group, number, self._holdings.at_most(entry.name))
        if not entry.is_message:
            return self._program.collective(self._began.action, operation, group, entry.members, seconds, processors)
        messages = [(call.operation == "send", call.peer or 0) for call in entry.calls]
        return self._program.messages(
            self._began.action,
            group,
            entry.members,
            messages,
            seconds,
            processors,
            self._began.content,
            self._began.expects,
        )

    def _kernel(self, kernel: Kernel, seconds: float) -> None:
        """Launch a kernel of fused/README.md: what it tells other ranks, and what it waits for."""
        action, members = self._began.action, kernel.members
        # Each kernel on every rank tells the same as many times: calls are numbered.
        number = self._program.number(kernel.name, kernel.how, *members)
        own = (kernel.name, *members, number)
        all_of = tuple((*own, member) for member in members if member != self._rank)
        mine = ((*own, self._rank),)
        fused = self._holdings.of_fused
        if kernel.name == "publish_kernel":
            self._gather = own
            self._add(kernel, Launch(action, kernel.name, COMPUTE, seconds, fused, 1, ends=mine))
        elif kernel.name in ("fetch_kernel", "wait_kernel"):
            published = tuple((*self._gather, member) for member in members if member != self._rank)
            there = ((*self._gather, "fetched", self._rank),)
            self._add(kernel, Launch(action, kernel.name, COPIES, seconds, 1, 1, ends=there, awaits=published))
        elif kernel.name == "gather_matmul_kernel" and kernel.how == "pull":
            there = ((*self._gather, "fetched", self._rank),)
            self._add(kernel, Launch(action, kernel.name, COMPUTE, seconds, fused, 1, awaits=there))
        elif kernel.name == "counts_kernel":
            self._add(kernel, Launch(action, kernel.name, COMPUTE, seconds, 1, 1, begins=mine, awaits=all_of))
        elif kernel.name in ("matmul_scatter_kernel", "take_kernel", "return_kernel") or kernel.how == "push":
            # It sends what it has for the others, then waits for theirs.
            self._add(kernel, Launch(action, kernel.name, COMPUTE, seconds, fused, 1, begins=mine, awaits=all_of))
        else:
            self._add(kernel, Launch(action, kernel.name, COMPUTE, seconds, fused, 1))

    def _add(self, kernel: Kernel, launch: Launch) -> None:
        assert kernel.by_copies == (launch.stream == COPIES), kernel
        place = self._program.add(launch)
        if kernel.by_copies:
            self._copies.append(place)
