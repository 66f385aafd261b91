"""The executor: a loop over one rank's list of actions, with a table of handlers.

It runs exactly the verified list and knows nothing of layers, buckets or transport; the trainer passes the handlers.
The trace records the plan's own actions, so that predicted and measured timelines can be compared (observe/records.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tpengine.observe.activity import Activity
from tpengine.plan import Action, Kind

Handler = Callable[[Action], None]


class Clock(Protocol):
    """Takes the moments of a trace. A GPU's moments can only be converted to times later (runs/meter.py)."""

    def now(self) -> Any:
        """Return this moment."""

    def ns(self, moment: Any) -> int:
        """Return a moment's time in nanoseconds, as time.perf_counter_ns counts."""


class HostClock:
    """The clock of this process's CPU; on Linux all processes of the host read the same one."""

    def now(self) -> int:
        """See Clock."""
        return time.perf_counter_ns()

    def ns(self, moment: int) -> int:
        """See Clock."""
        return moment


@dataclass(frozen=True)
class Event:
    """One action as it ran. For a sub-action, which only starts something, `end_ns == begin_ns`.

    Attributes:
        action: the action's text, as in the plan.
        begin_ns, end_ns: times of the trace's clock.
    """

    action: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Awaited:
    """One thing that a WAIT lists: a transfer or a reduction.

    Attributes:
        action: its text, as in the plan.
        begin_ns, end_ns: when waiting for it began and ended: the WAIT's time for it alone.
        was_complete: whether it was complete when waiting began. On a GPU the host asks earlier than the GPU gets
            there, so that False does not mean that the GPU waited.
        done_ns: when it was complete, if its transport knows; never after `end_ns`.
    """

    action: str
    begin_ns: int
    end_ns: int
    was_complete: bool
    done_ns: int | None


class Trace:
    """Records what ran when. It reads the clock twice per action; texts and times are made when they are asked for.

    Args:
        clock: default that of this process.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or HostClock()
        self._ran: list[tuple[Action, Any, Any]] = []
        self._waited: list[tuple[Action, Any, Any, bool, int | None]] = []

    @property
    def events(self) -> list[Event]:
        """What ran, ordered by begin; the sub-actions that an action started follow it."""
        ns = self._clock.ns
        return [Event(str(action), ns(begin), ns(end)) for action, begin, end in self._ran]

    @property
    def awaited(self) -> list[Awaited]:
        """What was waited for, in order."""
        ns = self._clock.ns
        return [
            Awaited(str(action), ns(begin), ns(end), complete, None if done is None else min(done, ns(end)))
            for action, begin, end, complete, done in self._waited
        ]

    def now(self) -> Any:
        """Return the clock's moment."""
        return self._clock.now()

    @property
    def num_events(self) -> int:
        """The number of events so far."""
        return len(self._ran)

    def mark(self, action: Action) -> None:
        """Record that a sub-action started now."""
        now = self._clock.now()
        self._ran.append((action, now, now))

    def span(self, action: Action, begin: Any, place: int) -> None:
        """Record an action that ran from `begin` until now, in front of the sub-actions recorded since `place`."""
        self._ran.insert(place, (action, begin, self._clock.now()))

    def waited(self, action: Action, begin: Any, was_complete: bool, done_ns: int | None = None) -> None:
        """Record that the wait for what `action` started lasted from `begin` until now."""
        self._waited.append((action, begin, self._clock.now(), was_complete, done_ns))


class ActionError(RuntimeError):
    """An action failed. The message names the rank, the action and its place in the list."""


class Executor:
    """Runs lists of actions.

    Args:
        rank: this rank, for messages.
        handlers: what to do for each kind of action.
        trace: where to record; None records nothing.
        activity: told of each action as it begins, so that the watch can report a stuck rank (watch.py).

    Attributes:
        current: the action that is running; None between plans.
        trace: as given; may be changed between plans.
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
        """Refuse a list that has an action without a handler; call it before the first action.

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
        trace = self.trace
        for place, action in enumerate(actions):
            self.current = action
            self.activity.begin(action)
            begin, first_event = (trace.now(), trace.num_events) if trace is not None else (None, 0)
            try:
                self.handlers[action.kind](action)
            except Exception as error:
                raise ActionError(
                    f"rank {self.rank}: action {action} (place {place} of {len(actions)}) failed: {error!r}"
                ) from error
            if trace is not None:
                trace.span(action, begin, first_event)
        self.current = None
