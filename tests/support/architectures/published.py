"""config.json of published models: the entries of their directories that matter here, and numbers of parameters."""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_MIXTRAL = {
    **_MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
# GPT-2's say nothing of ties: they are tied.
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
# Gemma 3's neither.
_GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# What is not written here of SmolLM3, Phi and OLMo 3 is transformers' default.
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "logits_scaling": 8.0,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {**_GPT2, "n_embd": width, "n_layer": layers, "n_head": heads}


def _qwen2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, first_window: int, *, tie: bool) -> Any:
    more = {"num_key_value_heads": kv_heads, "max_window_layers": first_window, "sliding_window": 32768}
    return {**_QWEN2, **_sizes(hidden, ffn, layers, heads), **more, "tie_word_embeddings": tie}


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tie: bool) -> dict[str, Any]:
    return {**_QWEN3, **_sizes(hidden, ffn, layers, heads), "max_window_layers": layers, "tie_word_embeddings": tie}


# Name -> config.json, parameters (a tied head counts once).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3 30B A3B": (_QWEN3_MOE, 30_532_122_624),
    "Mixtral 8x7B v0.1": (_MIXTRAL, 46_702_792_704),
    "Llama 3.1 8B": (
        {**_LLAMA, **_sizes(4096, 14336, 32, 32, tie_word_embeddings=False, rope_scaling=_LLAMA3_ROPE)},
        8_030_261_248,
    ),
    "Llama 3.2 1B": (
        {
            **_LLAMA,
            **_sizes(2048, 8192, 16, 32, tie_word_embeddings=True, head_dim=64),
            "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        },
        1_235_814_400,
    ),
    "Qwen2.5 0.5B": (_qwen2(896, 4864, 24, 14, 2, 24, tie=True), 494_032_768),
    "Qwen2.5 7B": ({**_qwen2(3584, 18944, 28, 28, 4, 28, tie=False), "vocab_size": 152064}, 7_615_616_512),
    "Qwen3 0.6B": (_qwen3(1024, 3072, 28, 16, tie=True), 596_049_920),
    "Qwen3 8B": (_qwen3(4096, 12288, 36, 32, tie=False), 8_190_735_360),
    "Qwen3 32B": (_qwen3(5120, 25600, 64, 64, tie=False), 32_762_123_264),
    "Mistral 7B v0.1": (
        {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        7_241_732_096,
    ),
    "Mistral 7B v0.3": (
        {**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        7_248_023_552,
    ),
    "GPT-2": (_gpt2(768, 12, 12), 124_439_808),
    "GPT-2 medium": (_gpt2(1024, 24, 16), 354_823_168),
    "GPT-2 large": (_gpt2(1280, 36, 20), 774_030_080),
    "GPT-2 XL": (_gpt2(1600, 48, 25), 1_557_611_200),
    "Gemma 3 1B": (_GEMMA, 999_885_952),
    "Granite 3.0 2B": ({**_GRANITE, **_sizes(2048, 8192, 40, 32)}, 2_533_531_648),
    "SmolLM3 3B": ({**_SMOLLM3, **_sizes(2048, 11008, 36, 16)}, 3_075_098_624),
    "Phi-3 mini 4k": (
        {**_PHI3, **_sizes(3072, 8192, 32, 32, sliding_window=2047, vocab_size=32064, rope_theta=10000.0)},
        3_821_079_552,
    ),
    "Phi-4": (
        {
            **_PHI3,
            **_sizes(5120, 17920, 40, 40, num_key_value_heads=10, sliding_window=None, vocab_size=100352),
            "rope_theta": 250000,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
        },
        14_659_507_200,
    ),
    "OLMo 3 7B": ({**_OLMO3, **_sizes(4096, 11008, 32, 32)}, 7_298_011_136),
}
