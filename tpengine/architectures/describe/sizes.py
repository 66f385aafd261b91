"""The numbers that the configurations of Llama and its relatives have in common."""

from __future__ import annotations

from tpengine.architectures.describe.config_json import ConfigJson
from tpengine.config import ModelConfig
from tpengine.config.details import ModelDetails


def llama_sizes(config: ConfigJson, *, ties: bool = False) -> ModelConfig:
    """Return the sizes of config.json.

    Args:
        config: the file.
        ties: whether the ends are tied where it does not say.
    """
    config.must_be("hidden_act", "silu")
    theta, rope = config.rope()
    num_heads = config.integer("num_attention_heads")
    return ModelConfig(
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        ffn_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        tie_embeddings=config.flag("tie_word_embeddings", ties),
        rope_theta=theta,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        details=ModelDetails(head_size=config.integer("head_dim", 0), rope=rope),
    )
