"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

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
        "self_attn": Attention(qkv_bias=True, window=windows[layer] if windows else 0),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with the windows of the layers that have one."""
    model = llama_sizes(config, kv_heads=32)
    return replace(model, details=replace(model.details, windows=windows_of(config, model.num_layers)))


def windows_of(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    """Return the windows: of layers from `max_window_layers` on, if `use_sliding_window`."""
    first = config.integer("max_window_layers", 28)
    used = config.flag("use_sliding_window", False)
    return config.windows(num_layers, [i >= first for i in range(num_layers)], 4096) if used else ()


ARCHITECTURE = Architecture("Qwen2ForCausalLM", llama.TABLE, block, numbers)
