"""Rung: pure. Virtual ranks' arenas know each other; their clock, on streams and events that are not real.

Only a GPU shows that launches begin together, and that no rank holds what another needs (test_co_located.py).
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import CONTROL_BYTES, NUM_GENERATIONS
from tpkernels.launch import Target, observed, run
from tpkernels.symmetric.signals_kernel import LIMIT_NS, LINE_WORDS, MAX_WORLD, RANK, STATE, TABLE, WORLD

from benchmarks.harness.shapes import MODELS, Model
from benchmarks.overlap import ranks as overlap_ranks
from benchmarks.overlap.cases import Operands
from benchmarks.overlap.co_located import arenas_for
from benchmarks.overlap.ranks import RanksClock, VirtualRanks, load

TINY = Model("tiny", 24, 4, 2, 16, 20, 96)


def ranks_on(device: str, world: int) -> VirtualRanks:
    return VirtualRanks(world, torch.device(device), [HostCopies() for _ in range(world)])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_arenas_of_virtual_ranks_know_each_other(world: int) -> None:
    arenas = ranks_on("cpu", world).arenas(5000 * world)
    addresses = [arena.memory.addresses[arena.rank] for arena in arenas]
    assert len(set(addresses)) == world
    for rank, arena in enumerate(arenas):
        state = arena.control[STATE * LINE_WORDS :].tolist()
        assert (state[RANK], state[WORLD]) == (rank, world) and state[LIMIT_NS : LIMIT_NS + 2] != [0, 0]
        assert arena.processors == max(4 // world, 1), "interpreted, there are four"
        table = arena.memory.block(rank, 4 * TABLE * LINE_WORDS, (MAX_WORLD,), torch.int64).tolist()
        assert table == addresses + [0] * (MAX_WORLD - world)
        for generation in range(NUM_GENERATIONS):
            assert arena.offset_of(generation) >= CONTROL_BYTES
            slot = arena.block(0, generation, (arena.slot_bytes,), torch.uint8, (world - 1) * arena.slot_bytes)
            assert arena.slot_bytes >= 4096 and slot.fill_(rank).eq(rank).all()
        arena.check()
    assert all(int(arena.control[STATE * LINE_WORDS + RANK]) == arena.rank for arena in arenas), "nothing overwritten"


@pytest.mark.parametrize(("model", "tokens", "world"), [(TINY, 10, 3), (MODELS[0], 512, 4), (MODELS[2], 16384, 8)])
def test_every_exchange_fits_into_one_piece(model: Model, tokens: int, world: int) -> None:
    with observed(Target("cuda", 90), lambda *_: None):
        o = Operands(model, tokens, ranks_on("meta", world))
        arena = arenas_for(o)[0]
    assert arena.slot_bytes >= -(-tokens // world) * model.hidden * 2


class Gpu:
    """Streams and events that are not real: what was recorded and waited for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        self.happened: list[str] = []
        self.started = False
        happened, gpu = self.happened, self

        class Event:
            def __init__(self, name: str) -> None:
                self.name = name

            def record(self, stream: Any = None) -> None:
                happened.append(f"record {self.name}")

            def query(self) -> bool:
                return gpu.started

            def synchronize(self) -> None:
                happened.append("wait")

            def elapsed_time(self, end: Any) -> float:
                return 2.0

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                happened.append(f"{self.name} after {event.name}")

            def wait_stream(self, stream: Any) -> None:
                happened.append(f"{self.name} after {stream.name}")

            def record_event(self) -> Event:
                return Event(f"all of {self.name}")

        names = iter(("start", "end"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(next(names)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
        self.ranks = ranks_on("cpu", world)
        self.ranks.streams = [Stream(f"rank {i}") for i in range(world)]  # type: ignore[misc]
        monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(zero_=lambda: happened.append("flush")))
        self.clock = RanksClock(self.ranks)


def test_every_stream_begins_after_the_flushes_and_the_clock_stops_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 2)
    # The host takes 5 ms, a flush 2.
    times = iter([1.0, 1.005, 2.0, 2.005])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    call = lambda: gpu.happened.append("call")  # noqa: E731
    assert gpu.clock.timed(call, "bar")[0] == 0.002
    assert gpu.happened.index("call") > overlap_ranks.MOST_FLUSHES
    gpu.happened.clear()
    assert gpu.clock.timed(call, "bar") == (0.002, None)
    begins = ["record start", "rank 0 after start", "rank 1 after start"]
    ends = ["main after rank 0", "main after rank 1", "record end", "wait"]
    assert gpu.happened == [*["flush"] * 5, *begins, "call", *ends]


def test_a_sample_that_began_without_the_host_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 2)
    times = itertools.count(1.0, 0.005)  # the host takes 5 ms each time
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    gpu.clock.timed(lambda: None, "bar")  # the first sample measures that 5 flushes suffice
    gpu.happened.clear()
    lengths: list[int] = []

    def call() -> str:
        lengths.append(gpu.happened.count("flush"))
        gpu.happened.clear()
        gpu.started = len(lengths) < 3
        return f"call {len(lengths)}"

    assert gpu.clock.timed(call, "bar") == (0.002, "call 3")
    assert lengths == [5, 10, 20]

    def late() -> None:
        gpu.started = True

    with pytest.raises(AssertionError, match="longer than flushes"):
        gpu.clock.timed(late, "bar")


def test_kernels_are_loaded_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Compiled:
        @property
        def run(self) -> str:
            loaded.append("loaded")
            return "launcher"

    class Kernel:
        def warmup(self, x: int, *, grid: tuple[int, ...], num_warps: int, num_stages: int) -> Compiled:
            loaded.append(f"compiled for {x}, grid {grid}, {num_warps} warps")
            return Compiled()

    ranks = ranks_on("cpu", 2)
    load(lambda: pytest.fail("there is no GPU"), ranks)
    ranks.streams = ["a stream"]  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: loaded.append("settled"))
    load(lambda: run(Kernel(), (5,), 7, num_warps=4), ranks)
    assert loaded[:2] == ["compiled for 7, grid (5,), 4 warps", "loaded"] and loaded[-1] == "settled"
