"""Drawn configurations of transformers' models, one family for each architecture that is here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

# What transformers calls the configuration of each architecture of ours.
CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "gpt2": "GPT2Config",
    "gemma3": "Gemma3TextConfig",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "phi3": "Phi3Config",
    "olmo3": "Olmo3Config",
    "ministral3": "Ministral3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
}
# Those with experts.
EXPERTS = ("qwen3_moe", "mixtral")

# Rotary positions of heads of 10 elements, of which 6 are rotated.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.6,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 4.0],
}


def drawn_config(architecture: str, seed: int, **given: Any) -> Any:
    """Return a tiny configuration: heads, KV heads, head size, ties, biases, eps, rotary positions, window, vocabulary.

    Args:
        architecture: one of CONFIGS.
        seed: equal seeds give equal configurations.
        given: entries that are not drawn.
    """
    import transformers

    draw = random.Random(f"{architecture} {seed}")
    entries = _gpt2(draw) if architecture == "gpt2" else _family(architecture, draw)
    # Special tokens beyond the vocabulary are warned of; the row of a padding token would get no gradient.
    entries |= dict(attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if architecture in EXPERTS:
        # Its other ways do not take float64.
        entries["experts_implementation"] = "eager"
    return getattr(transformers, CONFIGS[architecture])(**entries | given)


def _gpt2(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([1, 2, 4])
    return dict(
        vocab_size=draw.randrange(50, 120),
        n_positions=draw.choice([16, 24, 40]),
        n_embd=heads * draw.choice([4, 6, 16]),
        n_layer=2,
        n_head=heads,
        n_inner=draw.choice([None, 32]),
        layer_norm_epsilon=draw.choice([1e-5, 1e-2]),
        tie_word_embeddings=draw.random() < 0.5,
    )


def _family(architecture: str, draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([1, 2, 4, 6])
    entries: dict[str, Any] = dict(
        vocab_size=draw.randrange(50, 120),
        hidden_size=heads * draw.choice([4, 8, 10]),
        intermediate_size=draw.choice([24, 40]),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in (1, 2, 3, 6, 4) if heads % n == 0]),
        rms_norm_eps=draw.choice([1e-6, 1e-2]),
        tie_word_embeddings=draw.random() < 0.5,
    )
    if architecture not in ("qwen2", "phi3"):
        entries["head_dim"] = draw.choice([4, 8, 12])
    if architecture in ("llama", "qwen3", "gemma3", "granite", "smollm3", "olmo3", "qwen3_moe"):
        entries["attention_bias"] = draw.random() < 0.5
    if architecture in ("llama", "granite", "smollm3"):
        entries["mlp_bias"] = draw.random() < 0.5
    return entries | _OWN.get(architecture, _llama)(draw, heads)


def _llama(draw: random.Random, heads: int) -> dict[str, Any]:
    return {"rope_parameters": _rope(draw)}


def _qwen(draw: random.Random, heads: int) -> dict[str, Any]:
    return dict(
        use_sliding_window=draw.random() < 0.5,
        sliding_window=draw.choice([3, 7]),
        max_window_layers=draw.choice([0, 1, 2]),
        rope_parameters=_rope(draw),
    )


def _mistral(draw: random.Random, heads: int) -> dict[str, Any]:
    return dict(sliding_window=draw.choice([None, 1, 5]), rope_parameters=_rope(draw))


def _qwen3_moe(draw: random.Random, heads: int) -> dict[str, Any]:
    num = draw.choice([3, 4, 6])
    return dict(
        moe_intermediate_size=draw.choice([8, 16]),
        num_experts=num,
        num_experts_per_tok=draw.randrange(1, num + 1),
        norm_topk_prob=draw.random() < 0.5,
        decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([[], [], [0]]),
        use_sliding_window=draw.random() < 0.5,
        sliding_window=draw.choice([3, 7]),
        rope_parameters=_rope(draw),
    )


def _mixtral(draw: random.Random, heads: int) -> dict[str, Any]:
    num = draw.choice([3, 4, 8])
    chosen = dict(num_local_experts=num, num_experts_per_tok=draw.randrange(1, num + 1))
    return chosen | _mistral(draw, heads)


def _granite(draw: random.Random, heads: int) -> dict[str, Any]:
    return dict(
        embedding_multiplier=draw.choice([1.0, 12.3]),
        attention_multiplier=draw.choice([0.015625, 0.3]),
        residual_multiplier=draw.choice([0.22, 1.0]),
        logits_scaling=draw.choice([8.0, 3.0]),
        rope_parameters=_rope(draw),
    )


def _smollm3(draw: random.Random, heads: int) -> dict[str, Any]:
    return dict(
        no_rope_layers=draw.choice([None, [1, 0], [0, 1]]),
        no_rope_layer_interval=draw.choice([2, 4]),
        use_sliding_window=draw.random() < 0.5,
        sliding_window=draw.choice([3, 7]),
        rope_parameters=_rope(draw),
    )


def _gemma3(draw: random.Random, heads: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return dict(
        layer_types=[draw.choice(kinds), draw.choice(kinds)],
        sliding_window=draw.choice([3, 7]),
        query_pre_attn_scalar=draw.choice([4, 24]),
        rope_parameters={
            kinds[0]: {"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])},
            # Of several entries transformers does not read `truncate`.
            kinds[1]: {name: value for name, value in _rope(draw).items() if name != "truncate"},
        },
    )


def _olmo3(draw: random.Random, heads: int) -> dict[str, Any]:
    entries = _gemma3(draw, heads)
    del entries["query_pre_attn_scalar"]
    # One base: version 4 has no other place for it.
    ropes = entries["rope_parameters"]
    ropes["sliding_attention"]["rope_theta"] = ropes["full_attention"]["rope_theta"]
    return entries


def _phi3(draw: random.Random, heads: int) -> dict[str, Any]:
    # Heads of an even number of elements of which an even number is rotated.
    size, rotated = draw.choice([(8, 8), (8, 6), (10, 4)])
    entries: dict[str, Any] = dict(hidden_size=heads * size, sliding_window=draw.choice([None, 5]))
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": draw.choice([100.0, 10000.0]),
        "partial_rotary_factor": rotated / size,
    }
    if draw.random() < 0.7:
        # Sequences are longer than the first length, and shorter than the second.
        entries |= dict(original_max_position_embeddings=draw.choice([8, 64]), max_position_embeddings=256)
        rope |= dict(
            rope_type="longrope",
            short_factor=[draw.uniform(1, 2) for _ in range(rotated // 2)],
            long_factor=[draw.uniform(2, 9) for _ in range(rotated // 2)],
        )
        if draw.random() < 0.3:
            rope |= dict(factor=4.0, attention_factor=0.7)
    return entries | {"rope_parameters": rope}


def _ministral3(draw: random.Random, heads: int) -> dict[str, Any]:
    window, mscale = draw.choice([None, 1, 5]), draw.choice([None, 0.7, 1.0])
    rope = {
        "rope_type": "yarn",
        "rope_theta": draw.choice([100.0, 10000.0]),
        "factor": draw.choice([2.0, 4.0]),
        "original_max_position_embeddings": draw.choice([4, 64]),
        "llama_4_scaling_beta": draw.choice([0.1, 0.7]),
    }
    amplitudes = {} if mscale is None else {"mscale": mscale, "mscale_all_dim": 1.0}
    return {"sliding_window": window, "rope_parameters": rope | amplitudes}


# What a family draws besides, rotary positions among it; the others draw what Llama does.
_OWN: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "granite": _granite,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "olmo3": _olmo3,
    "ministral3": _ministral3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}


def _rope(draw: random.Random) -> dict[str, Any]:
    """Return rotary positions; the tests' sequences are longer than the original ones."""
    kind = draw.choice(["default", "linear", "llama3", "yarn"])
    entries: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 10000.0, 500000.0])}
    if kind == "linear":
        entries["factor"] = draw.choice([2.0, 3.5])
    if kind == "llama3":
        entries |= dict(
            factor=draw.choice([2.0, 8.0]),
            low_freq_factor=1.0,
            high_freq_factor=draw.choice([2.0, 4.0]),
            original_max_position_embeddings=draw.choice([8, 64]),
        )
    if kind == "yarn":
        entries |= dict(factor=draw.choice([2.0, 4.0]), original_max_position_embeddings=draw.choice([4, 8]))
        if draw.random() < 0.3:
            entries |= dict(attention_factor=0.7)
        if draw.random() < 0.3:
            entries |= dict(beta_fast=8.0, beta_slow=2.0, truncate=False)
    return entries
