"""The plan of one step: what every pipeline rank does, in order. Pure data, printable, hashable.

Every rank builds the whole plan, and the ranks compare digests at start, so that all run the plan that was verified.
A Plan can be wrong: generators.py and lower.py build it, verify.py checks it, text.py parses its text. A check raises
PlanError: which rule is broken, where, and a picture of the place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from tpengine.plan.actions import Action, format_actions, peer_chunk

_CONTEXT = 3


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that crosses a chunk boundary; the dtype is a name such as "float32"."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Recompute(StrEnum):
    """What backward recomputes instead of keeping it since forward; the value is its text."""

    NONE = "none"
    # The attention half of every block, from the block's input.
    ATTENTION = "attention"
    # Every block, from its input.
    BLOCK = "block"
    # The whole chunk, from its input.
    FULL = "full"


class Gathered(StrEnum):
    """Whether x[T, D] that a column-parallel layer gathered is kept for its weight gradient, or gathered again.

    The same holds for dy[T, D] that the input half of a row-parallel layer gathered, where W runs apart from I.
    """

    KEEP = "keep"
    AGAIN = "again"


class Weights(StrEnum):
    """Where a data-parallel replica has the weights of a bucket; the value is its text."""

    # Every replica holds them whole all the time and updates all of them.
    WHOLE = "whole"
    # Every replica holds them whole, but STEP gives it new values of its own slice only. So they are gathered once per
    # plan, before their first use.
    UPDATED = "updated"
    # A replica holds its slice. They are whole only between a gather and a free.
    SLICED = "sliced"


class Reduced(StrEnum):
    """When a bucket's gradient contributions are summed over the data-parallel replicas; the value is its text."""

    # Those of all micro-batches at once: inside the last backward that fills the bucket.
    STEP = "step"
    # Those of each micro-batch for itself: inside every backward that fills the bucket.
    MICROBATCH = "microbatch"
    # There are none: its weights are frozen.
    NEVER = "never"


class Residency(StrEnum):
    """How long `lower` keeps the gathered weights of a SLICED bucket; the value is its text."""

    # From their first to their last use in the step: gathered once.
    STEP = "step"
    # For one use: F, B, or I to its W; gathered before each, freed after it.
    USE = "use"


@dataclass(frozen=True)
class Chunk:
    """One piece of the model on one pipeline rank; a plan lists chunks in model order.

    Args:
        rank: the pipeline rank that holds it. A rank may hold several chunks.
        layers: half-open range of the model's layers.
        input: what arrives from the chunk before; None for the first chunk, which reads tokens.
        output: what goes to the chunk after; None for the last chunk, which ends in the loss.
        recompute, gathered: how the chunk trades time for memory.
        has_backward: whether backward comes to it: it, or a chunk before it, has weights that are trained. Of a chunk
            without, no gradient is computed, sent or received.
    """

    rank: int
    layers: tuple[int, int]
    input: TensorSpec | None
    output: TensorSpec | None
    recompute: Recompute = Recompute.NONE
    gathered: Gathered = Gathered.KEEP
    has_backward: bool = True


@dataclass(frozen=True)
class Bucket:
    """Parameters that replicas gather, and whose gradients they reduce, together.

    Args:
        index: unique over the whole plan, not per rank.
        chunks: the chunks that use its weights and whose backwards fill it, all on one rank: either one, or the first
            and the last chunk where they are on one rank and share a parameter. A plan lists a chunk's buckets in the
            order in which backward completes them; forward uses them in the reverse order.
        weights: where a replica has the bucket's weights.
        reduced: when its gradients are reduced. A forward-only plan reduces nothing.
    """

    index: int
    chunks: tuple[int, ...]
    weights: Weights = Weights.WHOLE
    reduced: Reduced = Reduced.STEP


