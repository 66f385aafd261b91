"""Rung: pure and gloo ranks. What a device arena does on its host; what its kernels do: test_kernels.py of fused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.copies import has_published
from tpkernels.exchange.device_arena import DeviceArena


class Stream:
    """A stream of a GPU: whom it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other)


def check_streams() -> None:
    arena = DeviceArena.open(dist.group.WORLD, 1 << 13, torch.device("cpu"))
    first, second, captured = Stream(), Stream(), Stream()
    state = SimpleNamespace(stream=first, captures=False)

    def call_on(stream: Stream, captures: bool = False) -> None:
        state.stream, state.captures = stream, captures
        arena.begin("all_gather_matmul", "pulls", 4, 4, torch.float32, 0)

    with pytest.MonkeyPatch.context() as patch:
        call_on(first)  # of a CPU: no stream
        patch.setattr(arena, "device", torch.device("cuda", 0))
        patch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
        for stream in (first, first, second, second, first):
            call_on(stream)
        assert first.awaited == [second] and second.awaited == [first]
        call_on(captured, captures=True)
        assert not captured.awaited
        call_on(second)
        assert second.awaited == [first, captured]


def test_calls_on_another_stream_come_after_those_before(ranks: RankPool) -> None:
    ranks.run(check_streams, 1)


def test_what_is_published_is_seen_without_a_look_at_the_clock() -> None:
    """A clock is read between two polls of one flag, never before the first."""

    def unasked() -> float:
        raise AssertionError("the clock was read")

    # Flag and number of a call, both 7: later than epoch 5.
    arena = SimpleNamespace(clock=unasked, timeout_seconds=1.0, word=lambda index: torch.tensor([7]))
    assert has_published(cast(DeviceArena, arena), 0, 5, 7)
