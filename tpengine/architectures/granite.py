"""Granite 3, dense: Llama with four multipliers: of the embedding's rows, scores, what halves add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, ConfigJson, Ends, FeedForward, Norm, Part
from tpengine.config import ModelConfig

# A multiplier of zero would make nothing of what it multiplies.
_LEAST = 1e-6


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    numbers = model.details
    biases, scale = numbers.attention_bias, numbers.residual_multiplier
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(
            qkv_bias=biases, output_bias=biases, scale=numbers.attention_scale, residual_scale=scale
        ),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(bias=numbers.mlp_bias, residual_scale=scale),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, biases where config.json asks for them, and the multipliers."""
    model = llama.numbers(config)
    details = replace(
        model.details,
        attention_scale=config.number("attention_multiplier", 1.0, _LEAST),
        embedding_multiplier=config.number("embedding_multiplier", 1.0, _LEAST),
        residual_multiplier=config.number("residual_multiplier", 1.0, _LEAST),
        logits_scaling=config.number("logits_scaling", 1.0, _LEAST),
    )
    return replace(model, details=details)


def ends(model: ModelConfig) -> Ends:
    """Return the scales of the embedding's rows and of the logits."""
    numbers = model.details
    return Ends(numbers.embedding_multiplier, rounds_scale=False, logits_scale=1 / numbers.logits_scaling)


ARCHITECTURE = Architecture("GraniteForCausalLM", llama.TABLE, block, numbers, ends=ends)
