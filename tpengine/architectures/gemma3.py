"""Gemma 3 (text): norms before and behind each half of a block, windows with frequencies of their own, scaled rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import qwen3
from tpengine.architectures.describe import (
    Architecture,
    Attention,
    ConfigJson,
    Ends,
    FeedForward,
    Norm,
    Part,
    llama_sizes,
    sandwich_norm,
)
from tpengine.config import ModelConfig
from tpengine.config.settings import ModelDetails

_NORM = Norm("rms_offset")


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    numbers = model.details
    window = numbers.windows[layer] if numbers.windows else 0
    return {
        "input_layernorm": _NORM,
        "self_attn": Attention(
            qkv_bias=numbers.attention_bias,
            output_bias=numbers.attention_bias,
            head_norm=_NORM,
            window=window,
            rope_theta=numbers.local_rope_theta if window else 0.0,
            scale=numbers.attention_scale,
        ),
        "post_attention_layernorm": _NORM,
        "pre_feedforward_layernorm": _NORM,
        "mlp": FeedForward("gelu_tanh"),
        "post_feedforward_layernorm": _NORM,
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes; layers with a window have a base of their own, which rope_theta and rope_scaling do not say."""
    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    config.must_be("use_bidirectional_attention", False)
    config.must_be("final_logit_softcapping", None)
    theta, rope = config.rope("full_attention", 1e6)
    local = config.section_theta("sliding_attention")
    model = llama_sizes(config.without("rope_parameters", "hidden_act"), ties=True, kv_heads=4)
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6, 1), 1)
    is_local = [bool((i + 1) % every) for i in range(model.num_layers)]
    details = ModelDetails(
        head_size=config.integer("head_dim", 256),
        rope=rope,
        windows=config.windows(model.num_layers, is_local, 4096),
        local_rope_theta=config.number("rope_local_base_freq", local, 1.0),
        attention_bias=config.flag("attention_bias", False),
        attention_scale=config.number("query_pre_attn_scalar", 256, 1e-6) ** -0.5,
    )
    return replace(model, rope_theta=theta, details=details)


def ends(model: ModelConfig) -> Ends:
    """Return the scale of the embedding's rows, sqrt(D), and the last norm."""
    return Ends(embedding_scale=model.hidden_size**0.5, norm=_NORM)


ARCHITECTURE = Architecture("Gemma3ForCausalLM", qwen3.TABLE, block, numbers, sandwich_norm, ends)
