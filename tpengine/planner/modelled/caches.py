"""Copies of weights in the layout that a CPU's matmuls read fastest, made by `Transformer.prepare` once per step.

A matrix [K, N] has two, one for its forward and one for the gradient of its input, if M K N multiplications of M rows
are enough (tpkernels/ops/matmul/host.py). Intel's processors need none: for them the bytes are too many.

`touched_bytes` is what a rank touches between two uses of a tensor: the less it is, the more stays in its caches. No
torch.
"""

from __future__ import annotations

from dataclasses import replace

from tpengine.architectures.part import Sizes
from tpengine.architectures.registry import layer_halves
from tpengine.config import Config, num_shards_of
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.dtypes import dtype_bytes
from tpengine.layout.state_bytes import num_trained, num_weights
from tpengine.layout.step_plan import Layout, gradient_bytes
from tpengine.plan import Gathered, Plan, Recompute
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.activations import bytes_of_chunks

# As tpkernels.ops.matmul.host has it, which needs torch; nothing here does.
FEWEST_MULTIPLICATIONS = 8_000_000
FORMS = 2


def prepares(config: Config, machine: Machine) -> bool:
    """Return whether a step begins by copying weights, as `Trainer` does it.

    Weights that come and go (ZeRO), and those of a pipeline stage whose time a copy would prolong, are not copied; in
    exact mode all are, because other layouts' products have other bits.
    """
    if machine.is_asynchronous or config.train.dtype != "float32":
        return False
    parallel = config.parallel
    if config.train.reduction == "exact":
        return parallel.zero_in_effect < ZERO_OF_SLICED_WEIGHTS
    return parallel.zero_in_effect == 0 and ((parallel.tp or 1) > 1 or (parallel.pp or 1) == 1)


def prepared_bytes(config: Config, layout: Layout, rank: int, machine: Machine) -> int:
    """Return the bytes of the copies that a pipeline rank holds while a step runs.

    Args:
        config: validated.
        layout: of that configuration.
        rank: of the pipeline.
        machine: on which it runs.
    """
    if not prepares(config, machine):
        return 0
    numel, size = 0, Sizes.of(config, layout.tp)
    shards, rows = 1, size.own_tokens
    if config.train.reduction == "exact":
        # Each shard multiplies all tokens by a matrix of its own.
        shards, rows = num_shards_of(config) // layout.tp, size.tokens
    for first, last in layout.layers_of(rank):
        for layer in range(first, last):
            # Columns that are multiplied together are one matrix.
            products = [product for half in layer_halves(config.model, layer) for product in half.part.products(size)]
            numel += sum(_copied(rows, product.inner, product.columns, shards) for product in products)
        if last == config.model.num_layers:
            numel += _copied(rows, size.hidden, size.vocab, shards)
    return FORMS * numel * size.item


def _copied(rows: int, inner: int, columns: int, shards: int) -> int:
    return inner * columns if rows * inner * columns // shards >= FEWEST_MULTIPLICATIONS else 0


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
        gradients = num_trained(config, layout, rank) * wide
        found.append(weights + gradients + sum(int(kept[chunk].saved) for chunk in plan.chunks_of(rank)))
    return max(found)
