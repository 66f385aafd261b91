"""Rung: host. What a clock records, and in which order; what one contestant overwrites the next has again.

No time is asserted. Only a GPU shows that its clock works as called: here its events are not real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.shapes import Model
from benchmarks.kernels import timing as kernel_timing
from benchmarks.kernels.cases.cases import (
    DIRECTIONS,
    Contestant,
    Draw,
    Shape,
)
from benchmarks.kernels.timing import CudaClock, HostClock, Operands, Timed, measure_ceilings

TINY = Model("tiny", 64, 4, 2, 16, 48, 96)
SHAPE = Shape(TINY, 64, torch.float32, "cpu")


def test_what_one_contestant_overwrites_the_next_has_again() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def spoiled(x: Tensor) -> Tensor:
        class Spoil(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                seen.append((x.detach().clone(), slopes[0].clone()))
                y = 2 * x
                x.detach().zero_()
                return y

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                dy.zero_()
                return torch.zeros_like(dy)

        return Spoil.apply(x)

    inputs, slopes = {"x": Draw(SHAPE, 0).normal(3, 4)}, [torch.ones(3, 4)]
    before = inputs["x"].detach().clone()
    contestants = [Contestant(spoiled, overwrites=("x",), overwrites_slopes=True), Contestant(spoiled)]
    operands = Operands(inputs, slopes, contestants)
    for contestant in contestants:
        for direction in DIRECTIONS:
            Timed(contestant, operands, direction, "cpu").seconds()
    assert len(seen) == 6
    for x, slope in seen:
        assert torch.equal(x, before) and torch.equal(slope, torch.ones(3, 4))


def test_a_backward_pass_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built outside the measured time, in the contestant's context."""
    happened: list[str] = []

    class Clock(HostClock):
        def seconds(self, call: Callable[[], object]) -> float:
            happened.append("timed")
            return super().seconds(call)

    class Entered:
        def __enter__(self) -> None:
            happened.append("enter")

        def __exit__(self, *_: object) -> None:
            happened.append("leave")

    def function(x: Tensor) -> Tensor:
        happened.append("forward")
        return x.square()

    monkeypatch.setattr(kernel_timing, "HostClock", Clock)
    operands = Operands({"x": torch.ones(3, requires_grad=True)}, [torch.ones(3)], [])
    for direction, order in (
        ("forward", ["enter", "timed", "forward", "leave"]),
        ("backward", ["enter", "forward", "timed", "leave"]),
    ):
        happened.clear()
        timed = Timed(Contestant(function, context=Entered), operands, direction, "cpu")
        timed.seconds()
        timed.seconds()
        assert happened == 2 * order


def test_a_short_call_is_called_several_times_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x

    for seconds, expected in ((19e-6, 10), (21e-6, 1)):
        monkeypatch.setattr(HostClock, "seconds", lambda self, call, s=seconds: (call(), s)[1])
        timed = Timed(Contestant(function), Operands({"x": torch.ones(1)}, [], []), "forward", "cpu")
        timed.warm_up()
        calls.clear()
        assert timed.seconds() == pytest.approx(seconds) and len(calls) == expected


def test_the_clock_of_a_gpu_flushes_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time decides how often: 25 ms of launching behind flushes of 10 ms."""
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 10.0

    class Buffer:
        def zero_(self) -> None:
            happened.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel_timing, "flush_buffer", Buffer)
    clock = CudaClock()
    times = iter([1.0, 1.025])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock.learn(lambda: None)
    happened.clear()
    assert clock.seconds(lambda: happened.append("call")) == 0.010
    assert happened == [*["flush"] * 5, "record", "call", "record", "wait"]


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings("cpu", torch.float32, samples=1)
    assert set(ceilings) == {"copy", "matmul"} and all(speed > 0 for speed in ceilings.values())
