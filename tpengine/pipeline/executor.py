"""The executor: a loop over one rank's list of actions and a table of handlers.

It runs exactly the verified list and knows nothing of layers, buckets or transport; the trainer passes the handlers.
The trace uses the plan's own actions, so predicted and measured timelines overlay (observe/records.py).
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
    """Moments of a trace. A GPU's clock gives moments that are times only later (clocks.py)."""

    def now(self) -> Any:
        """This moment."""

    def ns(self, moment: Any) -> int:
        """A moment in nanoseconds of time.perf_counter_ns."""


class HostClock:
    """The clock of this process's CPU; on Linux that of all processes of the host."""

    def now(self) -> int:
        """As Clock."""
        return time.perf_counter_ns()

    def ns(self, moment: int) -> int:
        """As Clock."""
        return moment


@dataclass(frozen=True)
class Event:
    """One action as it ran; sub-actions that only start something have `end_ns == begin_ns`.

    Attributes:
        action: the action's text, as in the plan.
        begin_ns, end_ns: by the trace's clock.
    """

    action: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Awaited:
    """One thing that a WAIT lists: a transfer or a reduction.

    Attributes:
        action: its text, as in the plan.
        begin_ns, end_ns: when it was asked for, and when it was there: the WAIT's time on it alone.
        was_complete: whether it was there when asked for. A GPU's host asks ahead of the GPU, which then may find it.
        done_ns: when it was there, if what carried it knows; never after `end_ns`.
    """

    action: str
    begin_ns: int
    end_ns: int
    was_complete: bool
    done_ns: int | None


class Trace:
    """What ran when. Recording costs two readings of the clock an action; texts and times are made when asked for.

    Args:
        clock: default this process's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or HostClock()
        self._ran: list[tuple[Action, Any, Any]] = []
        self._waited: list[tuple[Action, Any, Any, bool, int | None]] = []

    @property
    def events(self) -> list[Event]:
        """What ran, in order of beginning; the sub-actions that an action started come behind it."""
        ns = self._clock.ns
        return [Event(str(action), ns(begin), ns(end)) for action, begin, end in self._ran]

    @property
    def awaited(self) -> list[Awaited]:
        """What was waited for, in the order of the waits and within them."""
        ns = self._clock.ns
        return [
            Awaited(str(action), ns(begin), ns(end), complete, None if done is None else min(done, ns(end)))
            for action, begin, end, complete, done in self._waited
        ]

    def now(self) -> Any:
        """Read the clock."""
        return self._clock.now()

    @property
    def num_events(self) -> int:
        """How many events there are."""
        return len(self._ran)

    def mark(self, action: Action) -> None:
        """Record that a sub-action started now."""
        now = self._clock.now()
        self._ran.append((action, now, now))

    def span(self, action: Action, begin: Any, place: int) -> None:
        """Record an action that began at `begin`, before the sub-actions recorded since `place`."""
        self._ran.insert(place, (action, begin, self._clock.now()))

    def waited(self, action: Action, begin: Any, was_complete: bool, done_ns: int | None = None) -> None:
        """Record that what `action` started was asked for at `begin`, and that it is there now."""
        self._waited.append((action, begin, self._clock.now(), was_complete, done_ns))


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
