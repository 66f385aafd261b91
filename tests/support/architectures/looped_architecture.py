"""An architecture in a file of its own: Llama whose layers but the first have experts, of looped_layer.py."""

from __future__ import annotations

from collections.abc import Mapping

from support.architectures.looped_experts import LoopedExperts
from tpengine.architectures import llama, qwen3_moe
from tpengine.architectures.describe import Architecture, Part
from tpengine.config import ModelConfig


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    parts = qwen3_moe.block(model, layer)
    return {**parts, "mlp": LoopedExperts.of(model)} if layer else parts


ARCHITECTURE = Architecture("LoopedForCausalLM", qwen3_moe.TABLE, block, llama.numbers)
