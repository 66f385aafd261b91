"""Rung: pure. One thread reads the samples of coming steps; what was read ahead is only a guess."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data import ReadAhead, Samples, batch_digest, open_tokens, write_tokens
from tpengine.training.samples import PackedBatch, SamplePosition


def samples_of(path: Path, num_tokens: int = 4_000) -> Samples:
    """Samples of 16 tokens of a file of drawn bytes."""
    write_tokens(path, np.random.default_rng(3).integers(0, 256, num_tokens), 256)
    return Samples(open_tokens(path).tokens, 16, 256, ignore_token=7, seed=5)


@dataclass
class Slow:
    """Samples whose reads wait until they are let through, and are counted."""

    samples: Samples
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[list[int]] = field(default_factory=list)
    packs: bool = False
    columns: tuple[()] = ()

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        self.asked.append(samples.tolist())
        self.gate.wait()
        return self.samples.read_with_starts(samples)

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        raise AssertionError("nothing is packed")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tpengine-read-ahead"]


def test_what_is_taken_is_what_was_asked_for_whatever_was_read_ahead(tmp_path: Path) -> None:
    """Steps go on as they were guessed, or elsewhere, as after a rollback that leaves samples out."""
    samples = samples_of(tmp_path / "t")
    ahead = ReadAhead(samples, needs_tokens=True)
    random, left_out = np.random.default_rng(0), ()
    for step in range(60):
        if random.random() < 0.2:
            left_out = (*left_out, (8 * step + 3, 8 * step + 7))
        numbers = SamplePosition(0, 8 * step, left_out).samples(0, 8)
        found = ahead.take(numbers)
        tokens, labels = samples.read(numbers)
        assert found.tokens is not None and found.labels is not None
        assert np.array_equal(found.tokens, tokens) and np.array_equal(found.labels, labels)
        assert found.digest == batch_digest(tokens, labels)
        assert found.count == int((labels != IGNORED_LABEL).sum())
        for coming in range(step + 1 + ahead.num_asked, step + 3):
            ahead.ask(SamplePosition(0, 8 * coming, left_out).samples(0, 8))
    ahead.close()


def test_samples_are_there_before_they_are_taken_and_in_the_order_of_asking(tmp_path: Path) -> None:
    slow = Slow(samples_of(tmp_path / "t"))
    ahead = ReadAhead(slow, needs_tokens=True)
    first, second = np.arange(4), np.arange(4, 8)
    ahead.ask(first)
    ahead.ask(second)
    assert not ahead.is_there(first)
    slow.gate.set()
    ahead.take(first)
    while not ahead.is_there(second):
        pass
    assert not ahead.is_there(first)
    ahead.take(second)
    assert slow.asked == [first.tolist(), second.tolist()]


def test_what_is_no_longer_wanted_is_not_read(tmp_path: Path) -> None:
    slow = Slow(samples_of(tmp_path / "t"))
    ahead = ReadAhead(slow, needs_tokens=True)
    for first in (0, 4, 8):
        ahead.ask(np.arange(first, first + 4))
    while not slow.asked:
        pass
    ask = ahead.ask

    def ask_and_open(numbers: NDArray[np.int64]) -> None:
        ask(numbers)
        slow.gate.set()

    # Taking others asks for them when it has given up what was asked before.
    with patch.object(ahead, "ask", ask_and_open):
        ahead.take(np.arange(100, 104))
    assert slow.asked == [[0, 1, 2, 3], [100, 101, 102, 103]]


def test_an_error_is_that_of_the_samples_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    samples = samples_of(path)
    ahead = ReadAhead(samples, needs_tokens=True)
    ahead.ask(np.arange(4))
    assert not ahead.take(np.arange(4)).error
    os.truncate(path, 40)
    ahead.ask(np.arange(4, 8))
    found = ahead.take(np.arange(4, 8))
    assert found.tokens is None and found.count == 0
    assert found.error.startswith(f"a token file must not be cut short while it is read: {path} has 40 bytes now")
    assert "\n" not in found.error


def test_what_no_user_can_mend_is_raised_where_samples_are_taken(tmp_path: Path) -> None:
    class Broken(Slow):
        def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
            raise ZeroDivisionError("a bug")

    ahead = ReadAhead(Broken(samples_of(tmp_path / "t")), needs_tokens=True)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ahead.take(np.arange(4))
    # The thread lives on.
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ahead.take(np.arange(4))


def test_the_thread_ends_when_it_is_told_and_when_nobody_holds_it(tmp_path: Path) -> None:
    # Threads of other tests may end meanwhile: what matters is which are new.
    samples, others = samples_of(tmp_path / "t"), set(threads())
    ahead = ReadAhead(samples, needs_tokens=True)
    assert not set(threads()) - others
    ahead.take(np.arange(4))
    (thread,) = set(threads()) - others
    ahead.ask(np.arange(4, 8))
    ahead.close()
    assert not thread.is_alive()
    assert not set(threads()) - others
    # It may be asked again.
    assert ahead.take(np.arange(4, 8)).count
    (thread,) = set(threads()) - others
    del ahead
    gc.collect()
    thread.join()
