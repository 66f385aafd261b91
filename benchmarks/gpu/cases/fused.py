"""Cases of fused operators between co-located ranks: the overlap benchmark, its bars alone, the host's time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.gather_kernel import launch_publish

from benchmarks.gpu.cases.clock import device_here, host_seconds, medians, write
from benchmarks.harness.shapes import MODELS, REHEARSED, Model
from benchmarks.overlap.cases import GATHER, SCATTER, Operands
from benchmarks.overlap.gpu import arenas_for, measure_on_gpu
from benchmarks.overlap.ranks import VirtualRanks, load, prepare_environment
from benchmarks.overlap.ways import Fused, Way

_MODELS = {model.name: model for model in (*MODELS, REHEARSED)}


def overlap(rows: Path, model: str, tokens: Sequence[int], ranks: int, rounds: int = 20) -> int:
    """Check and measure the fused operators between co-located ranks; return 1 if a result is wrong."""
    prepare_environment()
    return measure_on_gpu([model], tokens, ranks, rounds, rows)


def host(rows: Path, model: str, tokens: int, ranks: int, calls: int = 50) -> None:
    """Measure the host's time per fused call of one rank.

    All ranks' calls are launched one after the other, and a queue that is full would stop the host. So a few calls are
    timed at a time, and the GPU is awaited in between.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    o = Operands(_MODELS[model], tokens, virtual)
    o.fill(integers=True)
    arenas = arenas_for(o)
    pulled, pushed = (Fused(virtual, arenas, push=push) for push in (False, True))
    every: dict[str, Callable[[], object]] = {
        f"{GATHER}/pulled": lambda: pulled.gather(o.x, o.w_t, GATHER, False),
        f"{GATHER}/pushed": lambda: pushed.gather(o.x, o.w_t, GATHER, False),
        SCATTER: lambda: pulled.scatter(o.h, o.v_t, SCATTER),
    }
    for name, call in every.items():
        load(call, virtual)
        # The first call makes its decision.
        host_seconds(call, virtual.device, 1)
        found = sorted(host_seconds(call, virtual.device, 1) / ranks for _ in range(calls))
        fields: dict[str, Any] = {"model": model, "tokens": tokens, "virtual_ranks": ranks}
        write(rows, f"host/fused/{name}/tokens_{tokens}", fields | {"host_us": 1e6 * found[len(found) // 2]})
        for arena in arenas:
            arena.check()


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


def pulls(rows: Path, ranks: int, calls: int, seconds: float) -> int:
    """Pull shards over and over into poisoned memory, a flag behind each row of tiles; return 1 if a bit is wrong.

    The ranks are co-located in one process, so that a hundred thousand pulls take seconds. protocol.py has processes.
    """
    prepare_environment()
    virtual = _ranks(ranks)
    o = Operands(Model("pulls", 512, 2, 1, 128, 256, 512), 2048, virtual)
    o.fill(integers=True)
    arenas = arenas_for(o)
    for arena in arenas:
        arena.split_bytes = 1
    fused = Fused(virtual, arenas, push=False)
    right = Way(virtual, torch.mm).gather(o.x, o.w_t, GATHER, False)[0]
    wrong = [torch.zeros((), dtype=torch.int64, device=virtual.device) for _ in range(ranks)]

    def poison(rank: int) -> None:
        # Freed at once: the next tensor of these sizes is made of it.
        torch.full_like(o.x.full[rank], torch.nan)

    def count(rank: int) -> None:
        wrong[rank] += (results[rank] != right[rank]).sum()

    virtual.settle()
    load(lambda: fused.gather(o.x, o.w_t, GATHER, False), virtual)
    begin, done = time.monotonic(), 0
    while done < calls and time.monotonic() - begin < seconds:
        virtual.each(poison)
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
