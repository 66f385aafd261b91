"""GPT-2: LayerNorm and biases, learned positions, gelu; products stored transposed, queries, keys and values as one."""

from __future__ import annotations

from collections.abc import Mapping

from tpengine.architectures.describe import (
    Architecture,
    Attention,
    ConfigJson,
    Ends,
    FeedForward,
    Norm,
    Part,
    column,
    heads,
    replicate,
    row,
    vocab,
)
from tpengine.config import ModelConfig
from tpengine.config.settings import ModelDetails

TABLE = {
    "wte": vocab.of("embed_tokens"),
    "wpe": replicate.of("embed_positions"),
    "lm_head": vocab,
    "h.*.ln_1": replicate.of("layers.*.input_layernorm"),
    "h.*.attn.c_attn": column(heads).transposed.of("layers.*.self_attn.{q,k,v}_proj"),
    "h.*.attn.c_proj": row(heads).transposed.of("layers.*.self_attn.o_proj"),
    "h.*.ln_2": replicate.of("layers.*.post_attention_layernorm"),
    "h.*.mlp.c_fc": column.transposed.of("layers.*.mlp.up_proj"),
    "h.*.mlp.c_proj": row.transposed.of("layers.*.mlp.down_proj"),
    "ln_f": replicate.of("norm"),
}


def block(model: ModelConfig, layer: int) -> Mapping[str, Part]:
    """Return the parts of a layer."""
    return {
        "input_layernorm": Norm("layer"),
        "self_attn": Attention(qkv_bias=True, output_bias=True, rotates=False),
        "post_attention_layernorm": Norm("layer"),
        "mlp": FeedForward("gelu_tanh", gated=False, bias=True),
    }


def numbers(config: ConfigJson) -> ModelConfig:
    """Return the sizes; dropout rates are settings of a run, not taken from the file."""
    config.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.must_be("scale_attn_weights", True)
    config.must_be("scale_attn_by_inverse_layer_idx", False)
    config.must_be("add_cross_attention", False)
    hidden, num_heads = config.size("n_embd", "hidden_size"), config.size("n_head", "num_heads")
    return ModelConfig(
        hidden_size=hidden,
        num_layers=config.num_layers("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_size=config.size("n_inner", "ffn_size", 4 * hidden),
        vocab_size=config.size("vocab_size", "vocab_size"),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        details=ModelDetails(max_positions=config.integer("n_positions", least=1)),
    )


def ends(model: ModelConfig) -> Ends:
    """Return the table of positions, and the last norm."""
    return Ends(has_positions=True, norm=Norm("layer"))


ARCHITECTURE = Architecture("GPT2LMHeadModel", TABLE, block, numbers, ends=ends, prefix="transformer.")
