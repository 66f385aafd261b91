"""Rung: gloo ranks. Packed documents: every layout trains as one process does, to the last bit in exact mode.

Packed logits against each document's alone are in model/test_documents.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine import exactness, parity
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.data import open_corpus, write_tokens
from tpengine.training.evaluation.held_out import held_out_loss
from tpengine.training.trainer import RunError, Trainer

VOCAB = 250


def written(path: Path) -> Path:
    """Documents of 1 token, of less than a sequence, of one, of one and a token, of ten."""
    generator = np.random.default_rng(4)
    lengths = list(itertools.chain([1, 24, 25, 240, 2, 1, 1], generator.integers(1, 60, 150).tolist()))
    write_tokens(path, generator.integers(0, VOCAB, sum(lengths)), VOCAB, lengths=lambda: lengths)
    return path


def packed(config: Config, path: Path, **data: Any) -> Config:
    parallel = config.parallel
    assert parallel.tp and parallel.pp and parallel.dp
    data = {"path": str(path), "packing": "documents", "held_out_fraction": 0.2, **data}
    return validate(replace(config, data=replace(config.data, **data)), parallel.tp * parallel.pp * parallel.dp)


def held_out(config: Config) -> float | None:
    return held_out_loss(Trainer(config, open_corpus(config), torch.device("cpu")))


# Of the two, every one has a stage in the middle or ranks that share a sequence.
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 2), (2, 1, 2)])
def test_a_layout_trains_as_one_process(ranks: RankPool, tmp_path: Path, dp: int, tp: int, pp: int) -> None:
    path = written(tmp_path / "tokens")
    options: dict[str, Any] = dict(tied=True, kv_heads=2, recompute="block" if tp > 1 else "none")
    (reference,) = ranks.run(parity.train, 1, packed(parity.config_of(1, 1, 1, **options), path))
    config = packed(parity.config_of(dp, tp, pp, **options), path)
    parity.compare(ranks.run(parity.train, dp * tp * pp, config), reference)


def test_exact_mode_has_the_bits_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    path = written(tmp_path / "tokens")
    config = packed(exactness.exact_config(1, 2, 2, dtype="float32", layers=2, steps=2), path)
    one = exactness.alone(config)
    found = exactness.merge(config, ranks.run(exactness.train, 4, config))
    exactness.assert_same_bits(found, exactness.merge(one, ranks.run(exactness.train, 1, one)))
    (alone,) = ranks.run(held_out, 1, one)
    assert ranks.run(held_out, 4, config) == [alone] * 4
    # Cut, the same text has another loss: borders reach the held-out text too.
    (cut,) = ranks.run(held_out, 1, packed(one, path, packing="cut"))
    assert cut != alone


def test_a_step_of_ignored_labels_alone_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    write_tokens(path, np.arange(1200) % VOCAB, VOCAB, lengths=lambda: [1] * 1200)
    (found,) = ranks.run(trained_step, 1, packed(parity.config_of(1, 1, 1, tied=True, kv_heads=2), path))
    assert "all labels of step 1 are ignored" in found


def trained_step(config: Config) -> str:
    try:
        Trainer(config, open_corpus(config), torch.device("cpu")).train_step(0)
    except RunError as error:
        return str(error)
    return "trained"
