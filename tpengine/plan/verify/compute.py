"""Compute: every chunk computes every micro-batch once in each direction, on the chunk's rank, in order."""

from __future__ import annotations

from itertools import product

from tpengine.plan.actions import COMPUTE, Action, Kind
from tpengine.plan.plan import Plan
from tpengine.plan.verify.fault import fault

_Positions = dict[tuple[Kind, int, int], int]


def check_compute(plan: Plan) -> None:
    """Check the compute actions inside each rank; matching.py and posting.py check what crosses ranks."""
    positions: _Positions = {}
    for rank, actions in enumerate(plan.actions):
        for position, action in enumerate(actions):
            if action.kind in COMPUTE:
                _check_place(plan, rank, position, action, positions)
                positions[action.kind, *action.piece] = position
    for chunk, microbatch in product(range(len(plan.chunks)), range(plan.num_microbatches)):
        _check_complete(plan, chunk, microbatch, positions)
        _check_order(plan, chunk, microbatch, positions)


def _check_place(plan: Plan, rank: int, position: int, action: Action, seen: _Positions) -> None:
    chunk, microbatch = action.piece
    if chunk >= len(plan.chunks) or microbatch >= plan.num_microbatches:
        values = f"{action}, with {len(plan.chunks)} chunks and {plan.num_microbatches} micro-batches"
        raise fault(plan, "an action names an existing chunk and micro-batch", values, rank, position)
    if plan.chunks[chunk].rank != rank:
        values = f"{action} on rank {rank}, chunk {chunk} is on rank {plan.chunks[chunk].rank}"
        raise fault(plan, "a chunk computes on its own rank", values, rank, position)
    if (action.kind, *action.piece) in seen:
        raise fault(
            plan, "each kind of action occurs once per chunk and micro-batch", f"{action} twice", rank, position
        )


def _check_complete(plan: Plan, chunk: int, microbatch: int, positions: _Positions) -> None:
    found = {kind for kind in COMPUTE if (kind, chunk, microbatch) in positions}
    legal = [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}] if plan.training else [{Kind.F}]
    if found not in legal:
        what = "one F and one B, or F, I and W" if plan.training else "one F and nothing else"
        names = ", ".join(sorted(found)) or "nothing"
        rank = plan.chunks[chunk].rank
        raise fault(
            plan,
            f"every chunk and micro-batch has {what}",
            f"chunk {chunk}, micro-batch {microbatch} has {names}",
            rank,
            len(plan.actions[rank]),
        )


def _check_order(plan: Plan, chunk: int, microbatch: int, positions: _Positions) -> None:
    """Check dependencies inside one rank: between the passes of a chunk, and between chunks on the same rank."""
    rank = plan.chunks[chunk].rank
    before: dict[Kind, list[tuple[Kind, int]]] = {
        Kind.F: [(Kind.F, chunk - 1)],
        Kind.B: [(Kind.F, chunk), (Kind.B, chunk + 1), (Kind.I, chunk + 1)],
        Kind.I: [(Kind.F, chunk), (Kind.B, chunk + 1), (Kind.I, chunk + 1)],
        Kind.W: [(Kind.I, chunk)],
    }
    for kind, needs in before.items():
        position = positions.get((kind, chunk, microbatch))
        for needed_kind, needed_chunk in needs:
            needed = positions.get((needed_kind, needed_chunk, microbatch))
            if position is None or needed is None or plan.chunks[needed_chunk].rank != rank:
                continue
            if needed > position:
                values = f"{plan.actions[rank][position]} before {plan.actions[rank][needed]}"
                raise fault(plan, "an action comes after what it depends on", values, rank, position)
