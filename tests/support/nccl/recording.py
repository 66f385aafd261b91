"""Records what ranks of a run do, one rank after another, over torch's fake backend; also fused kernels' launches.

What a rank's host does is noted by its real code: calls of torch.distributed and waits for them, what the executor says
it begins, launches of fused kernels where tensor-parallel GPUs would have symmetric memory (`launch.observed`, as if
for an H100), and reads of device tensors. Whatever else torch computes is noted as computed.

What is not there: the size of anything. A fused kernel writes zeros.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import _disable_current_modes
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import CopiedArea, Fetch
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.launch import Target, observed
from tpkernels.symmetric.cuda_memory import VirtualMemory
from tpkernels.symmetric.wait_kernels import launch_wait

from support.nccl.record import Began, Called, Computed, Entry, HostWaited, Joined, Kernel, Record, Section, Waited
from support.ranks.fake_ranks import Call, Recorder, fake_rank
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.distributed.mesh import Communicators
from tpengine.layout.decided import Decided
from tpengine.observe.activity import Activity
from tpengine.plan import Action
from tpengine.plan.actions import RECEIVES, SENDS, counterpart
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer
from tpengine.training import step_batch

CPU = torch.device("cpu")
HOPPER = Target("cuda", 90)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_GENERATION_BYTES = 1 << 16
# What these read are the host paths' own numbers; on a GPU kernels read them.
_HOST_PATHS = "/tpkernels/ops/"


# What kernels write, and tables that one writes and others read.
_WRITTEN, _TABLES = ("p_y", "p_full", "p_rows", "p_dweights"), ("p_segments", "p_offsets", "p_spilled")


@dataclass
class Noting(Recorder):
    """Notes everything that the machine runs, not the calls alone."""

    entries: Record = field(default_factory=list)
    _works: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _num_operations: int = 0
    _batch: list[Call] | None = None
    _by_copies: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "alltoall_base_" and not args[1].numel():
            # Others' rows are taken to be as many as this rank's, and the fake backend refuses some of none.
            args = (args[0], args[0].clone(), args[2], args[3], args[3], *args[5:])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self._called(dist.Work.unbox(result[-1] if isinstance(result, tuple) else result))
        elif _launches(func):
            self.computed(by_product=func.overloadpacket.__name__ in _PRODUCTS)
        return result

    def computed(self, *, by_product: bool) -> None:
        """Note a computation; one entry for all up to the next of another kind."""
        if self.entries and isinstance(self.entries[-1], Computed):
            by_product |= self.entries[-1].by_product
            self.entries.pop()
        self.entries.append(Computed(by_product))

    def _called(self, work: Any) -> None:
        call = self.calls[-1]
        if self._batch is not None:
            self._batch.append(call)
        else:
            self._num_operations += 1
            self.entries.append(Called(self._num_operations, _name_of(call), (call,)))
        # The work is kept, so that no other gets its identity.
        self._works[id(work)] = self._num_operations, work

    def batch(self, operations: list[Any], plain: Callable[[list[Any]], Any]) -> Any:
        """Note the messages of a batch as one operation, as NCCL runs them."""
        self._batch = []
        self._num_operations += 1
        works = plain(operations)
        self.entries.append(Called(self._num_operations, _name_of(self._batch[0]), tuple(self._batch)))
        self._batch = None
        return works

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Note a split, which all ranks of the parent make together."""
        group = super().split_group(*args, **kwargs)
        self._num_operations += 1
        self.entries.append(Called(self._num_operations, "default_pg", (self.calls[-1],)))
        return group

    def waited(self, work: Any, *_: Any) -> bool:
        """Note that the compute stream waits for a work."""
        self.entries.append(Waited(self._works[id(work)][0]))
        return True

    def began(self, what: object) -> None:
        """Note an action."""
        content = str(counterpart(what)) if isinstance(what, Action) and what.kind in SENDS else ""
        expects = str(what) if isinstance(what, Action) and what.kind in RECEIVES else ""
        self.entries.append(Began(str(what), content, expects))

    def launched(
        self, arenas: Mapping[int, tuple[int, ...]], kernel: Any, arguments: Sequence[Any], options: Mapping
    ) -> None:
        """Note a kernel of the ranks whose arena it is given; what it would write is zero."""
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        with _disable_current_modes():
            for name in (*_WRITTEN, *(_TABLES if kernel.fn.__name__ == "counts_kernel" else ())):
                if isinstance(named.get(name), Tensor):
                    named[name].zero_()
        if "control" not in named:
            self.computed(by_product=False)
            return
        how = str(options.get("HOW", ""))
        self.entries.append(Kernel(kernel.fn.__name__, how, arenas[named["control"]], self._by_copies))

    @contextmanager
    def on_copies(self) -> Iterator[None]:
        """What is launched meanwhile is on the copy engine's stream."""
        self._by_copies = True
        yield
        self._by_copies = False

    def begin_section(self, name: str) -> None:
        """Begin a part of the run."""
        self.entries.append(Section(name))


class NotedActivity(Activity):
    """Tells the record what a rank begins."""

    def __init__(self, noting: Noting) -> None:
        super().__init__()
        self._noting = noting

    def begin(self, what: object, *, timed: bool = True) -> None:
        """See Activity."""
        super().begin(what, timed=timed)
        self._noting.began(what)


