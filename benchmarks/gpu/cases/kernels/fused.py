"""Cases of fused operators between co-located ranks: what they are made of, and the host's time of a call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.kernels import scatter_kernel
from tpkernels.fused.kernels.gather_kernel import launch_publish
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.symmetric.signals import PeerError

from benchmarks.gpu.cases.clock import device_here, host_seconds, medians, on_device, write
from benchmarks.gpu.cases.kernels.engines import copies_beside_a_full_gpu
from benchmarks.harness.shapes import MODELS, REHEARSED, Model
from benchmarks.harness.still_gpu import why_not_still
from benchmarks.harness.timing import Spread, interleave
from benchmarks.launches import host_time
from benchmarks.overlap.cases import GATHER, SCATTER, Operands
from benchmarks.overlap.co_located import arenas_for
from benchmarks.overlap.ranks import (
    TIMEOUT_SECONDS,
    Clock,
    RanksClock,
    VirtualRanks,
    load,
    matmul_on,
    prepare_environment,
)
from benchmarks.overlap.ways import Fused, Own, Reference, Way

_GRAPH_TIMEOUT_SECONDS = 0.5
_MODELS = {model.name: model for model in (*MODELS, REHEARSED)}


def host(rows: Path, model: str, tokens: int, ranks: int, calls: int = 50, graph: bool = False) -> int:
    """Measure the host's time per fused call of one rank; return 1 if a graph's branches do not run at the same time.

    All ranks' calls are launched one after the other, and a queue that is full would stop the host. So one call of
    every rank is timed at a time, and the GPU is awaited in between.

    Args:
        rows: where the rows go.
        model, tokens, ranks: sizes, and the number of co-located ranks.
        calls: samples.
        graph: replay a CUDA graph of the ranks' calls instead. Its branches wait for each other, and CUDA does not
            promise that branches run at the same time: then a row says so, after one short wait.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    o = Operands(_MODELS[model], tokens, virtual)
    o.fill(integers=True)
    arenas = arenas_for(o, _GRAPH_TIMEOUT_SECONDS if graph else TIMEOUT_SECONDS)
    pulled, pushed = (Fused(virtual, arenas, push=push) for push in (False, True))
    gather = functools.partial(pulled.gather, o.x, o.w_t, GATHER, False)
    # Shards of one size are fetched in one way only, so both are forced.
    every: dict[str, Callable[[], object]] = {
        f"{GATHER}/pulled_by_kernel": gather,
        f"{GATHER}/pulled_by_engine": gather,
        f"{GATHER}/pushed": functools.partial(pushed.gather, o.x, o.w_t, GATHER, False),
        SCATTER: functools.partial(pulled.scatter, o.h, o.v_t, SCATTER),
    }
    for name, call in every.items():
        by_engine = name.endswith("engine")
        _fetch_by(arenas, engine=by_engine)
        load(call, virtual)
        # The first call makes its decision.
        host_seconds(call, virtual.device, 1)
        fields: dict[str, Any] = {"model": model, "tokens": tokens, "virtual_ranks": ranks, "by_engine": by_engine}
        row = f"host/{'fused_graph' if graph else 'fused'}/{name}/tokens_{tokens}"
        timed = call
        if graph:
            timed = _captured(call, virtual)
            timed()
            virtual.settle()
            try:
                for arena in arenas:
                    arena.check()
            except PeerError as error:
                # No call of these arenas runs any more.
                write(rows, row, fields, f"failed: branches of one graph wait for each other: {error}")
                return 1
        median = Spread.of([host_seconds(timed, virtual.device, 1) / ranks for _ in range(calls)]).median
        write(rows, row, fields | {"host_us": 1e6 * median})
        for arena in arenas:
            arena.check()
    return 0


def _fetch_by(arenas: Sequence[DeviceArena], *, engine: bool) -> None:
    """Let copy engines fetch shards of any size, or kernels."""
    for arena in arenas:
        arena.engine_bytes = 0 if engine else 1 << 60


