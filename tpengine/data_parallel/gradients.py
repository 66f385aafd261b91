"""The gradients of a step: where micro-batches add them, in which order they are summed, and what the optimizer reads.

    fast    one buffer per parameter; micro-batches one after the other, then the ranks
    exact   one buffer per parameter and shard; blocks of micro-batches in a balanced tree, then the replicas, then the
            shards that have the same weights: the same order in every layout

Both accumulate through sinks into flat buckets whose reductions start inside the backward pass that fills them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.tree import tree_sum

from tpengine.architectures.part import Axis
from tpengine.data_parallel.bucket import FlatBucket
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.distributed.mesh import Communicators
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layout.parameters import ALIGNMENT_BYTES, EMBEDDING, HEAD, BucketLayout, Piece, leaf_name
from tpengine.layout.slices import BlockCut, BucketCut
from tpengine.model.exact import Shards


class StepGradients:
    """The gradients of one rank.

    Args:
        buckets: the flat buffers, and the reductions that start while backward runs.
        terms: by piece, the buffers that are added when the step ends, in a balanced tree; one of each needs no sum.
        summed: `of` in as few tensors as there are, for what is done to all elements.
        shared: ranks and sums that each of them has only a part of after the reductions; added when the step ends.
        in_tree: add the latter in a balanced tree of ranks, whatever the transport.
        chunk_of: by bucket index, the chunk that fills it, where blocks of micro-batches are summed (exact mode).
        block_length: micro-batches of a block.

    Attributes:
        buckets, summed: as given.
        of: by piece, what the optimizer reads after `finish`; of a piece that is cut over the replicas (ZeRO) the
            elements that this one owns, one dim. Pieces of which it owns none are left out.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        terms: Mapping[str, Sequence[Tensor]],
        summed: Collection[Tensor],
        shared: Sequence[tuple[Communicator, Sequence[Tensor]]] = (),
        *,
        in_tree: bool = False,
        chunk_of: Mapping[int, int] | None = None,
        block_length: int = 1,
    ) -> None:
        self.buckets, self.summed = buckets, summed
        self.of: Mapping[str, Tensor] = {piece: of_piece[0] for piece, of_piece in terms.items()}
        self._terms = [of_piece for of_piece in terms.values() if len(of_piece) > 1]
        self._shared, self._in_tree = shared, in_tree
        self._chunk_of, self._block_length = chunk_of or {}, block_length

    def begin(self) -> None:
        """Begin a step: everything is zero."""
        self.buckets.zero()

    def set_blocks(self, num_micro_batches: int, num_blocks: int) -> None:
        """Sum other numbers of micro-batches and blocks from now on: between steps; nothing where there are none."""
        self._block_length = num_micro_batches // num_blocks
        self.buckets.set_blocks(num_blocks)

    def after_backward(self, chunk: int, microbatch: int, reduced: Collection[int]) -> None:
        """End a block after its last micro-batch.

        Args:
            chunk, microbatch: what has been added.
            reduced: buckets whose reductions have started, which ended the block.
        """
        if (microbatch + 1) % self._block_length:
            return
        for index, filled_by in self._chunk_of.items():
            if filled_by == chunk and index not in reduced:
                self.buckets.end_block(index)

    def finish(self) -> None:
        """Take the sums that are left, of this rank's shards and then of other ranks; reductions have ended."""
        for terms in self._terms:
            tree_sum(terms, out=terms[0])
        for comm, shared in self._shared:
            flat = torch.cat([gradient.reshape(-1) for gradient in shared])
            comm.all_reduce_in_tree_(flat) if self._in_tree else comm.all_reduce_(flat)
            for gradient, total in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
                gradient.copy_(total.view(gradient.shape))


