"""Simulate: compute the times of a whole plan, with its communication and memory. Dataflow, without a ticking clock.

The time of an event is the latest end of what it waits for. So a rank is played until it reaches an event whose time is
not known yet, and continued when it is. These run at the same time:

    compute      each rank's list, in order; posting takes no time, WAIT blocks
    transfers    in order on the channels of the transport: of a pair of ranks, a direction, or a rank (links.py)
    reductions   with gathers, one in-order stream per rank, as over one communicator. The gathers of an action begin
                 when it begins, the k-th of its n reductions at (k+1)/n of its duration
    meetings     TIE_REDUCE blocks until all ranks that share the parameter have arrived, CLIP until all ranks have

The decision a reader will question: data-parallel replicas and tensor-parallel ranks are not simulated one by one. They
do the same at the same time, so one of each is played, and `Costs` says how their number enters the durations. A
gather or reduction begins when this rank begins it, since the other replicas begin it at the same time.

memory.py computes memory from these times and the lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tpengine.plan.actions import COMPUTE, SENDS, TRANSFERS, Action, Kind
from tpengine.plan.clock import RankTimeline, Span, Timeline
from tpengine.plan.plan import Plan
from tpengine.planner.costs import Costs, unit_costs
from tpengine.planner.links import CausedSpan, Links
from tpengine.planner.memory import memory_curve


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a plan.

    Args:
        plan: complete and accepted by `verify`: a missing input is not noticed here.
        costs: None for `unit_costs`: a forward of all layers of a rank takes 1, a backward 2, and links are free.
    Returns: every span of every rank, the critical path, and, if the costs include bytes, the memory.
    Raises: ValueError: a compute action has no duration, or the plan cannot finish; one line that says which rank waits
        for which.
    Cost: linear in the number of actions.
    """
    known = unit_costs(plan) if costs is None else costs
    machine = _Player(plan, known)
    machine.run()
    ranks = tuple(state.timeline() for state in machine.ranks)
    if known.holds_bytes:
        ranks = tuple(
            replace(timeline, memory=memory_curve(plan, rank, timeline, known)) for rank, timeline in enumerate(ranks)
        )
    return Timeline(ranks, machine.critical_path())


@dataclass(slots=True)
class _PlayedRank:
    """How far a rank has been played.

    Attributes:
        now: the time up to which its compute stream is used; `cause` is the event that used it last.
        awaits: what the action at the cursor is blocked on.
        done: the transfers, gathers and reductions whose times are known; of what is posted again, the latest.
        last_bucket: the latest gather or reduction on their stream.
    """

    rank: int
    actions: tuple[Action, ...]
    cursor: int = 0
    now: float = 0.0
    cause: CausedSpan | None = None
    awaits: Action | None = None
    done: dict[Action, CausedSpan] = field(default_factory=dict)
    last_bucket: CausedSpan | None = None
    compute: list[Span] = field(default_factory=list)
    sends: list[Span] = field(default_factory=list)
    receives: list[Span] = field(default_factory=list)
    reductions: list[Span] = field(default_factory=list)
    gathers: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.cursor == len(self.actions)

    def stand_until(self, time: float, cause: CausedSpan | None) -> None:
        """Record a wait in the action at the cursor until `time`."""
        if time > self.now:
            self.waits.append(Span(self.actions[self.cursor], self.now, time))
            self.now, self.cause = time, cause

    def timeline(self) -> RankTimeline:
        # A transfer is recorded when its second side is posted, so the order is not that of the starts.
        sends, receives = (sorted(lane, key=lambda span: span.start) for lane in (self.sends, self.receives))
        return RankTimeline(
            compute=tuple(self.compute),
            sends=tuple(sends),
            receives=tuple(receives),
            reductions=tuple(self.reductions),
            gathers=tuple(self.gathers),
            waits=tuple(self.waits),
        )


