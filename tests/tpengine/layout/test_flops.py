"""Rung: pure. Flops of a step against the formulas that Megatron-LM and PaLM publish, on their own models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpengine.config import Config, ModelConfig, OptimConfig, ParallelConfig, ParameterGroup, TrainConfig
from tpengine.config.settings import ModelDetails
from tpengine.layout.flops import layer_flops, step_flops
from tpengine.layout.parameters import num_parameters


def gpt(
    layers: int, hidden: int, heads: int, seq: int, batch: int, vocab: int = 51200, recompute: str = "none"
) -> Config:
    model = ModelConfig(
        architecture="gpt2",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=vocab,
        tie_embeddings=True,
        details=ModelDetails(max_positions=seq),
    )
    parallel = ParallelConfig(tp=1, pp=1, dp=1, recompute=recompute)  # type: ignore[arg-type]
    return Config(
        model=model, parallel=parallel, train=TrainConfig(seq_len=seq, micro_batch_size=batch, num_micro_batches=1)
    )


# Narayanan et al., "Efficient large-scale language model training", arXiv 2104.04473, table 1: layers, width, heads,
# batch, parameters in billions.
MEGATRON = [
    (24, 2304, 24, 512, 1.7),
    (48, 8192, 64, 1536, 39.1),
    (96, 12288, 96, 1536, 174.6),
    (128, 25600, 160, 3072, 1008.0),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "batch", "billions"), MEGATRON)
def test_hardware_flops_are_megatrons(layers: int, hidden: int, heads: int, batch: int, billions: float) -> None:
    """Its section 5: F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)), all layers computed again, attention whole."""
    seq, vocab = 2048, 51200
    config = gpt(layers, hidden, heads, seq, batch, vocab, "block")
    assert num_parameters(config.model) / 1e9 == pytest.approx(billions, rel=0.01, abs=0.05)
    formula = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert step_flops(config, causal_half=False, counts_again=True) == pytest.approx(formula, rel=1e-9)


def test_model_flops_are_palms() -> None:
    """Chowdhery et al., arXiv 2204.02311, appendix B: per token 6 N + 12 L H Q T, with the paper's GPT-3 of 175 B."""
    config = gpt(96, 12288, 96, 2048, 2)
    per_token = 6 * num_parameters(config.model) + 12 * 96 * 96 * 128 * 2048
    assert step_flops(config, causal_half=False) / (2 * 2048) == pytest.approx(per_token, rel=0.01)


def test_scores_outside_of_a_window_are_not_counted() -> None:
    """Of 4 layers 3 have a window of 16 tokens: the flops that are missing are those of the pairs outside of it."""
    of_gpt = gpt(4, 256, 4, 128, 2, 1000)
    whole = replace(of_gpt, model=replace(of_gpt.model, architecture="mistral"))
    details = replace(whole.model.details, windows=(16, 16, 0, 16))
    narrow = replace(whole, model=replace(whole.model, details=details))
    inside = sum(min(query + 1, 16) for query in range(128))
    missing = 3 * 3 * 4 * 256 * 2 * (128 * 128 // 2 - inside)
    assert step_flops(whole, causal_half=True) - step_flops(narrow, causal_half=True) == missing
    assert step_flops(whole, causal_half=False) == step_flops(narrow, causal_half=False)


def test_what_is_computed_again_is_counted_once_more() -> None:
    none, attention, block, full = (
        step_flops(gpt(4, 256, 4, 128, 2, 1000, again), causal_half=True, counts_again=True)
        for again in ("none", "attention", "block", "full")
    )
    tokens, head = 256, 2 * 1000 * 256 * 256
    assert none == step_flops(gpt(4, 256, 4, 128, 2, 1000), causal_half=True) and none % 3 == 0
    assert full - none == none // 3 and full - block == head
    assert attention - none == 4 * (2 * 4 * 256 * 256 * tokens + 4 * 256 * 128 * tokens // 2)


def test_backward_of_frozen_weights_is_not_counted() -> None:
    """Below the lowest trained weight nothing of backward; above it the weight gradients of what is trained."""
    whole = gpt(4, 256, 4, 128, 2, 1000)
    tokens, matrices = 2 * 128, {"up": 1024 * 256, "q": 256 * 256}
    mixed = replace(whole, optim=OptimConfig(groups=(ParameterGroup("model.layers.[12].mlp.up*.weight", frozen=True),)))
    missing = step_flops(whole, causal_half=False) - step_flops(mixed, causal_half=False)
    assert missing == 2 * 2 * tokens * matrices["up"]
    patterns = "model.embed_*", "model.layers.[0-2].*", "*.q_proj.weight"
    below = replace(whole, optim=OptimConfig(groups=tuple(ParameterGroup(of, frozen=True) for of in patterns)))
    block, _ = layer_flops(whole.model, 0, 128)
    head = 2 * 1000 * 256 * tokens
    missing = step_flops(whole, causal_half=True) - step_flops(below, causal_half=True)
    assert missing == 3 * 2 * 2 * block + head + 2 * tokens * matrices["q"]
