"""Rung: pure. Receive slots: few, and never two live tensors in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, Plan, parse_action, parse_actions, receive_slots

BuildPlan = Callable[..., Plan]


def test_slots_of_a_small_list() -> None:
    text = "1RECV_F0 w[1RECV_F0] 1F0 X[1SEND_F0 1RECV_F1] 1RECV_B0 1B0 1RECV_F2 1F1 1B1 1F2 1RECV_B1"
    slots = receive_slots(parse_actions(text))
    assert dict(slots.forward) == {(1, 0): 0, (1, 1): 1, (1, 2): 0}
    assert dict(slots.backward) == {(1, 0): 0, (1, 1): 0}
    assert (slots.num_forward, slots.num_backward) == (2, 1)
    assert slots.slot(parse_action("1RECV_F1")) == 1


def test_split_backward_keeps_both_until_the_weight_half() -> None:
    slots = receive_slots(parse_actions("0RECV_F0 0F0 0RECV_B0 0I0 0RECV_F1 0F1 0RECV_B1 0W0 0I1 0W1"))
    assert (slots.num_forward, slots.num_backward) == (2, 2)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(2, 16), st.integers(1, 64))
def test_1f1b_needs_as_many_as_are_live_and_one(build_plan: BuildPlan, p: int, m: int) -> None:
    for rank, actions in enumerate(build_plan("1f1b", p, m).actions):
        slots = receive_slots(actions)
        assert slots.num_forward <= min(p - rank + 1, m) * (rank > 0)
        assert slots.num_backward <= 1


@pytest.mark.parametrize("m", [1, 8])
def test_gpipe_holds_all_and_forward_only_one(build_plan: BuildPlan, m: int) -> None:
    for rank, actions in enumerate(build_plan("gpipe", 3, m).actions):
        assert receive_slots(actions).num_forward == m * (rank > 0)
    for rank, actions in enumerate(build_plan("forward_only", 3, m).actions):
        assert receive_slots(actions).num_forward == (rank > 0)


def test_immutable() -> None:
    slots = receive_slots(SCHEDULES["1f1b"](1, 1)[0])
    with pytest.raises(TypeError):
        slots.forward[0, 0] = 1  # type: ignore[index]