class _Player:
    """Plays all ranks until none can continue."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.ranks = [_PlayedRank(rank, actions) for rank, actions in enumerate(plan.actions)]
        self.links = Links(plan, costs)
        # By TIE_REDUCE or CLIP: its members, and those that have arrived.
        self.members: dict[Action, tuple[int, ...]] = {Action(Kind.CLIP): tuple(range(plan.num_ranks))}
        for tie in plan.ties:
            # Two of the tie's chunks may be on one rank, which arrives once.
            self.members[Action(Kind.TIE_REDUCE, index=tie.index)] = tuple(dict.fromkeys(plan.tie_ranks(tie)))
        self.arrived: dict[Action, set[int]] = {}
        self.movable = list(reversed(range(plan.num_ranks)))
        self.last: CausedSpan | None = None
        self._durations: dict[tuple[Kind, int | None], float] = {}

    def run(self) -> None:
        while self.movable:
            state = self.ranks[self.movable.pop()]
            while not state.is_finished and self._play(state, state.actions[state.cursor]):
                state.cursor += 1
        stuck = next((state.rank for state in self.ranks if not state.is_finished), None)
        if stuck is not None:
            raise ValueError(f"a plan must finish: {self._explain(stuck)}: `verify` names the rule that is broken")

    def critical_path(self) -> tuple[tuple[int, Span], ...]:
        """Return the chain of causes from the last event back to the beginning, first to last."""
        path = []
        event = self.last
        while event is not None:
            path.append((event.rank, event.span))
            event = event.cause
        return tuple(reversed(path))

    def _play(self, state: _PlayedRank, action: Action) -> bool:
        """Play the action at a rank's cursor; return False if the rank is blocked in it."""
        kind = action.kind
        if kind in COMPUTE or kind is Kind.STEP:
            self._compute(state, action)
        elif kind is Kind.WAIT:
            return self._wait(state, action)
        elif kind in TRANSFERS:
            self._post(state, action)
        elif kind in (Kind.TIE_REDUCE, Kind.CLIP):
            return self._meet(state, action)
        else:
            self._start_bucket(state, action, state.now, state.cause)
        return True

    def _note(self, event: CausedSpan) -> None:
        if self.last is None or event.span.end > self.last.span.end:
            self.last = event

    def _compute(self, state: _PlayedRank, action: Action) -> None:
        key = action.kind, action.chunk
        duration = self._durations.get(key)
        if duration is None:
            duration = self._durations[key] = self.costs.duration(action)
        if self.costs.reduce_share:
            moved = sum(self.costs.gathers.get(sub.index or 0, 0.0) for sub in action.gathers)
            moved += sum(self.costs.reductions.get(sub.index or 0, 0.0) for sub in action.reduces)
            duration += self.costs.reduce_share * moved
        for gather in action.gathers:
            self._start_bucket(state, gather, state.now, state.cause)
        event = CausedSpan(state.rank, Span(action, state.now, state.now + duration), state.cause)
        self._note(event)
        state.compute.append(event.span)
        reduces = action.reduces
        for k, sub in enumerate(reduces):
            self._start_bucket(state, sub, state.now + duration * ((k + 1) / len(reduces)), event)
        state.now, state.cause = event.span.end, event

    def _start_bucket(self, state: _PlayedRank, action: Action, time: float, cause: CausedSpan | None) -> None:
        """Put a gather or reduction on their stream. Nothing waits for a FREE."""
        if action.kind is Kind.FREE:
            return
        before = state.last_bucket
        if before is not None and before.span.end > time:
            time, cause = before.span.end, before
        is_reduce = action.kind is Kind.REDUCE
        duration = (self.costs.reductions if is_reduce else self.costs.gathers).get(action.index or 0, 0.0)
        event = CausedSpan(state.rank, Span(action, time, time + duration), cause)
        self._note(event)
        state.last_bucket = event
        (state.reductions if is_reduce else state.gathers).append(event.span)
        state.done[action] = event

    def _wait(self, state: _PlayedRank, action: Action) -> bool:
        last: CausedSpan | None = None
        for sub in action.subs:
            event = state.done.get(sub)
            if event is None:
                state.awaits = sub
                return False
            if last is None or event.span.end > last.span.end:
                last = event
        assert last is not None, "a WAIT lists at least one action"
        state.stand_until(last.span.end, last)
        return True

    def _post(self, state: _PlayedRank, transfer: Action) -> None:
        for event in self.links.post(state.rank, transfer, state.now, state.cause):
            peer, action = self.ranks[event.rank], event.span.action
            self._note(event)
            (peer.sends if action.kind in SENDS else peer.receives).append(event.span)
            peer.done[action] = event
            if peer.awaits == action:
                peer.awaits = None
                self.movable.append(event.rank)

    def _meet(self, state: _PlayedRank, action: Action) -> bool:
        """Record that a rank has arrived; the last one plays the action for all members."""
        state.awaits = action
        if action not in self.members:
            raise ValueError(f"{action} needs a tie {action.index}: the plan has {len(self.plan.ties)} ties")
        members = self.members[action]
        arrived = self.arrived.setdefault(action, set())
        arrived.add(state.rank)
        if not arrived.issuperset(members):
            return False
        last = max((self.ranks[member] for member in members), key=lambda member: member.now)
        time, cause = last.now, last.cause
        for rank in members:
            member = self.ranks[rank]
            member.stand_until(time, cause)
            self._compute(member, action)
            member.awaits = None
            if member is not state:
                member.cursor += 1
                self.movable.append(rank)
        return True

    def _explain(self, rank: int) -> str:
        """Return the chain of waits from this rank on, until a rank occurs again or one does not wait."""
        seen: list[int] = []
        text = f"rank {rank}"
        while rank not in seen:
            seen.append(rank)
            state = self.ranks[rank]
            missing, rank = self._missing(state)
            text += f"{', which' if len(seen) > 1 else ''} waits in {state.actions[state.cursor]} for {missing}"
            if rank == state.rank:
                return f"{text}, which it never starts"
            text += f" with rank {rank}"
            if self.ranks[rank].is_finished:
                return f"{text}, which has ended"
        return text

    def _missing(self, state: _PlayedRank) -> tuple[Action, int]:
        """Return what a rank is blocked on, and the rank that has not begun it, which may be the rank itself."""
        awaited = state.awaits
        assert awaited is not None, "an unfinished rank is blocked on something"
        if awaited in self.members:
            return awaited, next(member for member in self.members[awaited] if member not in self.arrived[awaited])
        if awaited.kind not in TRANSFERS:
            return awaited, state.rank
        return self.links.missing(state.rank, awaited)
