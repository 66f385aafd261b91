"""Structure: chunks hold all layers once, and ranks hold chunks; boundaries, buckets and ties name what exists."""

from __future__ import annotations

from collections.abc import Sequence

from tpengine.dtypes import DTYPES
from tpengine.plan.plan import Plan
from tpengine.plan.verify.fault import fault


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
        # Between ranks matching.py compares the shapes, because there an error has a place to show.

        if index > 0 and chunk.rank == plan.chunks[index - 1].rank:
            output = plan.chunks[index - 1].output
            if output != chunk.input:
                values = f"chunk {index - 1} gives {output}, chunk {index} takes {chunk.input}"
                raise fault(plan, "neighbouring chunks agree on shape and dtype", values)


def _check_gradients(plan: Plan) -> None:
    _check_unique(plan, "bucket", [bucket.index for bucket in plan.buckets])
    _check_unique(plan, "tie", [tie.index for tie in plan.ties])
    named = [(f"bucket {bucket.index}", chunk) for bucket in plan.buckets for chunk in bucket.chunks]
    named += [(f"tie {tie.index}", chunk) for tie in plan.ties for chunk in tie.chunks]
    for name, chunk in named:
        if not 0 <= chunk < len(plan.chunks):
            raise fault(plan, f"chunks are 0 to {len(plan.chunks) - 1}", f"{name} names chunk {chunk}")
    for bucket in plan.buckets:
        holders = {plan.chunks[chunk].rank for chunk in bucket.chunks}
        if len(holders) != 1 or len(set(bucket.chunks)) < len(bucket.chunks):
            values = f"bucket {bucket.index} names chunks {list(bucket.chunks)}"
            raise fault(plan, "a bucket belongs to chunks of one rank, each once", values)
    for tie in plan.ties:
        ranks = plan.tie_ranks(tie)
        if len(ranks) < 2 or len(set(ranks)) < len(ranks):
            values = f"tie {tie.index} is on ranks {list(ranks)}"
            raise fault(plan, "a tie has members on different ranks", values)


def _check_unique(plan: Plan, what: str, indices: Sequence[int]) -> None:
    seen: set[int] = set()
    for index in indices:
        if index in seen:
            raise fault(plan, f"each {what} has its own index", f"{what} {index} is listed twice")
        seen.add(index)
