"""The executor: a loop over one rank's list of actions and a table of handlers.

It runs exactly the verified list and knows nothing of layers, buckets or transport; the trainer passes the handlers.
The trace uses the plan's own action text, so predicted and measured timelines overlay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tpengine.activity import Activity
from tpengine.plan import Action, Kind

Handler = Callable[[Action], None]


@dataclass(frozen=True)
class Event:
    """One action as it ran; sub-actions that only start something have `end_ns == begin_ns`.

    Attributes:
        action: the action's text, as in the plan.
        begin_ns, end_ns: time.perf_counter_ns of this process.
    """

    action: str
    begin_ns: int
    end_ns: int


@dataclass
class Trace:
    """What ran when, in order of beginning. Recording costs two clock reads an action."""

    events: list[Event] = field(default_factory=list)

    def mark(self, action: Action) -> None:
        """Record that a sub-action started now."""
        now = time.perf_counter_ns()
        self.events.append(Event(str(action), now, now))

    def span(self, action: Action, begin_ns: int, place: int) -> None:
        """Record an action that began at `begin_ns`, before the sub-actions recorded since `place`."""
        self.events.insert(place, Event(str(action), begin_ns, time.perf_counter_ns()))


class ActionError(RuntimeError):
    """An action failed; the message names rank, action and place in the list."""


class Executor:
    """Runs action lists and keeps the current action in a plain field, for whoever must report a stuck rank (watch.py).

    Args:
        rank: this rank, for messages.
        handlers: what to do for each kind of action.
        trace: where to record; None records nothing.
        activity: told of each action as it begins; the rank's, where something watches it.

    Attributes:
        current: the action under way; None between plans.
    """

    def __init__(
        self,
        rank: int,
        handlers: Mapping[Kind, Handler],
        trace: Trace | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.rank, self.handlers, self.trace = rank, handlers, trace
        self.activity = activity or Activity()
        self.current: Action | None = None

    def check(self, actions: Sequence[Action]) -> None:
        """Refuse, before the first action, a list that has an action without a handler.

        Raises:
            ValueError: names the kinds.
        """
        missing = sorted({action.kind.name for action in actions if action.kind not in self.handlers})
        if missing:
            raise ValueError(f"every action needs a handler: none for {', '.join(missing)}: use another schedule")

    def run(self, actions: Sequence[Action]) -> None:
        """Run `actions` in order.

        Raises:
            ActionError: a handler failed; the cause is attached.
        """
        for place, action in enumerate(actions):
            self.current = action
            self.activity.begin(action)
            begin_ns = time.perf_counter_ns()
            first_event = len(self.trace.events) if self.trace else 0
            try:
                self.handlers[action.kind](action)
            except Exception as error:
                raise ActionError(
                    f"rank {self.rank}: action {action} (place {place} of {len(actions)}) failed: {error!r}"
                ) from error
            if self.trace is not None:
                self.trace.span(action, begin_ns, first_event)
        self.current = None
