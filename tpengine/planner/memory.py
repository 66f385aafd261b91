"""Memory: how many bytes a rank holds at what time, from its list and the times at which its actions run.

    resident      weights, gradients, moments: all the time
    slots         receive buffers: all the time, as many as slots.py assigns, each as large as the largest tensor
    activations   `ChunkBytes` of a micro-batch: saved from the start of F to the end of B or I, deferred from there to
                  the end of W, working while an action runs
    outputs       of F, and the input's gradient of B or I: from its end until its send has been waited for, or until
                  the next chunk on the same rank begins with it
    weights       gathered, of a SLICED bucket: from the start of the action that starts the gather, since a gather
                  needs its buffer even while it queues behind others, to the end of the action that frees them
    contributions of a bucket that is reduced every micro-batch: from the start of the action that fills it until its
                  reduction has been waited for: before that nobody gives the buffer back

The times may be simulated or measured: what is held when follows from the list either way.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping

from tpengine.plan.actions import COMPUTE, INPUT_GRADIENT, RECEIVES, SENDS, Action, Kind
from tpengine.plan.clock import RankTimeline, Span
from tpengine.plan.plan import Plan, Reduced, Weights
from tpengine.plan.slots import receive_slots
from tpengine.planner.costs import ChunkBytes, Costs, spec_bytes, tensor_of

_NOTHING = ChunkBytes()


def memory_curve(plan: Plan, rank: int, timeline: RankTimeline, costs: Costs) -> tuple[tuple[float, float], ...]:
    """Return a rank's (time, bytes held from then on), changes only, from time 0.

    Args:
        plan: the plan. rank: of the pipeline.
        timeline: of the rank: compute, reductions and waits.
        costs: bytes; missing ones count as 0.
    Cost: linear in the rank's actions, and slots.
    """
    held = slot_bytes(plan, rank) + (costs.resident[rank] if costs.resident else 0.0)
    changes = sorted(_Holder(plan, rank, timeline, costs).changes().items())
    curve = [(0.0, held)]
    for time, change in changes:
        if change:
            if time == curve[-1][0]:
                curve.pop()
            held += change
            curve.append((time, held))
    return tuple(curve)


def slot_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of a rank's receive slots."""
    receives = [action for action in plan.actions[rank] if action.kind in RECEIVES]
    largest: dict[Kind, int] = {}
    for kind, chunk in {(receive.kind, receive.piece[0]) for receive in receives}:
        spec = plan.chunks[chunk].input if kind is Kind.RECV_F else plan.chunks[chunk].output
        assert spec is not None, f"chunk {chunk} has no tensor to receive"
        largest[kind] = max(largest.get(kind, 0), spec_bytes(spec))
    slots = receive_slots(plan.actions[rank])
    return slots.num_forward * largest.get(Kind.RECV_F, 0) + slots.num_backward * largest.get(Kind.RECV_B, 0)


class _Holder:
    """Walks a rank's list and records by how many bytes the memory changes at what time."""

    def __init__(self, plan: Plan, rank: int, timeline: RankTimeline, costs: Costs) -> None:
        self.plan, self.rank, self.timeline, self.costs = plan, rank, timeline, costs
        self.change: defaultdict[float, float] = defaultdict(float)
        # Bytes of outputs that are still held, by tensor.
        self.outputs: dict[tuple[bool, int, int], int] = {}
        sliced = {bucket.index for bucket in plan.buckets if bucket.weights is Weights.SLICED}
        summed = {bucket.index for bucket in plan.buckets if bucket.reduced is Reduced.MICROBATCH}
        self.weights = {index: size for index, size in costs.weights.items() if index in sliced}
        self.buffers = {index: size for index, size in costs.contributions.items() if index in summed}
        self.waited: defaultdict[Action, deque[Span]] = defaultdict(deque)
        for span in timeline.waits:
            self.waited[span.action].append(span)

    def changes(self) -> dict[float, float]:
        """Return the change of bytes by time."""
        spans = deque(self.timeline.compute)
        now = 0.0
        for action in self.plan.actions[self.rank]:
            if action.kind is Kind.WAIT:
                now = max(now, self._end_of_wait(action, spans[0].start if spans else math.inf))
                for sub in action.subs:
                    if sub.kind in SENDS:
                        self._let_go(tensor_of(sub), now)
                    elif sub.kind is Kind.REDUCE:
                        self._hold(-self._bytes(self.buffers, sub), now)
            elif action.kind is Kind.GATHER:
                self._hold(self._bytes(self.weights, action), now)
            elif action.kind in COMPUTE or action.kind in (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP):
                span = spans.popleft()
                now = span.end
                if action.kind in COMPUTE:
                    self._compute(action, span.start, span.end)
        return self.change

    def _end_of_wait(self, wait: Action, next_start: float) -> float:
        """Return when a WAIT ended, if the rank was idle in it.

        Args: next_start: of the computation behind it. A later WAIT for the same actions ends after that.
        """
        spans = self.waited[wait]
        return spans.popleft().end if spans and spans[0].end <= next_start else 0.0

    def _compute(self, action: Action, start: float, end: float) -> None:
        self._buckets(action, start, end)
        chunk, microbatch = action.piece
        size = self.costs.activations.get(chunk, _NOTHING)
        working = size.working.get(action.kind, 0.0)
        self._hold(working, start)
        self._hold(-working, end)
        if action.kind is Kind.F:
            self._let_go((True, chunk - 1, microbatch), start)
            if self.plan.training:
                self._hold(size.saved, start)
            self._make((True, chunk, microbatch), end)
        elif action.kind in INPUT_GRADIENT:
            self._let_go((False, chunk + 1, microbatch), start)
            self._hold(-size.saved, end)
            self._make((False, chunk, microbatch), end)
        if action.kind is Kind.I:
            self._hold(size.deferred, end)
        elif action.kind is Kind.W:
            self._hold(-size.deferred, end)

    def _buckets(self, action: Action, start: float, end: float) -> None:
        for gather in action.gathers:
            self._hold(self._bytes(self.weights, gather), start)
        for free in action.frees:
            self._hold(-self._bytes(self.weights, free), end)
        for reduction in action.reduces:
            self._hold(self._bytes(self.buffers, reduction), start)

    def _bytes(self, sizes: Mapping[int, float], action: Action) -> float:
        """Return the bytes of the bucket that an action names."""
        return 0.0 if action.index is None else sizes.get(action.index, 0.0)

    def _make(self, tensor: tuple[bool, int, int], time: float) -> None:
        is_forward, chunk, _ = tensor
        if not is_forward and not self.plan.gives_gradient(chunk):
            return
        spec = self.plan.chunks[chunk].output if is_forward else self.plan.chunks[chunk].input
        if spec is not None:
            self.outputs[tensor] = spec_bytes(spec)
            self._hold(self.outputs[tensor], time)

    def _let_go(self, tensor: tuple[bool, int, int], time: float) -> None:
        """Free an output that was computed here; a received input is in its slot and counted there."""
        self._hold(-self.outputs.pop(tensor, 0), time)

    def _hold(self, num_bytes: float, time: float) -> None:
        self.change[time] += num_bytes
