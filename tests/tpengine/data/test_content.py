"""Rung: pure. The hash of a text's content: in the header, else noted beside the file or in the run directory.

The thread that compares a text with its hash: what it finds, how little it takes, when it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpengine.config import Config, DataConfig
from tpengine.data import (
    CPU_SHARE,
    ContentCheck,
    ContentChecks,
    Corpus,
    StoredTokens,
    TokenFile,
    open_corpus,
    open_tokens,
    opened_text,
    stdlib_text,
    write_tokens,
)
from tpengine.data.content import content_sha256, note_sha256, noted_sha256, once_per_host

HEADER_BEFORE = struct.Struct("<8sIIQQ")
TOKENS = np.arange(400_000) % 251
# What checkpoints of before hold for this text.
ENDS_BEFORE = "ddfbcc1684af3510330d7b971b8d85b8bdbcd2a2604fc3809de1c2c4f4ccc190"
SHA256 = hashlib.sha256(TOKENS.astype(np.uint8).tobytes()).hexdigest()
CHECKED = np.arange(3_000_000) % 256


def write_without_hash(path: Path) -> None:
    """Write a file without a hash, as earlier releases did."""
    header = HEADER_BEFORE.pack(b"TPTOKENS", 1, 1, 251, len(TOKENS)).ljust(64, b"\0")
    path.write_bytes(header + TOKENS.astype(np.uint8).tobytes())


def opened(path: Path, run_dir: Path | None = None) -> tuple[Corpus, list[str]]:
    """The corpus of a file, and what was said while it was opened."""
    said: list[str] = []
    config = Config(data=DataConfig(path=str(path)), run_dir=str(run_dir or ""))
    return open_corpus(config, said.append), said


def test_a_header_holds_the_hash_of_all_tokens_and_is_read_by_who_knows_none(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", (piece for piece in np.split(TOKENS.reshape(-1, 100), 4)), 251)
    assert open_tokens(tmp_path / "t").sha256 == SHA256
    content = (tmp_path / "t").read_bytes()
    assert content[32:64].hex() == SHA256 == hashlib.sha256(content[64:]).hexdigest()
    assert HEADER_BEFORE.unpack_from(content) == (b"TPTOKENS", 1, 1, 251, 400_000)
    corpus, said = opened(tmp_path / "t")
    assert corpus.fingerprint() == f"400000 uint8 tokens below 251, SHA-256 {SHA256[:32]}" and not said
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_text_in_memory_has_its_hash_at_once() -> None:
    text = open_corpus(Config()).text
    assert text.sha256 == hashlib.sha256(stdlib_text().tobytes()).hexdigest()


def test_a_file_without_a_hash_is_read_once_and_tells_the_same(tmp_path: Path) -> None:
    write_without_hash(tmp_path / "t")
    write_tokens(tmp_path / "with", TOKENS, 251)
    first, said = opened(tmp_path / "t")
    assert said == [f"{tmp_path / 't'} was written without a hash of its content: reading its 0 MB once to make one"]
    again, said = opened(tmp_path / "t")
    assert not said
    assert first.fingerprint() == again.fingerprint() == opened(tmp_path / "with")[0].fingerprint()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".t.hash", "t", "with"]


def test_a_note_in_the_run_directory_serves_where_none_can_lie_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, run_dir = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    run_dir.mkdir()
    write_without_hash(texts / "t")
    opens = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.parent == texts and "w" in mode:
            raise OSError(30, "Read-only file system")
        return opens(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    corpus, said = opened(texts / "t")
    assert said and not corpus.opened.is_noted
    # Rank 0 has made a directory that no rank knew before.
    corpus.note_hash(run_dir)
    again, said = opened(texts / "t", run_dir)
    assert not said and again.opened.is_noted and again.fingerprint() == corpus.fingerprint()
    assert [p.name for p in texts.iterdir()] == ["t"] and [p.name for p in run_dir.iterdir()] == [
        f".t.{(texts / 't').stat().st_ino}.hash"
    ]


def test_hosts_with_files_of_their_own_keep_notes_of_their_own_in_a_run_directory(tmp_path: Path) -> None:
    """A file of the same name on each host's disk, and one run directory that all see."""
    (tmp_path / "run").mkdir()
    texts = []
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        write_without_hash(tmp_path / host / "t")
        text = open_tokens(tmp_path / host / "t").tokens
        assert isinstance(text, StoredTokens) and note_sha256(text, SHA256, tmp_path / "run")
        texts.append(text)
    assert [noted_sha256(text, [tmp_path / "run"]) for text in texts] == [SHA256] * 2


def once_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes: list[Callable[[], str]]) -> list[object]:
    """Two processes of a host, as threads, want a hash; the first makes it until the second waits. What each got."""
    write_without_hash(tmp_path / "t")
    texts = [open_tokens(tmp_path / "t").tokens for _ in range(2)]
    begun, waits = threading.Event(), threading.Event()
    lock = fcntl.flock
    got: list[object] = [None, None]

    def locking(file: Any, operation: int) -> None:
        if threading.current_thread() is second:
            waits.set()
        lock(file, operation)

    def first_make() -> str:
        begun.set()
        waits.wait()
        return makes[0]()

    def want(number: int, make: Callable[[], str]) -> None:
        text = texts[number]
        assert isinstance(text, StoredTokens)
        try:
            got[number] = once_per_host(text, make)
        except ValueError as error:
            got[number] = str(error)

    monkeypatch.setattr(fcntl, "flock", locking)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    first = threading.Thread(target=want, args=(0, first_make))
    second = threading.Thread(target=want, args=(1, makes[1]))
    first.start()
    begun.wait()
    second.start()
    first.join()
    second.join()
    return got


