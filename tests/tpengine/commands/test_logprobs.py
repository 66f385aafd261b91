"""Rung: gloo ranks, as `tpengine logprobs` starts them, and of the pool. The oracle is transformers, by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.architectures.runs import saved
from support.ranks.rank_pool import RankPool

from tpengine.cli import main
from tpengine.commands.generate import FoundModel, GenerateOptions, find_model
from tpengine.commands.logprobs import LogprobsOptions, _config_of
from tpengine.commands.logprobs_rank import scoring_rank
from tpengine.config import Config, ModelConfig
from tpengine.config.settings import ModelDetails
from tpengine.data import TokenWriter, open_file
from tpengine.data.columns import open_column
from tpengine.data.whole_text import Stretch, stretches_of

VOCAB, SEQ, LENGTHS = 256, 16, [5, 1, 30, 16, 17, 2, 40, 3, 9]


def documents() -> list[NDArray[np.int64]]:
    draws = np.random.default_rng(0)
    return [draws.integers(0, VOCAB, length) for length in LENGTHS]


def text(path: Path) -> Path:
    with TokenWriter(path, VOCAB) as writer:
        for ids in documents():
            writer.add(ids)
    return path


def by_transformers(model: Any) -> NDArray[np.float64]:
    """Each document by itself, at most SEQ tokens at a time."""
    found = []
    for ids in documents():
        found.append(np.zeros(1))
        for begin in range(0, len(ids) - 1, SEQ):
            part = torch.tensor(ids[begin : begin + SEQ + 1])
            with torch.no_grad():
                logits = model(part[None, :-1]).logits[0].double()
            found.append(logits.log_softmax(-1).gather(1, part[1:, None])[:, 0].numpy())
    return np.concatenate(found)


def scored(options: LogprobsOptions, stretch: Stretch) -> Any:
    """A rank's program: what it says of the samples, padded to a pass."""
    model = find_model(GenerateOptions(options.model, tp=options.tp, pp=options.pp))
    config = _config_of(model, options, 10_000)
    rank = scoring_rank(config, 1)
    problem = rank.prepare()
    assert not problem, problem
    num = options.dp * config.train.num_micro_batches * config.train.micro_batch_size
    missing = num - len(stretch.tokens)
    assert missing >= 0
    tokens = np.pad(stretch.tokens, ((0, missing), (0, 0)))
    labels = np.pad(stretch.labels, ((0, missing), (0, 0)), constant_values=-100)
    starts = [*stretch.starts, *[np.empty(0, np.int64)] * missing]
    return rank.score(tokens.astype(np.int32), labels.astype(np.int32), starts)


@pytest.mark.by_default("2-1-1-gemma3", "1-2-2-gemma3")
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3", "gpt2"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 2, 2), (2, 2, 2), (4, 1, 1)])
def test_logprobs_are_those_of_transformers_in_any_layout(
    ranks: RankPool, tmp_path: Path, architecture: str, tp: int, pp: int, dp: int
) -> None:
    (tmp_path / "model").mkdir()
    theirs = saved(architecture, tmp_path / "model")
    (stretch,) = stretches_of(open_file(text(tmp_path / "t")), SEQ, 10_000)
    options = LogprobsOptions(str(tmp_path / "model"), "", "ref", tp, pp, dp, SEQ)
    answers = ranks.run(scored, tp * pp * dp, options, stretch)
    values = np.concatenate([answer for answer in answers if answer is not None])
    found: NDArray[np.float32] = np.append(np.zeros(1, np.float32), stretch.of_tokens(values[: len(stretch.tokens)]))
    # Of float64 models; a column has float32.
    np.testing.assert_allclose(found, by_transformers(theirs), atol=2e-6)


@pytest.mark.parametrize(("positions", "seq_len"), [(64, 64), (4096, 2048)])
def test_a_directorys_model_reads_as_far_as_its_positions(positions: int, seq_len: int) -> None:
    """Rotary ones have no end, learned ones do."""
    model = ModelConfig(architecture="gpt2", details=ModelDetails(max_positions=positions))
    found = FoundModel(Config(model=model), Path(), trained_on=None)
    assert _config_of(found, LogprobsOptions("", "", "ref"), 10_000).train.seq_len == seq_len


def test_the_command_writes_a_column_and_refuses_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    theirs, path = saved("qwen3", tmp_path / "model", torch.float32), text(tmp_path / "t")
    argv = ["logprobs", str(tmp_path / "model"), str(path), "--seq-len", str(SEQ), "--out"]
    assert main([*argv, "ref_logprobs"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}.ref_logprobs.column: 123 tokens, 114 of them predicted, mean -"), out
    column, values, _ = open_column(open_file(path), "ref_logprobs")
    assert (column.dtype, column.width) == ("float32", 1)
    float32, exact = by_transformers(theirs), by_transformers(theirs.double())
    # The last bit of a log-probability of -8 besides.
    np.testing.assert_allclose(values[:], exact, rtol=0, atol=2 * np.abs(float32 - exact).max() + 2.0**-20)
    for name, message in (
        ("ref_logprobs", "a column must be new"),
        ("weights", "--out names a column of log-probabilities"),
        ("Ref", "small letters"),
    ):
        assert main([*argv, name]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    with TokenWriter(path, 300) as writer:
        writer.add([1, 299])
    assert main([*argv, "other"]) == 2
    assert "below the model's vocabulary, 256" in capsys.readouterr().err
