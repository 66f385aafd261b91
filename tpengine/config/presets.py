"""Named runs: functions that return a `Config`, so that a preset can be read, diffed and composed like code.

`--preset NAME` chooses one; a TOML file and flags are applied after it. Presets leave the layout open, because it
depends on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tpengine.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from tpengine.config.settings import ModelDetails
from tpengine.spelling import use


def tiny() -> Config:
    """The default: 918,656 parameters, for two CPU cores and a few minutes."""
    return Config()


def bench() -> Config:
    """The CPU benchmark: 25,960,960 parameters, steps of 32 sequences of 256 bytes."""
    return Config(
        model=ModelConfig(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=1408),
        train=TrainConfig(seq_len=256, micro_batch_size=4, num_micro_batches=8),
    )


def llama_1b() -> Config:
    """The shape of Llama 3.2 1B, vocabulary 32,768, head untied: 1,107,363,840 parameters in bfloat16."""
    return Config(
        model=ModelConfig(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            ffn_size=8192,
            vocab_size=32768,
        ),
        train=TrainConfig(seq_len=2048, micro_batch_size=4, num_micro_batches=4, dtype="bfloat16"),
        optim=OptimConfig(lr=3e-4),
    )


def llama_8b() -> Config:
    """The shape of Llama 3 8B: 8,030,261,248 parameters in bfloat16."""
    return Config(
        model=ModelConfig(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            ffn_size=14336,
            vocab_size=128256,
            rope_theta=500000.0,
        ),
        train=TrainConfig(seq_len=8192, micro_batch_size=1, num_micro_batches=16, dtype="bfloat16"),
        optim=OptimConfig(lr=3e-4),
    )


def llama_70b() -> Config:
    """The shape of Llama 3 70B, which is advised and planned more often than trained: 70,553,706,496 parameters."""
    return Config(
        model=ModelConfig(
            hidden_size=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            ffn_size=28672,
            vocab_size=128256,
        ),
        train=TrainConfig(seq_len=8192, micro_batch_size=1, num_micro_batches=32, dtype="bfloat16"),
        optim=OptimConfig(lr=1.5e-4),
    )


def qwen3_30b_a3b() -> Config:
    """The shape of Qwen3-30B-A3B, 8 of 128 experts per token: 30,532,122,624 parameters in bfloat16, 3.4e9 active."""
    return Config(
        model=ModelConfig(
            architecture="qwen3_moe",
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            ffn_size=6144,
            vocab_size=151936,
            rope_theta=1e6,
            norm_eps=1e-6,
            details=ModelDetails(
                head_size=128, num_experts=128, experts_per_token=8, expert_ffn_size=768, normalizes_scores=True
            ),
        ),
        train=TrainConfig(seq_len=4096, micro_batch_size=1, num_micro_batches=16, dtype="bfloat16"),
        optim=OptimConfig(lr=3e-4),
    )


def tiny_moe() -> Config:
    """As tiny, with 2 of 8 experts per token that are half as wide as its network: 2,692,480 parameters."""
    details = ModelDetails(num_experts=8, experts_per_token=2, expert_ffn_size=192, normalizes_scores=True)
    return Config(model=ModelConfig(architecture="qwen3_moe", details=details))


def certify() -> Config:
    """What `tpengine certify` trains: 3,017,472 parameters, with everything that could depend on a layout.

    8 heads share 4 KV heads; 5 layers do not divide evenly over any pipeline; embeddings are tied; there are three
    kinds of dropout, ignored labels, clipping, and blocks of 2 micro-batches. Matrices are large enough to reach every
    code path of the matrix libraries that training reaches.
    """
    return Config(
        model=ModelConfig(
            hidden_size=256,
            num_layers=5,
            num_heads=8,
            num_kv_heads=4,
            ffn_size=512,
            tie_embeddings=True,
            residual_dropout=0.1,
            attention_dropout=0.1,
            mlp_dropout=0.1,
        ),
        train=TrainConfig(seq_len=64, micro_batch_size=4, num_micro_batches=16),
        data=DataConfig(ignore_token=32),
        optim=OptimConfig(warmup_steps=2, clip_norm=0.5),
    )


PRESETS: Mapping[str, Callable[[], Config]] = MappingProxyType(
    {
        "tiny": tiny,
        "bench": bench,
        "llama_1b": llama_1b,
        "llama_8b": llama_8b,
        "llama_70b": llama_70b,
        "qwen3_30b_a3b": qwen3_30b_a3b,
        "tiny_moe": tiny_moe,
        "certify": certify,
    }
)


def preset_config(spelling: str) -> Config:
    """Return the configuration of a preset; "-" may be written for "_" in its name.

    Raises: ValueError: no such preset; names the one that was meant, if that is plain.
    """
    name = spelling.replace("-", "_")
    if name not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}: got {name!r}: {use(name, PRESETS)}")
    return PRESETS[name]()
