"""Rung: pure. Token files come back as they were written, and refuse damage; what fails leaves the file before."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpengine.data import open_tokens, write_tokens
from tpengine.data.documents import DocumentReader
from tpengine.data.encode import bytes_of

HEADER = struct.Struct("<8sIIQQ")


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (2**32, 4)])
def test_tokens_come_back_in_the_smallest_dtype(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokens = np.array([0, vocab_size - 1, vocab_size // 2], dtype=np.int64)
    path = tmp_path / "some.tokens"
    assert write_tokens(path, tokens, vocab_size) == 3
    assert path.stat().st_size == 64 + 3 * itemsize
    read = open_tokens(path)
    assert read.vocab_size == vocab_size
    assert read.tokens.dtype.itemsize == itemsize
    assert not read.tokens[:].flags.writeable
    np.testing.assert_array_equal(read.tokens[:], tokens)


def test_pieces_are_joined(tmp_path: Path) -> None:
    pieces = (np.full(size, size, dtype=np.uint8) for size in (3, 0, 2))
    assert write_tokens(tmp_path / "t", pieces, 4) == 5
    assert open_tokens(tmp_path / "t").tokens[:].tolist() == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 2, 9],
        (3, 1, 2, 9),
        iter([3, 1, 2, 9]),
        [np.int32(3), np.uint8(1), 2, torch.tensor(9)],
        [[3, 1], [], [2, 9]],
        [[3, 1], np.array([2]), torch.tensor([9])],
        torch.tensor([[3, 1], [2, 9]]),
        bytearray([3, 1, 2, 9]),
        bytes([3, 1, 2, 9]),
    ],
    ids=lambda tokens: f"{type(tokens).__name__} {tokens}"[:30],
)
def test_numbers_of_a_list_or_a_tensor_are_written(tmp_path: Path, tokens: Any) -> None:
    assert write_tokens(tmp_path / "t", tokens, 300) == 4
    read = open_tokens(tmp_path / "t").tokens
    assert read[:].tolist() == [3, 1, 2, 9] and read.dtype == np.uint16


def test_a_long_list_is_written_as_the_array_is(tmp_path: Path) -> None:
    """A piece of 65,536 numbers at a time."""
    tokens = np.arange(200_001) % 70_000
    write_tokens(tmp_path / "array", tokens, 70_000)
    write_tokens(tmp_path / "list", tokens.tolist(), 70_000)
    assert (tmp_path / "array").read_bytes() == (tmp_path / "list").read_bytes()


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "parts"),
    [
        ([3, 10], 10, ["below vocab_size", "10", "use vocab_size 11"]),
        ([3, -1], 10, ["at least 0", "-1"]),
        ([3, 2**64], 10, ["at least 0 and below vocab_size", "a number of 65 bits at place 1"]),
        ([3, 10**5000], 10, ["at least 0 and below vocab_size"]),
        ([3, 0.5], 10, ["must be integers", "got 0.5 at place 1"]),
        ([True, False], 10, ["must be integers", "got True at place 0"]),
        (["3"], 10, ["must be integers", "got '3' at place 0"]),
        ("text", 256, ["must be integers", "got 't' at place 0"]),
        ([3, None], 10, ["must be integers", "got None at place 1"]),
        ([3, [4]], 10, ["must be integers", "got [4] at place 1"]),
        ([[3, [4]]], 10, ["must be integers", "got [4] at place 1"]),
        (torch.empty(3, device="meta"), 10, ["must be integers in the host's memory", "use tokens.cpu()"]),
        (torch.tensor([0.5]), 10, ["integers", "float32"]),
        ([], 10, ["at least 1 token"]),
        (np.array([3, 10]), 10, ["below vocab_size", "10", "use vocab_size 11"]),
        (np.array([3, -1]), 10, ["at least 0", "-1"]),
        (np.array([0.5]), 10, ["integers", "float64"]),
        (np.array([], dtype=np.uint8), 10, ["at least 1 token"]),
        (np.array([0]), 0, ["vocab_size must be at least 1", "0"]),
        (np.array([0]), 2**32 + 1, ["vocab_size", "2**32"]),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, tokens: Any, vocab_size: int, parts: list[str]
) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3)
    with pytest.raises(ValueError) as error:
        write_tokens(path, tokens, vocab_size)
    for part in parts:
        assert part in str(error.value)
    assert open_tokens(path).tokens[:].tolist() == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".t.temporary")

    with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
        patch.setattr(os, call, fail)
        write_tokens(path, np.array([2, 2]), 3)
    assert str(error.value) == (
        f"a token file must be writable: {path}: No space left on device: correct that or choose another file"
    )
    assert open_tokens(path).tokens[:].tolist() == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_source_that_fails_is_not_taken_for_the_output(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"text")
    documents = DocumentReader([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError) as error:
        write_tokens(tmp_path / "t", (chunk.ids for chunk in bytes_of(documents)), 256)
    assert str(error.value) == (
        f"the text must be readable: {tmp_path / 'b'}: No such file or directory: correct that or leave it out"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_that_may_not_be_replaced_is_left(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3, replaces=False)
    with pytest.raises(ValueError, match=r"must be new: .*/t is there: remove it first, or choose another file"):
        write_tokens(path, np.array([2, 2]), 3, replaces=False)
    assert open_tokens(path).tokens[:].tolist() == [1, 2]


GOOD = HEADER.pack(b"TPTOKENS", 1, 2, 300, 5).ljust(64, b"\0") + bytes(10)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["at least 64 bytes", "has 0"]),
        (GOOD[:63], ["at least 64 bytes", "has 63"]),
        (b"PK" + GOOD[2:], ["starts with b'TPTOKENS'", "PKTOKENS"]),
        (HEADER.pack(b"TPTOKENS", 3, 2, 300, 5).ljust(74, b"\0"), ["version must be 1 or 2", "has 3"]),
        (HEADER.pack(b"TPTOKENS", 1, 3, 300, 5).ljust(74, b"\0"), ["dtype code must be 1, 2 or 4", "has 3"]),
        (HEADER.pack(b"TPTOKENS", 1, 1, 300, 10).ljust(74, b"\0"), ["1 to 256 for 1-byte tokens", "has 300"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 0, 5).ljust(74, b"\0"), ["1 to 65536", "has 0"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 300, 0).ljust(64, b"\0"), ["at least 1 token", "has 0"]),
        (GOOD[:-1], ["5 2-byte tokens", "74 bytes", "has 73", "cut short"]),
        (GOOD + b"x", ["74 bytes", "has 75", "too long"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 300, 2**63).ljust(74, b"\0"), [str(64 + 2**64), "has 74", "cut short"]),
    ],
)
def test_damaged_token_files_are_refused(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "damaged.tokens"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_tokens(path)
    message = str(error.value)
    assert "\n" not in message
    for part in [str(path), "tpengine data --from", *parts]:
        assert part in message


def test_a_missing_token_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: No such file.*tpengine data --from DIR --out"):
        open_tokens(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Is a directory"):
        open_tokens(tmp_path)


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what the user wrote")
    with pytest.raises(ValueError, match=r"must not replace a file of another kind: .* such as .*text\.txt\.tokens"):
        write_tokens(text, np.arange(5), vocab_size=8)
    assert text.read_text() == "what the user wrote"
    with pytest.raises(ValueError, match=r"--out .*text\.txt\.tokens"):
        open_tokens(text)
