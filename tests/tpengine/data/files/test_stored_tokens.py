"""Rung: pure. Tokens are read from their file, and a file that is cut short or copied over is named, not fatal."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpengine.data import Samples, StoredTokens, open_tokens, write_tokens
from tpengine.data.files import stored_tokens as module

TOKENS = np.arange(3000) * 7 % 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "some.tokens", TOKENS, 1000)
    return tmp_path / "some.tokens"


def stored(path: Path) -> StoredTokens:
    tokens = open_tokens(path).tokens
    assert isinstance(tokens, StoredTokens)
    return tokens


@pytest.mark.parametrize("place", [slice(None), slice(5, 9), slice(9, 5), slice(-4, None), slice(2995, 9999)])
def test_slices_and_parts_are_those_of_the_array(path: Path, place: slice) -> None:
    tokens = stored(path)
    np.testing.assert_array_equal(tokens[place], TOKENS[place])
    part = tokens.part(100, 2990)
    assert len(part) == 2890 and part.dtype == np.uint16
    np.testing.assert_array_equal(part[place], TOKENS[100:2990][place])
    np.testing.assert_array_equal(part.part(10, 9999)[place], TOKENS[110:2990][place])


def test_pieces_are_the_bytes_of_all(path: Path) -> None:
    pieces = list(stored(path).part(1, 3000).pieces(700))
    assert [len(piece) for piece in pieces] == [1400] * 4 + [398]
    assert b"".join(pieces) == TOKENS[1:].astype("<u2").tobytes()


def test_a_read_that_stops_early_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may return less than was asked for."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 100), offset))
    np.testing.assert_array_equal(stored(path)[:], TOKENS)


def test_a_file_cut_short_while_it_is_read_is_named(path: Path) -> None:
    samples = Samples(stored(path), 100, 1000)
    samples.batch(0, 29)
    os.truncate(path, 1064)
    samples.batch(0, 4)
    with pytest.raises(ValueError) as error:
        samples.batch(0, 29)
    assert str(error.value) == (
        f"a token file must not be cut short while it is read: {path} has 1064 bytes now and needs 1066: restore it "
        "and continue with --resume; rename a new file over it instead of copying"
    )


def test_a_file_cut_short_and_gone_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for its size may fail, where the read has not."""

    def gone(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    tokens = stored(path)
    os.truncate(path, tokens.offset + 20)
    monkeypatch.setattr(module.OpenFile, "identity", gone)
    for begin, most in ((0, 20), (100, 200)):
        with pytest.raises(ValueError, match=rf"some\.tokens has at most {tokens.offset + most} bytes now and needs"):
            tokens[begin:300]


def test_a_file_renamed_over_it_changes_nothing(path: Path) -> None:
    tokens = stored(path)
    write_tokens(path, TOKENS[::-1], 1000)
    np.testing.assert_array_equal(tokens[:], TOKENS)
    np.testing.assert_array_equal(stored(path)[:], TOKENS[::-1])


def test_a_disk_that_fails_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    tokens = stored(path)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ValueError, match=r"must be readable: .*some\.tokens: Input/output error: correct that"):
        tokens[:1]


def test_a_file_may_be_dropped_while_another_makes_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage may run between the list of what is open and the look at it."""

    class Dropping(OrderedDict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            yield from list(super().__iter__())
            dropped.clear()

    for name, value in (("_OPEN", Dropping()), ("_SOME_OPEN", 2), ("_most_open", lambda: 2)):
        monkeypatch.setattr(module, name, value)
    before = len(os.listdir("/proc/self/fd"))
    dropped = [module.OpenFile(path)]
    files = [module.OpenFile(path) for _ in range(3)]
    assert not dropped and len(os.listdir("/proc/self/fd")) == before + 2
    assert len({file.read(0, 100) for file in files}) == 1
    del files[:]
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_and_not_sent_to_other_processes(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tokens = stored(path)
    part = tokens.part(0, 10)
    del tokens
    assert part[:2].tolist() == [0, 7]
    with pytest.raises(TypeError, match=r"open .*some\.tokens there"):
        pickle.dumps(part)
    del part
    assert len(os.listdir("/proc/self/fd")) == before
