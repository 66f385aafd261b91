"""`python -m benchmarks.run host`: the host's time of every fused call and of every launch of a step, without a GPU.

Kernels are bound by triton and launched on a GPU that does nothing (harness/still_gpu.py). An eager layer is bound by
the host where this time is longer than the kernels'. Sizes are small, because the host's work does not depend on them:
one piece, one split per shard.

Numbers of launches and copies are exact, and a test asserts them. Times depend on the machine.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import CONTROL_BYTES, NUM_GENERATIONS, DeviceArena
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.scatter import matmul_scatter, matmul_then_gather, scatter_and_gather
from tpkernels.launch import INTERPRETED, Target, observed
from tpkernels.symmetric.cuda_memory import VirtualMemory

from benchmarks.harness.journal import append
from benchmarks.harness.rows import make_row
from benchmarks.harness.still_gpu import StillCopies, still_gpu, still_streams, why_not_still
from benchmarks.launches.kernel_time import kernel_times

# Per rank: tokens, features, and columns of a weight. Whole tiles, rows that TMA reads.
_TOKENS, _WIDTH, _COLUMNS = 64, 64, 64
_GENERATION_BYTES = 1 << 20


@dataclass(frozen=True)
class Rank:
    """The first rank of a group whose other ranks never come."""

    comm: Communicator
    num_tokens: int
    x: torch.Tensor
    wide: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, world: int, strategy: str) -> Rank:
        memory = VirtualMemory.allocate(world, CONTROL_BYTES + 4096 + NUM_GENERATIONS * _GENERATION_BYTES, "cpu")[0]
        record = torch.zeros(8, dtype=torch.int32)
        copies = StillCopies()
        arena = DeviceArena(memory, record, copies, _GENERATION_BYTES, "of no ranks", range(world), timeout_seconds=1.0)
        comm = Communicator(None, strategy="push" if strategy == "push" else "fused")
        arena.engine_bytes = 0 if strategy == "engine" else 1 << 60
        comm.size, comm.device_arena = world, arena
        tokens = world * _TOKENS
        x, wide, weight = (torch.zeros(rows, _WIDTH, dtype=torch.bfloat16) for rows in (_TOKENS, tokens, _COLUMNS))
        return cls(comm, tokens, x, wide, weight)


@contextlib.contextmanager
def _rank_for(world: int, strategy: str) -> Iterator[Rank]:
    """Yield a rank; with "plain" its collectives go through a process group that does nothing."""
    if strategy != "plain":
        yield Rank.of(world, strategy)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        # As few numbers as can be: the product is a CPU's.
        x, wide, weight = (torch.zeros(rows, _WIDTH) for rows in (1, world, _COLUMNS))
        yield Rank(Communicator(dist.group.WORLD), world, x, wide, weight)
    finally:
        dist.destroy_process_group()


def _gather(rank: Rank, *, keep: bool) -> None:
    gather_matmul(rank.x, [rank.weight.T], rank.comm, rank.num_tokens, "all_gather_matmul", keep=keep)


def _scatter(rank: Rank) -> None:
    matmul_scatter([(rank.wide, rank.weight.T)], rank.comm, "matmul_reduce_scatter")


def _scatter_and_gather(rank: Rank) -> None:
    scatter_and_gather([(rank.wide, rank.weight)], rank.x, rank.comm, rank.num_tokens, "all_gather_matmul")


def _all_reduce(rank: Rank) -> None:
    matmul_then_gather(rank.wide, rank.weight.T, rank.comm, "matmul_all_reduce")


# Each call by name: how rows are gathered, and the call. "kernel" and "engine" fetch, small shards and large ones;
# "plain" is a product of torch's and collectives.
CALLS: Mapping[str, tuple[str, Callable[[Rank], None]]] = MappingProxyType(
    {
        "gather_matmul/kernel": ("kernel", lambda rank: _gather(rank, keep=False)),
        "gather_matmul/kernel/keep": ("kernel", lambda rank: _gather(rank, keep=True)),
        "gather_matmul/engine": ("engine", lambda rank: _gather(rank, keep=False)),
        "gather_matmul/engine/keep": ("engine", lambda rank: _gather(rank, keep=True)),
        "gather_matmul/push": ("push", lambda rank: _gather(rank, keep=False)),
        "gather_matmul/push/keep": ("push", lambda rank: _gather(rank, keep=True)),
        "matmul_scatter": ("kernel", _scatter),
        "scatter_and_gather/kernel": ("kernel", _scatter_and_gather),
        "scatter_and_gather/engine": ("engine", _scatter_and_gather),
        "gather_matmul/plain": ("plain", lambda rank: _gather(rank, keep=False)),
        "matmul_scatter/plain": ("plain", _scatter),
        "matmul_then_gather/plain": ("plain", _all_reduce),
        "matmul_then_gather/kernel": ("kernel", _all_reduce),
        "matmul_then_gather/engine": ("engine", _all_reduce),
    }
)


@dataclass(frozen=True)
class Options:
    """The host's time of fused calls and of a step's launches, on a GPU that does nothing."""

    call: tuple[str, ...] = tuple(CALLS)
    """Calls."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Tensor-parallel ranks, 2 to 8."""
    preset: str = "llama_1b"
    """The model of whose step on one GPU each kernel's launch is timed; empty for none."""
    calls: int = 300
    """Timed calls of each."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


@dataclass
class _Copies(TorchDispatchMode):
    """Counts torch's copies."""

    number: int = field(default=0)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket is torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


