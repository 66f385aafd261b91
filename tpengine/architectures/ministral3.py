"""Ministral 3, text: Mistral with yarn's frequencies, and queries that grow with their position.

The published directories hold an image encoder too, and another architecture: transformers saves the text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, ConfigJson, FeedForward, Norm, Part, llama_sizes
from tpengine.config import ModelConfig

# What transformers takes where config.json has none.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "attention_factor": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    windows, rope = model.details.windows, model.details.rope
    return {
        "input_layernorm": Norm(),
        "self_attn": Attention(
            window=windows[layer] if windows else 0,
            query_beta=rope.llama_4_scaling_beta,
            query_length=rope.original_max_position_embeddings,
        ),
        "post_attention_layernorm": Norm(),
        "mlp": FeedForward(),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with one window for all layers; a head has 128 elements where config.json does not say."""
    values = dict(config.without("layer_types").values)
    if not values.get("rope_parameters") and not values.get("rope_scaling"):
        values["rope_parameters"] = _ROPE
    if "head_dim" not in values:
        values["head_dim"] = 128
    config = ConfigJson(values, config.path)
    model = llama_sizes(config, kv_heads=8, eps=1e-5)
    if (kind := model.details.rope.rope_type) != "yarn":
        raise ValueError(f"{config.path}: rope_type of Ministral 3 must be yarn: got {kind!r}: use a model that has it")
    windows = config.windows(model.num_layers, [True] * model.num_layers, 0)
    return replace(model, details=replace(model.details, windows=windows))


ARCHITECTURE = Architecture("Ministral3ForCausalLM", llama.TABLE, block, numbers)
