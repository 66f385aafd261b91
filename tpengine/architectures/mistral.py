"""Mistral: Llama whose queries may see a window of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, ConfigJson, FeedForward, Norm, Part, llama_sizes
from tpengine.config import ModelConfig


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    windows = model.details.windows
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(window=windows[layer] if windows else 0),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with one window for all layers: transformers reads no layer_types here."""
    model = llama_sizes(config, kv_heads=8)
    windows = config.without("layer_types").windows(model.num_layers, [True] * model.num_layers, 4096)
    return replace(model, details=replace(model.details, windows=windows))


ARCHITECTURE = Architecture("MistralForCausalLM", llama.TABLE, block, numbers)
