"""Rung: gloo ranks. Weights and columns of a token file in training: next-token loss by hand, layouts, a loss's batch.

The loop by hand is plain torch in float64: sum(w * nll) / sum(w) over the global batch, read from the file itself.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.engine.parity import compare, config_of, outcome_of
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.config import Config
from tpengine.data import Column, TokenWriter, open_corpus
from tpengine.data.samples import Samples
from tpengine.runs.evaluation import held_out_loss
from tpengine.runs.trainer import Trainer
from tpengine.training.last_output import LastOutput
from tpengine.training.objective import MicroBatch, Objective
from tpengine.training.step_batch import BatchReader, MicroBatches

CPU, VOCAB, IGNORED = torch.device("cpu"), 250, 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of drawn ids; weights between 0 and 2, of three sizes; a `gain` per token, and whether it counts."""
    path, draws = tmp_path_factory.mktemp("columns") / "t", np.random.default_rng(3)
    kinds = [Column("weights", "float16"), Column("gain", "float32"), Column("pair", "int32", 2)]
    with TokenWriter(path, VOCAB, kinds) as writer:
        for _ in range(120):
            ids = draws.integers(0, VOCAB, draws.integers(2, 40))
            gain = draws.uniform(0, 1, len(ids))
            weights = draws.choice([0.0, 0.5, 1.75], len(ids))
            writer.add(ids, weights=weights, gain=gain, pair=ids[:, None] * [1, 2])
    return path


def reading(config: Config, text: Path, columns: str = "", packing: Any = "documents", **data: Any) -> Config:
    data = {"path": str(text), "columns": columns, "packing": packing, "held_out_fraction": 0.2, **data}
    return replace(config, data=replace(config.data, **data))


def small(dp: int, tp: int, pp: int, **parallel: Any) -> Config:
    return config_of(dp, tp, pp, tied=True, kv_heads=2, num_layers=2, **parallel)


def train(config: Config) -> Any:
    return outcome_of(Trainer(config, open_corpus(config), CPU))


def by_hand(config: Config) -> tuple[float, float]:
    """The first loss, and the held-out loss before it, of drawn weights."""
    corpus = open_corpus(config)
    trainer = Trainer(config, corpus, CPU)
    net, seq = trainer.state.model, config.train.seq_len
    found = []
    for part, count in ((corpus.train, 8), (corpus.held_out, corpus.held_out.num_windows)):
        numbers = np.arange(min(count, 32))
        tokens, labels, starts = part.read_with_starts(numbers)
        weights = torch.from_numpy(part.read_columns(numbers, labels)["weights"]).double()
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(numbers)):
            # Each document by itself.
            edges = [0, *starts[row].tolist(), seq]
            for begin, end in pairwise(edges):
                ids, known = (torch.from_numpy(of[row, begin:end]) for of in (tokens, labels))
                z = net(ids, end - begin)[:, :VOCAB]
                nll = torch.nn.functional.cross_entropy(z, known, reduction="none")
                total += (nll * weights[row, begin:end]).sum()
        found.append(float(total / weights.sum()))
    return found[0], found[1]


def first_losses(config: Config) -> tuple[float, float]:
    trainer = Trainer(config, open_corpus(config), CPU)
    held_out = held_out_loss(trainer.state)
    assert held_out is not None
    return trainer.step.run(0).loss, held_out


