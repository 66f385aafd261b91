"""Rung: pure. Generators list every micro-batch once each way, in order, and can finish."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, Action, Kind, format_actions, forward_only, simulate


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.integers(1, 64))
def test_training_schedules(name: str, num_ranks: int, num_microbatches: int) -> None:
    lists = SCHEDULES[name](num_ranks, num_microbatches)
    assert len(lists) == num_ranks
    for rank, actions in enumerate(lists):
        for kind in (Kind.F, Kind.B):
            in_order = [Action(kind, rank, microbatch) for microbatch in range(num_microbatches)]
            assert [action for action in actions if action.kind is kind] == in_order
        assert len(actions) == 2 * num_microbatches
    timeline = simulate(lists)
    assert timeline.makespan == 3 * (num_microbatches + num_ranks - 1)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 16), st.integers(1, 64))
def test_forward_only(num_ranks: int, num_microbatches: int) -> None:
    lists = forward_only(num_ranks, num_microbatches)
    for rank, actions in enumerate(lists):
        assert actions == tuple(Action(Kind.F, rank, i) for i in range(num_microbatches))
    assert simulate(lists).peak_live_activations == (1.0,) * num_ranks


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        ("1f1b", 0, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        ("1f1b", 1, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        ("1f1b", 2, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
        ("gpipe", 1, "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"),
    ],
)
def test_lists_of_three_ranks(name: str, rank: int, text: str) -> None:
    assert format_actions(SCHEDULES[name](3, 4)[rank]) == text


def test_fewer_microbatches_than_ranks() -> None:
    assert [format_actions(actions) for actions in SCHEDULES["1f1b"](4, 2)] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


@pytest.mark.parametrize("generator", [*SCHEDULES.values(), forward_only])
def test_bad_arguments(generator: object) -> None:
    assert callable(generator)
    with pytest.raises(ValueError, match="num_ranks of at least 1: got 0, use 1"):
        generator(0, 1)
    with pytest.raises(ValueError, match="num_microbatches of at least 1: got -2, use 1"):
        generator(1, -2)


def test_table_is_immutable() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = forward_only  # type: ignore[index]
