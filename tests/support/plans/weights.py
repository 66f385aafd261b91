"""The weights and gradients of one rank's buckets on one replica, with symbolic contributions, for oracle.py.

A whole gradient buffer is a list of the contributions in it, (chunk, micro-batch); so is what the owner of a slice has
received. Where each micro-batch is reduced for itself, the buffer has room for one contribution.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tpengine.plan import Action, Bucket, Kind, Plan, Reduced, Weights

_Piece = tuple[int, int]


class Illegal(Exception):
    """The plan loses or mixes up a tensor, waits for ever, or forgets something."""


def demand(holds: bool, text: str) -> None:
    """Raise `Illegal` unless the condition holds."""
    if not holds:
        raise Illegal(text)


class Replica:
    """What a rank has of its buckets."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.buckets = {b.index: b for b in plan.buckets if plan.chunks[b.chunks[0]].rank == rank}
        self.buffers: dict[int, list[_Piece]] = defaultdict(list)
        self.owners: dict[int, Counter[_Piece]] = defaultdict(Counter)
        # Buckets whose storage is there, and those whose values are.
        self.allocated = {i for i, b in self.buckets.items() if b.weights is Weights.WHOLE}
        self.current = set(self.allocated)
        self.pinned: dict[int, set[_Piece]] = defaultdict(set)
        # What forwards have counted, by its index.
        self.counts = {c.index: c.chunks for c in plan.counts if plan.chunks[c.chunks[0]].rank == rank}
        self.counted: dict[int, Counter[_Piece]] = defaultdict(Counter)

    def compute(self, action: Action, under_way: set[Action]) -> None:
        """Use the weights of a chunk, and add to its buffers and counts."""
        for index, chunks in self.counts.items():
            if action.kind is Kind.F and action.chunk in chunks:
                demand(Action(Kind.REDUCE, index=index) not in under_way, "counts are added to while they are reduced")
                self.counted[index][action.piece] += 1
        for index, bucket in self.buckets.items():
            if action.chunk not in bucket.chunks:
                continue
            demand(index in self.current, f"{action} without the weights of bucket {index}")
            if action.kind is Kind.I:
                self.pinned[index].add(action.piece)
            self.pinned[index] -= {action.piece} if action.kind is Kind.W else set()
            if action.kind in (Kind.B, Kind.W) and bucket.reduced is not Reduced.NEVER:
                demand(Action(Kind.REDUCE, index=index) not in under_way, "a buffer is filled while it is reduced")
                demand(bucket.reduced is Reduced.STEP or not self.buffers[index], "a buffer of one has two")
                self.buffers[index].append(action.piece)

    def gather(self, gather: Action) -> None:
        """Allocate a bucket's weights; they are there when the gather has finished."""
        bucket = self._bucket(gather)
        demand(bucket.index not in self.allocated, f"{gather} twice")
        self.allocated.add(bucket.index)

    def free(self, free: Action) -> None:
        """Let go of a bucket's weights."""
        bucket = self._bucket(free)
        demand(bucket.weights is Weights.SLICED, f"{free} of the only copy")
        demand(bucket.index in self.current, f"{free} without weights")
        demand(not self.pinned[bucket.index], f"{free} between I and W")
        demand(
            bucket.reduced is not Reduced.MICROBATCH or not self.buffers[bucket.index], f"{free} before it is reduced"
        )
        self.allocated.remove(bucket.index)
        self.current.remove(bucket.index)

    def reduce(self, reduction: Action, inside: Action) -> None:
        """Send all that is in a buffer."""
        bucket = self._bucket(reduction)
        demand(self.plan.training, "only in training")
        demand(bucket.reduced is not Reduced.NEVER, f"{reduction} of frozen weights")
        demand(inside.chunk in bucket.chunks and inside.kind in (Kind.B, Kind.W), f"{reduction} in {inside}")
        if bucket.reduced is Reduced.MICROBATCH:
            demand(self.buffers[bucket.index] == [inside.piece], "not this micro-batch alone")
        self.owners[bucket.index].update(self.buffers[bucket.index])
        if bucket.reduced is Reduced.MICROBATCH:
            self.buffers[bucket.index].clear()

    def reduce_counts(self, reduction: Action) -> None:
        """Send all that was counted."""
        demand(self.plan.training and reduction.index in self.counts, f"{reduction} alone")
        self.owners[reduction.index or 0].update(self.counted[reduction.index or 0])

    def finish(self, sub: Action) -> None:
        """End a gather or reduction."""
        if sub.kind is Kind.GATHER:
            self.current.add(self._bucket(sub).index)

    def end(self) -> None:
        """Check that only slices are left."""
        sliced = {index for index, bucket in self.buckets.items() if bucket.weights is Weights.SLICED}
        demand(not sliced & self.allocated, f"buckets {sliced & self.allocated} are not freed")

    def check_owner(self) -> None:
        """Check that every contribution has reached its owner once."""
        for index, bucket in self.buckets.items():
            wanted = Counter((chunk, i) for chunk in bucket.chunks for i in range(self.plan.num_microbatches))
            frozen = bucket.reduced is Reduced.NEVER
            demand(
                self.owners[index] == (Counter() if frozen else wanted),
                f"bucket {index} lacks or repeats contributions",
            )

        for index, chunks in self.counts.items():
            wanted = Counter((chunk, i) for chunk in chunks for i in range(self.plan.num_microbatches))
            demand(self.owners[index] == wanted, f"counts {index} lack or repeat contributions")

    def _bucket(self, action: Action) -> Bucket:
        demand(action.index in self.buckets, f"{action}: a bucket of another rank")
        return self.buckets[action.index or 0]
