"""Rung: gloo ranks, interpreter. What is timed, how often, and with what in the caches; no time is asserted.

What only a GPU checks: that its kernels are timed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from support.ranks.rank_pool import RankPool

from tpengine.doctor.measure.clock import CallClock, DeviceCallClock, LaunchClock
from tpengine.doctor.measure.exchanges import message_seconds, sum_rates
from tpengine.doctor.measure.operators import _core, operator_rates, update_rates
from tpengine.doctor.measure.products import cold_shares
from tpengine.doctor.measure.sizes import TINY
from tpengine.planner.machine.measured import OPERATORS


def test_shares_of_memorys_cost_are_those_of_matrices_in_turns() -> None:
    """Times of the clocks: 5 from memory, 1 from caches, and in turns 1, 3, 9 by the number of matrices."""
    numbers: list[int] = []

    class Told(CallClock):
        def of_call(self, calls: Any, **_: Any) -> float:
            numbers.append(len(calls))
            return self.seconds if len(calls) == 1 else {2: 1.0, 4: 3.0, 8: 9.0}[len(calls)]

    cold, warm = (Told(torch.device("cpu"), seconds, 4) for seconds in (5.0, 1.0))
    found = cold_shares(cold, warm, torch.float32, (4, 8, 8), [2 * 256, 4 * 256, 8 * 256])
    assert numbers == [1, 1, 2, 4, 8]
    assert found == [(512.0, 0.01), (1024.0, 0.5), (2048.0, 1.0)]
    # Where caches gain nothing to speak of, all comes from memory; ranks time the same calls as ever.
    numbers.clear()
    found = cold_shares(Told(torch.device("cpu"), 1.05, 4), warm, torch.float32, (4, 8, 8), [512])
    assert found == [(512.0, 1.0)] and numbers == [1, 1, 2]


class Event:
    """An event of CUDA that writes down what happens."""

    happened: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.happened.append("record")

    def synchronize(self) -> None:
        self.happened.append("wait")

    def elapsed_time(self, end: Event) -> float:
        return 10.0


def test_what_runs_on_a_gpu_and_its_host_have_clocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stand around the call behind work that lasts while the host starts it; the host's clock does not wait."""
    cpu, happened = torch.device("cpu"), Event.happened
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("cover"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    assert DeviceCallClock(cpu, 0.0, 4)._timed(lambda: happened.append("call"), (), is_cold=False) == 0.010
    assert happened == ["cover", "record", "call", "record", "wait"]
    happened.clear()
    times = iter([1.0, 1.5])
    monkeypatch.setattr(time, "perf_counter", lambda: (happened.append("look"), next(times))[1])
    assert LaunchClock(cpu, 0.0, 4)._timed(lambda: happened.append("call"), (), is_cold=False) == 0.5
    assert happened == ["wait", "look", "call", "look", "wait"]


@pytest.mark.slow
def test_every_kernel_that_a_gpu_would_time_runs(interpreters: RankPool) -> None:
    """Interpreted: attention and AdamW of another dtype are other functions there than on a CPU."""
    assert interpreters.run(rates_by_kernels, 1) == [True]


def rates_by_kernels() -> bool:
    """Whether the engine's operators, as on a GPU, have rates; attention is that of the host."""
    clock, dtype = CallClock(torch.device("cpu"), 0.0, 4), torch.float32
    sizes = replace(TINY, seqs=(16,))
    found = operator_rates(clock, dtype, sizes, 0.0) | update_rates(clock, torch.bfloat16, sizes.updated)
    qkv = torch.randn(16, 3 * 2 * 64)
    by_kernels, by_host = (_core(torch.device(kind), 1, 2, 2, 16) for kind in ("cuda", "cpu"))
    heads = torch.stack([x.unflatten(1, (2, 64)).transpose(0, 1) for x in qkv.chunk(3, 1)])
    expected = by_host(heads.reshape(16, -1))[0].transpose(0, 1).flatten(1)
    assert torch.allclose(by_kernels(qkv), expected, atol=1e-5)
    return {*OPERATORS} - {"prepare"} <= found.keys()


def test_sums_are_timed_cold_and_messages_as_they_come(ranks: RankPool) -> None:
    assert ranks.run(evictions, 2) == [(0, 10), (0, 10)]


def evictions() -> tuple[int, int]:
    """How often caches were emptied for messages, and for the sums of one size: ten rounds."""
    clock, counts = CallClock(torch.device("cpu"), 0.0, 4), []
    for measure in (message_seconds, sum_rates):
        with patch.object(CallClock, "evict", autospec=True) as evict:
            measure(clock, [64])
        counts.append(evict.call_count)
    return counts[0], counts[1]
