"""A cost model of the step: durations and bytes for the simulator, from a configuration and a machine.

An action is the sum of its operators (actions.py, times/), each of which takes the time that the machine needs for it
(simulate/machine). Use it to predict which layout or schedule is faster before anything has run; costs that a run has
measured predict its own machine better. held/ has the bytes of activations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from tpkernels.work import Work, adamw_work

from tpengine.config import Config
from tpengine.layout.parameters import ParameterSpec, chunk_specs
from tpengine.layout.slices import slice_numel
from tpengine.layout.state_bytes import num_weights, state_bytes
from tpengine.layout.step_plan import Layout, dtype_bytes, gradient_bytes, num_summed
from tpengine.plan import Bucket, Kind, Plan, Reduced, Weights
from tpengine.simulate import Costs
from tpengine.simulate.costs import spec_bytes
from tpengine.simulate.machine import CPU_CORE, Machine
from tpengine.simulate.modelled.actions import action_seconds
from tpengine.simulate.modelled.engines.engine import OURS, Engine
from tpengine.simulate.modelled.engines.kept import engine_activations
from tpengine.simulate.modelled.held.activations import activation_bytes
from tpengine.simulate.modelled.held.prepared import prepared_bytes, prepares
from tpengine.simulate.modelled.times.packed import Packed


def model_costs(
    config: Config,
    layout: Layout,
    plan: Plan,
    machine: Machine = CPU_CORE,
    engine: Engine = OURS,
    packed: Packed | None = None,
) -> Costs:
    """Return the costs of a configuration's plan, in seconds and bytes.

    Args:
        config: validated.
        layout: of that configuration; dp enters the reductions and tp the exchanges inside each action, because the
            simulator plays one tp rank of one replica.
        plan: training_plan or forward_plan of both; includes what its chunks recompute and gather again.
        machine: its rates.
        engine: what it does differently from ours.
        packed: the documents of micro-batches, whose mean is modelled; None for whole sequences.
    """
    per_rank = bytes_per_rank(config, layout) if engine.is_ours else _engine_bytes(config, layout, engine)
    dtype = config.train.dtype
    numel, item, wide = max(num for num, _ in per_rank), dtype_bytes(dtype), gradient_bytes(dtype)
    world = layout.pp * layout.dp * layout.tp
    seconds = action_seconds(config, layout, plan, machine, engine, packed)
    reduced = engine.reduced_item or wide
    sizes = {
        bucket.index: layout.dp * slice_numel(layout.buckets[bucket.index].layout, layout.dp) for bucket in plan.buckets
    }
    # What each replica's optimizer updates.
    updated = -(-numel // layout.dp) if layout.zero else numel
    table_bytes = config.model.padded_vocab_size(layout.tp) // layout.tp * config.model.hidden_size * wide
    ends = machine.link(2, (layout.pp - 1) * layout.dp * layout.tp, range(layout.dp * layout.tp))
    # What a recorded run took for its updates, over what the rates say.
    update = machine.recorded.get(Kind.STEP, 1.0)
    costs = Costs(
        compute={key: of.total for key, of in seconds.items()},
        latency=machine.within.latency_s,
        bytes_per_time=machine.within.bytes_per_s,
        links=_links_between_nodes(layout, plan, machine),
        reductions={
            bucket.index: _reduction(
                config, layout, bucket.index, _stage_of(bucket, plan), machine, reduced, is_whole=engine.reduces_whole
            )
            for bucket in plan.buckets
        },
        gathers={
            bucket.index: _gather(config, layout, bucket, _stage_of(bucket, plan), sizes[bucket.index] * item, machine)
            for bucket in plan.buckets
            if bucket.weights is not Weights.WHOLE
        },
        reduce_share=machine.reduce_share,
        ties=2 * ends.exchange_seconds(table_bytes, 2),
        # Each gradient is read once; then one number is reduced over all ranks and broadcast.
        clip=update
        * (
            machine.other_seconds(Work(memory_bytes=updated * wide), dtype)
            + 2 * math.ceil(math.log2(world)) * machine.link(world, 1).latency_s
        ),
        step=update
        * (
            machine.other_seconds(adamw_work(updated, wide, item if item < wide else 0), dtype, "adamw")
            + _once_per_step(config, numel, wide, item, machine)
            + (machine.other_seconds(Work(memory_bytes=numel * engine.once_item), dtype) if engine.once_item else 0.0)
        ),
        activations=(
            activation_bytes(config, layout.tp, plan)
            if engine.is_ours
            else engine_activations(config, layout.tp, plan, engine)
        ),
        resident=tuple(
            float(held + prepared_bytes(config, layout, rank, machine)) for rank, (_, held) in enumerate(per_rank)
        ),
        weights={b.index: float(sizes[b.index] * item) for b in plan.buckets if b.weights is Weights.SLICED},
        contributions={
            b.index: float(sizes[b.index] * reduced) for b in plan.buckets if b.reduced is Reduced.MICROBATCH
        },
    )
    if engine.frees_reduced and costs.contributions:
        held = 2 * max(costs.contributions.values())
        costs = replace(costs, contributions={}, resident=tuple(size + held for size in costs.resident))
    return _in_series(costs, layout, plan, machine, engine) if engine.waits_for_transfers else costs


def _links_between_nodes(layout: Layout, plan: Plan, machine: Machine) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Return the links of neighbouring stages that lie on several nodes, of any replica: each step waits for all."""
    between = machine.between.latency_s, machine.between.bytes_per_s
    holders = [chunk.rank for chunk in plan.chunks]
    pairs = {pair for one, other in itertools.pairwise(holders) for pair in ((one, other), (other, one))}
    return {pair: between for pair in pairs if pair[0] != pair[1] and _crosses_nodes(layout, machine, *pair)}