class NotedCopies:
    """A copy engine that launches what StreamCopies does, and copies nothing."""

    def __init__(self, noting: Noting) -> None:
        self._noting, self._is_under_way = noting, False

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        """See Copies."""
        with self._noting.on_copies():
            for fetch in fetches:
                if fetch.peer != arena.rank:
                    launch_wait(arena, fetch.peer, 1, generation, call)
        self._is_under_way = True

    def launch(self, kernel: Callable[[], None], target: Tensor) -> None:
        """See Copies."""
        with self._noting.on_copies():
            kernel()
        self._is_under_way = True

    def join(self) -> None:
        """See Copies."""
        if self._is_under_way:
            self._noting.entries.append(Joined())
        self._is_under_way = False

    def reset(self) -> None:
        """See Copies."""


@contextmanager
def noted_rank(rank: int, world: int, config: Config) -> Iterator[Noting]:
    """Be one rank of a run over NCCL, and note what it does."""
    noting = Noting()
    with fake_rank(rank, world, noting, splits=True), pytest.MonkeyPatch.context() as patch:
        batch = dist.batch_isend_irecv
        patch.setattr(dist, "batch_isend_irecv", lambda operations: noting.batch(operations, batch))
        patch.setattr(FakeWork, "wait", lambda work, *args: noting.waited(work, *args))
        for name in ("tolist", "item", "cpu"):
            patch.setattr(Tensor, name, _noted_read(noting, getattr(Tensor, name)))
        # A stage in the middle reads nothing, and hears only itself: that somebody has read.
        report = step_batch.Report
        patch.setattr(step_batch, "Report", lambda *said: report(*(said or (1, 0, 24))))
        for module in ("tpengine.pipeline.preload", "tpengine.training.train_step"):
            patch.setattr(f"{module}.must_preload", lambda group: dist.get_world_size(group) > 1)
        if config.parallel.tp_comm == "plain":
            yield noting
            return
        of = Communicators.of
        arenas: dict[int, tuple[int, ...]] = {}

        def open_arena(comm: Communicator, strategy: str) -> None:
            if comm.group is not None and comm.size > 1:
                members = dist.get_process_group_ranks(comm.group)
                comm.device_arena, comm.strategy = _arena(comm, members, noting), strategy
                arenas[comm.device_arena.address] = tuple(members)

        def with_kernels(*args: Any) -> Communicators:
            comms = of(*args)
            open_arena(comms.tp, "fused")
            if comms.ep is None or not config.parallel.moe_load:
                return comms
            if comms.ep is not comms.tp:
                open_arena(comms.ep, "plain")
            return replace(comms, row_load=config.parallel.moe_load)

        patch.setattr(Communicators, "of", with_kernels)
        with observed(HOPPER, lambda kernel, _, args, options: noting.launched(arenas, kernel, args, options)):
            yield noting


def _noted_read(noting: Noting, read: Callable[..., Any]) -> Callable[..., Any]:
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _HOST_PATHS not in sys._getframe(1).f_code.co_filename:
            noting.entries.append(HostWaited())
        return read(tensor, *args, **kwargs)

    return noted


def _arena(comm: Communicator, members: Sequence[int], noting: Noting) -> DeviceArena:
    memory = VirtualMemory.allocate(comm.size, 2 * CONTROL_BYTES + 2 * _GENERATION_BYTES, CPU)[comm.rank]
    record = torch.zeros(8, dtype=torch.int32)
    return DeviceArena(memory, record, NotedCopies(noting), _GENERATION_BYTES, comm.name, members, timeout_seconds=1.0)


@functools.cache
def _launches(operator: Any) -> bool:
    """Return whether an operator of torch computes: it neither makes a view nor only memory."""
    is_view = any(of.alias_info is not None and not of.alias_info.is_write for of in operator._schema.returns)
    return not is_view and "empty" not in operator.overloadpacket.__name__


def _name_of(call: Call) -> str:
    """Return what the group is for, as who made it has described it."""
    group = next(group for group, name in _world.pg_names.items() if name == call.group)
    return str(group.group_desc).removeprefix("mesh_")


def record_run(config: Config) -> list[Record]:
    """Connect, train two steps, evaluate and sample between them, on every rank of a run in turn.

    Call it in a worker of the pool of ranks.
    """
    parallel = config.parallel
    assert parallel.tp and parallel.pp and parallel.dp
    corpus, world = open_corpus(config), parallel.tp * parallel.pp * parallel.dp
    records = []
    for rank in range(world):
        with noted_rank(rank, world, config) as noting:
            noting.begin_section("connect")
            decided = Decided(row_load=config.parallel.moe_load)
            trainer = Trainer(config, corpus, CPU, activity=NotedActivity(noting), decided=decided)
            for step in range(2):
                noting.begin_section(f"step {step}")
                trainer.step.run(step)
                noting.begin_section("evaluate")
                held_out_loss(trainer.state)
                sample(trainer.state, [1, 2], 1)
            records.append(noting.entries)
            trainer.close()
            del trainer
    return records


def entries_of(record: Record, kind: type[Entry]) -> list[Any]:
    """Return the entries of one kind."""
    return [entry for entry in record if isinstance(entry, kind)]