def test_one_process_of_a_host_makes_the_hash_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No note is needed for it: the file may lie where nobody may write."""
    assert once_for_two(tmp_path, monkeypatch, [lambda: "a" * 64, lambda: "b" * 64]) == ["a" * 64] * 2
    assert len(list((tmp_path / "temporary").iterdir())) == 1


@pytest.mark.parametrize("takes_notes", [True, False])
def test_a_rank_that_comes_late_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_notes: bool
) -> None:
    """It reads nothing again even if no note can be written. A changed text is a new one. Nothing is kept twice."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    write_without_hash(tmp_path / "t")
    read: list[StoredTokens] = []
    monkeypatch.setattr(opened_text, "content_sha256", lambda tokens: read.append(tokens) or content_sha256(tokens))
    if not takes_notes:
        monkeypatch.setattr(opened_text, "note_sha256", lambda *_: False)
    for num_read in (1, 2):
        for _ in range(3):
            corpus, _ = opened(tmp_path / "t")
            assert (corpus.text.sha256, corpus.opened.is_noted) == (SHA256, takes_notes)
        assert len(read) == num_read
        assert len(list((tmp_path / "temporary").iterdir())) == (0 if takes_notes else num_read)
        os.utime(tmp_path / "t", (1, 1))


def test_who_fails_to_make_the_hash_leaves_it_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise ValueError("cut short")

    assert once_for_two(tmp_path, monkeypatch, [fail, lambda: "b" * 64]) == ["cut short", "b" * 64]
    assert not list((tmp_path / "temporary").iterdir())


def test_without_temporary_files_each_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    write_without_hash(tmp_path / "t")
    corpus, said = opened(tmp_path / "t")
    assert said and corpus.text.sha256 == SHA256


def test_a_text_without_a_hash_is_waited_for_longer(tmp_path: Path) -> None:
    """Ranks that have found a note wait longer too: other hosts may have no note."""
    write_without_hash(tmp_path / "t")
    assert [opened(tmp_path / "t")[0].reading_seconds for _ in range(2)] == [pytest.approx(0.04)] * 2
    write_tokens(tmp_path / "with", TOKENS, 251)
    assert opened(tmp_path / "with")[0].reading_seconds == 0


def test_a_note_is_left_in_one_place_only(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_without_hash(tmp_path / "t")
    opened(tmp_path / "t", tmp_path / "run")[0].note_hash(tmp_path / "run")
    assert (tmp_path / ".t.hash").is_file() and not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("change", ["size", "mtime_ns", "inode", "sha256", "text"])
def test_a_note_of_another_file_is_not_believed(tmp_path: Path, change: str) -> None:
    write_without_hash(tmp_path / "t")
    opened(tmp_path / "t")
    note = tmp_path / ".t.hash"
    fields = json.loads(note.read_text())
    assert set(fields) == {"size", "mtime_ns", "inode", "sha256"} and fields["sha256"] == SHA256
    false = {**fields, "sha256": "0" * 64}
    note.write_text(json.dumps(false))
    assert not opened(tmp_path / "t")[1], "this test proves nothing: the note is not read at all"
    if change == "text":
        note.write_text("[" * 100_000)
    elif change == "sha256":
        note.write_text(json.dumps({**fields, "sha256": 7}))
    else:
        note.write_text(json.dumps({**false, change: fields[change] + 1}))
    corpus, said = opened(tmp_path / "t")
    assert said and corpus.text.sha256 == SHA256
    assert json.loads(note.read_text()) == fields


def test_a_file_that_is_written_while_it_is_hashed_is_refused(tmp_path: Path) -> None:
    write_without_hash(tmp_path / "t")
    config = Config(data=DataConfig(path=str(tmp_path / "t")))
    with pytest.raises(ValueError, match=r"must not change while it is read: .*t: wait until it is written"):
        open_corpus(config, lambda _: os.utime(tmp_path / "t", (1, 1)))
    assert not (tmp_path / ".t.hash").exists()


def test_texts_that_differ_in_one_token_differ_and_their_ends_do_not_tell(tmp_path: Path) -> None:
    tokens = TOKENS.copy()
    tokens[200_000] += 1
    write_tokens(tmp_path / "a", TOKENS, 251)
    write_tokens(tmp_path / "b", tokens, 251)
    write_tokens(tmp_path / "c", TOKENS, 252)
    a, b, c = (opened(tmp_path / name)[0] for name in "abc")
    assert len({a.fingerprint(), b.fingerprint(), c.fingerprint()}) == 3
    assert a.fingerprint_of_ends() == b.fingerprint_of_ends()
    shorter = open_corpus(replace(Config(), data=DataConfig(path=str(tmp_path / "a"), held_out_fraction=0.1)))
    assert shorter.fingerprint_of_ends() != a.fingerprint_of_ends()
    assert a.fingerprint_of_ends() == ENDS_BEFORE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "some.tokens", CHECKED, 256)
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
    write_tokens(other, CHECKED[::-1], 256)
    change(other, 7)
    texts = [open_tokens(path), open_tokens(other), open_tokens(path)]
    with ContentChecks(texts, 3, reads=True, share=1.0) as checks:
        while checks.flag == 0:
            time.sleep(0.001)
    assert f"{other} on the host of rank 3 does not have" in checks.explain(checks.flag)
