"""Rung: pure. Every token of a file is a label once, behind what comes before it in its document, at most S tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpengine.config import IGNORED_LABEL
from tpengine.data import TokenWriter, open_file, write_tokens
from tpengine.data.whole_text import stretches_of

LENGTHS = [5, 1, 30, 16, 17, 2, 8, 40, 3, 9, 1, 1, 24]


@pytest.mark.parametrize("num_tokens", [1, 20, 64, 10_000])
@pytest.mark.parametrize("seq_len", [1, 8, 16, 64])
def test_values_of_labels_come_back_to_their_tokens(tmp_path: Path, seq_len: int, num_tokens: int) -> None:
    """A label's value is its number, and 1000 times how many tokens of its document stand before it in its sample."""
    with TokenWriter(tmp_path / "t", 4096) as writer:
        first = 1
        for length in LENGTHS:
            writer.add(np.arange(first, first + length))
            first += length
    found, num_rows = [np.zeros(1, np.float32)], 0
    for stretch in stretches_of(open_file(tmp_path / "t"), seq_len, num_tokens):
        before = np.zeros_like(stretch.tokens)
        for row, starts in enumerate(stretch.starts):
            for begin, end in zip([0, *starts], [*starts, seq_len], strict=True):
                before[row, begin:end] = np.arange(end - begin) + 1
        counts = stretch.labels != IGNORED_LABEL
        np.testing.assert_array_equal(stretch.labels[counts], stretch.tokens[counts] + 1)
        found.append(stretch.of_tokens(np.where(counts, stretch.labels + 1000 * before, 0).astype(np.float32)))
        num_rows += len(stretch.tokens)
    want = []
    for length in LENGTHS:
        place = np.arange(length)
        want.append(np.where(place > 0, ((place - 1) % seq_len + 1) * 1000, 0))
    together = np.concatenate(want) + np.where(np.concatenate(want) > 0, np.arange(1, sum(LENGTHS) + 1), 0)
    np.testing.assert_array_equal(np.concatenate(found), together)
    if num_tokens == 10_000:
        assert num_rows <= 1.5 * -(-sum(LENGTHS) // seq_len)


def test_a_file_without_documents_is_one(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", range(21), 256)
    (stretch,) = stretches_of(open_file(tmp_path / "t"), 8, 1000)
    assert stretch.labels[:2].tolist() == [list(range(1, 9)), list(range(9, 17))]
    assert stretch.labels[2].tolist() == [17, 18, 19, 20, *[IGNORED_LABEL] * 4]
    assert (stretch.first, stretch.num) == (1, 20)
    np.testing.assert_array_equal(stretch.of_tokens(stretch.labels.astype(np.float32)), np.arange(1, 21))
