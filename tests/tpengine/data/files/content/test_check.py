"""Rung: pure. The thread that compares a text with its hash: what it finds, how little it takes, when it ends."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tpengine.data import CPU_SHARE, ContentCheck, ContentChecks, TokenFile, open_tokens, stdlib_text, write_tokens

TOKENS = np.arange(3_000_000) % 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "some.tokens", TOKENS, 256)
    return tmp_path / "some.tokens"


class Waits:
    """Stands for the clock: notes what is waited for, and lets the check look at its file only when told."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ending = False
        self.looked, self.look_again = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if seconds == 2.0:
            self.looked.release()
            self.look_again.acquire()
        return self.ending


def change(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(64 + place)
        file.write(b"\xff")


def found(text: TokenFile, rank: int) -> tuple[int, str]:
    """The flag of the check that finds a fault in this text, and its explanation."""
    with ContentCheck(text, rank, reads=True, share=1.0) as check:
        while check.flag == 0:
            time.sleep(0.001)
    return check.flag, check.explain(check.flag)


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_998])
def test_one_wrong_token_anywhere_is_found(path: Path, place: int) -> None:
    change(path, place)
    _, message = found(open_tokens(path), rank=5)
    assert message == (
        f"a text must have the content that its hash says: {path} on the host of rank 5 does not have SHA-256 "
        f"{open_tokens(path).sha256}: restore it and continue with --resume, or write it again for a new run"
    )


def test_a_file_cut_short_is_found_and_any_rank_can_say_so(path: Path) -> None:
    text = open_tokens(path)
    os.truncate(path, 1_000_000)
    flag, message = found(text, rank=3)
    assert f"must stay readable to its end: {path} on the host of rank 3 was cut short" in message
    assert ContentCheck(text, 0, reads=False, share=1.0).explain(flag) == message


def test_what_is_written_later_is_found_and_what_is_not_is_not_read_again(path: Path) -> None:
    waits = Waits()
    check = ContentCheck(open_tokens(path), 0, reads=True, share=0.5, wait=waits)
    pieces = -(-3_000_000 // (1 << 19))
    with check:
        waits.looked.acquire()
        assert check.flag == 0 and len(waits.seconds) == pieces + 1
        waits.look_again.release()
        waits.looked.acquire()
        assert check.flag == 0 and len(waits.seconds) == pieces + 2, "an untouched file was read again"
        os.utime(path)
        waits.look_again.release()
        waits.looked.acquire()
        assert check.flag == 0 and len(waits.seconds) == 2 * pieces + 3
        change(path, 7)
        waits.look_again.release()
        waits.looked.acquire()
        assert check.flag != 0
        waits.look_again.release()


def test_it_waits_as_long_as_its_share_asks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each piece takes 3 ms of a core."""
    readings = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.003 * next(readings))
    waits = Waits()
    with ContentCheck(open_tokens(path), 0, reads=True, share=CPU_SHARE, wait=waits):
        waits.looked.acquire()
        waits.ending = True
        waits.look_again.release()
    assert len(waits.seconds) > 6
    for seconds in waits.seconds[:6]:
        assert 0.003 / (0.003 + seconds) == pytest.approx(0.003)


def test_it_ends_when_told_and_reads_on_one_rank_only(path: Path) -> None:
    """At its share the file would take some 0.7 s, and looks at it go on for ever."""
    text = open_tokens(path)
    before = set(threading.enumerate())
    with ContentCheck(text, 0, reads=True, share=CPU_SHARE) as check:
        (thread,) = set(threading.enumerate()) - before
    assert not thread.is_alive() and check.flag == 0
    in_memory = TokenFile(stdlib_text(), 256, "0" * 64)
    for idle in (ContentCheck(text, 1, reads=False, share=1.0), ContentCheck(in_memory, 0, reads=True, share=1.0)):
        with idle:
            assert not set(threading.enumerate()) - before  # threads of other tests may end meanwhile


def test_of_several_texts_the_one_that_changed_is_named(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tokens"
    write_tokens(other, TOKENS[::-1], 256)
    change(other, 7)
    texts = [open_tokens(path), open_tokens(other), open_tokens(path)]
    with ContentChecks(texts, 3, reads=True, share=1.0) as checks:
        while checks.flag == 0:
            time.sleep(0.001)
    assert f"{other} on the host of rank 3 does not have" in checks.explain(checks.flag)