@dataclass(frozen=True)
class CountBucket:
    """What the forwards of a rank count, as tokens of each expert, and replicas sum once a step.

    Args:
        index: unique over the whole plan, among those of its buckets.
        chunks: the chunks whose forwards add to it, all on one rank.
    """

    index: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """A parameter used by several chunks that live on different ranks; its gradients are summed over them."""

    index: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One step of every pipeline rank.

    Args:
        schedule: the generator's name, for messages and drawings.
        num_microbatches: micro-batches of one data-parallel replica.
        num_layers: layers of the whole model.
        chunks: the model's pieces, in model order.
        buckets: the parameters that replicas gather and reduce. ties: the gradients to sum over chunks.
        actions: one list per pipeline rank.
        training: False for a plan that only runs forward.
        counts: what a step counts in forward and sums over replicas, at most one entry for each rank.
    """

    schedule: str
    num_microbatches: int
    num_layers: int
    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]
    ties: tuple[Tie, ...]
    actions: tuple[tuple[Action, ...], ...]
    training: bool
    counts: tuple[CountBucket, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.actions)

    def peer(self, transfer: Action) -> int:
        """Return the rank on the other side of a send or receive.

        Raises:
            ValueError: the model has no chunk on that side.
        """
        chunk = peer_chunk(transfer)
        if not 0 <= chunk < len(self.chunks):
            raise ValueError(f"{transfer} needs a chunk {chunk}: there are {len(self.chunks)} chunks")
        return self.chunks[chunk].rank

    def gives_gradient(self, chunk: int) -> bool:
        """Return whether backward of a chunk computes the gradient of its input, which the chunk before it needs."""
        return chunk > 0 and self.chunks[chunk - 1].has_backward

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that a rank holds, in model order."""
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.rank == rank)

    def counts_of(self, rank: int) -> CountBucket | None:
        """Return what the forwards of a rank count; None if nothing."""
        return next((counts for counts in self.counts if self.chunks[counts.chunks[0]].rank == rank), None)

    def tie_ranks(self, tie: Tie) -> tuple[int, ...]:
        """Return the ranks that hold the tie's chunks, in the tie's order."""
        return tuple(self.chunks[chunk].rank for chunk in tie.chunks)

    def text(self) -> str:
        """Return the complete plan as text: equal texts are equal plans, and `parse_plan` gives the plan back."""
        mode = "training" if self.training else "forward"
        lines = [f"plan {self.schedule} {mode} microbatches {self.num_microbatches} layers {self.num_layers}"]
        for index, chunk in enumerate(self.chunks):
            first, last = chunk.layers
            ends = f"input {chunk.input or 'none'} output {chunk.output or 'none'}"
            memory = f"recompute {chunk.recompute} gathered {chunk.gathered}{'' if chunk.has_backward else ' forward'}"
            lines.append(f"chunk {index} rank {chunk.rank} layers {first}:{last} {ends} {memory}")
        for bucket in self.buckets:
            state = f"weights {bucket.weights} reduced {bucket.reduced}"
            lines.append(f"bucket {bucket.index} chunks {' '.join(map(str, bucket.chunks))} {state}")
        lines += [f"counts {counts.index} chunks {' '.join(map(str, counts.chunks))}" for counts in self.counts]
        lines += [f"tie {tie.index} chunks {' '.join(map(str, tie.chunks))}" for tie in self.ties]
        lines += [f"rank {rank}: {format_actions(actions)}" for rank, actions in enumerate(self.actions)]
        return "\n".join(lines) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text().encode()).hexdigest()


class PlanError(ValueError):
    """A plan breaks a rule.

    The message is one line: the rule, then the values. `rank` and `position` locate the fault in `plan.actions`:
    position len(list) means that something is missing at the end, None that the fault is not in a list. `picture` shows
    the list around the place with an arrow; it is empty where there is no place.
    """

    def __init__(self, message: str, rank: int | None = None, position: int | None = None, picture: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.picture = picture


def fault(plan: Plan, rule: str, values: str, rank: int | None = None, position: int | None = None) -> PlanError:
    """Build the error for a broken rule.

    Args: plan: for the picture. rule: always the same words for the same rule. values: what was found.
        rank, position: where, if it is in a list.
    """
    if rank is None or position is None:
        return PlanError(f"{rule}: {values}", rank, position)
    place = f"rank {rank}, action {position}"
    return PlanError(f"{rule}: {values} ({place})", rank, position, _picture(plan, rank, position))


def _picture(plan: Plan, rank: int, position: int) -> str:
    words = [*map(str, plan.actions[rank]), "<end>"]
    start, end = max(position - _CONTEXT, 0), min(position + _CONTEXT + 1, len(words))
    before = " ".join([f"rank {rank}: {'... ' if start else ''}".rstrip(), *words[start:position]])
    after = " ".join(words[position:end]) + (" ..." if end < len(words) else "")
    return f"{before} {after}\n{' ' * (len(before) + 1)}^ action {position} of {len(words) - 1}"
