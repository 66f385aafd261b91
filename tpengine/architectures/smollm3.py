"""SmolLM3: Llama in which every fourth layer rotates nothing; a window, if there is one, is of these layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, ConfigJson, FeedForward, Norm, Part, llama_sizes
from tpengine.config import ModelConfig


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    numbers = model.details
    biases, windows, rotates = numbers.attention_bias, numbers.windows, numbers.rotates
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(
            qkv_bias=biases,
            output_bias=biases,
            rotates=rotates[layer] if rotates else True,
            window=windows[layer] if windows else 0,
        ),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(bias=numbers.mlp_bias),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, biases where config.json asks for them, and which layers rotate and have a window."""
    model = llama_sizes(config, ties=True, kv_heads=4, theta=2e6)
    num = model.num_layers
    every = config.integer("no_rope_layer_interval", 4, 1)
    rotates = config.values.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % every > 0) for i in range(num)]
    if not isinstance(rotates, list) or len(rotates) < num or any(of not in (0, 1) for of in rotates):
        raise ValueError(
            f"{config.path}: no_rope_layers must be 1 or 0 (no rotation) of each of {num} layers: got {rotates!r}: "
            "correct it"
        )
    rotates = tuple(bool(of) for of in rotates[:num])
    has_windows = config.flag("use_sliding_window", False)
    details = replace(
        model.details,
        rotates=() if all(rotates) else rotates,
        windows=config.windows(num, [not of for of in rotates], 0) if has_windows else (),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    return replace(model, details=details)


ARCHITECTURE = Architecture("SmolLM3ForCausalLM", llama.TABLE, block, numbers)
