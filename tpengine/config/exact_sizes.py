"""Shards of exact mode: how it cuts a model and a batch, independently of the layout. No torch.

Exact mode computes what V tensor-parallel and W data-parallel ranks would compute, with every sum in a fixed order. The
V fixed cuts of the model are called shards. A rank computes V/tp shards and W/dp blocks of micro-batches, one after
another, so no operation's shape depends on the layout. V follows from the model and the tokens of a micro-batch, W from
the micro-batches of a step.
"""

from __future__ import annotations

import math

from tpengine.config.settings import Config

# Gradient norms add up in blocks of so many elements of a shard, and slices of it (ZeRO) begin at their borders.
BLOCK = 1024
# Every shard is a smaller matrix product and one more partial sum: 8 allow the layouts of a node.
MOST_SHARDS = 8


def num_shards(num_heads: int, num_kv_heads: int, ffn_size: int, num_tokens: int) -> int:
    """Return V, the number of shards: the largest power of two up to 8 that fits the model and the micro-batch.

    V divides query heads, feed-forward width and tokens of a micro-batch, and divides the KV heads or is divided by
    them (as tp must be). The vocabulary is padded to a multiple of 8.
    """
    common = math.gcd(num_heads, ffn_size, num_tokens)
    return next(
        v for v in (MOST_SHARDS, 4, 2, 1) if common % v == 0 and (num_kv_heads % v == 0 or v % num_kv_heads == 0)
    )


def largest_dp(num_micro_batches: int) -> int:
    """Return W: the largest power of two up to 8 that divides the micro-batches of a step, over all replicas."""
    return math.gcd(num_micro_batches, MOST_SHARDS)


def num_gradient_buffers(num_blocks: int) -> int:
    """Return how many gradient buffers a rank needs to add `num_blocks`, a power of two, in a balanced tree."""
    return num_blocks.bit_length()


def num_shards_of(config: Config) -> int:
    """Return the number of shards of exact mode (V in the module docstring)."""
    model, train = config.model, config.train
    tokens = train.micro_batch_size * train.seq_len
    return num_shards(model.num_heads, model.num_kv_heads, math.gcd(*model.ffn_widths.values()), tokens)


def shards_said(config: Config) -> str:
    """Return the number of shards in words; of one alone why there are no more."""
    number = num_shards_of(config)
    if number > 1:
        return f"{number} shards"
    model, train = config.model, config.train
    sizes = {
        "num_heads": model.num_heads,
        # Shards may share a KV head, so one is no hindrance.
        "num_kv_heads": model.num_kv_heads if model.num_kv_heads > 1 else 0,
        **model.ffn_widths,
        "the tokens of a micro-batch": train.micro_batch_size * train.seq_len,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 2]
    return f"1 shard, so tp 1 alone, since 2 does not divide {' and '.join(odd)}"


def elements_of_shared_experts(config: Config, ep: int) -> int:
    """Return the elements of a shard of a projection that a rank of `ep` has; norms need whole blocks of them."""
    details = config.model.details
    return details.num_experts // ep * (details.expert_ffn_size // num_shards_of(config)) * config.model.hidden_size


def num_blocks(config: Config) -> int:
    """Return the number of blocks of micro-batches that exact mode sums (W above). The layout must be resolved."""
    return largest_dp(config.train.num_micro_batches * (config.parallel.dp or 1))
