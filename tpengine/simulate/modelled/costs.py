"""A cost model of the step: durations and bytes for the simulator, from a configuration and a machine.

An action is the sum of its operators (operators.py), each of which takes the time that the machine needs for it
(simulate/machine). Use it to predict which layout or schedule is faster before anything has run; costs that a run has
measured predict its own machine better. bytes.py has the bytes of activations.
"""

from __future__ import annotations

import math

from tpkernels.work import Work, adamw_work

from tpengine.config import Config
from tpengine.layout.slices import slice_numel
from tpengine.layout.state_bytes import num_weights, state_bytes
from tpengine.layout.step_plan import Layout, dtype_bytes, gradient_bytes, num_summed
from tpengine.plan import Plan, Reduced, Weights
from tpengine.simulate import Costs
from tpengine.simulate.machine import CPU_CORE, Machine
from tpengine.simulate.modelled.activations import activation_bytes
from tpengine.simulate.modelled.operators import action_seconds


def model_costs(config: Config, layout: Layout, plan: Plan, machine: Machine = CPU_CORE) -> Costs:
    """Return the costs of a configuration's plan, in seconds and bytes.

    Args:
        config: validated.
        layout: of that configuration; dp enters the reductions and tp the exchanges inside each action, because the
            simulator plays one tp rank of one replica.
        plan: training_plan or forward_plan of both; includes what its chunks recompute and gather again.
        machine: its rates.
    """
    per_rank = bytes_per_rank(config, layout)
    numel, wide = max(num for num, _ in per_rank), gradient_bytes(config.train.dtype)
    item, world = dtype_bytes(config.train.dtype), layout.pp * layout.dp * layout.tp
    sizes = {
        bucket.index: layout.dp * slice_numel(layout.buckets[bucket.index].layout, layout.dp) for bucket in plan.buckets
    }
    # What each replica's optimizer updates.
    updated = -(-numel // layout.dp) if layout.zero else numel
    table_bytes = config.model.padded_vocab_size(layout.tp) // layout.tp * config.model.hidden_size * wide
    replicas, neighbours = machine.link(layout.dp, layout.tp), machine.link(2, layout.dp * layout.tp)
    ends = machine.link(2, (layout.pp - 1) * layout.dp * layout.tp)
    return Costs(
        compute={key: seconds.total for key, seconds in action_seconds(config, layout.tp, plan, machine).items()},
        latency=neighbours.latency_s,
        bytes_per_time=neighbours.bytes_per_s,
        reductions={bucket.index: _reduction(config, layout, bucket.index, machine) for bucket in plan.buckets},
        gathers={
            bucket.index: replicas.gather_seconds(sizes[bucket.index] * item, layout.dp)
            for bucket in plan.buckets
            if bucket.weights is not Weights.WHOLE
        },
        ties=2 * ends.exchange_seconds(table_bytes, 2),
        # Each gradient is read once; then one number is reduced over all ranks and broadcast.
        clip=machine.other_seconds(Work(memory_bytes=updated * wide), config.train.dtype)
        + 2 * math.ceil(math.log2(world)) * machine.link(world, 1).latency_s,
        step=machine.other_seconds(adamw_work(updated, wide, item if item < wide else 0), config.train.dtype),
        activations=activation_bytes(config, layout.tp, plan),
        resident=tuple(float(held) for _, held in per_rank),
        weights={b.index: float(sizes[b.index] * item) for b in plan.buckets if b.weights is Weights.SLICED},
        contributions={b.index: float(sizes[b.index] * wide) for b in plan.buckets if b.reduced is Reduced.MICROBATCH},
    )


def bytes_per_rank(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Return (weights, bytes) by pipeline rank: elements that it computes with; what its state takes between steps."""
    return [(num_weights(config, layout, rank), state_bytes(config, layout, rank).total) for rank in range(layout.pp)]


def _reduction(config: Config, layout: Layout, index: int, machine: Machine) -> float:
    bucket = layout.buckets[index].layout
    num_bytes = bucket.numel * gradient_bytes(config.train.dtype)
    if layout.zero:
        return machine.link(layout.dp, layout.tp).gather_seconds(num_bytes, layout.dp)
    num_ranks = num_summed(layout, bucket, config.model)
    # Ranks that hold the same weight whole are next to each other.
    stride = layout.tp if num_ranks == layout.dp else 1
    return machine.link(num_ranks, stride).all_reduce_seconds(num_bytes, num_ranks)
