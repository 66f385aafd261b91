"""Rung: pure. Receive slots: few, and never two live tensors in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, Action, Kind, Plan, parse_action, parse_actions, receive_slots
from tpengine.plan.actions import COMPUTE, RECEIVES

NAMES = [*sorted(SCHEDULES), "forward_only"]

BuildPlan = Callable[..., Plan]


def test_slots_of_a_small_list() -> None:
    text = "1RECV_F0 w[1RECV_F0] 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1B0 1RECV_F2 1F1 1B1 1F2 1RECV_B1"
    slots = receive_slots(parse_actions(text))
    assert dict(slots.forward) == {(1, 0): 0, (1, 1): 1, (1, 2): 0}
    assert dict(slots.backward) == {(1, 0): 0, (1, 1): 0}
    assert (slots.num_forward, slots.num_backward) == (2, 1)
    assert slots.slot(parse_action("1RECV_F1")) == 1


def test_split_backward_keeps_both_until_the_weight_half() -> None:
    slots = receive_slots(parse_actions("0RECV_F0 0F0 0RECV_B0 0I0 0RECV_F1 0F1 0RECV_B1 0W0 0I1 0W1"))
    assert (slots.num_forward, slots.num_backward) == (2, 2)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(1, 20))
def test_1f1b_needs_as_many_as_are_live_and_one(build_plan: BuildPlan, p: int, m: int) -> None:
    for rank, actions in enumerate(build_plan("1f1b", p, m).actions):
        slots = receive_slots(actions)
        assert slots.num_forward <= min(p - rank + 1, m) * (rank > 0)
        assert slots.num_backward <= 1


@pytest.mark.parametrize("m", [1, 8])
def test_gpipe_holds_all_and_forward_only_two(build_plan: BuildPlan, m: int) -> None:
    for rank, actions in enumerate(build_plan("gpipe", 3, m).actions):
        assert receive_slots(actions).num_forward == m * (rank > 0)
    for rank, actions in enumerate(build_plan("forward_only", 3, m).actions):
        assert receive_slots(actions).num_forward == min(m, 2) * (rank > 0)


def most_live(actions: Sequence[Action], kind: Kind) -> int:
    """Count, at every position on its own, the tensors received that are still needed: no fewer slots can do."""
    received = [(place, action.piece) for place, action in enumerate(actions) if action.kind is kind]
    uses = [(place, action.piece) for place, action in enumerate(actions) if action.kind in COMPUTE]
    lives = [(begin, max(place for place, piece in uses if piece == own)) for begin, own in received]
    return max((sum(begin <= now <= end for begin, end in lives) for now in range(len(actions))), default=0)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_as_many_as_are_live_at_once(build_plan: BuildPlan, name: str, p: int, m: int, v: int) -> None:
    for actions in build_plan(name, p, m, num_chunks=v).actions:
        slots = receive_slots(actions)
        assert slots.num_forward == most_live(actions, Kind.RECV_F)
        assert slots.num_backward == most_live(actions, Kind.RECV_B)


@pytest.mark.by_default("16-32-4-zbv", *(f"8-20-2-{name}" for name in NAMES))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 5, 2), (4, 8, 2), (4, 12, 3), (8, 20, 2), (16, 32, 4)])
def test_early_receives_cost_a_slot_a_chunk(build_plan: BuildPlan, name: str, p: int, m: int, v: int) -> None:
    """Against receives posted where they are read, and a gradient, but more in interleaved's cool-down."""
    for actions in build_plan(name, p, m, num_chunks=v).actions:
        late = receive_slots(posted_late(actions))
        chunks = {action.chunk for action in actions if action.kind in COMPUTE}
        slots = receive_slots(actions)
        assert late.num_forward <= slots.num_forward <= late.num_forward + len(chunks)
        if name != "interleaved":
            assert late.num_backward <= slots.num_backward <= late.num_backward + 1


def posted_late(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the compute actions of a list, with each receive right before the action that reads it."""
    receives = {action for action in actions if action.kind in RECEIVES}
    late: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE and action.kind is not Kind.W:
            kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
            late += [t for t in [Action(kind, *action.piece)] if t in receives]
        if action.kind in COMPUTE:
            late.append(action)
    return tuple(late)


def test_immutable() -> None:
    slots = receive_slots(parse_actions("1RECV_F0 1F0 1B0"))
    with pytest.raises(TypeError):
        slots.forward[1, 0] = 1  # type: ignore[index]
