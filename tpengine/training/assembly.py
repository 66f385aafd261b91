"""Build a rank's model and gradient buffers, for fast mode, or for exact mode with one sink per shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tpengine.config import Config, num_blocks, num_shards_of
from tpengine.data_parallel.exact_slices import PackedWeights
from tpengine.data_parallel.gradients import ExactGradients, FastGradients, StepGradients
from tpengine.data_parallel.sliced_gradients import SlicedGradients
from tpengine.data_parallel.sliced_weights import SlicedWeights
from tpengine.distributed.groups import Communicators
from tpengine.distributed.mesh import Mesh
from tpengine.distributed.process import make_deterministic
from tpengine.layers.gradient_sink import BufferSink, DeferringSink, WeightHalves, accumulation_dtype
from tpengine.layers.linear.packed import declare_places
from tpengine.layout.parameters import in_order_of_packing
from tpengine.layout.slices import BlockCut
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
    sliced: SlicedWeights | PackedWeights | None = None


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
    dtype, sink = getattr(torch, config.train.dtype), BufferSink()
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
    options: dict[str, Any] = dict(
        # Tied ends in one chunk contribute twice per backward pass; in two chunks of a rank, once per chunk's pass.
        tied_ends=config.model.tie_embeddings and len(layout.ranks) == 1,
        comms=comms,
        dtype=accumulation_dtype(dtype),
        device=device,
        sink=sink,
    )
    if not layout.zero:
        return Assembled(model, FastGradients(buckets, model.held, **options))
    sliced = SlicedWeights(buckets, model.held, comms.dp, _kept_whole(config, layout, buckets))
    _declare(model, sliced)
    each = reduced_of(config) is Reduced.MICROBATCH
    return Assembled(model, SlicedGradients(buckets, model.pieces, model.held, each=each, **options), sliced)


def _exact(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    make_deterministic(device)
    dtype = getattr(torch, config.train.dtype)
    shards = Shards(comms.tp, num_shards_of(config))
    sinks, head_sinks = ([BufferSink() for _ in shards.held] for _ in range(2))
    parts = ExactParts(
        config.model,
        shards,
        sinks=[DeferringSink(sink, halves) for sink in sinks],
        head_sinks=[DeferringSink(sink, halves) for sink in head_sinks],
        dtype=dtype,
        device=device,
    )
    model = _model(config, layout, mesh, parts)
    gradients = ExactGradients(
        layout.buckets_of(mesh.at.pp),
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
        sliced=layout.zero > 0,
    )
    if not layout.zero:
        return Assembled(model, gradients)
    members: dict[int, list[str]] = {}
    for name in in_order_of_packing(model.pieces):
        members.setdefault(gradients.bucket_of(name), []).append(name)
    cuts = {name: BlockCut.of(name, parameter.numel(), comms.dp.size) for name, parameter in model.held.items()}
    kept = _kept_whole(config, layout, members)
    sliced = PackedWeights(members, cuts, model.held, comms.dp, kept)
    _declare(model, sliced)
    return Assembled(model, gradients, sliced)


def _declare(model: Transformer, sliced: SlicedWeights | PackedWeights) -> None:
    declare_places(model, {model.held[name]: place for name, place in sliced.owned.places.items()})


def _kept_whole(config: Config, layout: Layout, buckets: Iterable[int]) -> frozenset[int]:
    return frozenset(index for index in buckets if weights_of(config, layout, index) is Weights.UPDATED)


def _model(config: Config, layout: Layout, mesh: Mesh, parts: Parts) -> Transformer:
    recompute = Recompute(config.parallel.recompute)
    return Transformer(parts, chunks=layout.layers_of(mesh.at.pp), seed=config.train.seed, recompute=recompute)
