"""Rung: pure. Data of a user's own: what they are, what is held out, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpengine.config import IGNORED_LABEL, Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data.own_data import OwnCorpus, open_own

CONFIG = Config(ModelConfig(vocab_size=50), train=TrainConfig(seq_len=8), data=DataConfig(held_out_fraction=0.25))


class Data:
    """Samples of any lengths; those of `numbers` alone can be read."""

    def __init__(self, lengths: list[int], identity: str = "") -> None:
        self.lengths, self.read = lengths, set[int]()
        if identity:
            self.fingerprint = lambda: identity

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Any:
        self.read.add(number)
        if self.lengths[number] < 0:
            raise OSError("gone")
        return [number] * self.lengths[number]


def test_short_samples_are_padded_and_the_last_are_held_out() -> None:
    corpus = open_own(Data([9, 3, 9, 2, 9, 9, 9, 5]), CONFIG)
    assert (corpus.train.num_windows, corpus.held_out.num_windows) == (6, 2)
    tokens, labels = corpus.held_out.read(np.arange(2))
    assert tokens.tolist() == [[6] * 8, [7] * 4 + [0] * 4]
    assert labels.tolist() == [[6] * 8, [7] * 4 + [IGNORED_LABEL] * 4]
    # An epoch has each sample once, in an order that the seed and the phase decide.
    orders = [
        view.train.read(np.arange(6))[0][:, 0].tolist()
        for view in (
            corpus,
            corpus.viewed(CONFIG, 1),
            open_own(Data([9] * 8), replace(CONFIG, train=TrainConfig(seq_len=8, seed=1))),
        )
    ]
    assert all(sorted(order) == list(range(6)) for order in orders) and len({tuple(order) for order in orders}) > 1
    tokens, labels = corpus.viewed(replace(CONFIG, data=replace(CONFIG.data, ignore_token=6)), 0).held_out.read(
        np.arange(1)
    )
    assert (labels == IGNORED_LABEL).all() and (tokens == 6).all()


def test_samples_are_known_by_some_of_them_or_by_what_they_say() -> None:
    data = Data([9] * 40)
    known = open_own(data, CONFIG).fingerprint()
    assert known.startswith("40 samples given to tpengine.run, SHA-256 of 40 ") and len(data.read) == 40
    assert open_own(Data([9] * 39 + [8]), CONFIG).fingerprint() != known
    many = np.zeros((1000, 9), dtype=np.int64)
    known = open_own(many, CONFIG).fingerprint()
    assert known.startswith("1000 samples given to tpengine.run, SHA-256 of 64 ")
    many[-1] = 1
    assert open_own(many, CONFIG).fingerprint() != known
    data = Data([9] * 40, "mine")
    assert open_own(data, CONFIG).fingerprint() == "40 samples given to tpengine.run, fingerprint mine"
    assert data.read == {0, 39}


@pytest.mark.parametrize(
    ("lengths", "settings", "said"),
    [
        ([9] * 7 + [10], {}, "data[7] has 10, train.seq_len 8: cut it, or use train.seq_len 9"),
        ([1] + [9] * 7, {}, "data[0] has 1, train.seq_len 8"),
        ([-1] + [9] * 7, {}, "every sample must be readable: data[0] fails: OSError: gone: correct it"),
        ([9], {}, "1 samples, data.held_out_fraction 0.25 of them held out"),
        ([9] * 8, {"held_out_fraction": 0.0}, "8 samples, data.held_out_fraction 0 of them held out"),
        ([9] * 8, {"held_out": "x"}, "own samples hold out their last ones: got data.held_out x too"),
        ([9] * 8, {"columns": "ref"}, "columns lie beside token files: got data of your own, and data.columns ref"),
        ([9] * 8, {"packing": "documents"}, "--data.packing documents needs token files, which say where documents"),
        ([9] * 8, {"mixture": "m.toml"}, "a run trains on one text: got data of your own, and m.toml"),
        ([9] * 60, {}, "data[50]: tokens must be at least 0 and below model.vocab_size: got 50"),
    ],
)
def test_what_is_refused(lengths: list[int], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        open_own(Data(lengths), replace(CONFIG, data=replace(CONFIG.data, **settings)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_table_is_samples_and_a_sample_of_another_form_is_refused() -> None:
    table = np.arange(9 * 5).reshape(5, 9)
    corpus = open_own(table, CONFIG)
    assert isinstance(corpus, OwnCorpus) and corpus.train.num_windows == 3
    with pytest.raises(ValueError) as error:
        open_own(table.astype(float), CONFIG)
    assert "a sample must be integers in one row" in str(error.value)
    with pytest.raises(ValueError) as error:
        open_own([{"tokens": 3}] * 9, CONFIG)
    assert "a sample must be integers in one row: data[0] is object []: return its tokens" in str(error.value)


class Fails:
    """Fails where it is asked to."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _answer(self, asked: str, answer: Any) -> Any:
        if asked == self.at:
            raise OSError("gone")
        return answer

    def __len__(self) -> int:
        return int(self._answer("len", 40))

    def __getitem__(self, number: int) -> Any:
        return np.zeros(9, dtype=np.int64)

    def fingerprint(self) -> str:
        return str(self._answer("fingerprint", "mine"))


class NoArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("on another device")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Fails("len"), "data must be readable: len(data) fails: OSError: gone: correct it"),
        (Fails("fingerprint"), "data must be readable: data.fingerprint() fails: OSError: gone: correct it"),
        (NoArray(), "data must be readable: numpy.asarray(data) fails: TypeError: on another device"),
    ],
    ids=["len", "fingerprint", "array"],
)
def test_an_object_that_fails_is_said_in_one_line(own: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        open_own(own, CONFIG)
    assert said in str(error.value) and "\n" not in str(error.value)
