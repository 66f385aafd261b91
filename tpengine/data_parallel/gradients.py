"""The gradients of a step: where micro-batches add them, in which order they are summed, and what the optimizer reads.

    FastGradients    one buffer per parameter; micro-batches one after the other, then the ranks
    ExactGradients   one buffer per parameter and shard; blocks of micro-batches in a balanced tree, then the
                     replicas, then the shards that have the same weights: the same order in every layout

Both accumulate through sinks into flat buckets whose reductions start inside the backward pass that fills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.tree import tree_sum

from tpengine.data_parallel import BlockSums, GradientBuckets
from tpengine.data_parallel.exact_slices import PackedBuckets
from tpengine.distributed.groups import Communicators
from tpengine.layers.gradient_sink import BufferSink
from tpengine.layout.parameters import ALIGNMENT_BYTES, EMBEDDING, HEAD, BucketLayout, Piece, leaf_name
from tpengine.layout.slices import BlockCut
from tpengine.model.exact import Shards


class StepGradients(Protocol):
    """The gradients of one rank.

    Attributes:
        buckets: the flat buffers.
        of: by piece, what the optimizer reads after `finish`.
        summed: the same in as few tensors as there are, for what is done to all elements.
    """

    of: Mapping[str, Tensor]
    summed: Collection[Tensor]

    @property
    def buckets(self) -> GradientBuckets: ...

    def begin(self) -> None:
        """Begin a step: everything is zero."""

    def after_backward(self, chunk: int, microbatch: int, reduced: Collection[int]) -> None:
        """A micro-batch of this replica has been added to a chunk; `reduced`: buckets whose reductions have started."""

    def finish(self) -> None:
        """Take the sums that are left; all reductions have been waited for."""


def attach(sink: BufferSink, held: Mapping[str, Parameter], buckets: GradientBuckets) -> None:
    """Have a sink add to the buffers of these parameters: by one product to those that the buckets have packed."""
    packs = {tuple(held[name] for name in names): matrix for names, matrix in buckets.packs.items()}
    sink.attach({parameter: buckets.place(name) for name, parameter in held.items()}, buckets, packs)


class FastGradients:
    """A gradient is one buffer, summed over the ranks named in the table.

    Args:
        layouts: buckets by index.
        held: the parameters by piece.
        tied_ends: the embedding is also the output head of its chunk, and gets two contributions in a backward pass.
        comms: the ranks.
        dtype, device: of the buffers.
        sink: what the model's layers add to.
    """

    def __init__(
        self,
        layouts: Mapping[int, BucketLayout],
        held: Mapping[str, Parameter],
        tied_ends: bool,
        comms: Communicators,
        dtype: torch.dtype,
        device: torch.device,
        sink: BufferSink,
    ) -> None:
        over = {"dp": comms.dp, "dp_tp": comms.dp_tp, "dp_replica": comms.dp_replica}
        self.buckets = GradientBuckets(
            layouts,
            held,
            {name: 2 if tied_ends and name == EMBEDDING else 1 for name in held},
            {index: over[layout.reduce_over] for index, layout in layouts.items()},
            dtype=dtype,
            device=device,
        )
        self.of: Mapping[str, Tensor] = self.buckets.gradients
        self.summed: Collection[Tensor] = self.buckets.flat.values()
        attach(sink, held, self.buckets)

    def begin(self) -> None:
        """See StepGradients."""
        self.buckets.zero()

    def after_backward(self, chunk: int, microbatch: int, reduced: Collection[int]) -> None:
        """Nothing: micro-batches are added one after the other."""

    def finish(self) -> None:
        """Nothing: the reductions have summed over all holders."""


class ExactGradients:
    """A gradient is one buffer per shard that this rank holds, all summed in balanced trees.

        gradient of a piece = tree over the shards that have it of (tree over blocks of (sum over the micro-batches))

    Args:
        layouts: buckets by index, of parameters.exact_gradients.
        pieces, held: what this rank holds, and the parameters, by piece.
        shards: all shards, and which of them this rank holds.
        chunk_of: the chunk that fills each bucket, by index.
        tied_ends: the embedding is also the output head of this rank, which then has a buffer of its own.
        comms: the ranks.
        num_micro_batches: of a step and replica.
        num_blocks: of them, on this replica.
        dtype, device: of the buffers.
        sinks, head_sinks: what the layers and the output head add to, one per held shard.
        sliced: every replica keeps the sums of the elements that it owns (ZeRO).

    Attributes:
        blocks: sums of blocks of micro-batches.
        on_block_end: called with a bucket's gradients, by buffer, when they hold the sum of a block of micro-batches.

    Memory: num_gradient_buffers(num_blocks) buffers of all gradients; those of norms, and of KV heads fewer than
        shards, once per shard.
    """

    def __init__(
        self,
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
        sinks: Sequence[BufferSink],
        head_sinks: Sequence[BufferSink],
        sliced: bool = False,
    ) -> None:
        self._block_length = num_micro_batches // num_blocks
        self._layouts, self._chunk_of = layouts, chunk_of
        self.on_block_end: Callable[[Mapping[str, Tensor]], None] | None = None
        leaves = _Leaves(pieces, shards, tied_ends)
        shaped = {leaf: held[piece] for piece, names in leaves.of_piece.items() for leaf in names}
        make = partial(PackedBuckets, cuts=cuts_of(leaves, pieces, comms.dp.size)) if sliced else GradientBuckets
        self.buckets = make(
            layouts,
            shaped,
            dict.fromkeys(shaped, 1),
            dict.fromkeys(layouts, comms.dp),
            dtype=dtype,
            device=device,
            in_tree=True,
            before_sum=self._end_block,
        )
        self.blocks = BlockSums(self.buckets.flat, num_blocks)
        buffers = self.buckets.gradients
        sums = self.buckets.parts if isinstance(self.buckets, PackedBuckets) else buffers
        self._terms = {
            piece: [sums[leaf] for leaf in names] for piece, names in leaves.of_piece.items() if sums[names[0]].numel()
        }
        self.of: Mapping[str, Tensor] = {piece: terms[0] for piece, terms in self._terms.items()}
        self.summed: Collection[Tensor] = self.of.values()
        for gradient in buffers.values():
            assert gradient.data_ptr() % ALIGNMENT_BYTES == 0, "a library's order of sums may depend on alignment"
        num_held = len(shards.held)
        # What other real ranks hold too: norms on all tp ranks, a KV head's weights on the ranks that share it.
        self._first_leaf = {piece: names[0] for piece, names in leaves.of_piece.items()}
        self._shared_by = {
            comm: [
                self.of[name]
                for name, piece in pieces.items()
                if chosen(piece) and piece.num_holders > num_held and name in self.of
            ]
            for comm, chosen in (
                (comms.tp, lambda piece: piece.spec.shard_dim is None),
                (comms.replica, lambda piece: piece.spec.shard_dim is not None),
            )
            if comm is not None
        }
        place = self.buckets.place
        for i, (sink, head_sink) in enumerate(zip(sinks, head_sinks, strict=True)):
            sink.attach({held[piece]: place(leaf) for piece, leaf in leaves.of_rank(i).items()}, self.buckets)
            head_sink.attach({held[piece]: place(leaf) for piece, leaf in leaves.of_head(i).items()}, self.buckets)

    def set_blocks(self, num_micro_batches: int, num_blocks: int) -> None:
        """Sum other numbers of micro-batches and blocks from now on: between steps."""
        self._block_length = num_micro_batches // num_blocks
        if num_blocks != self.blocks.num_blocks:
            self.blocks = BlockSums(self.buckets.flat, num_blocks)

    def bucket_of(self, piece: str) -> int:
        """Return the bucket in which the first buffer of a piece lies."""
        return self.buckets.place(self._first_leaf[piece])[1]

    def begin(self) -> None:
        """See StepGradients."""
        self.buckets.zero()
        self.blocks.begin()

    def after_backward(self, chunk: int, microbatch: int, reduced: Collection[int]) -> None:
        """End a block after its last micro-batch; buckets whose reductions have started did so before."""
        if (microbatch + 1) % self._block_length:
            return
        for index in self.buckets.flat:
            if self._chunk_of[index] == chunk and index not in reduced:
                self._end_block(index)

    def finish(self) -> None:
        """Add the shards' gradients of each piece, those of this rank and then those of others."""
        for terms in self._terms.values():
            if len(terms) > 1:
                tree_sum(terms, out=terms[0])
        for comm, shared in self._shared_by.items():
            if shared:
                flat = torch.cat([gradient.reshape(-1) for gradient in shared])
                comm.all_reduce_in_tree_(flat)
                for gradient, total in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
                    gradient.copy_(total.view(gradient.shape))

    def _end_block(self, index: int) -> None:
        if self.on_block_end is not None:
            self.on_block_end({name: self.buckets.gradients[name] for name in self._layouts[index].names})
        self.blocks.end_block(index)


def cuts_of(leaves: _Leaves, pieces: Mapping[str, Piece], num_replicas: int) -> dict[str, BlockCut]:
    """Return how each buffer is cut over the replicas: as its piece, so that terms of one sum lie together."""
    return {
        leaf: BlockCut.of(name, math.prod(pieces[name].block[1]), num_replicas)
        for name, names in leaves.of_piece.items()
        for leaf in names
    }


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
        return {name: leaf_name(p.spec.name, i) for name, p in self._pieces.items() if i in self._ranks_of(p)}

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
        """The held shards, counted from the first held, that have this piece."""
        first = piece.holder - self._held.start
        return range(max(first, 0), min(first + piece.num_holders, len(self._held)))
