"""Qwen3 with experts: Qwen3 in which layers, all or some, have experts in place of a feed-forward network.

Published models have no shared experts; a model of one's own may (ModelDetails).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import qwen3
from tpengine.architectures.describe import (
    Architecture,
    Attention,
    ConfigJson,
    Experts,
    FeedForward,
    Norm,
    Part,
    column,
    llama_sizes,
    replicate,
    row,
)
from tpengine.config import ModelConfig

TABLE = {
    **qwen3.TABLE,
    "layers.*.mlp.{gate,up}_proj": column.optional,
    "layers.*.mlp.down_proj": row.optional,
    "layers.*.mlp.gate": replicate.optional,
    "layers.*.mlp.experts.#.{gate,up}_proj": column.optional,
    "layers.*.mlp.experts.#.down_proj": row.optional,
    "layers.*.mlp.shared_expert.{gate,up}_proj": column.optional,
    "layers.*.mlp.shared_expert.down_proj": row.optional,
    "layers.*.mlp.shared_expert_gate": replicate.optional,
}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    numbers = model.details
    has_experts = numbers.num_experts > 0 and (not numbers.has_experts or numbers.has_experts[layer])
    biases, window = numbers.attention_bias, numbers.windows[layer] if numbers.windows else 0
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(qkv_bias=biases, output_bias=biases, head_norm=Norm(), window=window),
        "post_attention_layernorm": Norm(),
        "mlp": Experts.of(model) if has_experts else FeedForward(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with one window for all layers, and which layers have experts: every n-th, but for some."""
    model = llama_sizes(config, kv_heads=4)
    every, num = config.integer("decoder_sparse_step", 1, 1), model.num_layers
    dense = config.layers("mlp_only_layers", num)
    has_experts = tuple((layer + 1) % every == 0 and layer not in dense for layer in range(num))
    used = config.flag("use_sliding_window", False)
    details = replace(
        model.details,
        head_size=config.integer("head_dim", 0),
        attention_bias=config.flag("attention_bias", False),
        windows=config.without("layer_types").windows(num, [True] * num, 4096) if used else (),
        num_experts=config.integer("num_experts" if "num_experts" in config.values else "num_local_experts", 128),
        experts_per_token=config.integer("num_experts_per_tok", 8, 1),
        expert_ffn_size=config.size("moe_intermediate_size", "ffn_size", 768),
        has_experts=() if all(has_experts) else has_experts,
        normalizes_scores=config.flag("norm_topk_prob", False),
    )
    return replace(model, details=details)


ARCHITECTURE = Architecture("Qwen3MoeForCausalLM", TABLE, block, numbers)
