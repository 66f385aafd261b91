"""What a rank touches between two uses of a tensor: the less it is, the more stays in its caches. No torch."""

from __future__ import annotations

from dataclasses import replace

from tpengine.config import Config
from tpengine.dtypes import dtype_bytes
from tpengine.layout.state_bytes import num_weights
from tpengine.layout.step_plan import Layout, gradient_bytes
from tpengine.plan import Gathered, Plan, Recompute
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.held.activations import bytes_of_chunks
from tpengine.simulate.modelled.held.prepared import FORMS, prepared_bytes


def touched_bytes(config: Config, layout: Layout, plan: Plan, machine: Machine) -> int:
    """Return the bytes that a rank of the pipeline touches for a micro-batch, forward and backward: the most of any.

    After so many it comes back to a weight: its matrices, of which forward and backward may each have a copy in its
    place, their gradients, and what a micro-batch keeps, which is written even where it is computed or gathered twice.

    Args:
        config, layout: sizes of a rank.
        plan: of both; its chunks.
        machine: decides whether weights have copies.
    """
    item, wide = dtype_bytes(config.train.dtype), gradient_bytes(config.train.dtype)
    whole = [replace(chunk, recompute=Recompute.NONE, gathered=Gathered.KEEP) for chunk in plan.chunks]
    kept = bytes_of_chunks(config, layout.tp, whole)
    found = []
    for rank in range(layout.pp):
        numel = num_weights(config, layout, rank)
        copied = prepared_bytes(config, layout, rank, machine)
        weights = numel * item - copied // FORMS + copied
        found.append(weights + numel * wide + sum(int(kept[chunk].saved) for chunk in plan.chunks_of(rank)))
    return max(found)
