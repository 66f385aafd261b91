"""OLMo 3: norms behind each half of a block instead of before, of q and k over all heads; windows in 3 of 4 layers.

Frequencies are scaled in layers without a window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama
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
    reordered_norm,
)
from tpengine.config import ModelConfig

TABLE = {**llama.TABLE, "layers.*.self_attn.{q,k}_norm": column(heads)}
_THETA = 500000.0


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    numbers = model.details
    window = numbers.windows[layer] if numbers.windows else 0
    return {
        "self_attn": Attention(
            qkv_bias=numbers.attention_bias,
            output_bias=numbers.attention_bias,
            norms_width=True,
            window=window,
            rope_theta=numbers.local_rope_theta if window else 0.0,
        ),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(),
        "post_feedforward_layernorm": Norm(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes; rope_scaling is of layers without a window."""
    theta, rope = config.rope("full_attention", _THETA)
    local = config.section_theta("sliding_attention", theta)
    model = llama_sizes(config.without("rope_parameters", "rope_scaling", "rope_theta"), eps=1e-5)
    is_local = [bool((i + 1) % 4) for i in range(model.num_layers)]
    details = replace(
        model.details,
        rope=rope,
        windows=config.windows(model.num_layers, is_local, 4096),
        local_rope_theta=local,
        attention_bias=config.flag("attention_bias", False),
    )
    return replace(model, rope_theta=theta, details=details)


ARCHITECTURE = Architecture("Olmo3ForCausalLM", TABLE, block, numbers, reordered_norm)
