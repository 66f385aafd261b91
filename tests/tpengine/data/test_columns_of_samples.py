"""Rung: pure. A column's values stay with their tokens through windows, documents, fitted samples, files and mixtures.

The oracle is the data: a token's value is its own number, and ids are numbers of tokens, so that a column must be equal
to the labels wherever these count, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tpengine.commands.data_check import check_data, fit_data
from tpengine.config import IGNORED_LABEL, Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import (
    Column,
    TokenWriter,
    change_of,
    open_corpus,
    open_file,
    write_column,
    write_tokens,
)
from tpengine.data.columns import column_path
from tpengine.data.samples import FittedSamples
from tpengine.data.stored_tokens import StoredTokens
from tpengine.training.ahead import read_samples
from tpengine.training.samples import batch_digest

VOCAB, SEQ = 4096, 8
LENGTHS = [3, 5, 1, 20, 8, 2, 17, 4, 8, 9, 1, 6]


def write(path: Path, lengths: list[int] = LENGTHS, first: int = 1, wide: str = "int32") -> None:
    with TokenWriter(path, VOCAB, [Column("weights", "float16"), Column("pair", wide, 2)]) as writer:
        for length in lengths:
            ids = np.arange(first, first + length)
            writer.add(ids, weights=ids, pair=ids[:, None] * [1, 2])
            first += length


def config_of(path: Path | str, packing: str, columns: str = "pair") -> Config:
    data = DataConfig(path=str(path), held_out_fraction=0.2, columns=columns)
    return Config(
        model=ModelConfig(vocab_size=VOCAB),
        train=TrainConfig(seq_len=SEQ, micro_batch_size=2, num_micro_batches=2),
        data=replace(data, packing=packing),  # type: ignore[arg-type]
    )


def check(part: Any) -> None:
    """All samples of a part, in two passes over it."""
    numbers = np.arange(2 * part.num_windows)
    _, labels, _ = part.read_with_starts(numbers)
    counted = np.where(labels == IGNORED_LABEL, 0, labels)
    assert counted.any()
    columns = part.read_columns(numbers, labels)
    assert set(columns) == {"pair", "weights"}
    np.testing.assert_array_equal(columns["pair"], counted[..., None] * [1, 2])
    assert columns["pair"].dtype == np.int32
    np.testing.assert_array_equal(columns["weights"], counted)
    assert columns["weights"].dtype == np.float32


def sources_of(directory: Path, packing: str) -> str:
    """A text of two files, with an index where samples are fitted."""
    directory.mkdir()
    write(directory / "a")
    write(directory / "b", first=500)
    if packing == "fit":
        fit_data(str(directory), str(SEQ), 0.2)
    return str(directory)


@pytest.mark.parametrize("packing", ["cut", "documents", "fit"])
def test_columns_are_those_of_the_labels(tmp_path: Path, packing: str) -> None:
    corpus = open_corpus(config_of(sources_of(tmp_path / "text", packing), packing))
    check(corpus.train)
    check(corpus.held_out)


def one_behind(original: Any) -> Any:
    def read(self: Any, name: str, begin: int, end: int) -> NDArray[Any]:
        return original(self, name, max(0, begin - 1), max(0, begin - 1) + end - begin)

    return read


def of_the_window(original: Any) -> Any:
    def targets(self: FittedSamples, samples: NDArray[np.int64]) -> Any:
        # As if a sample were one piece of text.
        return ([(0, ranges[0][1], ranges[0][1] + self.seq_len)] for ranges in original(self, samples))

    return targets


def forgets_its_part(original: Any) -> Any:
    def read(self: StoredTokens, name: str, begin: int, end: int) -> NDArray[Any]:
        return original(self, name, begin - self.first, end - self.first)

    return read


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (StoredTokens, "read_column", one_behind),
        (FittedSamples, "_targets", of_the_window),
        (StoredTokens, "read_column", forgets_its_part),
    ],
)
def test_a_column_that_packing_shifts_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Callable[[Any], Any]
) -> None:
    write(tmp_path / "t")
    fit_data(str(tmp_path / "t"), str(SEQ), 0.2)
    corpus = open_corpus(config_of(tmp_path / "t", "fit"))
    check(corpus.train)
    check(corpus.held_out)
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with pytest.raises((AssertionError, ValueError)):
        check(corpus.train)
        check(corpus.held_out)


def test_a_mixture_hands_out_the_columns_of_its_sources(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", first=500)
    table = tmp_path / "mix.toml"
    table.write_text("".join(f'{of} = {{ path = "{tmp_path / of}", weight = 1, epochs = inf }}\n' for of in "ab"))
    config = config_of("", "documents")
    config = replace(config, data=replace(config.data, path="", mixture=str(table)))
    corpus = open_corpus(config)
    check(corpus.train)
    check(corpus.held_out)
    # A source without weights counts each target as 1; one without a column that is asked for is refused.
    write_tokens(tmp_path / "c", np.arange(700, 790), VOCAB, lengths=lambda: [40, 50])
    with table.open("a") as file:
        file.write(f'c = {{ path = "{tmp_path / "c"}", weight = 1, epochs = inf }}\n')
    with pytest.raises(ValueError, match=r"mix.toml: source c: a text must have the columns .* has no pair"):
        open_corpus(config)
    samples = open_corpus(replace(config, data=replace(config.data, columns=""))).train
    _, labels = samples.read(np.arange(40))
    (weights,) = samples.read_columns(np.arange(40), labels).values()
    is_c = (labels >= 700) & (labels < 790)
    assert is_c.any() and not is_c.all()
    np.testing.assert_array_equal(weights, np.where(is_c, 1, np.where(labels == IGNORED_LABEL, 0, labels)))
    write(tmp_path / "c", first=700, wide="int16")
    with pytest.raises(ValueError, match=r"one dtype and width in all sources: pair is 2 x int32 in a and 2 x int16"):
        open_corpus(config)


def test_weights_are_read_unless_they_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "t")
    names = {
        asked: [column.name for column in open_corpus(config_of(tmp_path / "t", "documents", asked)).train.columns]
        for asked in ("", "pair", "no-weights", "pair,no-weights")
    }
    assert names == {"": ["weights"], "pair": ["weights", "pair"], "no-weights": [], "pair,no-weights": ["pair"]}
    said: list[str] = []
    samples = open_corpus(config_of(tmp_path / "t", "documents"), said.append).train
    assert said == [
        f"{tmp_path / 't'} has weights: each target's loss is multiplied by its own (--data.columns no-weights leaves "
        "them)"
    ]
    found = read_samples(samples, np.arange(4), needs_tokens=True)
    assert found.tokens is not None and found.labels is not None and found.weights is not None
    assert list(found.columns) == ["pair"]
    assert found.digest != batch_digest(found.tokens, found.labels, found.starts)
    # Copied without its weights it would be another text without a word.
    column_path(tmp_path / "t", "weights").unlink()
    with pytest.raises(ValueError, match=r"has no weights, .* there is pair"):
        open_corpus(config_of(tmp_path / "t", "documents", ""))
    assert not open_corpus(config_of(tmp_path / "t", "documents", "no-weights")).train.columns


def test_weights_that_are_none_are_refused_where_they_are_read(tmp_path: Path) -> None:
    write(tmp_path / "t")
    path = column_path(tmp_path / "t", "weights")
    content = bytearray(path.read_bytes())
    content[128 + 2 * 9 : 128 + 2 * 10] = np.float16("nan").tobytes()
    path.write_bytes(content)
    found = read_samples(open_corpus(config_of(tmp_path / "t", "cut")).train, np.arange(7), needs_tokens=True)
    assert found.error.startswith(f"weights must be finite and at least 0: token 9 of {tmp_path / 't'} has nan")
    with pytest.raises(ValueError, match=r"values of weights have SHA-256"):
        check_data(str(tmp_path / "t"))


def test_a_column_identifies_the_text(tmp_path: Path) -> None:
    write(tmp_path / "t")
    plain = open_corpus(config_of(tmp_path / "t", "cut", "no-weights"))
    before = open_corpus(config_of(tmp_path / "t", "cut"))
    assert len(before.texts) == 1 + 2 and len(plain.texts) == 1
    write_column(open_file(tmp_path / "t"), Column("pair", "int32", 2), np.zeros((sum(LENGTHS), 2), np.int32))
    after = open_corpus(config_of(tmp_path / "t", "cut"))
    change = change_of(before.fingerprint(), after.fingerprint())
    assert change is not None and change.what == "the column pair"


def test_check_reads_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "t")
    check_data(str(tmp_path / "t"))
    out = capsys.readouterr().out
    assert "t.weights.column: 84 x 1 float16, SHA-256 right" in out
    assert "t.pair.column: 84 x 2 int32, SHA-256 right" in out
    column_path(tmp_path / "t", "pair").unlink()
    with pytest.raises(ValueError, match="has no pair"):
        check_data(str(tmp_path / "t"))


def test_stdlib_has_no_columns() -> None:
    with pytest.raises(ValueError, match=r"columns lie beside token files: data.columns is 'pair'"):
        open_corpus(config_of("stdlib", "cut"))
