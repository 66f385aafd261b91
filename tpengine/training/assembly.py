"""Build a rank's model and gradient buffers, for fast mode, or for exact mode with one sink per shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tpkernels.launch import accumulation_dtype

from tpengine.config import Config, num_blocks, num_shards_of
from tpengine.data_parallel.gradients import StepGradients, buckets_of_pieces, exact_step_gradients, fast_step_gradients
from tpengine.data_parallel.weight_buckets import WeightBuckets
from tpengine.distributed.mesh import Communicators, Mesh
from tpengine.distributed.process import make_deterministic
from tpengine.layers.column import declare_places
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layout.parameters import BucketLayout, in_order_of_packing
from tpengine.layout.slices import BlockCut, Cut
from tpengine.layout.step_plan import Layout, reduced_of, weights_of
from tpengine.model.exact import Shards
from tpengine.model.parts import ExactParts, FastParts, Parts
from tpengine.model.transformer import Transformer
from tpengine.model.undrawn import Undrawn
from tpengine.plan import Gathered, Recompute, Reduced, Weights


class Assembled(NamedTuple):
    """A rank's model and what training it needs.

    Attributes:
        model: this rank's chunks, uninitialised.
        gradients: what the model's layers add to.
        sliced: its weights, where replicas own slices of them (ZeRO); else None.
    """

    model: Transformer
    gradients: StepGradients
    sliced: WeightBuckets | None = None


def assemble(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    """Build what train.reduction and parallel.zero ask for.

    Args:
        config: validated.
        layout, mesh, comms: of that configuration.
        device: where this rank computes.
        halves: keeps contributions to weight gradients between the halves of a backward pass.

    With exact, torch is made deterministic for the whole process (distributed.make_deterministic).
    """
    build = _exact if config.train.reduction == "exact" else _fast
    # Somebody draws weights that are the same in every layout, or loads them.
    with Undrawn():
        return build(config, layout, mesh, comms, device, halves)


def _fast(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    dtype, sink = getattr(torch, config.train.dtype), GradientSink()
    parts = FastParts(
        config.model,
        comms.tp,
        replicas=comms.replica,
        attention=config.train.attention,
        sink=DeferringSink(sink, halves),
        gathers_again=Gathered(config.parallel.gathered) is Gathered.AGAIN,
        dtype=dtype,
        device=device,
    )
    model, buckets = _model(config, layout, mesh, parts), layout.buckets_of(mesh.at.pp)
    cuts = {index: Cut(bucket, comms.dp.size) for index, bucket in buckets.items()}
    sliced = _sliced(config, layout, model, cuts, comms)
    gradients = fast_step_gradients(
        buckets,
        model.pieces,
        model.held,
        # Tied ends in one chunk contribute twice per backward pass; in two chunks of a rank, once per chunk's pass.
        tied_ends=config.model.tie_embeddings and len(layout.ranks) == 1,
        comms=comms,
        dtype=accumulation_dtype(dtype),
        device=device,
        sink=sink,
        is_cut=layout.zero > 0,
        each=layout.zero > 0 and reduced_of(config) is Reduced.MICROBATCH,
    )
    return Assembled(model, gradients, sliced)


def _exact(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    make_deterministic(device)
    dtype = getattr(torch, config.train.dtype)
    shards = Shards(comms.tp, num_shards_of(config))
    sinks, head_sinks = ([GradientSink() for _ in shards.held] for _ in range(2))
    parts = ExactParts(
        config.model,
        shards,
        sinks=[DeferringSink(sink, halves) for sink in sinks],
        head_sinks=[DeferringSink(sink, halves) for sink in head_sinks],
        dtype=dtype,
        device=device,
    )
    model, buckets = _model(config, layout, mesh, parts), layout.buckets_of(mesh.at.pp)
    # A weight lies in the bucket of its number in which its gradient does, behind those that it is packed with.
    members: dict[int, list[str]] = {}
    bucket_of = buckets_of_pieces(buckets, model.pieces, shards)
    for name in in_order_of_packing(model.pieces):
        members.setdefault(bucket_of[name], []).append(name)
    blocks = {name: BlockCut.of(name, parameter.numel(), comms.dp.size) for name, parameter in model.held.items()}
    cuts = {
        index: Cut(
            BucketLayout(("dp",), tuple(names), tuple(model.held[name].numel() for name in names)),
            comms.dp.size,
            blocks,
        )
        for index, names in members.items()
    }
    sliced = _sliced(config, layout, model, cuts, comms)
    gradients = exact_step_gradients(
        buckets,
        model.pieces,
        model.held,
        shards,
        {index: bucket.chunks[0] for index, bucket in layout.buckets.items()},
        tied_ends=config.model.tie_embeddings and layout.ends_share_a_rank and mesh.at.pp == layout.ranks[0],
        comms=comms,
        num_micro_batches=config.train.num_micro_batches,
        num_blocks=num_blocks(config) // mesh.shape.dp,
        dtype=accumulation_dtype(dtype),
        device=device,
        sinks=sinks,
        head_sinks=head_sinks,
        is_cut=layout.zero > 0,
    )
    return Assembled(model, gradients, sliced)


def _sliced(
    config: Config, layout: Layout, model: Transformer, cuts: Mapping[int, Cut], comms: Communicators
) -> WeightBuckets | None:
    """Lay the weights into buckets, if replicas own slices of them."""
    if not layout.zero:
        return None
    kept = {index for index in cuts if weights_of(config, layout, index) is Weights.UPDATED}
    sliced = WeightBuckets(cuts, model.held, comms.dp, kept)
    declare_places(model, {model.held[name]: place for name, place in sliced.places.items()})
    return sliced


def _model(config: Config, layout: Layout, mesh: Mesh, parts: Parts) -> Transformer:
    recompute = Recompute(config.parallel.recompute)
    return Transformer(parts, chunks=layout.layers_of(mesh.at.pp), seed=config.train.seed, recompute=recompute)
