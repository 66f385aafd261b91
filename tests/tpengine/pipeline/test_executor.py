"""Rung: pure. The executor's loop, its trace and its errors."""

from __future__ import annotations

import pytest

from tpengine.pipeline.executor import ActionError, Executor, Handler, Trace
from tpengine.plan import Action, Kind, parse_actions

ACTIONS = parse_actions("0F0 0F1 0B0 0B1[r1 r0] w[r1 r0] CLIP STEP")


def recording(log: list[str]) -> dict[Kind, Handler]:
    return {kind: lambda action: log.append(str(action)) for kind in Kind}


def test_runs_exactly_the_list() -> None:
    log: list[str] = []
    executor = Executor(0, recording(log))
    executor.run(ACTIONS)
    assert log == [str(action) for action in ACTIONS]
    assert executor.current is None


def test_the_current_action_is_in_a_plain_field() -> None:
    seen: list[Action | None] = []
    handlers: dict[Kind, Handler] = {kind: lambda _: seen.append(executor.current) for kind in Kind}
    executor = Executor(0, handlers)
    executor.run(ACTIONS)
    assert seen == list(ACTIONS)


def test_trace_has_the_plans_ids_and_subs_lie_inside_their_action() -> None:
    trace = Trace()
    handlers = recording([])
    handlers[Kind.B] = lambda action: [trace.mark(sub) for sub in action.subs] and None
    Executor(0, handlers, trace).run(ACTIONS)
    names = [event.action for event in trace.events]
    assert names == ["0F0", "0F1", "0B0", "0B1[r1 r0]", "r1", "r0", "w[r1 r0]", "CLIP", "STEP"]
    backward, *subs = trace.events[3:6]
    assert all(backward.begin_ns <= sub.begin_ns <= backward.end_ns for sub in subs)
    assert all(a.end_ns <= b.begin_ns for a, b in zip(trace.events, trace.events[6:], strict=False))


def test_an_error_names_rank_action_and_place() -> None:
    handlers = recording([])

    def fail(_: Action) -> None:
        raise OSError("cable cut")

    handlers[Kind.WAIT] = fail
    executor = Executor(3, handlers)
    with pytest.raises(ActionError, match=r"rank 3: action w\[r1 r0\] \(place 4 of 7\) failed: OSError\('cable cut'\)"):
        executor.run(ACTIONS)
    assert executor.current == ACTIONS[4]


def test_an_action_without_handler_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs a handler: none for B, CLIP, F, STEP, WAIT"):
        Executor(0, {}).check(ACTIONS)
    with pytest.raises(ActionError, match="KeyError"):
        Executor(0, {}).run(ACTIONS)
