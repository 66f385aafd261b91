"""Verify: a plan that passes finishes and loses no gradient. The plan that runs is the plan that was verified.

Here is what needs no other rank: the parts of the plan that are named, and the compute actions in each list.
verify_transfers.py checks what crosses ranks and whether the plan finishes, verify_buckets.py gradients and weights,
verify_counts.py what forwards count.
Checks run from the simple to the involved, so that a broken plan is reported by the rule nearest to the cause. Each
takes a plan and returns None or raises PlanError; it may rely on the checks that run before it. They share no code with
lowering except the meaning of a single action.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tpengine.dtypes import DTYPES
from tpengine.plan.actions import COMPUTE, Action, Kind
from tpengine.plan.plan import Plan, Reduced, fault
from tpengine.plan.verify_buckets import check_gradients, check_residency
from tpengine.plan.verify_counts import check_counts
from tpengine.plan.verify_transfers import check_blocking, check_channels, check_matching, check_posting, check_receives

_Positions = dict[tuple[Kind, int, int], int]


def verify(plan: Plan) -> None:
    """Check a plan completely.

    In this order: chunks, layers, buckets and ties exist; each (chunk, micro-batch) is computed once in each direction
    and in order, also between chunks of one rank; sends and receives pair up; every contribution to a bucket or tie is
    reduced once, before CLIP STEP, and so is what forwards count; weights are gathered before their use and freed after
    it; everything posted is waited for in time; no receive slot is overwritten; no deadlock, with blocking transfers or
    in-order channels. The order in which micro-batches add to a weight's gradient is not checked here: see
    `Schedule.keeps_order`. Bytes are not known here: `simulate` counts them.

    Raises: PlanError: the first rule that is broken, with rank, position and picture.
    Cost: linear in the number of actions, sub-actions included; 0.75 s for 16 ranks with 4 chunks each and 64
        micro-batches.
    """
    check_structure(plan)
    check_compute(plan)
    check_matching(plan)
    check_gradients(plan)
    check_counts(plan)
    check_residency(plan)
    check_posting(plan)
    check_receives(plan)
    check_blocking(plan)
    check_channels(plan)


def check_structure(plan: Plan) -> None:
    """Check everything in a plan except its lists of actions."""
    counts = {"micro-batch": plan.num_microbatches, "rank": plan.num_ranks, "chunk": len(plan.chunks)}
    for what, count in counts.items():
        if count < 1:
            raise fault(plan, f"a plan has at least one {what}", f"got {count}")
    _check_layers(plan)
    _check_ranks(plan)
    _check_tensors(plan)
    _check_boundaries(plan)
    _check_gradients(plan)
    _check_backwards(plan)


def _check_layers(plan: Plan) -> None:
    rule = f"the chunks hold layers 0 to {plan.num_layers - 1}, each once and in order"
    expected = 0
    for index, chunk in enumerate(plan.chunks):
        first, end = chunk.layers
        if first > expected:
            raise fault(plan, rule, f"layer {expected} is in no chunk, chunk {index} starts at {first}")
        if first < expected:
            raise fault(plan, rule, f"layer {first} of chunk {index} is in a chunk before it too")
        if end <= first:
            raise fault(plan, rule, f"chunk {index} holds no layer, its range is {first}:{end}")
        expected = end
    if expected != plan.num_layers:
        raise fault(plan, rule, f"the last chunk ends before layer {expected}")


def _check_ranks(plan: Plan) -> None:
    for index, chunk in enumerate(plan.chunks):
        if not 0 <= chunk.rank < plan.num_ranks:
            raise fault(plan, f"chunks live on ranks 0 to {plan.num_ranks - 1}", f"chunk {index} on {chunk.rank}")
    used = {chunk.rank for chunk in plan.chunks}
    for rank in range(plan.num_ranks):
        if rank not in used:
            raise fault(plan, "every rank holds a chunk", f"rank {rank} of {plan.num_ranks} holds none")


def _check_tensors(plan: Plan) -> None:
    for index, chunk in enumerate(plan.chunks):
        for end, tensor in (("input", chunk.input), ("output", chunk.output)):
            if tensor is None:
                continue
            name = f"{end} {tensor} of chunk {index}"
            if any(dim < 1 for dim in tensor.shape):
                raise fault(plan, "a tensor's dimensions are at least 1", name)
            if tensor.dtype not in DTYPES:
                raise fault(plan, f"a tensor's dtype is one of {', '.join(DTYPES)}", name)


def _check_boundaries(plan: Plan) -> None:
    last = len(plan.chunks) - 1
    for index, chunk in enumerate(plan.chunks):
        if (chunk.input is None) != (index == 0) or (chunk.output is None) != (index == last):
            ends = f"chunk {index} of {last + 1} has input {chunk.input}, output {chunk.output}"
            raise fault(plan, "only the first chunk has no input, only the last no output", ends)
        # Between ranks check_matching compares the shapes, because there an error has a place to show.

        if index > 0 and chunk.rank == plan.chunks[index - 1].rank:
            output = plan.chunks[index - 1].output
            if output != chunk.input:
                values = f"chunk {index - 1} gives {output}, chunk {index} takes {chunk.input}"
                raise fault(plan, "neighbouring chunks agree on shape and dtype", values)


def _check_gradients(plan: Plan) -> None:
    _check_unique(plan, "bucket", [*(of.index for of in plan.buckets), *(of.index for of in plan.counts)])
    _check_unique(plan, "tie", [tie.index for tie in plan.ties])
    named = [(f"bucket {bucket.index}", chunk) for bucket in plan.buckets for chunk in bucket.chunks]
    named += [(f"counts {counts.index}", chunk) for counts in plan.counts for chunk in counts.chunks]
    named += [(f"tie {tie.index}", chunk) for tie in plan.ties for chunk in tie.chunks]
    for name, chunk in named:
        if not 0 <= chunk < len(plan.chunks):
            raise fault(plan, f"chunks are 0 to {len(plan.chunks) - 1}", f"{name} names chunk {chunk}")
    for bucket in plan.buckets:
        holders = {plan.chunks[chunk].rank for chunk in bucket.chunks}
        if len(holders) != 1 or len(set(bucket.chunks)) < len(bucket.chunks):
            values = f"bucket {bucket.index} names chunks {list(bucket.chunks)}"
            raise fault(plan, "a bucket belongs to chunks of one rank, each once", values)
    for counts in plan.counts:
        holders = {plan.chunks[chunk].rank for chunk in counts.chunks}
        if len(holders) != 1 or len(set(counts.chunks)) < len(counts.chunks):
            values = f"counts {counts.index} name chunks {list(counts.chunks)}"
            raise fault(plan, "counts belong to chunks of one rank, each once", values)
    counting = [plan.chunks[counts.chunks[0]].rank for counts in plan.counts]
    if len(set(counting)) < len(counting):
        raise fault(plan, "the chunks of a rank count together", f"counts {[of.index for of in plan.counts]} do not")
    for tie in plan.ties:
        ranks = plan.tie_ranks(tie)
        if len(ranks) < 2 or len(set(ranks)) < len(ranks):
            values = f"tie {tie.index} is on ranks {list(ranks)}"
            raise fault(plan, "a tie has members on different ranks", values)


def _check_backwards(plan: Plan) -> None:
    """Check that backward comes to the end of the model, and is needed where gradients are reduced."""
    has_backward = [chunk.has_backward for chunk in plan.chunks]
    if has_backward != sorted(has_backward) or not has_backward[-1]:
        rule = "backward comes from the last chunk, and ends at the first that is trained"
        without = [index for index, found in enumerate(has_backward) if not found]
        raise fault(plan, rule, f"chunks {without} of {len(plan.chunks)} have none")
    named = [(f"bucket {bucket.index}", bucket.chunks) for bucket in plan.buckets if bucket.reduced != Reduced.NEVER]
    named += [(f"tie {tie.index}", tie.chunks) for tie in plan.ties]
    for name, chunks in named:
        for chunk in chunks:
            if plan.training and not has_backward[chunk]:
                raise fault(plan, "gradients are reduced of chunks that have a backward", f"{name} names chunk {chunk}")


def _check_unique(plan: Plan, what: str, indices: Sequence[int]) -> None:
    seen: set[int] = set()
    for index in indices:
        if index in seen:
            raise fault(plan, f"each {what} has its own index", f"{what} {index} is listed twice")
        seen.add(index)


def check_compute(plan: Plan) -> None:
    """Check the compute actions inside each rank; verify_transfers.py checks what crosses ranks."""
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
    has_backward = plan.training and plan.chunks[chunk].has_backward
    legal = [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}] if has_backward else [{Kind.F}]
    if found not in legal:
        what = "one F and one B, or F, I and W" if has_backward else "one F and nothing else"
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
