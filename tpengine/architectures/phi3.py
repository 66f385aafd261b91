"""Phi-3 and Phi-4: q, k and v stored as one matrix, gate and up as another; longrope, and a part of a head rotated.

Which of longrope's two lists of factors is taken follows from the length of the sequences: model/parts.py, rotation_of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpengine.architectures import llama, mistral
from tpengine.architectures.describe import Architecture, ConfigJson, column, heads, llama_sizes
from tpengine.config import ModelConfig

_APART = ("layers.*.self_attn.{q,k,v}_proj", "layers.*.mlp.{gate,up}_proj")
TABLE = {
    **{pattern: rule for pattern, rule in llama.TABLE.items() if pattern not in _APART},
    "layers.*.self_attn.qkv_proj": column(heads).of(_APART[0]),
    "layers.*.mlp.gate_up_proj": column.of(_APART[1]),
}


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes, with one window for all layers; the file's own original length counts before longrope's."""
    config.must_be("attention_bias", False)
    longest, original = "max_position_embeddings", "original_max_position_embeddings"
    lengths = {name: config.integer(name, 4096, 1) for name in (longest, original)}
    spellings = {name: config.values.get(name) for name in ("rope_scaling", "rope_parameters")}
    ropes = {
        name: {**rope, **_renamed(rope), **lengths}
        for name, rope in spellings.items()
        if isinstance(rope, dict) and rope
    }
    config = ConfigJson({**config.without("layer_types").values, **lengths, **ropes}, config.path)
    model = llama_sizes(config, eps=1e-5, rotates_parts=True)
    windows = config.windows(model.num_layers, [True] * model.num_layers, 0)
    return replace(model, details=replace(model.details, windows=windows))


def _renamed(rope: Mapping[str, Any]) -> dict[str, str]:
    """Return what longrope is called now, where a file has an old name of it; transformers takes both for longrope."""
    return {key: "longrope" for key in ("rope_type", "type") if rope.get(key) in ("su", "yarn")}


ARCHITECTURE = Architecture("Phi3ForCausalLM", TABLE, mistral.block, numbers)
