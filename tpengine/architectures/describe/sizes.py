"""The numbers that the configurations of Llama and its relatives have in common."""

from __future__ import annotations

from tpengine.architectures.describe.config_json import ConfigJson
from tpengine.config import ModelConfig
from tpengine.config.settings import ModelDetails


def llama_sizes(config: ConfigJson, *, ties: bool = False, kv_heads: int | None = None) -> ModelConfig:
    """Return the sizes of config.json.

    Args:
        config: the file.
        ties: whether the ends are tied where it does not say.
        kv_heads: how many there are where it has no entry; None, and where it has null, as many as query heads.
    """
    config.must_be("hidden_act", "silu")
    theta, rope = config.rope()
    num_heads = config.size("num_attention_heads", "num_heads")
    is_silent = kv_heads is not None and "num_key_value_heads" not in config.values
    return ModelConfig(
        hidden_size=config.size("hidden_size", "hidden_size"),
        num_layers=config.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", "num_kv_heads", kv_heads if is_silent else num_heads),
        ffn_size=config.size("intermediate_size", "ffn_size"),
        vocab_size=config.size("vocab_size", "vocab_size"),
        tie_embeddings=config.flag("tie_word_embeddings", ties),
        rope_theta=theta,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        details=ModelDetails(head_size=config.integer("head_dim", 0), rope=rope),
    )