def fast_step_gradients(
    layouts: Mapping[int, BucketLayout],
    pieces: Mapping[str, Piece],
    held: Mapping[str, Parameter],
    tied_ends: bool,
    comms: Communicators,
    dtype: torch.dtype,
    device: torch.device,
    sink: GradientSink,
    *,
    is_cut: bool = False,
    each: bool = False,
) -> StepGradients:
    """Make gradients of one buffer each, summed over the axes that their bucket names.

    Cut, a bucket is summed over the replicas while backward runs, and each keeps a slice. What other ranks of the
    replica have a share of, norms on all tp ranks and KV heads on several, is added when all micro-batches are in: of
    the slices alone. Experts that no other rank holds have nobody to share with: their buckets stay whole.

    Args:
        layouts: buckets by index.
        pieces, held: what this rank holds, and the parameters that are trained, by piece.
        tied_ends: the embedding is also the output head of its chunk, and gets two contributions in a backward pass.
        comms: the ranks.
        dtype, device: of the buffers.
        sink: what the model's layers add to.
        is_cut: replicas own slices (ZeRO).
        each: sum every micro-batch's contribution on its own (Reduced.MICROBATCH); of cut buckets only.
    """
    made: dict[int, FlatBucket] = {}
    for index, layout in layouts.items():
        replicas = comms.over(layout.reduce_over[:1])
        cut = BucketCut(layout, replicas.size) if is_cut and replicas.size > 1 else None
        comm = comms.over(layout.reduce_over) if cut is None else replicas
        made[index] = FlatBucket(layout, held, comm, dtype, device, cut=cut, is_transient=each and cut is not None)
        # Before the next one is made: whole buffers never exist at once.
        if made[index].is_transient:
            made[index].free()
    buckets = GradientBuckets(made, {EMBEDDING: 2} if tied_ends else {})
    packs = {tuple(held[name] for name in names): matrix for names, matrix in buckets.packs.items()}
    sink.attach({parameter: buckets.place(name) for name, parameter in held.items()}, buckets, packs)
    kept = [bucket.own for bucket in made.values()]
    if not is_cut:
        return StepGradients(buckets, {name: [gradient] for name, gradient in buckets.gradients.items()}, kept)
    # What a slice lacks when all micro-batches are in: sums over axes that are not its bucket's.
    later: dict[tuple[Axis, ...], list[Tensor]] = {}
    for bucket in made.values():
        if axes := _without(bucket.layout.reduce_over, bucket.axes):
            later.setdefault(axes, []).append(bucket.own)
        for name, own in bucket.own_views.items():
            if axes := _without(pieces[name].spec.reduce_over, bucket.layout.reduce_over):
                later.setdefault(axes, []).append(own)
    summed = [bucket.views if bucket.cut is None else bucket.own_views for bucket in made.values()]
    terms = {name: [gradient] for views in summed for name, gradient in views.items()}
    return StepGradients(buckets, terms, kept, _shared(later, comms))


def exact_step_gradients(
    layouts: Mapping[int, BucketLayout],
    pieces: Mapping[str, Piece],
    held: Mapping[str, Parameter],
    shards: Shards,
    chunk_of: Mapping[int, int],
    tied_ends: bool,
    comms: Communicators,
    num_micro_batches: int,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    sinks: Sequence[GradientSink],
    head_sinks: Sequence[GradientSink],
    expert_sinks: Sequence[Sequence[GradientSink]] = (),
    *,
    is_cut: bool = False,
) -> StepGradients:
    """Make gradients of one buffer per shard that this rank holds, all summed in balanced trees.

        gradient of a piece = tree over the shards that have it of (tree over blocks of (sum over the micro-batches))

    Args:
        layouts: buckets by index, of parameters.exact_gradients.
        pieces, held: what this rank trains, and the parameters, by piece.
        shards: all shards, and which of them this rank holds.
        chunk_of: the chunk that fills each bucket, by index.
        tied_ends: the embedding is also the output head of this rank, which then has a buffer of its own.
        comms: the ranks.
        num_micro_batches: of a step and replica.
        num_blocks: of them, on this replica.
        dtype, device: of the buffers.
        sinks, head_sinks: what the layers and the output head add to, one per held shard.
        expert_sinks: what experts that ranks share add to, for each replica among these ranks one per shard.
        is_cut: every replica keeps the sums of the elements that it owns (ZeRO).

    The replicas of ranks that share experts are lanes of a bucket, joined before its ranks are: replicas that are
    neighbours in the tree of all.

    Memory: num_gradient_buffers(num_blocks) buffers of all gradients; those of norms, and of KV heads fewer than
        shards, once per shard; those of experts once per replica among the ranks that share them.
    """
    leaves = _Leaves(pieces, shards, tied_ends)
    shaped = {leaf: held[piece] for piece, names in leaves.of_piece.items() for leaf in names}
    # A buffer is cut as its piece, so that terms of one sum lie together.
    blocks = {
        leaf: BlockCut.of(name, math.prod(pieces[name].block[1]), comms.over(pieces[name].spec.reduce_over[:1]).size)
        for name, names in leaves.of_piece.items()
        for leaf in names
    }

    def bucket_of(layout: BucketLayout) -> FlatBucket:
        comm = comms.over(layout.reduce_over)
        # Experts that nobody else has stay whole.
        cut = BucketCut(layout, comm.size, blocks) if is_cut and comm.size > 1 else None
        num_lanes = len(expert_sinks) if layout.reduce_over == ("edp",) else 1
        return FlatBucket(layout, shaped, comm, dtype, device, cut=cut, num_lanes=num_lanes)

    made = {index: bucket_of(layout) for index, layout in layouts.items()}
    buckets = GradientBuckets(made, in_tree=True, num_blocks=num_blocks)
    for gradient in buckets.gradients.values():
        assert gradient.data_ptr() % ALIGNMENT_BYTES == 0, "a library's order of sums may depend on alignment"
    for i, (sink, head_sink) in enumerate(zip(sinks, head_sinks, strict=True)):
        for to, places in ((sink, leaves.of_rank(i)), (head_sink, leaves.of_head(i))):
            to.attach({held[piece]: buckets.place(leaf) for piece, leaf in places.items()}, buckets)
    for lane, of_shards in enumerate(expert_sinks):
        for shard, to in enumerate(of_shards):
            to.attach(
                {held[piece]: buckets.place(leaf, lane) for piece, leaf in leaves.of_chunk(shard).items()}, buckets
            )
    sums = {
        name: own
        for bucket in made.values()
        for name, own in (bucket.views if bucket.cut is None else bucket.own_views).items()
    }
    terms = {piece: [sums[leaf] for leaf in names] for piece, names in leaves.of_piece.items() if names[0] in sums}
    of = {piece: of_piece[0] for piece, of_piece in terms.items()}
    # What other real ranks hold too: norms on all tp ranks, a KV head's weights on the ranks that share it.
    later: dict[tuple[Axis, ...], list[Tensor]] = {}
    for name, piece in pieces.items():
        if name in of and piece.num_holders > len(shards.held):
            axes = _without(piece.spec.reduce_over, buckets[buckets.place(leaves.of_piece[name][0])[1]].axes)
            later.setdefault(axes, []).append(of[name])
    return StepGradients(
        buckets,
        terms,
        of.values(),
        _shared(later, comms),
        in_tree=True,
        chunk_of={index: chunk_of[index] for index in layouts},
        block_length=num_micro_batches // num_blocks,
    )