def _captured(call: Callable[[], object], virtual: VirtualRanks) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a call that all ranks have made before."""
    virtual.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in virtual.streams:
            stream.wait_stream(main)
        call()
        for stream in virtual.streams:
            main.wait_stream(stream)
    return graph.replay


def publish(rows: Path, tokens: Sequence[int], hidden: int, rounds: int = 20) -> int:
    """Measure publish_kernel alone, against a copy of the same bytes; return 1 if what it publishes is wrong.

    One rank publishes and nobody reads, so nothing waits: two ranks' memories are enough.
    """
    prepare_environment()
    virtual = _ranks(2)
    wrong = 0
    for num_tokens in tokens:
        dtype = torch.bfloat16 if virtual.streams else torch.float16
        x = torch.randn(num_tokens, hidden, device=virtual.device).to(dtype)
        arena = virtual.arenas(x.numel() * x.element_size())[0]
        arena.processors = None
        copy = torch.empty_like(x)
        launch = functools.partial(_publish, x, arena)
        launch()
        got = arena.block(0, arena.generation, x.shape, x.dtype)
        check = "passed" if torch.equal(got, x) else f"failed: {int((got != x).sum())} elements are not x's"
        wrong |= check != "passed"
        calls: dict[str, Callable[[], object]] = {"publish": launch, "copy": functools.partial(copy.copy_, x)}
        times = medians(calls, virtual.device, rounds)
        moved = 2 * x.numel() * x.element_size()
        fields: dict[str, Any] = {"tokens": num_tokens, "hidden": hidden}
        for name, spread in times.items():
            fields |= {f"{name}_us": 1e6 * spread.median, f"{name}_bytes_per_second": moved / spread.median}
        write(rows, f"publish/tokens_{num_tokens}", fields, check)
    return wrong


def own_bars(
    rows: Path,
    depths: Sequence[int],
    tokens: int,
    hidden: int,
    ranks: int,
    tiles: Sequence[Sequence[Any]],
    rounds: int = 10,
) -> None:
    """Time the scattering matmul without any wait, with forced tiles, beside plain matmuls of the same shape.

    What it takes longer is the price of its stores into slots and of the fence behind each tile.

    Args:
        rows: where the rows go.
        depths: what is summed over, K.
        tokens, hidden: rows and columns of the products.
        ranks: co-located ranks.
        tiles: block_m, block_n, block_k, group_m, num_warps, num_stages of each.
        rounds: samples of each way.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    clock: Clock = RanksClock(virtual) if virtual.streams else _HostTime()
    for depth in depths:
        dtype = torch.bfloat16 if virtual.streams else torch.float16
        o = Operands(Model(f"depth_{depth}", hidden, 1, 1, 128, depth, 128), tokens, virtual, dtype)
        o.fill(integers=False)
        plain = {
            "torch": Way(virtual, torch.mm),
            "kernel": Way(virtual, functools.partial(matmul_on, virtual.processors)),
        }
        calls: dict[str, Callable[[], object]] = {
            name: functools.partial(way.scatter, o.h, o.v_t, SCATTER) for name, way in plain.items()
        }
        arenas = []
        for numbers in tiles:
            # Of its own: an arena makes a launch that it knows again, whatever tile is asked for.
            of_tile = arenas_for(o)
            arenas += of_tile
            own = Own(virtual, of_tile)
            calls["x".join(map(str, numbers))] = functools.partial(_with_tile, MatmulConfig(*numbers), own, o)
        for call in calls.values():
            load(call, virtual)
        timers = {name: functools.partial(_seconds, clock, call, (depth, name)) for name, call in calls.items()}
        samples = interleave(timers, rounds=rounds, warmup=1)
        for arena in arenas:
            arena.check()
        times = {f"tile_{name}_us": 1e6 * Spread.of(seconds).median for name, seconds in samples.items()}
        write(rows, f"own_bars/depth_{depth}", {"tokens": tokens, "hidden": hidden, "virtual_ranks": ranks, **times})


def _seconds(clock: Clock, call: Callable[[], object], name: object) -> float:
    return clock.timed(call, name)[0]


def _with_tile(config: MatmulConfig, own: Own, o: Operands) -> object:
    """Scatter with a tile that no size chooses."""
    with patch.object(scatter_kernel, "exchange_config", lambda *_, **__: config):
        return own.scatter(o.h, o.v_t, SCATTER)


