"""Rung: pure. Samples are a function of seed and index; labels are the next tokens; every dp split sees the same.

Fitted samples: every document once an epoch, none of at most S cut, longer ones from their beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.draws import over_draws

from tpengine.commands.data_check import fit_data
from tpengine.config import IGNORED_LABEL, Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import Samples, batch_digest, first_sample_index, fitting, open_corpus, write_tokens
from tpengine.data.samples import FittedSamples
from tpengine.training.samples import PackedBatch

DIGEST_OF_FOUR = 4831835340026645102


def counting(num_tokens: int, seq_len: int, **options: Any) -> Samples:
    """Samples of the text 0, 1, 2, ...: a token is its own position."""
    return Samples(np.arange(num_tokens, dtype=np.uint32), seq_len, num_tokens, **options)


def test_few_samples_are_the_windows_that_many_are() -> None:
    for options in ({}, {"seed": 3}, {"seed": 3, "phase": 2, "source": 1}):
        samples = Samples(np.arange(1000) % 251, 8, 256, **options)
        numbers = np.arange(0, 1000, 7)
        tokens, labels = samples.read(numbers)
        for number, *row in zip(numbers.tolist(), tokens, labels, strict=True):
            np.testing.assert_array_equal(np.concatenate(samples.batch(number, 1)), row)


def test_labels_are_the_next_tokens_and_an_epoch_reads_every_window_once() -> None:
    samples = counting(100, 8, seed=1)
    assert samples.num_windows == 12
    tokens, labels = samples.batch(0, 12)
    assert tokens.shape == labels.shape == (12, 8)
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.flags.c_contiguous and labels.flags.c_contiguous and tokens.flags.writeable
    np.testing.assert_array_equal(labels, tokens + 1)
    assert sorted(tokens[:, 0]) == list(range(0, 96, 8))
    assert sorted(samples.batch(12, 12)[0][:, 0]) == list(range(0, 96, 8))
    assert samples.batch(12, 12)[0].tolist() != tokens.tolist()


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_a_batch_is_its_samples_one_by_one(first: int, count: int, seq_len: int) -> None:
    samples = counting(60, seq_len, seed=5, ignore_token=7)
    together = samples.batch(first, count)
    alone = [samples.batch(first + number, 1) for number in range(count)]
    for part in (0, 1):
        np.testing.assert_array_equal(together[part], np.concatenate([one[part] for one in alone]))


def test_windows_need_one_token_more_than_their_inputs() -> None:
    assert counting(8, 8).num_windows == 0
    assert counting(9, 8).num_windows == 1
    assert counting(0, 8).num_windows == 0
    with pytest.raises(ValueError, match=r"8 tokens, seq_len 8 and one more: use a smaller seq_len"):
        counting(8, 8).batch(0, 1)


def test_without_a_seed_windows_follow_each_other_and_repeat() -> None:
    assert counting(25, 8).batch(1, 4)[0][:, 0].tolist() == [8, 16, 0, 8]


def test_ignored_tokens_leave_the_labels_only() -> None:
    tokens, labels = counting(9, 8, ignore_token=3).batch(0, 1)
    assert tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert labels[0].tolist() == [1, 2, IGNORED_LABEL, 4, 5, 6, 7, 8]


def test_a_token_beyond_the_vocabulary_is_found_when_read() -> None:
    samples = replace(counting(100, 8), vocab_size=50)
    samples.batch(0, 6)
    with pytest.raises(
        ValueError,
        match=r"vocab_size: got 56, model.vocab_size 50; the first beyond it, 50, is token 50 of the text: use .* 57",
    ):
        samples.batch(6, 1)


def test_a_digest_tells_batches_apart_by_any_token_and_by_their_order() -> None:
    samples = counting(100, 8, ignore_token=3)
    tokens, labels = samples.batch(0, 4)
    digest = batch_digest(tokens, labels)
    assert 0 <= digest < 2**63 and digest == batch_digest(*samples.batch(0, 4))
    others = {batch_digest(*samples.batch(1, 4)), batch_digest(tokens[::-1], labels[::-1])}
    others.add(batch_digest(tokens.reshape(2, 16), labels.reshape(2, 16)))
    for sample, place in np.ndindex(4, 9):
        text = np.array(samples.tokens)
        text[sample * 8 + place] += 1
        others.add(batch_digest(*replace(samples, tokens=text).batch(0, 4)))
    # A window's last token is the next one's first.
    assert digest not in others and len(others) == 3 + 4 * 8 + 1


def test_a_digest_is_what_it_always_was() -> None:
    """Ranks of one run may be machines of several kinds."""
    assert batch_digest(*counting(100, 8, ignore_token=3).batch(0, 4)) == DIGEST_OF_FOUR


@pytest.mark.parametrize(("dp", "num_micro_batches"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_every_split_sees_the_same_global_batches(dp: int, num_micro_batches: int) -> None:
    samples, size = counting(500, 8, seed=2), 2
    for step in range(3):
        indices = [
            first_sample_index(step, rank, dp, mb, num_micro_batches=num_micro_batches, micro_batch_size=size)
            for rank in range(dp)
            for mb in range(num_micro_batches)
        ]
        split = np.concatenate([samples.batch(index, size)[0] for index in indices])
        np.testing.assert_array_equal(split, samples.batch(step * 12 * size, 12 * size)[0])


@dataclass(frozen=True)
class Draw:
    """A text of files of documents, and a run that fits them."""

    files: list[list[int]]
    seq_len: int
    held_out_fraction: float
    window: int
    seed: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    seq_len = draw(st.integers(1, 9))
    length = st.sampled_from([1, seq_len, seq_len + 1, 10 * seq_len]) | st.integers(1, 25)
    files = draw(st.lists(st.lists(length, min_size=1, max_size=12), min_size=1, max_size=3))
    fraction = draw(st.sampled_from([0.0, 0.1, 0.4]))
    return Draw(files, seq_len, fraction, draw(st.sampled_from([1, 2, 5, 100])), draw(st.integers(0, 3)))


def check(drawn: Draw, directory: Path) -> None:
    config = config_of(drawn, directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "WINDOW", drawn.window)
        fit_data(config.data.path, str(drawn.seq_len), drawn.held_out_fraction)
    corpus = open_corpus(config)
    lengths = [length for of_file in drawn.files for length in of_file]
    starts = list(accumulate(lengths, initial=0))
    num_train = len(corpus.train.tokens)
    # Whole documents are held out, but for a text of one.
    assert num_train in starts or len(lengths) == 1
    documents = [(a, min(b, num_train)) for a, b in pairwise(starts) if a < num_train]
    held_out = [(max(a, num_train), b) for a, b in pairwise(starts) if b > num_train]
    for part, of_part in ((corpus.train, documents), (corpus.held_out, held_out)):
        want = sorted(piece for document in of_part for piece in pieces(document, drawn.seq_len))
        num = part.num_windows
        for epoch in range(2 if num else 0):
            numbers = np.arange(epoch * num, (epoch + 1) * num)
            found = part.read_with_starts(numbers)
            assert sorted(piece for row in zip(*found, strict=True) for piece in pieces_in(*row)) == want
            one_by_one = [part.read_with_starts(numbers[place : place + 1]) for place in range(num)]
            np.testing.assert_array_equal(found[1], np.concatenate([one[1] for one in one_by_one]))
            for of_sample, alone in zip(found[2], part.document_starts(numbers), strict=True):
                np.testing.assert_array_equal(of_sample, alone)
        assert num or not want


def pieces(document: tuple[int, int], seq_len: int) -> list[tuple[int, int, bool]]:
    """What a document must become: its first token, tokens, and whether the last of them has a label."""
    begin, end = document
    cuts = [*range(begin, end, seq_len), end]
    return [(a, b - a, b < end) for a, b in pairwise(cuts)]


def pieces_in(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], starts: NDArray[np.int64]
) -> list[tuple[int, int, bool]]:
    """What a sample has, told from its tokens and borders; asserts that each label is the next token, or ignored."""
    borders, found = [0, *starts.tolist(), len(tokens)], []
    assert borders == sorted(set(borders))
    for a, b in pairwise(borders):
        if tokens[a] == 0:
            # Token 0 is padding alone: it is behind all, and nothing in it counts.
            assert b == len(tokens) and not tokens[a:].any() and (labels[a:] == IGNORED_LABEL).all()
            continue
        np.testing.assert_array_equal(np.diff(tokens[a:b]), 1)
        np.testing.assert_array_equal(labels[a : b - 1], tokens[a + 1 : b])
        assert labels[b - 1] in (IGNORED_LABEL, tokens[b - 1] + 1)
        # Tokens are numbered from 1.
        found.append((int(tokens[a]) - 1, b - a, bool(labels[b - 1] != IGNORED_LABEL)))
    return found


def config_of(drawn: Draw, directory: Path) -> Config:
    first = 1
    for number, lengths in enumerate(drawn.files):
        ids = np.arange(first, first + sum(lengths))
        write_tokens(directory / f"{number}", ids, 4096, lengths=partial(list, lengths))
        first += sum(lengths)
    path = ",".join(str(directory / f"{number}") for number in range(len(drawn.files)))
    return Config(
        model=ModelConfig(vocab_size=4096),
        train=TrainConfig(seq_len=drawn.seq_len, seed=drawn.seed, eval_micro_batches=0, sample_tokens=0),
        data=DataConfig(path=path, packing="fit", held_out_fraction=drawn.held_out_fraction),
    )


def test_every_document_comes_once_an_epoch_and_whole(tmp_path: Path) -> None:
    over_draws(draws(), check, tmp_path, 15)


@pytest.mark.slow
def test_every_document_comes_once_an_epoch_and_whole_in_a_thousand_texts(tmp_path: Path) -> None:
    over_draws(draws(), check, tmp_path, 1000)


def counts_padding(original: Any) -> Any:
    def read(self: FittedSamples, samples: NDArray[np.int64]) -> PackedBatch:
        tokens, labels, starts = original(self, samples)
        labels[tokens == 0] = 0
        return tokens, labels, starts

    return read


def counts_borders(original: Any) -> Any:
    def read(self: FittedSamples, samples: NDArray[np.int64]) -> PackedBatch:
        tokens, labels, starts = original(self, samples)
        labels[:, :-1] = np.where(labels[:, :-1] == IGNORED_LABEL, tokens[:, 1:], labels[:, :-1])
        return tokens, labels, starts

    return read


def loses_a_border(original: Any) -> Any:
    def read(self: FittedSamples, samples: NDArray[np.int64]) -> PackedBatch:
        tokens, labels, starts = original(self, samples)
        return tokens, labels, [of[1:] for of in starts]

    return read


def goes_on_for_ever(original: Any) -> Any:
    def read(self: FittedSamples, samples: NDArray[np.int64]) -> PackedBatch:
        # Each epoch has the order of the text's first samples: the last ones never come.
        return original(self, samples % max(1, self.num_windows - 1))

    return read


@pytest.mark.parametrize("fault", [counts_padding, counts_borders, loses_a_border, goes_on_for_ever])
def test_a_fault_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any]) -> None:
    drawn = Draw([[3, 5, 1, 20], [8, 7, 2]], 8, 0.1, 100, 1)
    (tmp_path / "whole").mkdir()
    check(drawn, tmp_path / "whole")
    monkeypatch.setattr(FittedSamples, "read_with_starts", fault(FittedSamples.read_with_starts))
    with pytest.raises(AssertionError):
        check(drawn, tmp_path)


def test_padding_is_what_padded_samples_of_documents_are(tmp_path: Path) -> None:
    """Documents of which no two fit together are those of a text in which padding is written out."""
    lengths = np.random.default_rng(2).integers(13, 24, 30).tolist()
    ids = np.arange(1, sum(lengths) + 1)
    base = config_of(Draw([lengths], 24, 0.0, 100, 5), tmp_path)
    fit_data(base.data.path, "24", 0.0)
    ends = list(accumulate(lengths))
    padded = [[*ids[end - length : end], *[0] * (24 - length)] for length, end in zip(lengths, ends, strict=True)]
    parts = [part for length in lengths for part in (length, 24 - length)]
    path = tmp_path / "padded"
    write_tokens(path, np.append(np.concatenate(padded), 0), 4096, lengths=lambda: [*parts, 1])
    written_out = replace(base, data=replace(base.data, path=str(path), packing="documents", ignore_token=0))
    fitted, documents = (open_corpus(config).train for config in (base, written_out))
    numbers = np.arange(50)
    for left, right in zip(fitted.read_with_starts(numbers), documents.read_with_starts(numbers), strict=True):
        np.testing.assert_array_equal(np.concatenate(left), np.concatenate(right))


def test_a_token_beyond_the_vocabulary_has_its_place(tmp_path: Path) -> None:
    config = config_of(Draw([[3, 4], [5]], 8, 0.0, 100, 0), tmp_path)
    fit_data(config.data.path, "8", 0.0)
    samples = replace(open_corpus(config).train, vocab_size=9)
    with pytest.raises(ValueError, match=r"the first beyond it, 9, is token 1 of .*/1: use model.vocab_size 13"):
        samples.read(np.arange(2))
