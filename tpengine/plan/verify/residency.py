"""Residency: weights are whole whenever they are used, and let go of when they may be.

A bucket's weights are in one of three states on a rank: sliced, under way (gathered, not yet waited for), whole.
UPDATED and SLICED buckets begin sliced, since an UPDATED bucket holds old values until it is gathered. The list is
replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum, auto
from itertools import pairwise

from tpengine.plan.actions import BUCKET, COMPUTE, Action, Kind
from tpengine.plan.plan import Bucket, Plan, Weights
from tpengine.plan.verify.fault import PlanError, fault

_UPDATE = (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP)
_ORDER = {Kind.GATHER: 0, Kind.REDUCE: 1, Kind.FREE: 2}


class _State(Enum):
    SLICED = auto()
    UNDER_WAY = auto()
    WHOLE = auto()


def check_residency(plan: Plan) -> None:
    """Check each rank's gathers and frees: they are the rank's own, in time, and as many as the weights need."""
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in plan.buckets:
        buckets[plan.chunks[bucket.chunks[0]].rank].append(bucket)
    for rank in range(plan.num_ranks):
        _Residency(plan, rank, buckets[rank]).check()


class _Residency:
    """Walks one rank's list; keeps the state of each bucket, and which micro-batches are between I and W."""

    def __init__(self, plan: Plan, rank: int, buckets: Sequence[Bucket]) -> None:
        self.plan, self.rank = plan, rank
        self.buckets = {bucket.index: bucket for bucket in buckets}
        self.states = {bucket.index: _State.SLICED for bucket in buckets if bucket.weights is not Weights.WHOLE}
        # The buckets that the compute actions of a chunk use, without those that are whole all the time.
        self.used: dict[int, list[int]] = defaultdict(list)
        for bucket in buckets:
            for chunk in bucket.chunks if bucket.index in self.states else ():
                self.used[chunk].append(bucket.index)
        # By bucket, the actions I whose W is still to come.
        self.halves: dict[int, dict[tuple[int, int], Action]] = defaultdict(dict)
        self.position = 0

    def check(self) -> None:
        actions = self.plan.actions[self.rank]
        has_updated = False
        for self.position, action in enumerate(actions):
            if action.kind in _UPDATE and not has_updated:
                has_updated = True
                self._check_freed(str(action))
            if action.kind is Kind.WAIT:
                self._wait(action)
            elif action.kind in COMPUTE:
                self._compute(action)
            elif action.kind is Kind.GATHER:
                self._gather(action)
            elif action.kind is Kind.FREE:
                raise self._fault("a compute action frees, when it ends", f"{action} is an action of its own")
        self.position = len(actions)
        self._check_freed("the list ends")

    def _compute(self, action: Action) -> None:
        chunk, _ = action.piece
        for before, after in pairwise(action.subs):
            if _ORDER[before.kind] > _ORDER[after.kind]:
                rule = "an action gathers, then reduces, then frees"
                raise self._fault(rule, f"{after} comes behind {before} in {action}")
        for index in self.used[chunk]:
            if self.states[index] is not _State.WHOLE:
                state = {_State.SLICED: "not gathered", _State.UNDER_WAY: "gathered but not waited for"}
                values = f"{action} uses bucket {index}, which is {state[self.states[index]]}"
                raise self._fault("weights are gathered and waited for before use", values)
        for gather in action.gathers:
            self._gather(gather)
        for index in self.used[chunk]:
            if action.kind is Kind.I:
                self.halves[index][action.piece] = action
            elif action.kind is Kind.W:
                self.halves[index].pop(action.piece, None)
        for free in action.frees:
            self._free(free, action)

    def _gather(self, gather: Action) -> None:
        bucket = self._own(gather)
        state = self.states[bucket.index]
        if state is not _State.SLICED:
            found = "under way" if state is _State.UNDER_WAY else "gathered"
            if bucket.weights is Weights.UPDATED:
                raise self._fault("an updated bucket is gathered once", f"{gather}, which is {found} already")
            raise self._fault("a bucket is not gathered while gathered", f"{gather}, which is {found}")
        self.states[bucket.index] = _State.UNDER_WAY

    def _wait(self, wait: Action) -> None:
        """Take gathers as complete; that they were posted before is checked in posting.py."""
        for sub in wait.subs:
            if sub.kind is Kind.GATHER and self.states.get(sub.index or 0) is _State.UNDER_WAY:
                self.states[sub.index or 0] = _State.WHOLE

    def _free(self, free: Action, action: Action) -> None:
        bucket = self._own(free)
        if bucket.weights is Weights.UPDATED:
            raise self._fault("an updated bucket is never freed", f"{free} in {action}")
        state = self.states[bucket.index]
        if state is not _State.WHOLE:
            found = "still under way" if state is _State.UNDER_WAY else "not gathered"
            raise self._fault("a bucket is freed while gathered", f"{free} in {action}, which is {found}")
        for half in self.halves[bucket.index].values():
            chunk, microbatch = half.piece
            rule = "a bucket is not freed between I and W"
            raise self._fault(rule, f"{free} in {action}, before {chunk}W{microbatch} of {half}")
        self.states[bucket.index] = _State.SLICED

    def _own(self, action: Action) -> Bucket:
        """Return the bucket of a gather or free, if the rank holds its weights in part."""
        assert action.kind in BUCKET
        bucket = self.buckets.get(-1 if action.index is None else action.index)
        if bucket is None:
            values = f"{action} on rank {self.rank}, whose buckets are {list(self.buckets)}"
            raise self._fault("a rank gathers and frees its own chunks' buckets", values)
        if bucket.weights is Weights.WHOLE:
            raise self._fault("a whole bucket is never gathered or freed", f"found {action}")
        return bucket

    def _check_freed(self, now: str) -> None:
        for index, state in self.states.items():
            if self.buckets[index].weights is Weights.SLICED and state is not _State.SLICED:
                values = f"bucket {index} is not when {now}"
                raise self._fault("a sliced bucket is freed again when all computation is done", values)

    def _fault(self, rule: str, values: str) -> PlanError:
        return fault(self.plan, rule, values, self.rank, self.position)
