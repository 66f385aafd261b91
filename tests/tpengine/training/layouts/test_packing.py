"""Rung: gloo ranks. Packed documents: logits are those of each alone, in a layout too; every layout trains as one
process does, to the last bit in exact mode.

Of every architecture, with gradients, in one process: model/test_documents.py.
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
from support.mixtures import write_mixture
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.commands.data_check import fit_data
from tpengine.config import IGNORED_LABEL, Config, validate
from tpengine.data import open_corpus, write_tokens
from tpengine.layers import Documents
from tpengine.runs.evaluation import ForwardPass, HeldOutLoss, held_out_losses, read_prompt
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError

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


def held_out(config: Config) -> HeldOutLoss:
    return held_out_losses(Trainer(config, open_corpus(config), torch.device("cpu")).state)


# Of the two, every one has a stage in the middle or ranks that share a sequence.
@pytest.mark.by_default("2-1-2")
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 2), (2, 1, 2)])
def test_a_layout_trains_as_one_process(ranks: RankPool, tmp_path: Path, dp: int, tp: int, pp: int) -> None:
    path = written(tmp_path / "tokens")
    options: dict[str, Any] = dict(tied=True, kv_heads=2, recompute="block" if tp > 1 else "none")
    (reference,) = ranks.run(parity.train, 1, packed(parity.config_of(1, 1, 1, **options), path))
    config = packed(parity.config_of(dp, tp, pp, **options), path)
    parity.compare(ranks.run(parity.train, dp * tp * pp, config), reference)


# Documents of a sequence: of 1 token, of some, the last.
STARTS = [0, 5, 6, 14, 24]


def test_a_packed_documents_logits_are_those_it_has_alone(ranks: RankPool) -> None:
    """In tp 2 x pp 2, beside one process that reads each document at the beginning of a sequence of its own."""
    tokens = torch.randint(0, VOCAB, (1, STARTS[-1]), generator=torch.Generator().manual_seed(3))
    alone = torch.zeros(len(STARTS) - 1, STARTS[-1], dtype=tokens.dtype)
    for row, (first, last) in zip(alone, itertools.pairwise(STARTS), strict=True):
        row[: last - first] = tokens[0, first:last]
    (each,) = ranks.run(logits, 1, parity.config_of(1, 1, 1, tied=True, kv_heads=2), alone, None)
    assert each is not None
    want = torch.cat([y[: last - first] for y, (first, last) in zip(each, itertools.pairwise(STARTS), strict=True)])
    found = ranks.run(logits, 4, parity.config_of(1, 2, 2, tied=True, kv_heads=2), tokens, STARTS)
    shown = [y for y in found if y is not None]
    assert len(shown) == 2, "of the last stage's ranks"
    for (y,) in shown:
        assert (y - want).abs().max() <= 1e-10 * want.abs().max()


def logits(config: Config, tokens: Tensor, starts: list[int] | None) -> list[Tensor] | None:
    """Logits [T, V] of each sequence, on the ranks of the last stage."""
    parallel = config.parallel
    assert parallel.tp and parallel.pp
    config = validate(config, parallel.tp * parallel.pp)
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    documents = () if starts is None else (Documents.of(starts, config.train.seq_len),)
    found: list[Tensor] = []

    def keep(y: Tensor, microbatch: int) -> None:
        found.append(trainer.state.rank.comms.tp.all_gather(y.T.contiguous())[:VOCAB].T)

    with torch.no_grad():
        ForwardPass(trainer.state, len(tokens), 1).run(tokens, keep, documents)
    return found or None


@pytest.mark.slow
def test_exact_mode_has_the_bits_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """With a mixture, of which some labels are ignored besides, and the held-out loss of each source.

    Most documents of one source have 1 token, so that a micro-batch has no target that counts.
    """
    path = written(tmp_path / "tokens")
    documents = [[1, 24, 25, 240, 2, 1, 1, *range(20, 50)], [*[1] * 300, 60, 70, 80]]
    mixture = str(write_mixture(tmp_path, documents, [0.5, 0.5], vocab_size=VOCAB))
    config = packed(exactness.exact_config(1, 2, 2, dtype="float32", layers=2, steps=2), path)
    config = replace(config, data=replace(config.data, path="stdlib", mixture=mixture))
    one = exactness.alone(config)
    num_valid = (open_corpus(one).train.batch(0, 16)[1] != IGNORED_LABEL).reshape(8, -1).sum(1)
    assert 0 in num_valid and num_valid.reshape(2, 4).sum(1).all()
    found = exactness.merge(config, ranks.run(exactness.train, 4, config))
    exactness.assert_same_bits(found, exactness.merge(one, ranks.run(exactness.train, 1, one)))
    (alone,) = ranks.run(held_out, 1, one)
    assert ranks.run(held_out, 4, config) == [alone] * 4
    assert set(alone.of_source) == {"s0", "s1"}
    assert alone.of_all == pytest.approx((alone.of_source["s0"] + alone.of_source["s1"]) / 2, rel=1e-15)
    # Each source by itself has that loss; cut, another: borders reach the held-out text too.
    for source, samples in (("s0", 3), ("s1", 3)):
        text = replace(one, data=replace(one.data, path=str(tmp_path / f"{source}.tokens"), mixture=""))
        text = replace(text, train=replace(text.train, micro_batch_size=1, eval_micro_batches=samples))
        (found,) = ranks.run(held_out, 1, text)
        assert found.of_all == pytest.approx(alone.of_source[source], rel=1e-6) and not found.of_source
        (cut,) = ranks.run(held_out, 1, packed(text, Path(text.data.path), packing="cut"))
        assert abs(cut.of_all - found.of_all) > 1e-4


@pytest.mark.slow
def test_fitted_documents_train_as_in_one_process_and_to_the_last_bit_in_exact_mode(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Samples of whole documents, and padding behind them, of which every stage and rank has the borders."""
    path = written(tmp_path / "tokens")
    options: dict[str, Any] = dict(tied=True, kv_heads=2)
    one = packed(parity.config_of(1, 1, 1, **options), path, packing="fit")
    fit_data(str(path), str(one.train.seq_len), 0.2)
    labels = open_corpus(one).train.batch(0, 50)[1]
    assert (labels[:, -2:] == IGNORED_LABEL).all(1).any(), "no sample has padding"
    (reference,) = ranks.run(parity.train, 1, one)
    for dp, tp, pp in ((1, 2, 2), (2, 1, 2)):
        config = packed(parity.config_of(dp, tp, pp, **options), path, packing="fit")
        parity.compare(ranks.run(parity.train, 4, config), reference)
    config = packed(
        exactness.exact_config(1, 2, 2, dtype="float32", layers=2, steps=2), path, packing="fit", mixture=""
    )
    fit_data(str(path), str(config.train.seq_len), 0.2)
    one = exactness.alone(config)
    found = exactness.merge(config, ranks.run(exactness.train, 4, config))
    exactness.assert_same_bits(found, exactness.merge(one, ranks.run(exactness.train, 1, one)))
    assert ranks.run(held_out, 4, config) == [ranks.run(held_out, 1, one)[0]] * 4