class _HostTime:
    """The clock of a rehearsal: calls wait for their own work."""

    def timed(self, call: Callable[[], Any], name: object = None) -> tuple[float, Any]:
        """Return the seconds of a call, and what it returned."""
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result


def what_copies(rows: Path, model: str, tokens: int, ranks: int) -> int:
    """Record one gather by copy engines, and write all that it runs; then whether copies need processors.

    Returns:
        1 if what should occupy every processor did not; engines.py says how that is found.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    o = Operands(_MODELS[model], tokens, virtual)
    o.fill(integers=True)
    arenas = arenas_for(o)
    _fetch_by(arenas, engine=True)
    fused = Fused(virtual, arenas, push=False)

    def gather() -> object:
        return fused.gather(o.x, o.w_t, GATHER, True)

    load(gather, virtual)
    gather()
    virtual.settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        gather()
        virtual.settle()
    for arena in arenas:
        arena.check()
    times: dict[str, list[float]] = {}
    for event in on_device(recorded):
        times.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    for place, (name, spans) in enumerate(sorted(times.items())):
        fields = {"what": name[:120], "num_calls": len(spans), "total_us": sum(spans), "virtual_ranks": ranks}
        write(rows, f"what_copies/{place}", fields)
    return copies_beside_a_full_gpu(rows, virtual)


def host_alone(rows: Path) -> int:
    """Measure the host's time, launches and copies of every fused call, as `benchmarks.run host` does."""
    if reason := why_not_still():
        write(rows, "host/alone", {"left_out": reason})
        return 0
    return host_time.main(host_time.Options(out=rows))


def pulls(rows: Path, ranks: int, calls: int, seconds: float) -> int:
    """Pull shards over and over into poisoned memory, a flag behind each row of tiles; return 1 if a bit is wrong.

    Copy engines and kernels fetch in turn. The ranks are co-located in one process, so that a hundred thousand pulls
    take seconds. protocol.py has processes.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    o = Operands(Model("pulls", 512, 2, 1, 128, 256, 512), 2048, virtual)
    o.fill(integers=True)
    arenas = arenas_for(o)
    for arena in arenas:
        arena.split_bytes = 1
    fused = Fused(virtual, arenas, push=False)
    right = Reference(virtual, exchanges=False).gather(o.x, o.w_t, GATHER, False)[0]
    wrong = [torch.zeros((), dtype=torch.int64, device=virtual.device) for _ in range(ranks)]

    def poison(rank: int) -> None:
        # Freed at once: the next tensor of these sizes is made of it.
        torch.full_like(o.x.full[rank], torch.nan)

    def count(rank: int) -> None:
        wrong[rank] += (results[rank] != right[rank]).sum()

    virtual.settle()

    for engine in (True, False):
        _fetch_by(arenas, engine=engine)
        load(lambda: fused.gather(o.x, o.w_t, GATHER, False), virtual)
    begin, done = time.monotonic(), 0
    while done < calls and time.monotonic() - begin < seconds:
        virtual.each(poison)
        _fetch_by(arenas, engine=done % 2 == 1)
        results = fused.gather(o.x, o.w_t, GATHER, False)[0]
        virtual.each(count)
        done += 1
        # Before the launches that may wait fill a queue.
        if done % 8 == 0:
            virtual.settle()
            for arena in arenas:
                arena.check()
    virtual.settle()
    found = sum(int(number) for number in wrong)
    check = f"failed: {found} elements of {done} pulls are wrong" if found else "passed"
    per_call_us = 1e6 * (time.monotonic() - begin) / max(done, 1)
    write(rows, f"pulls/ranks_{ranks}", {"num_calls": done, "per_call_us": per_call_us}, check)
    return int(found > 0)


def _publish(x: torch.Tensor, arena: DeviceArena) -> None:
    generation, call = arena.begin("publish", "publishes", len(x), x.shape[1], x.dtype, 0)
    launch_publish(x, arena, generation, call)


def _ranks(num_ranks: int) -> VirtualRanks:
    device = device_here()
    copies = None if device.type == "cuda" else [HostCopies() for _ in range(num_ranks)]
    return VirtualRanks(num_ranks, device, copies)
