"""Mixtral: Mistral with experts in place of every feed-forward network; a token's weights add up to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpengine.architectures import llama, mistral
from tpengine.architectures.describe import Architecture, ConfigJson, Experts, Part, column, llama_sizes, replicate, row
from tpengine.config import ModelConfig

_EXPERTS = "layers.*.mlp.experts"
TABLE = {
    **{pattern: rule for pattern, rule in llama.TABLE.items() if ".mlp." not in pattern},
    "layers.*.block_sparse_moe.gate": replicate.of("layers.*.mlp.gate"),
    "layers.*.block_sparse_moe.experts.#.w1": column.of(f"{_EXPERTS}.gate_proj"),
    "layers.*.block_sparse_moe.experts.#.w3": column.of(f"{_EXPERTS}.up_proj"),
    "layers.*.block_sparse_moe.experts.#.w2": row.of(f"{_EXPERTS}.down_proj"),
}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    return {**mistral.block(model, layer), "mlp": Experts.of(model)}


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes; an expert has the width of a feed-forward network."""
    config.must_be("router_jitter_noise", 0)
    model = llama_sizes(config, kv_heads=8, theta=1e6, eps=1e-5)
    windows = config.without("layer_types").windows(model.num_layers, [True] * model.num_layers, 0)
    details = replace(
        model.details,
        windows=windows,
        num_experts=config.integer("num_local_experts", 8, 1),
        experts_per_token=config.integer("num_experts_per_tok", 2, 1),
        expert_ffn_size=model.ffn_size,
        normalizes_scores=True,
    )
    return replace(model, details=details)


ARCHITECTURE = Architecture("MixtralForCausalLM", TABLE, block, numbers)