@pytest.mark.parametrize("packing", ["documents", pytest.param("fit", marks=pytest.mark.slow)])
def test_a_prompt_is_of_one_document(ranks: RankPool, tmp_path: Path, packing: str) -> None:
    path, lengths = tmp_path / "tokens", [*[30] * 20, 5, 6, 40]
    write_tokens(path, np.arange(sum(lengths)) % VOCAB, VOCAB, lengths=lambda: lengths)
    base = parity.config_of(1, 1, 1, tied=True, kv_heads=2)
    base = replace(base, train=replace(base.train, sample_tokens=1, eval_micro_batches=0))
    config = packed(base, path, packing=packing, held_out_fraction=0.075)
    fit_data(str(path), str(config.train.seq_len), 0.075)
    begin = sum(lengths[:20])
    (found,) = ranks.run(prompt_of, 1, config)
    assert found == [token % VOCAB for token in range(begin, begin + 5)]


def prompt_of(config: Config) -> list[int]:
    return read_prompt(Trainer(config, open_corpus(config), torch.device("cpu")).state, 16)


@pytest.mark.slow
def test_padding_changes_neither_loss_nor_update(ranks: RankPool, tmp_path: Path) -> None:
    """Loss is divided by known targets: padded to three times their length, the same samples train alike everywhere.

    Samples have 1 to 7 known targets, so that a mean over micro-batches, or over ranks, is another number.
    """
    generator, padding, number = np.random.default_rng(8), 0, 80
    samples = np.full((number, 24), padding)
    for row, known in zip(samples, generator.integers(1, 8, number), strict=True):
        row[1 : 1 + known] = generator.integers(1, VOCAB, known)
    configs = []
    for length, (dp, tp, pp) in ((8, (1, 1, 1)), (24, (1, 1, 1)), (24, (2, 1, 2)), (24, (1, 2, 2))):
        path = tmp_path / f"{length}"
        write_tokens(path, np.append(samples[:, :length], padding), VOCAB)
        config = parity.config_of(dp, tp, pp, tied=True, kv_heads=2, num_layers=2)
        train = replace(config.train, seq_len=length, eval_micro_batches=0, sample_tokens=0)
        data = replace(config.data, path=str(path), ignore_token=padding, held_out_fraction=0.0)
        configs.append(validate(replace(config, train=train, data=data), dp * tp * pp))
    labels = [open_corpus(config).train.batch(0, 16)[1] for config in configs[:2]]
    known = [(of != IGNORED_LABEL).reshape(4, -1).sum(1).tolist() for of in labels]
    assert known[0] == known[1] and len(set(known[0])) > 1
    (reference,) = ranks.run(parity.train, 1, configs[0])
    for config, num_ranks in zip(configs[1:], (1, 4, 4), strict=True):
        parity.compare(ranks.run(parity.train, num_ranks, config), reference)


def test_a_step_of_ignored_labels_alone_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    write_tokens(path, np.arange(1200) % VOCAB, VOCAB, lengths=lambda: [1] * 1200)
    (found,) = ranks.run(trained_step, 1, packed(parity.config_of(1, 1, 1, tied=True, kv_heads=2), path))
    assert "all labels of step 1 are ignored" in found


def trained_step(config: Config) -> str:
    try:
        Trainer(config, open_corpus(config), torch.device("cpu")).step.run(0)
    except RunError as error:
        return str(error)
    return "trained"
