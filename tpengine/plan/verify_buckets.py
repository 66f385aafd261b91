"""Checks of gradients and of weights that a replica holds in part, bucket by bucket.

Gradients: every contribution to a bucket or tie is reduced once, at the right time; the step ends with CLIP STEP. A
bucket's contributions are reduced together, inside the last backward that fills it, or each for itself, inside the
backward that makes it (`Reduced`).

Residency: weights are whole whenever they are used, and let go of when they may be. A bucket's weights are in one of
three states on a rank: sliced, under way (gathered, not yet waited for), whole. UPDATED and SLICED buckets begin
sliced, since an UPDATED bucket holds old values until it is gathered. The list is replayed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import pairwise

from tpengine.plan.actions import BACKWARD, BUCKET, COMPUTE, WEIGHT_GRADIENT, Action, Kind
from tpengine.plan.plan import Bucket, Plan, PlanError, Reduced, Tie, Weights, fault

_Placed = tuple[int, Action]
# The positions of each kind and index (REDUCE or TIE_REDUCE).
_Positions = Mapping[tuple[Kind, int | None], Sequence[int]]
# Where each chunk's gradients are complete: the position of its last B or W, by chunk.
_LastBackward = Mapping[int, int]
_UPDATE = (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP)
_ORDER = {Kind.GATHER: 0, Kind.REDUCE: 1, Kind.FREE: 2}


def check_gradients(plan: Plan) -> None:
    """Check reductions, ties and the ending, rank by rank."""
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in plan.buckets:
        buckets[plan.chunks[bucket.chunks[0]].rank].append(bucket)
    for rank, actions in enumerate(plan.actions):
        placed = list(_with_subs(actions))
        _refuse_unknown(plan, rank, placed)
        if plan.training:
            positions = _positions(placed)
            last_backward = _last_backward(actions)
            _check_buckets(plan, rank, placed, positions, last_backward, buckets[rank])
            _check_bucket_order(plan, rank, buckets[rank])
            _check_ties(plan, rank, placed, positions, last_backward)
            _check_ending(plan, rank)


def _with_subs(actions: Sequence[Action]) -> Iterator[_Placed]:
    """Yield each action and its sub-actions, with the position in the list."""
    for position, action in enumerate(actions):
        yield position, action
        if action.kind is not Kind.WAIT:
            yield from ((position, sub) for sub in action.subs)


def _positions(placed: Sequence[_Placed]) -> _Positions:
    positions: dict[tuple[Kind, int | None], list[int]] = defaultdict(list)
    for position, action in placed:
        if action.kind in (Kind.REDUCE, Kind.TIE_REDUCE):
            positions[action.kind, action.index].append(position)
    return positions


def _last_backward(actions: Sequence[Action]) -> _LastBackward:
    return {action.piece[0]: position for position, action in enumerate(actions) if action.kind in WEIGHT_GRADIENT}


def _refuse_unknown(plan: Plan, rank: int, placed: Sequence[_Placed]) -> None:
    for position, action in placed:
        if not plan.training and (action.kind is Kind.REDUCE or action.kind in _UPDATE):
            raise fault(plan, "only a training plan updates weights", f"found {action}", rank, position)


def _check_buckets(
    plan: Plan,
    rank: int,
    placed: Sequence[_Placed],
    positions: _Positions,
    last_backward: _LastBackward,
    buckets: Sequence[Bucket],
) -> None:
    own, counts = {bucket.index for bucket in buckets}, plan.counts_of(rank)
    own |= set() if counts is None else {counts.index}
    for position, action in placed:
        if action.kind is Kind.REDUCE and action.index not in own:
            values = f"{action} on rank {rank}, whose buckets are {sorted(own)}"
            raise fault(plan, "a rank reduces its own chunks' buckets", values, rank, position)
    for bucket in buckets:
        found = positions.get((Kind.REDUCE, bucket.index), ())
        for position in found:
            _check_place(plan, rank, bucket, position)
        if bucket.reduced is Reduced.NEVER:
            if found:
                values = f"bucket {bucket.index} of {_chunks(bucket)}"
                raise fault(plan, "a bucket of frozen weights has no gradients", values, rank, found[0])
        elif bucket.reduced is Reduced.MICROBATCH:
            _check_each(plan, rank, bucket, found)
        else:
            _check_once(plan, rank, bucket, found, max(last_backward[chunk] for chunk in bucket.chunks))
    _check_ends_before_update(plan, rank)


def _check_place(plan: Plan, rank: int, bucket: Bucket, position: int) -> None:
    start = plan.actions[rank][position]
    # The executor starts reductions from inside a backward; that is also how they overlap it.
    if start.kind not in BACKWARD or start.chunk not in bucket.chunks:
        place = "is an action of its own" if start.kind is Kind.REDUCE else f"starts in {start}"
        values = f"r{bucket.index} of {_chunks(bucket)} {place}"
        raise fault(plan, "a bucket is reduced inside its own chunk's backward", values, rank, position)


def _check_once(plan: Plan, rank: int, bucket: Bucket, found: Sequence[int], last: int) -> None:
    """Check a bucket whose contributions are reduced together."""
    actions = plan.actions[rank]
    if len(found) != 1:
        values = f"bucket {bucket.index} of {_chunks(bucket)} {len(found)} times"
        position = found[1] if found else len(actions)
        raise fault(plan, "every bucket is reduced exactly once", values, rank, position)
    if found[0] < last:
        values = f"r{bucket.index} starts in {actions[found[0]]}, {actions[last]} still adds to it"
        raise fault(plan, "a bucket is reduced after its last contribution", values, rank, found[0])


def _check_each(plan: Plan, rank: int, bucket: Bucket, found: Sequence[int]) -> None:
    """Check a bucket whose contributions are reduced one by one."""
    times = Counter(found)
    for position, action in enumerate(plan.actions[rank]):
        if action.kind not in COMPUTE or action.chunk not in bucket.chunks:
            continue
        wanted = int(action.kind in WEIGHT_GRADIENT)
        if times[position] != wanted:
            what = "fills" if wanted else "does not fill"
            values = (
                f"{action} {what} bucket {bucket.index} of {_chunks(bucket)} and reduces it {times[position]} times"
            )
            raise fault(plan, "every micro-batch's contribution is reduced exactly once", values, rank, position)


def _check_ends_before_update(plan: Plan, rank: int) -> None:
    """Check that no wait for a reduction is left when the gradients are used."""
    actions = plan.actions[rank]
    update = next((position for position, action in enumerate(actions) if action.kind in _UPDATE), len(actions))
    for position in range(update, len(actions)):
        for sub in actions[position].subs:
            if sub.kind is Kind.REDUCE:
                values = f"{sub} is not waited for before {actions[update]}"
                raise fault(plan, "reductions end before ties and CLIP", values, rank, position)


def _chunks(bucket: Bucket) -> str:
    return f"chunk{'s' if len(bucket.chunks) > 1 else ''} {', '.join(map(str, bucket.chunks))}"


def _check_bucket_order(plan: Plan, rank: int, buckets: Sequence[Bucket]) -> None:
    """Check the order of the buckets inside each backward; that it is the right backward is checked before."""
    listed = {Action(Kind.REDUCE, index=bucket.index): place for place, bucket in enumerate(buckets)}
    for position, action in enumerate(plan.actions[rank]):
        for before, after in pairwise(action.reduces):
            if listed[before] > listed[after]:
                values = f"{action} starts {before} where {after} is next"
                raise fault(plan, "the buckets of a backward are reduced in listed order", values, rank, position)


def _check_ties(
    plan: Plan, rank: int, placed: Sequence[_Placed], positions: _Positions, last_backward: _LastBackward
) -> None:
    own = [tie for tie in plan.ties if rank in plan.tie_ranks(tie)]
    found = [(position, action) for position, action in placed if action.kind is Kind.TIE_REDUCE]
    for position, action in found:
        if action.index not in {tie.index for tie in own}:
            values = f"{action} on rank {rank}, whose ties are {[tie.index for tie in own]}"
            raise fault(plan, "a rank reduces the ties it is a member of", values, rank, position)
    for tie in own:
        last = max(last_backward[chunk] for chunk in tie.chunks if plan.chunks[chunk].rank == rank)
        _check_tie(plan, rank, tie, positions.get((Kind.TIE_REDUCE, tie.index), ()), last)
    for tie, (position, action) in zip(own, found, strict=True):
        if action.index != tie.index:
            values = f"{action} where t{tie.index} is next"
            raise fault(plan, "ties are reduced in the same order on all ranks", values, rank, position)


def _check_tie(plan: Plan, rank: int, tie: Tie, found: Sequence[int], last: int) -> None:
    actions = plan.actions[rank]
    if len(found) != 1:
        place = found[1] if found else len(actions)
        values = f"tie {tie.index} {len(found)} times on rank {rank}"
        raise fault(plan, "every tie is reduced exactly once by each member", values, rank, place)
    if found[0] < last:
        values = f"t{tie.index} comes before {actions[last]}"
        raise fault(plan, "a tie is reduced after its last contribution", values, rank, found[0])
    if any(action.kind is Kind.CLIP for action in actions[: found[0]]):
        raise fault(plan, "ties are reduced before CLIP", f"t{tie.index} after CLIP", rank, found[0])


def _check_ending(plan: Plan, rank: int) -> None:
    actions = plan.actions[rank]
    wanted = [(len(actions) - 2, Kind.CLIP), (len(actions) - 1, Kind.STEP)]
    found = [(position, action.kind) for position, action in enumerate(actions) if action.kind in _UPDATE[1:]]
    if found != wanted:
        names = " ".join(kind.name for _, kind in found) or "neither"
        values = f"found {names}, the last action is {actions[-1]}" if actions else "the list is empty"
        raise fault(plan, "a training plan ends with one CLIP and one STEP", values, rank, len(actions))


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
        """Take gathers as complete; that they were posted before is checked by check_posting."""
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
