"""Cases for the planner: how fast this GPU multiplies, copies, exchanges and launches, by size, as plain rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.copies import HostCopies
from tpkernels.fused import on_device
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.norm.kernel import launch_norm
from tpkernels.symmetric.signals import PeerError

from benchmarks.gpu.cases.clock import device_here, host_seconds, medians, settle, write
from benchmarks.harness.timing import PASSED, Spread, interleave
from benchmarks.overlap.ranks import RanksClock, VirtualRanks, load, prepare_environment

_COLUMNS = 4096
_NO_LIMIT = 1 << 60


def matmul_rates(rows: Path, sizes: Sequence[int], rounds: int = 10) -> None:
    """Measure products of all sizes of rows, columns and depth, by torch and by our kernel."""
    device = device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for m in sizes:
        for n in sizes:
            for k in sizes:
                a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
                calls: dict[str, Callable[[], object]] = {
                    "torch": functools.partial(torch.mm, a, b.T),
                    "ours": functools.partial(launch_matmul, a, b.T),
                }
                times = medians(calls, device, rounds)
                speeds = {f"{name}_flops_per_second": 2 * m * n * k / s.median for name, s in times.items()}
                write(rows, f"planner/matmul/{m}x{n}x{k}", {"m": m, "n": n, "k": k, **speeds})


def copies(rows: Path, sizes_bytes: Sequence[int], rounds: int = 10) -> None:
    """Measure copies within the GPU's memory, and between it and pinned memory of the host."""
    device = device_here()
    for num_bytes in sizes_bytes:
        here, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        calls: dict[str, Callable[[], object]] = {
            "within": functools.partial(there.copy_, here),
            "to_host": functools.partial(host.copy_, here, non_blocking=True),
            "from_host": functools.partial(here.copy_, host, non_blocking=True),
        }
        times = medians(calls, device, rounds)
        speeds = {f"{name}_bytes_per_second": num_bytes / s.median for name, s in times.items()}
        write(rows, f"planner/copy/{num_bytes}", {"num_bytes": num_bytes, **speeds})


def links(rows: Path, sizes_bytes: Sequence[int], ranks: Sequence[int], rounds: int = 10) -> int:
    """Measure gathers of shards of all sizes between co-located ranks, by copy engines and by fetch_kernel.

    The ranks share one GPU, so the bytes cross no link: what is new to the planner is the time that a gather takes
    whatever its size, and from which size on a copy engine is faster than the kernel.

    Args:
        rows: a row for each number of ranks and size.
        sizes_bytes: of a rank's shard.
        ranks: numbers of ranks; without a GPU only 1, because ranks that wait for each other cannot run in turns.
        rounds: samples of each way.

    Returns: 1 if a gathered row is wrong.
    """
    prepare_environment()
    device = device_here()
    on_gpu = device.type == "cuda"
    num_wrong = 0
    for world in ranks:
        virtual = VirtualRanks(world, device, None if on_gpu else [HostCopies() for _ in range(world)])
        clock = RanksClock(virtual) if on_gpu else None
        for num_bytes in sizes_bytes:
            calls = {
                name: _Gathers(virtual, num_bytes, limit) for name, limit in (("engine", 0), ("kernel", _NO_LIMIT))
            }
            fields = {"ranks": f"virtual, one {_name_of(device)}", "virtual_ranks": world, "shard_bytes": num_bytes}
            check, samples = PASSED, dict[str, tuple[float, ...]]()
            try:
                for call in calls.values():
                    call.check()
                timers = {
                    name: functools.partial(_gather_seconds, call, clock, (world, num_bytes, name))
                    for name, call in calls.items()
                }
                samples = interleave(timers, rounds=rounds, warmup=1)
                for call in calls.values():
                    call.raise_errors()
            except (PeerError, CallMismatch, AssertionError) as error:
                check, samples = f"failed: {' '.join(str(error).split())}", {}
            for name, seconds in samples.items():
                median = Spread.of(seconds).median
                fields |= {f"{name}_us": 1e6 * median, f"{name}_bytes_per_second": (world - 1) * num_bytes / median}
            write(rows, f"planner/links/{num_bytes}", fields | {"num_samples": rounds}, check)
            num_wrong += check != PASSED
    return int(num_wrong > 0)


class _Gathers:
    """Gathers of one size by all ranks, in arenas of their own.

    Args:
        virtual: the ranks.
        num_bytes: of a rank's shard.
        engine_bytes: the smallest shard that copy engines fetch.
    """

    def __init__(self, virtual: VirtualRanks, num_bytes: int, engine_bytes: int) -> None:
        dtype = torch.bfloat16 if virtual.streams else torch.float16
        columns = min(_COLUMNS, num_bytes // dtype.itemsize)
        num_rows = num_bytes // (columns * dtype.itemsize)
        self._virtual, self._num_tokens = virtual, virtual.world * num_rows
        self._shards = [
            torch.full((num_rows, columns), rank + 1, dtype=dtype, device=virtual.device)
            for rank in range(virtual.world)
        ]
        self._arenas = virtual.arenas(num_bytes)
        for arena in self._arenas:
            arena.engine_bytes = engine_bytes
        load(self.gather, virtual)

    def gather(self) -> list[torch.Tensor]:
        """Return all rows, by rank."""
        return self._virtual.each(
            lambda rank: on_device.gather(self._shards[rank], self._arenas[rank], self._num_tokens, "links")
        )

    def check(self) -> None:
        """Gather once.

        Raises:
            AssertionError: ranks have wrong rows.
            PeerError, CallMismatch: a wait was given up.
        """
        right = torch.cat(self._shards)
        results = self.gather()
        self._virtual.settle()
        self.raise_errors()
        wrong = [str(rank) for rank, found in enumerate(results) if not torch.equal(found, right)]
        assert not wrong, f"ranks {', '.join(wrong)} have wrong rows"

    def raise_errors(self) -> None:
        """Raise what a rank found wrong while it waited."""
        for arena in self._arenas:
            arena.check()


def _gather_seconds(call: _Gathers, clock: RanksClock | None, name: object) -> float:
    if clock is not None:
        return clock.timed(call.gather, name)[0]
    return host_seconds(call.gather, torch.device("cpu"), 1)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def launches(rows: Path, calls: int = 200) -> None:
    """Measure the host's time per launch, of torch's smallest operator, ours, and a replayed graph of ours."""
    device = device_here()
    x = torch.randn(16, 64, device=device)
    every: dict[str, Callable[[], object]] = {
        "torch_add_": functools.partial(x.add_, 0),
        "triton_norm": lambda: launch_norm(x, x[0], None, None, 1e-5, False),
        "triton_matmul": lambda: launch_matmul(x, x.T),
    }
    for name, call in every.items():
        write(rows, f"planner/launch/{name}", {"host_us": 1e6 * host_seconds(call, device, calls)})
    if device.type != "cuda":
        return
    replay = _captured(every["triton_norm"], device)
    write(rows, "planner/launch/graph_of_norm", {"host_us": 1e6 * host_seconds(replay, device, calls)})


def _captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a call that has been made before."""
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
