"""Model flops and hardware flops of a step, from which a run's share of the peak follows (MFU and HFU). Torch-free."""

from __future__ import annotations

import math
from collections import Counter

from tpkernels.work import attention_work, visible_pairs

from tpengine.config import Config
from tpengine.layout.parameters import layer_specs, num_matmul_parameters
from tpengine.plan import Recompute


def step_flops(config: Config, *, causal_half: bool, counts_again: bool = False) -> int:
    """Return the flops of one step over all replicas.

        3 * (2 * N_matmul * tokens + attention)        forward, and backward of twice as many

    Args:
        config: sizes, micro-batches, replicas.
        causal_half: count the half of the scores that a causal kernel computes, and of a layer with a window those
            inside it; else the full square, as the PaLM paper does (arXiv 2204.02311, appendix B).
        counts_again: add what backward computes again: hardware flops, as Megatron-LM reports them (arXiv 2205.05198,
            section 6.3); else model flops, which do not depend on recomputation.
    """
    model, train = config.model, config.train
    sequences = train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)
    tokens = sequences * train.seq_len
    heads = model.num_heads, model.num_kv_heads, model.head_size
    attention = 0
    for window, number in Counter(model.details.windows or (0,) * model.num_layers).items():
        is_narrow = causal_half and 0 < window < train.seq_len
        pairs = sequences * visible_pairs([train.seq_len], window) if is_narrow else None
        work = attention_work(sequences, train.seq_len, *heads, 1, causal_half=causal_half, pairs=pairs)
        attention += number * work.flops
    matmuls = 2 * num_matmul_parameters(model) * tokens
    forward = matmuls + attention
    if not counts_again:
        return 3 * forward
    head = 2 * model.vocab_size * model.hidden_size * tokens
    projections = 2 * _num_attention_parameters(config) * tokens
    again = {
        Recompute.NONE: 0,
        Recompute.ATTENTION: attention + projections,
        Recompute.BLOCK: forward - head,
        Recompute.FULL: forward,
    }[Recompute(config.parallel.recompute)]
    return 3 * forward + again


def _num_attention_parameters(config: Config) -> int:
    """Return the parameters of all layers' products around attention."""
    return sum(
        math.prod(spec.shape)
        for layer in range(config.model.num_layers)
        for spec in layer_specs(config.model, 1, layer)
        if spec.is_matrix and ".self_attn." in spec.name
    )