def _crosses_nodes(layout: Layout, machine: Machine, one: int, other: int) -> bool:
    """Return whether a replica's two stages lie on different nodes: ranks are numbered by stage, replica, tp rank."""
    stride, per_node = layout.dp * layout.tp, machine.ranks_per_node
    starts = one * stride, other * stride
    return any((starts[0] + place) // per_node != (starts[1] + place) // per_node for place in range(stride))


def _once_per_step(config: Config, numel: int, wide: int, item: int, machine: Machine) -> float:
    """Return what a step does before its plan, where it was measured: zero gradients, prepare weights for products."""
    dtype = config.train.dtype
    if dtype not in machine.measured:
        return 0.0
    seconds = machine.other_seconds(Work(memory_bytes=numel * wide), dtype, "zero")
    if prepares(config, machine):
        # Both forms of every matrix: read and written.
        seconds += machine.other_seconds(Work(memory_bytes=4 * numel * item), dtype, "prepare")
    return seconds


def _in_series(costs: Costs, layout: Layout, plan: Plan, machine: Machine, engine: Engine) -> Costs:
    """Return costs of stages that compute nothing while they send: a transfer is part of the action before it."""
    gathers = machine.link(layout.tp, 1)
    compute = dict(costs.compute)
    for (kind, index), seconds in costs.compute.items():
        chunk = plan.chunks[index]
        spec = chunk.output if kind is Kind.F else chunk.input
        peer = index + 1 if kind is Kind.F else index - 1
        if kind is Kind.W or spec is None or plan.chunks[peer].rank == chunk.rank:
            continue
        crosses = _crosses_nodes(layout, machine, chunk.rank, plan.chunks[peer].rank)
        link = machine.between if crosses else machine.within
        num_bytes = spec_bytes(spec)
        more = link.message_seconds(num_bytes)
        if engine.scatters_transfers:
            more += gathers.gather_seconds(num_bytes * layout.tp, layout.tp)
        compute[kind, index] = seconds + more
    return replace(costs, compute=compute, latency=0.0, bytes_per_time=math.inf, links={})


def _engine_bytes(config: Config, layout: Layout, engine: Engine) -> list[tuple[int, int]]:
    """Return what `bytes_per_rank` does, by the bytes per parameter that an engine keeps."""
    found = []
    for rank in range(layout.pp):
        # Tied embeddings of a rank that holds both ends are one parameter.
        specs: dict[str, ParameterSpec] = {}
        for chunk in layout.chunks_of(rank):
            specs |= {spec.name: spec for spec in chunk_specs(config.model, layout.tp, layout.layers, chunk)}
        numel = sum(spec.local_numel(layout.tp) for spec in specs.values())
        sliced = -(-numel // layout.dp)
        kept = zip(
            (engine.weight_item, engine.gradient_item, engine.optimizer_item),
            (layout.zero >= 3, layout.zero >= 2, layout.zero >= 1),
            strict=True,
        )
        found.append((numel, sum(item * (sliced if is_cut else numel) for item, is_cut in kept)))
    return found


def bytes_per_rank(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Return (weights, bytes) by pipeline rank: elements that it computes with; what its state takes between steps."""
    return [(num_weights(config, layout, rank), state_bytes(config, layout, rank).total) for rank in range(layout.pp)]


def _stage_of(bucket: Bucket, plan: Plan) -> int:
    return plan.chunks[bucket.chunks[0]].rank


def _firsts(layout: Layout, stage: int) -> range:
    """Return the first ranks of a stage's groups of replicas: those of its tp ranks."""
    first = stage * layout.dp * layout.tp
    return range(first, first + layout.tp)


def _gather(config: Config, layout: Layout, bucket: Bucket, stage: int, num_bytes: float, machine: Machine) -> float:
    """Return how long a bucket's weights are gathered: exchanged, and copied by those who gather.

    On a CPU a slice that is a tensor of its own is read twice: for the other replicas, and into the buffer, where a
    slice of fast mode's weights that stay lies already (tpkernels/exchange/background.py). Exact mode gathers blocks
    of rows in another order, and then puts them into their places (data_parallel/exact_slices.py).
    """
    is_exact = config.train.reduction == "exact"
    has_slices_apart = is_exact or bucket.weights is Weights.SLICED
    copied = num_bytes / layout.dp * (has_slices_apart and not machine.is_asynchronous) + num_bytes * is_exact
    seconds = machine.link(layout.dp, layout.tp, _firsts(layout, stage)).gather_seconds(num_bytes, layout.dp)
    # Read and written.
    return seconds + (machine.other_seconds(Work(memory_bytes=int(2 * copied)), config.train.dtype) if copied else 0.0)


def _reduction(
    config: Config, layout: Layout, index: int, stage: int, machine: Machine, item: int, *, is_whole: bool = False
) -> float:
    bucket, firsts = layout.buckets[index].layout, _firsts(layout, stage)
    num_bytes = bucket.numel * item
    if layout.zero and not is_whole:
        return machine.link(layout.dp, layout.tp, firsts).gather_seconds(num_bytes, layout.dp)
    num_ranks = num_summed(layout, bucket, config.model)
    # Ranks that hold the same weight whole are next to each other.
    stride = layout.tp if num_ranks == layout.dp else 1
    return machine.link(num_ranks, stride, firsts[:stride]).all_reduce_seconds(num_bytes, num_ranks)