def test_next_token_loss_is_weighted_and_divided_by_the_weights(ranks: RankPool, text: Path) -> None:
    (want,) = ranks.run(by_hand, 1, reading(small(1, 1, 1), text))
    for config in (small(1, 2, 1), small(2, 1, 1, zero=3)):
        for found in ranks.run(first_losses, 2, reading(config, text)):
            assert found == pytest.approx(want, rel=1e-12)
    (unweighted,) = ranks.run(first_losses, 1, reading(small(1, 1, 1), text, "no-weights"))
    assert unweighted != pytest.approx(want, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_all_axes_train_the_weights_of_one_process(ranks: RankPool, text: Path, zero: int, schedule: str) -> None:
    one = config_of(1, 1, 1, tied=True, kv_heads=2, num_layers=4)
    every = config_of(2, 2, 2, tied=True, kv_heads=2, num_layers=4, zero=zero, schedule=schedule)
    compare(ranks.run(train, 8, reading(every, text)), ranks.run(train, 1, reading(one, text))[0])


def test_weights_of_0_and_1_are_ignored_labels(ranks: RankPool, tmp_path: Path) -> None:
    """To the last bit: the same file, whose label 32 is ignored, or has weight 0."""
    draws = np.random.default_rng(5)
    with TokenWriter(tmp_path / "t", VOCAB, [Column("weights", "uint8")]) as writer:
        for _ in range(60):
            ids = draws.choice([7, 9, IGNORED, 200], 40)
            writer.add(ids, weights=ids != IGNORED)
    config = small(1, 1, 1)
    weighted = reading(config, tmp_path / "t", ignore_token=None)
    ignored = reading(config, tmp_path / "t", "no-weights", ignore_token=IGNORED)
    (by_weight, by_label) = (ranks.run(train, 1, of)[0] for of in (weighted, ignored))
    assert by_weight[0] == by_label[0]
    for name, (_, values) in by_weight[1].items():
        assert torch.equal(values, by_label[1][name][1]), name


def exact(config: Config) -> Config:
    return replace(config, train=replace(config.train, reduction="exact", dtype="float32"))


@pytest.mark.slow
def test_exact_mode_gives_the_same_bits_in_every_layout(ranks: RankPool, text: Path) -> None:
    ((want, _),) = ranks.run(train, 1, exact(reading(small(1, 1, 1), text)))
    for layout in ((2, 2, 1), (1, 2, 2), (2, 1, 2)):
        for found, _ in ranks.run(train, 4, exact(reading(small(*layout, zero=1), text))):
            assert found == want, layout


def loss_of_columns(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Checks that columns are those of the labels, where a batch meets them."""
    counted = batch.labels.clamp_min(0)
    assert torch.equal(batch.columns["pair"], counted[:, None] * torch.tensor([1, 2], dtype=torch.int32))
    assert batch.weights is not None and batch.weights.dtype == torch.float32
    return -(batch.columns["gain"] * batch.weights * output.token_logprobs(batch.labels)).sum()


def own(config: Config) -> list[float]:
    trainer = Trainer(config, open_corpus(config), CPU, objective=Objective(loss_of_columns))
    return [trainer.step.run(step).loss for step in range(2)]


def test_a_loss_is_given_the_columns_of_its_labels(ranks: RankPool, text: Path) -> None:
    (want,) = ranks.run(own, 1, reading(small(1, 1, 1), text, "pair,gain"))
    for found in ranks.run(own, 2, reading(small(1, 2, 1), text, "pair,gain", packing="documents")):
        assert found == pytest.approx(want, rel=1e-12)


def given_before_and_after_it_is_cut_short(config: Config) -> tuple[MicroBatches, MicroBatches, str]:
    trainer = Trainer(config, open_corpus(config), CPU)
    state = trainer.state
    whole = trainer.step.reader.read(0)
    os.truncate(config.data.path, 100)
    cut = BatchReader(config, state.part.corpus.train, state.rank.mesh, (0, 0), CPU).read(0)
    return whole.given, cut.given, cut.error


def test_a_rank_that_cannot_read_computes_with_columns_of_zeros(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """Of the file's dtypes and widths: a loss raises nothing that would be said in place of why it could not read."""
    copy = shutil.copytree(text.parent, tmp_path / "copy") / text.name
    config = reading(small(1, 1, 1), copy, "pair,gain")
    ((whole, zeros, error),) = ranks.run(given_before_and_after_it_is_cut_short, 1, config)
    assert "must not be cut short while it is read" in error
    for before, after in (
        (whole.weights, zeros.weights),
        *((column, zeros.columns[name]) for name, column in whole.columns.items()),
    ):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert before.any() and not after.any()
    assert whole.columns["pair"].shape == (*whole.tokens.shape, 2)


def shifted(config: Config) -> str:
    """A rank's program: a column that a reader shifts by one is noticed by that loss."""
    original = Samples._targets
    Samples._targets = lambda self, samples: (  # type: ignore[method-assign]
        [(place, begin - 1, end - 1) for place, begin, end in ranges] for ranges in original(self, samples)
    )
    try:
        own(config)
    except Exception as error:
        return str(error)
    finally:
        Samples._targets = original  # type: ignore[method-assign]
    return ""


def test_a_shifted_column_is_noticed(ranks: RankPool, text: Path) -> None:
    (said,) = ranks.run(shifted, 1, reading(small(1, 1, 1), text, "pair,gain"))
    assert "the loss raised AssertionError" in cast(str, said)