def _without(axes: Iterable[Axis], summed: Collection[Axis]) -> tuple[Axis, ...]:
    """Return the axes that are not summed yet."""
    return tuple(axis for axis in axes if axis not in summed)


def _shared(
    later: Mapping[tuple[Axis, ...], Sequence[Tensor]], comms: Communicators
) -> list[tuple[Communicator, Sequence[Tensor]]]:
    """Return the ranks of axes, and what they sum when the step ends."""
    return [(comm, tensors) for axes, tensors in later.items() if (comm := comms.over(axes)).size > 1]


def buckets_of_pieces(
    layouts: Mapping[int, BucketLayout], pieces: Mapping[str, Piece], shards: Shards
) -> dict[str, int]:
    """Return the bucket in which the first of each piece's buffers lies, in exact mode; some may have none."""
    bucket_of = {leaf: index for index, layout in layouts.items() for leaf in layout.names}
    leaves = _Leaves(pieces, shards, tied_ends=False)
    return {piece: bucket_of[names[0]] for piece, names in leaves.of_piece.items() if names[0] in bucket_of}


class _Leaves:
    """Which buffer each shard adds to.

    Attributes:
        of_piece: the buffers of each piece, in the order in which they are added.
    """

    def __init__(self, pieces: Mapping[str, Piece], shards: Shards, tied_ends: bool) -> None:
        self._pieces, self._tied_ends = pieces, tied_ends
        self._held = shards.held
        self.of_piece: dict[str, list[str]] = {
            name: [
                leaf_name(piece.spec.name, i, head)
                for head in ((False, True) if self._is_tied(piece) else (False,))
                for i in self._ranks_of(piece)
            ]
            for name, piece in pieces.items()
        }

    def of_rank(self, i: int) -> dict[str, str]:
        """piece -> buffer, of the held shard number i, outside the head."""
        pieces = {name: p for name, p in self._pieces.items() if not p.spec.apart}
        return {name: leaf_name(p.spec.name, i) for name, p in pieces.items() if i in self._ranks_of(p)}

    def of_chunk(self, shard: int) -> dict[str, str]:
        """The same of a shard of experts that ranks share."""
        pieces = {name: p for name, p in self._pieces.items() if p.spec.apart and p.holder == shard}
        return {name: leaf_name(p.spec.name, shard) for name, p in pieces.items()}

    def of_head(self, i: int) -> dict[str, str]:
        """The same of the output head."""
        return {
            name: leaf_name(p.spec.name, i, self._is_tied(p))
            for name, p in self._pieces.items()
            if p.spec.name in (HEAD, EMBEDDING) and i in self._ranks_of(p)
        }

    def _is_tied(self, piece: Piece) -> bool:
        return self._tied_ends and piece.spec.name == EMBEDDING

    def _ranks_of(self, piece: Piece) -> Iterable[int]:
        """The held shards, counted from the first held, that have this piece; of whole experts all are held."""
        if piece.spec.apart:
            return (piece.holder,)
        first = piece.holder - self._held.start
        return range(max(first, 0), min(first + piece.num_holders, len(self._held)))
