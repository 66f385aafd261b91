"""What a rank holds from step to step, in bytes: weights, gradients, masters and moments. Torch-free.

With w bytes per weight, a bytes per element of promote_types(dtype, float32), and d replicas, a weight takes:

    zero 0    w + a + s + m               m = a below float32, where there is a master copy, else 0
    zero 1    w + a + (s + m) / d         s = what the optimizer keeps: 2a for AdamW's moments (layout/update_work.py)
    zero 2    w + (a + s + m) / d
    zero 3    (w + a + s + m) / d

Of a frozen weight there is the weight alone: w, or w / d at stage 3. Buckets that are cut into slices are padded
(layout/slices.py). Gathered weights, and gradients that are not summed yet, come on top while a step runs: the plan
says when, and the simulator how much. In exact mode each replica adds whole gradients up, in a tree, at every stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from tpengine.config import Config, OptimConfig, num_blocks, num_shards_of
from tpengine.config.exact_sizes import num_gradient_buffers
from tpengine.config.rules import ZERO_OF_SLICED_GRADIENTS, ZERO_OF_SLICED_WEIGHTS
from tpengine.dtypes import dtype_bytes
from tpengine.layout.groups import frozen_of
from tpengine.layout.parameters import BucketLayout, Piece, leaf_parts, pieces_of, stage_specs
from tpengine.layout.slices import BlockCut, parts_of, slice_numel
from tpengine.layout.step_plan import Layout, gradient_bytes, reduced_of
from tpengine.layout.update_work import states_bytes
from tpengine.plan import Reduced


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank between two steps.

    Attributes:
        weights, gradients: of the buffers; padding is counted, and listed once more in `padding`.
        masters, moments: what the optimizer keeps of the elements that this rank updates, moments or other states.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    padding: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all but `padding`, which is part of the others."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.padding


def num_weights(config: Config, layout: Layout, rank: int) -> int:
    """Return the elements of all weights that the tp ranks of pipeline rank `rank` hold each, not cut over replicas."""
    return _numel(_pieces(config, layout, rank))


def num_trained(config: Config, layout: Layout, rank: int) -> int:
    """Return those of `num_weights` that are not frozen."""
    return _numel(_split(config, _pieces(config, layout, rank))[0])


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(math.prod(piece.block[1]) for piece in pieces)


def _split(config: Config, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces that are trained, and those that are frozen; routers' biases, always whole, are neither."""
    frozen = frozen_of(config)
    trained = [piece for piece in pieces if piece.spec.name not in frozen]
    return trained, [piece for piece in pieces if piece.spec.name in frozen and piece.spec.has_gradient]


def _num_without_gradient(pieces: Sequence[Piece]) -> int:
    return _numel([piece for piece in pieces if not piece.spec.has_gradient])


def state_bytes(config: Config, layout: Layout, rank: int, replica: int = 0) -> StateBytes:
    """Return what a rank holds between steps.

    Args:
        config: validated.
        layout: of that configuration.
        rank, replica: its place in the pipeline, and among the replicas, which own different slices.
    """
    if config.train.reduction == "exact":
        held = _exact(config, layout, rank, replica)
    elif layout.zero:
        held = _sliced(config, layout, rank, replica)
    else:
        trained = num_trained(config, layout, rank)
        held = _Elements(num_weights(config, layout, rank), trained, trained)
    return _in_bytes(held, config.train.dtype, config.optim)


def even_state_bytes(numel: int, zero: int, dp: int, dtype: str, optim: OptimConfig) -> int:
    """Return what a rank holds of `numel` weights that replicas cut without padding, in fast mode.

    Args:
        numel: weights of the rank's tp and pp coordinates.
        zero, dp: which of it replicas cut, and into how many slices.
        dtype: of the weights.
        optim: the optimizer.
    """
    weights, gradients, owned = (
        numel // dp if zero >= stage else numel for stage in (ZERO_OF_SLICED_WEIGHTS, ZERO_OF_SLICED_GRADIENTS, 1)
    )
    return _in_bytes(_Elements(weights, gradients, owned), dtype, optim).total


def _in_bytes(held: _Elements, dtype: str, optim: OptimConfig) -> StateBytes:
    wide, narrow = gradient_bytes(dtype), dtype_bytes(dtype)
    return StateBytes(
        weights=held.weights * narrow,
        gradients=held.gradients * wide,
        masters=held.owned * wide if narrow != wide else 0,
        moments=held.owned * states_bytes(optim, dtype),
        padding=held.padded_weights * narrow + held.padded_gradients * wide,
    )


class _Elements(NamedTuple):
    """Elements that a rank holds; `owned` are those that it updates, and what is padding is part of the others."""

    weights: int
    gradients: int
    owned: int
    padded_weights: int = 0
    padded_gradients: int = 0


