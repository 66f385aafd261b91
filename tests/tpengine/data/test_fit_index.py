"""Rung: pure. The index of fitted samples is refused where it is not of the run; damage is one line."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tpengine.commands.data_check import fit_data
from tpengine.config import Config, DataConfig, ModelConfig, TrainConfig, phases_of
from tpengine.data import StoredTokens, change_of, fitting, open_corpora, open_corpus, write_tokens
from tpengine.data.content import content_sha256
from tpengine.data.fit_index import open_index
from tpengine.data.fitting import best_fit
from tpengine.data.source import open_text

LENGTHS = [5, 3, 20, 8, 1, 7, 8, 2, 9, 4, 30, 6, 5]


def config_of(path: Path | str, seq_len: int = 8) -> Config:
    return Config(
        model=ModelConfig(vocab_size=256),
        train=TrainConfig(seq_len=seq_len, eval_micro_batches=1, sample_tokens=0),
        data=DataConfig(path=str(path), packing="fit", held_out_fraction=0.2),
    )


def written(path: Path, lengths: list[int] = LENGTHS, seq_len: int = 8) -> Path:
    write_tokens(path, np.arange(sum(lengths)), 256, lengths=lambda: lengths)
    fit_data(str(path), str(seq_len), 0.2)
    return path


def refusal(config: Config) -> str:
    with pytest.raises(ValueError) as error:
        open_corpus(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_index_of_another_length_part_or_text_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t")
    remedy = f"write it with tpengine data --fit 4 {path} --held-out-fraction 0.2"
    assert refusal(config_of(path, 4)) == (
        f"--data.packing fit needs an index of train.seq_len 4: {path}.4.fit is not there, there is t.8.fit: {remedy}, "
        "or use --data.packing documents"
    )
    (tmp_path / "t.4.fit").write_bytes((tmp_path / "t.8.fit").read_bytes())
    assert f"{path}.4.fit is of 8, train.seq_len is 4: {remedy}" in refusal(config_of(path, 4))
    (tmp_path / "t.4.fit").unlink()
    config = config_of(path)
    assert "made with 41 tokens of 108 held out, this run holds out 11: write it with tpengine data --fit 8" in refusal(
        replace(config, data=replace(config.data, held_out_fraction=0.1))
    )
    write_tokens(path, np.arange(108)[::-1], 256, lengths=lambda: LENGTHS)
    assert "must be of the data" in refusal(config)
    write_tokens(path, np.arange(108), 256, lengths=lambda: [*LENGTHS[:-2], 5, 6])
    assert "must be of the data" in refusal(config)


def test_phases_have_an_index_each_and_an_order_of_each(tmp_path: Path) -> None:
    path = written(tmp_path / "t")
    (tmp_path / "p.toml").write_text("[[phase]]\nuntil = 3\n[[phase]]\ntrain.seq_len = 4\n")
    config = replace(config_of(path), phases=str(tmp_path / "p.toml"))
    with pytest.raises(ValueError, match=r"train.seq_len 4: .*t\.4\.fit is not there"):
        open_corpora(phases_of(config))
    fit_data(str(path), "4", 0.2)
    eight, four = open_corpora(phases_of(config))
    assert eight.train.read(np.arange(2))[0].shape == (2, 8) and four.train.read(np.arange(2))[0].shape == (2, 4)


def test_another_index_of_the_same_text_is_named_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for paths in ([tmp_path / "t"], [tmp_path / "a", tmp_path / "b"]):
        for path in paths:
            write_tokens(path, np.arange(sum(LENGTHS)), 256, lengths=lambda: LENGTHS)
        config = config_of(",".join(map(str, paths)))
        with monkeypatch.context() as patch:
            fit_data(config.data.path, "8", 0.2)
            before = open_corpus(config).fingerprint()
            assert change_of(before, open_corpus(config).fingerprint()) is None
            patch.setattr(fitting, "WINDOW", 2)
            fit_data(config.data.path, "8", 0.2)
        change = change_of(before, open_corpus(config).fingerprint())
        assert change is not None and change.what == "the fit index"


def test_a_window_has_few_pieces_or_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long documents have many pieces, and what is fitted together must fit into memory."""
    windows: list[int] = []

    def noted(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
        windows.append(len(lengths))
        return best_fit(lengths, capacity)

    monkeypatch.setattr(fitting, "WINDOW_PIECES", 3)
    monkeypatch.setattr(fitting, "best_fit", noted)
    path = written(tmp_path / "t")
    # Of the lengths 5, 3 | 20 | 8, 1, 7 | 8, 2, 9 ... in samples of 8; the documents held out begin anew.
    assert windows == [2, 3, 3, 2, 3, 4, 2]
    text = open_text(str(path))
    index = open_index(text, str(path), 8)
    read = sorted(piece[:2] for number in range(index.train.num_samples) for piece in index.train.sample(number))
    assert sum(length for _, length in read) == index.train.num_tokens
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(read))


def test_places_beyond_32_bits_are_read(tmp_path: Path) -> None:
    """A sparse file: two short documents behind one that is longer than 2^32 tokens, in the longest samples."""
    path, middle, seq_len = tmp_path / "t", 2**32 + 5, 2**24
    write_tokens(path, np.arange(3), 256, lengths=lambda: [1, 2])
    content, count = bytearray(path.read_bytes()[:512]), middle + 3
    offset = 512 + count + -(512 + count) % 8
    content[24:32] = count.to_bytes(8, "little")
    content[64:80] = (3).to_bytes(8, "little") + offset.to_bytes(8, "little")
    with path.open("wb") as file:
        file.write(content)
        file.seek(offset)
        file.write(np.array([0, middle, middle + 2], dtype="<u8").tobytes())
    fit_data(str(path), str(seq_len), 0.0)
    index = open_index(open_text(str(path)), str(path), seq_len)
    # The long document's last 5 tokens, and what lies behind it, share the last sample.
    assert index.train.num_samples == middle // seq_len + 1
    assert index.train.sample(middle // seq_len - 1) == [(2**32 - seq_len, seq_len, True)]
    assert index.train.sample(middle // seq_len) == [(2**32, 5, False), (middle, 2, False), (middle + 2, 1, False)]


def test_no_damage_is_a_crash(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte changed: refused at the start or where a sample is read, or --check finds it."""
    path = written(tmp_path / "t")
    place = tmp_path / "t.8.fit"
    whole, config, generator = place.read_bytes(), config_of(path), random.Random(3)
    for cut in (0, 5, 100, len(whole) - 1):
        place.write_bytes(whole[:cut])
        assert str(place) in refusal(config)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        place.write_bytes(damaged)
        try:
            corpus = open_corpus(config)
            for part in (corpus.train, corpus.held_out):
                part.read_with_starts(np.arange(part.num_windows))
        except ValueError as error:
            assert str(place) in str(error) and "\n" not in str(error)
        else:
            # What is checked while training goes on, on each host.
            _, index = corpus.texts
            assert isinstance(index.tokens, StoredTokens) and content_sha256(index.tokens) != index.sha256
