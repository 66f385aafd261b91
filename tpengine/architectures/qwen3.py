"""Qwen3: a head size of its own, and a norm of each head's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama, qwen2
from tpengine.architectures.describe import (
    Architecture,
    Attention,
    ConfigJson,
    FeedForward,
    Norm,
    Part,
    heads,
    llama_sizes,
    replicate,
)
from tpengine.config import ModelConfig

TABLE = {**llama.TABLE, "layers.*.self_attn.{q,k}_norm": replicate(heads)}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    biases, windows = model.details.attention_bias, model.details.windows
    window = windows[layer] if windows else 0
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(qkv_bias=biases, output_bias=biases, head_norm=Norm(), window=window),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes; a head has 128 elements where config.json does not say."""
    model = llama_sizes(config, kv_heads=32)
    return replace(
        model,
        details=replace(
            model.details,
            head_size=config.integer("head_dim", 128),
            attention_bias=config.flag("attention_bias", False),
            windows=qwen2.windows_of(config, model.num_layers),
        ),
    )


ARCHITECTURE = Architecture("Qwen3ForCausalLM", TABLE, block, numbers)
