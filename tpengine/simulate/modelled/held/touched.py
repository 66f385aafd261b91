"""What a rank touches between two uses of a tensor: the less it is, the more stays in its caches. No torch."""

from __future__ import annotations

from dataclasses import replace

from tpengine.config import Config
from tpengine.layout.parameters import chunk_specs
from tpengine.layout.step_plan import dtype_bytes, gradient_bytes
from tpengine.plan import Plan, Recompute
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.held.activations import bytes_of_chunks
from tpengine.simulate.modelled.held.prepared import prepares


def touched_bytes(config: Config, tp: int, plan: Plan, machine: Machine) -> int:
    """Return the bytes that a rank of the pipeline touches for a micro-batch, forward and backward: the most of any.

    After so many it comes back to a weight: its matrices, of which forward and backward may each have a copy, their
    gradients, and what a micro-batch keeps, which is written even where it is computed twice.

    Args:
        config, tp: sizes of a rank.
        plan: its chunks.
        machine: decides whether weights have copies.
    """
    item, wide = dtype_bytes(config.train.dtype), gradient_bytes(config.train.dtype)
    of_weight = (2 if prepares(config, machine) else 1) * item + wide
    layers = [chunk.layers for chunk in plan.chunks]
    whole = [replace(chunk, recompute=Recompute.NONE) for chunk in plan.chunks]
    of_rank: dict[int, int] = {}
    for index, kept in enumerate(bytes_of_chunks(config, tp, whole)):
        numel = sum(spec.local_numel(tp) for spec in chunk_specs(config.model, tp, layers, index))
        rank = plan.chunks[index].rank
        of_rank[rank] = of_rank.get(rank, 0) + numel * of_weight + int(kept.saved)
    return max(of_rank.values())
