"""Rung: pure. Samples are a function of seed and index; labels are the next tokens; every dp split sees the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.config import IGNORED_LABEL
from tpengine.data import Samples, batch_digest, first_sample_index

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
