"""Gradients: every bucket and tie is reduced once, at the right time; the step ends with CLIP STEP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpengine.plan.actions import BACKWARD, Action, Kind
from tpengine.plan.checks.fault import fault
from tpengine.plan.plan import Bucket, Plan, Tie

_Placed = tuple[int, Action]
# Where each chunk's gradients are complete: the position of its last B or W, by chunk.
_LastBackward = Mapping[int, int]
_UPDATE = (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP)


def check_gradients(plan: Plan) -> None:
    """Check reductions, ties and the ending, rank by rank."""
    for rank, actions in enumerate(plan.actions):
        placed = list(_with_subs(actions))
        _refuse_unknown(plan, rank, placed)
        if plan.training:
            last_backward = _last_backward(actions)
            _check_buckets(plan, rank, placed, last_backward)
            _check_bucket_order(plan, rank, placed)
            _check_ties(plan, rank, placed, last_backward)
            _check_ending(plan, rank)


def _with_subs(actions: Sequence[Action]) -> Iterator[_Placed]:
    """Yield each action and each that it starts, with the position in the list."""
    for position, action in enumerate(actions):
        yield position, action
        if action.kind is not Kind.WAIT:
            yield from ((position, sub) for sub in action.subs)


def _positions(placed: Sequence[_Placed], kind: Kind, index: int) -> list[int]:
    return [position for position, action in placed if action.kind is kind and action.index == index]


def _last_backward(actions: Sequence[Action]) -> _LastBackward:
    return {action.piece[0]: position for position, action in enumerate(actions) if action.kind in BACKWARD}


def _refuse_unknown(plan: Plan, rank: int, placed: Sequence[_Placed]) -> None:
    for position, action in placed:
        if action.kind in (Kind.GATHER, Kind.FREE):
            raise fault(plan, "no rule covers gathers and frees yet", f"found {action}", rank, position)
        if not plan.training and (action.kind is Kind.REDUCE or action.kind in _UPDATE):
            raise fault(plan, "only a training plan updates weights", f"found {action}", rank, position)


def _check_buckets(plan: Plan, rank: int, placed: Sequence[_Placed], last_backward: _LastBackward) -> None:
    own = {bucket.index: bucket for bucket in plan.buckets if plan.chunks[bucket.chunk].rank == rank}
    for position, action in placed:
        if action.kind is Kind.REDUCE and action.index not in own:
            values = f"{action} on rank {rank}, whose buckets are {list(own)}"
            raise fault(plan, "a rank reduces its own chunks' buckets", values, rank, position)
    for bucket in own.values():
        _check_bucket(plan, rank, placed, bucket, last_backward[bucket.chunk])


def _check_bucket(plan: Plan, rank: int, placed: Sequence[_Placed], bucket: Bucket, last: int) -> None:
    actions = plan.actions[rank]
    found = _positions(placed, Kind.REDUCE, bucket.index)
    if len(found) != 1:
        values = f"bucket {bucket.index} of chunk {bucket.chunk} {len(found)} times"
        position = found[1] if found else len(actions)
        raise fault(plan, "every bucket is reduced exactly once", values, rank, position)
    start = actions[found[0]]
    # The executor starts reductions from inside a backward, which is also what lets them overlap it.
    if start.kind not in BACKWARD or start.chunk != bucket.chunk:
        place = "stands alone" if start.kind is Kind.REDUCE else f"starts in {start}"
        values = f"r{bucket.index} of chunk {bucket.chunk} {place}"
        raise fault(plan, "a bucket is reduced inside its own chunk's backward", values, rank, found[0])
    if found[0] < last:
        values = f"r{bucket.index} starts in {start}, {actions[last]} still adds to it"
        raise fault(plan, "a bucket is reduced after its last contribution", values, rank, found[0])
    update = next((position for position, action in placed if action.kind in _UPDATE), len(actions))
    for position in range(update, len(actions)):
        if any(sub.kind is Kind.REDUCE and sub.index == bucket.index for sub in actions[position].subs):
            values = f"r{bucket.index} is not waited for before {actions[update]}"
            raise fault(plan, "reductions end before ties and CLIP", values, rank, position)


def _check_bucket_order(plan: Plan, rank: int, placed: Sequence[_Placed]) -> None:
    for chunk in (index for index, chunk in enumerate(plan.chunks) if chunk.rank == rank):
        listed = [bucket.index for bucket in plan.buckets if bucket.chunk == chunk]
        issued = [
            (position, action.index)
            for position, action in placed
            if action.kind is Kind.REDUCE and action.index in listed
        ]
        for expected, (position, index) in zip(listed, issued, strict=False):
            if index != expected:
                values = f"chunk {chunk} issues r{index} where r{expected} is next"
                raise fault(plan, "a chunk's buckets are reduced in listed order", values, rank, position)


def _check_ties(plan: Plan, rank: int, placed: Sequence[_Placed], last_backward: _LastBackward) -> None:
    own = [tie for tie in plan.ties if rank in plan.tie_ranks(tie)]
    found = [(position, action) for position, action in placed if action.kind is Kind.TIE_REDUCE]
    for position, action in found:
        if action.index not in {tie.index for tie in own}:
            values = f"{action} on rank {rank}, whose ties are {[tie.index for tie in own]}"
            raise fault(plan, "a rank reduces the ties it is a member of", values, rank, position)
    for tie in own:
        last = max(last_backward[chunk] for chunk in tie.chunks if plan.chunks[chunk].rank == rank)
        _check_tie(plan, rank, placed, tie, last)
    for tie, (position, action) in zip(own, found, strict=True):
        if action.index != tie.index:
            values = f"{action} where t{tie.index} is next"
            raise fault(plan, "ties are reduced in the same order on all ranks", values, rank, position)


def _check_tie(plan: Plan, rank: int, placed: Sequence[_Placed], tie: Tie, last: int) -> None:
    actions = plan.actions[rank]
    found = _positions(placed, Kind.TIE_REDUCE, tie.index)
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
