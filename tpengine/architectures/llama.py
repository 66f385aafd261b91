"""Llama 2 and 3: RMSNorm, rotary positions, SwiGLU; other architectures of this family begin from its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures.describe import (
    Architecture,
    Attention,
    ConfigJson,
    FeedForward,
    Norm,
    Part,
    column,
    heads,
    llama_sizes,
    replicate,
    row,
    vocab,
)
from tpengine.config import ModelConfig

TABLE = {
    "embed_tokens": vocab,
    "lm_head": vocab,
    "norm": replicate,
    "layers.*.*_layernorm": replicate,
    "layers.*.self_attn.{q,k,v}_proj": column(heads),
    "layers.*.self_attn.o_proj": row(heads),
    "layers.*.mlp.{gate,up}_proj": column,
    "layers.*.mlp.down_proj": row,
}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    biases = model.details.attention_bias
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(qkv_bias=biases, output_bias=biases),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(bias=model.details.mlp_bias),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with biases where config.json asks for them."""
    model = llama_sizes(config)
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return replace(model, details=replace(model.details, attention_bias=attention, mlp_bias=mlp))


ARCHITECTURE = Architecture("LlamaForCausalLM", TABLE, block, numbers)
