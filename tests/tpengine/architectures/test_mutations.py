"""Rung: gloo ranks. Architectures broken on purpose: the comparisons with transformers must notice.

Each mutation is judged by the check that stands for it elsewhere: logits and gradients (test_transformers.py), losses
of training on from transformers' weights (training/state/test_beginning.py), or what transformers loads from an export
(commands/test_export.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import CountMutations
from support.architectures.drawn import drawn_config
from support.architectures.mutations import broken
from support.architectures.parity import assert_exported, assert_parity, transformers_losses
from support.architectures.runs import beginning, begun, losses_of, saved, trained_pieces
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool

from tpengine.commands.weights import export
from tpengine.config import Config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0]}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}

# mutation -> a configuration that can show it
OF_ONE_PROCESS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotated_in_the_other_convention": ("qwen3", {**SIZES, "rope_parameters": PLAIN}),
    "default_theta_taken": ("llama", {**SIZES, "rope_parameters": LLAMA3}),
    "rope_scaling_dropped": ("llama", {**SIZES, "rope_parameters": LLAMA3}),
    "attention_factor_dropped": ("qwen3", {**SIZES, "rope_parameters": YARN}),
    "queries_rotated_one_position_late": ("llama", {**SIZES, "rope_parameters": PLAIN}),
    "learned_positions_shifted_by_one": ("gpt2", {}),
    "layer_norm_bias_missing": ("gpt2", {}),
    "long_factors_dropped": ("phi3", {**HEADS, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "queries_do_not_grow": ("ministral3", {**SIZES, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    "multipliers_dropped": ("granite", {**SIZES, "residual_multiplier": 0.22}),
}


def test_logits_and_gradients_notice_every_mutation(count_mutations: CountMutations) -> None:
    def check(name: str, mutation: str) -> None:
        architecture, given = OF_ONE_PROCESS[name]
        config = drawn_config(architecture, 0, **given)
        with broken(mutation):
            assert_parity(config, 0)

    for name in OF_ONE_PROCESS:
        check(name, "control")
    unnoticed = survivors(OF_ONE_PROCESS, lambda name: name, lambda name: check(name, name))
    judge("architectures (logits and gradients)", list(OF_ONE_PROCESS), unnoticed, count_mutations)


def judge(what: str, tried: list[str], unnoticed: list[str], count_mutations: CountMutations) -> None:
    count_mutations(what, len(tried) - len(unnoticed), len(tried))
    assert not unnoticed


# mutation -> architecture, at tp 2
OF_RANKS = {
    "q_norm_not_summed_over_tp": "qwen3",
    "packed_cut_as_one_block": "gpt2",
    "squares_of_own_heads": "olmo3",
}


def broken_losses(config: Config, mutation: str) -> list[float]:
    with broken(mutation):
        return losses_of(begun(config))


@pytest.mark.slow
def test_losses_notice_every_mutation(ranks: RankPool, tmp_path: Path, count_mutations: CountMutations) -> None:
    wanted: dict[str, tuple[Config, list[float]]] = {}
    for architecture in OF_RANKS.values():
        theirs = saved(architecture, tmp_path / architecture)
        config = beginning(tmp_path / architecture, (1, 2, 1), steps=3)
        wanted[architecture] = config, transformers_losses(theirs, config)

    def check(name: str, mutation: str) -> None:
        config, want = wanted[OF_RANKS[name]]
        for got in ranks.run(broken_losses, 2, config, mutation):
            assert got == pytest.approx(want, rel=1e-8)

    for name in OF_RANKS:
        check(name, "control")
    unnoticed = survivors(OF_RANKS, lambda name: name, lambda name: check(name, name))
    judge("architectures at tp 2 (losses)", list(OF_RANKS), unnoticed, count_mutations)


OF_EXPORT = ["padding_exported", "head_exported_from_the_first_stage"]


def test_an_export_notices_every_mutation(ranks: RankPool, tmp_path: Path, count_mutations: CountMutations) -> None:
    """An untied model, whose vocabulary is not a multiple of 8, trained at pp 2."""
    saved("qwen3", tmp_path / "theirs", vocab_size=250, tie_word_embeddings=False)
    run, layout = tmp_path / "run", (1, 2, 2)
    run.mkdir()
    config = replace(beginning(tmp_path / "theirs", layout, steps=1, checkpoint_every=1), run_dir=str(run))
    held = ranks.run(trained_pieces, math.prod(layout), config)

    def check(mutation: str) -> None:
        with broken(mutation):
            export(run, None, tmp_path / mutation)
        assert_exported(tmp_path / mutation, config.model, held)

    check("control")
    unnoticed = survivors(OF_EXPORT, lambda name: name, check)
    judge("exports", OF_EXPORT, unnoticed, count_mutations)