def counted(name: str, world: int) -> tuple[Counter[str], int]:
    """Return how often a call launches each kernel, and how many copies it makes."""
    strategy, call = CALLS[name]
    launches: Counter[str] = Counter()
    look = observed(Target("cuda", 90), lambda kernel, *_: launches.update([kernel.fn.__name__]))
    with _rank_for(world, strategy) as rank, look, still_streams(), _Copies() as copies:
        call(rank)
    return launches, copies.number


def host_us(name: str, world: int, num_calls: int) -> float:
    """Return the time of one call in microseconds; use it within `still_gpu`.

    It is that of the fastest call: other processes make calls slower, never faster.
    """
    strategy, call = CALLS[name]
    seconds = []
    with _rank_for(world, strategy) as rank:
        # Compile first.
        for _ in range(4):
            call(rank)
        gc.collect()
        gc.disable()
        try:
            for _ in range(num_calls):
                begin = time.perf_counter()
                call(rank)
                seconds.append(time.perf_counter() - begin)
        finally:
            gc.enable()
    return min(seconds) * 1e6


def main(options: Options) -> int:
    """Time and count every call, and time every kernel's launch; print tables; return 0."""
    if unknown := [name for name in options.call if name not in CALLS]:
        raise ValueError(f"--call must be of {', '.join(CALLS)}: got {', '.join(unknown)}: leave it out for all")
    if wrong := [world for world in options.ranks if not 2 <= world <= 8]:
        raise ValueError(f"--ranks must be 2 to 8, as groups with an arena: got {wrong[0]}: use 8")
    if INTERPRETED:
        raise ValueError("kernels must be bound as for a GPU: TRITON_INTERPRET is set, which interprets: unset it")
    if reason := why_not_still():
        raise ValueError(f"kernels must be bound without a GPU: {reason}")
    torch.set_num_threads(1)
    if options.call:
        _time_calls(options)
    if options.preset:
        _time_launches(options)
    return 0


def _time_calls(options: Options) -> None:
    table = Table(title="host time of a fused call, without the driver's", box=box.SIMPLE)
    for column in ("call", "ranks", "us", "launches", "copies"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name in options.call:
        for world in options.ranks:
            launches, copies = counted(name, world)
            with still_gpu():
                time_us = host_us(name, world, options.calls)
            fields: dict[str, Any] = {"ranks": world, "host_us": time_us}
            fields |= {"launches": launches.total(), "copies": copies, "kernels": dict(sorted(launches.items()))}
            table.add_row(name, str(world), f"{time_us:.1f}", str(launches.total()), str(copies))
            _write(options, f"host/{name}", fields)
    Console().print(table)


def _time_launches(options: Options) -> None:
    times = kernel_times(options.preset, options.calls)
    table = Table(title=f"host time of a launch in a step of {options.preset}, without the driver's", box=box.SIMPLE)
    for column in ("kernel", "variants", "arguments", "us", "triton's way, us"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for one in times:
        table.add_row(
            one.kernel, str(one.num_variants), str(one.num_arguments), f"{one.host_us:.1f}", f"{one.triton_us:.1f}"
        )
        _write(options, f"host/{options.preset}/{one.kernel}", one._asdict())
    medians = {name: median(getattr(one, name) for one in times) for name in ("host_us", "triton_us")}
    table.add_row("median", "", "", f"{medians['host_us']:.1f}", f"{medians['triton_us']:.1f}")
    _write(options, f"host/{options.preset}", {"num_kernels": len(times), **medians})
    Console().print(table)


def _write(options: Options, case: str, fields: dict[str, Any]) -> None:
    if options.out is not None:
        append(options.out, make_row(case, threads_per_rank=1, fields=fields))