def _sliced(config: Config, layout: Layout, rank: int, replica: int) -> _Elements:
    buckets, numel = layout.buckets_of(rank).values(), num_trained(config, layout, rank)
    cut = [bucket for bucket in buckets if layout.num_replicas(bucket) > 1]
    # Experts that nobody else holds: whole, whatever the stage.
    alone = sum(bucket.numel for bucket in buckets) - sum(bucket.numel for bucket in cut)
    slices = alone + sum(slice_numel(bucket, layout.num_replicas(bucket)) for bucket in cut)
    whole = alone + sum(layout.num_replicas(of) * slice_numel(of, layout.num_replicas(of)) for of in cut)
    owned = alone + sum(_owned(layout, bucket, replica) for bucket in cut)
    weights, used_weights = (slices, owned) if layout.zero == ZERO_OF_SLICED_WEIGHTS else (whole, numel)
    each = reduced_of(config) is Reduced.MICROBATCH
    gradients, used_gradients = (slices, owned) if each else (whole, numel)
    padding = weights - used_weights
    # Frozen weights: whole, or sliced as the others are.
    if layout.zero == ZERO_OF_SLICED_WEIGHTS:
        for bucket in layout.frozen_buckets_of(rank).values():
            size, used = bucket.numel, bucket.numel
            if layout.num_replicas(bucket) > 1:
                size, used = slice_numel(bucket, layout.num_replicas(bucket)), _owned(layout, bucket, replica)
            weights, padding = weights + size, padding + size - used
        weights += _num_without_gradient(_pieces(config, layout, rank))
    else:
        weights += num_weights(config, layout, rank) - numel
    return _Elements(weights, gradients, owned, padding, gradients - used_gradients)


def _owned(layout: Layout, bucket: BucketLayout, replica: int) -> int:
    """Return how many elements of a bucket that is cut a replica owns, padding left out."""
    parts = parts_of(bucket, layout.num_replicas(bucket), layout.replica_of(bucket, replica))
    return sum(part.in_slice.stop - part.in_slice.start for part in parts)


def _exact(config: Config, layout: Layout, rank: int, replica: int) -> _Elements:
    """Count whole gradients of several blocks of micro-batches; shards may each hold a part of one gradient.

    With ZeRO a replica holds what it owns besides, of gradients and weights; weights are whole too below stage 3.
    """
    pieces, buckets = _pieces(config, layout, rank), layout.buckets_of(rank).values()
    numels = {piece.spec.name: math.prod(piece.block[1]) for piece in pieces}
    trained, frozen = _split(config, pieces)
    numel = _numel(pieces)
    of_all = sum(layout.num_lanes(bucket) * bucket.numel for bucket in buckets)
    gradients = num_gradient_buffers(num_blocks(config) // layout.dp) * of_all
    if not layout.zero:
        return _Elements(numel, gradients, _numel(trained))
    # Experts that nobody else has are whole, whatever the stage.
    replicas = {piece.spec.name: layout.replicas_over(piece.spec.reduce_over) for piece in pieces}
    alone = [piece for piece in trained if replicas[piece.spec.name] == 1]
    cuts, of_frozen = (
        {
            piece.name: (BlockCut.of(piece.name, numels[name], replicas[name]), replica * replicas[name] // layout.dp)
            for piece in of
            if replicas[name := piece.spec.name] > 1
        }
        for of in (trained, frozen)
    )
    owned = sum(cut.owned_by(of).stop - cut.owned_by(of).start for cut, of in cuts.values()) + _numel(alone)
    is_cut_too = layout.zero == ZERO_OF_SLICED_WEIGHTS
    own = sum(cut.size for cut, _ in (*cuts.values(), *(of_frozen.values() if is_cut_too else ())))
    of_buffers = sum(
        BlockCut.of(leaf, numels[name], replicas[name]).size
        for bucket in buckets
        for leaf in bucket.names
        if replicas[name := leaf_parts(leaf)[0]] > 1
    )
    is_whole = [piece for piece in pieces if piece.name not in {**cuts, **of_frozen}]
    return _Elements((_numel(is_whole) if is_cut_too else numel) + own, gradients + of_buffers, owned)


def _pieces(config: Config, layout: Layout, rank: int) -> list[Piece]:
    is_exact = config.train.reduction == "exact"
    table_size = num_shards_of(config) if is_exact else layout.tp
    held = range(table_size // layout.tp)
    # Tied embeddings of a rank that holds both ends occur twice and are one parameter.
    specs = {
        spec.name: spec
        for layers in layout.layers_of(rank)
        for spec in stage_specs(config.model, table_size, *layers, layout.ep, in_chunks=is_exact)
    }
    return [piece for spec in specs.values() for piece in pieces_of(spec, table_size, held)]
