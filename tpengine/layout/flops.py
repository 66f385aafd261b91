"""Model flops and hardware flops of a step, from which a run's share of the peak follows (MFU and HFU). Torch-free."""

from __future__ import annotations

import functools
from collections import Counter

from tpengine.architectures.part import Part
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config, ModelConfig
from tpengine.layout.groups import first_trained, frozen_of, trains_head
from tpengine.layout.parameters import elements_per_token
from tpengine.plan import Recompute


def step_flops(config: Config, *, causal_half: bool, counts_again: bool = False) -> int:
    """Return the flops of one step over all replicas.

        3 * (2 * N_matmul * tokens + attention)        forward, and backward of twice as many

    Backward of frozen weights, and of blocks below the lowest trained one, is not counted.

    Args:
        config: sizes, micro-batches, replicas.
        causal_half: count the half of the scores that a causal kernel computes, and of a layer with a window those
            inside it; else the full square, as the PaLM paper does (arXiv 2204.02311, appendix B).
        counts_again: add what backward computes again: hardware flops, as Megatron-LM reports them (arXiv 2205.05198,
            section 6.3); else model flops, which do not depend on recomputation.
    """
    model, train = config.model, config.train
    sequences = train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)
    head = architecture_of(model).ends(model).head_flops(model, sequences * train.seq_len)
    blocks, attention = 0, 0
    for part, number in _parts_of(model).items():
        flops = number * part.flops(model, sequences, train.seq_len, causal_half=causal_half)
        blocks, attention = blocks + flops, attention + flops * part.is_computed_again
    forward = blocks + head
    whole = 3 * forward - _left_out(config, sequences, causal_half=causal_half)
    if not counts_again:
        return whole
    again = {Recompute.NONE: 0, Recompute.ATTENTION: attention, Recompute.BLOCK: blocks, Recompute.FULL: forward}
    return whole + again[Recompute(config.parallel.recompute)]


def _left_out(config: Config, sequences: int, *, causal_half: bool) -> int:
    """Return the flops of backward that frozen weights leave out: weight gradients, and all of it below the trained."""
    model, seq, frozen = config.model, config.train.seq_len, frozen_of(config)
    if not frozen:
        return 0
    flops, first = 0, first_trained(model, frozen)
    for layer in range(model.num_layers):
        if layer < first:
            parts = architecture_of(model).block(model, layer).values()
            flops += 2 * sum(part.flops(model, sequences, seq, causal_half=causal_half) for part in parts)
            continue
        matrices = elements_per_token(model, layer)
        flops += 2 * sequences * seq * sum(num for name, num in matrices.items() if name in frozen)
    if not trains_head(model, frozen):
        flops += architecture_of(model).ends(model).head_flops(model, sequences * seq)
    return flops


@functools.lru_cache(maxsize=64)
def _parts_of(model: ModelConfig) -> Counter[Part]:
    """Return the parts of all layers, and how many there are of each."""
    block = architecture_of(model).block
    return Counter(part for layer in range(model.num_layers) for part in block(model, layer).values())


@functools.lru_cache(maxsize=4096)
def layer_flops(model: ModelConfig, layer: int, seq: int) -> tuple[int, int]:
    """Return the flops of a layer's forward for a sequence, and how many of them `recompute attention` repeats.

    Windows are not counted.
    """
    parts = architecture_of(model).block(model, layer).values()
    flops = [(part, part.flops(model, 1, seq, causal_half=True, windowed=False)) for part in parts]
    return sum(of for _, of in flops), sum(of for part, of in flops if part.is_computed_again)
