"""Rung: pure. An index comes back equal, and every damage to a checkpoint is told in one line with file and remedy."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.checkpoint.index import (
    DTYPES,
    INDEX_FILE,
    CheckpointError,
    DamagedCheckpoint,
    FileEntry,
    Index,
    SavedPiece,
    TensorEntry,
    check_file,
    hash_file,
    merged,
    read_index,
    write_index,
)

A, B = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def cut_tensors(draw: st.DrawFn, files: list[str]) -> TensorEntry:
    """A tensor of up to 3 dims, each cut anywhere, its pieces in any order and any file."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    intervals = []
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        intervals.append(list(itertools.pairwise([0, *sorted(cuts), size])))
    pieces = []
    for number, cell in enumerate(itertools.product(*intervals)):
        offset, extent = tuple(start for start, _ in cell), tuple(end - start for start, end in cell)
        pieces.append(SavedPiece(offset, extent, draw(st.sampled_from(files)), f"piece {number}"))
    return TensorEntry(draw(st.sampled_from(DTYPES)), shape, tuple(draw(st.permutations(pieces))))


def covered_by_counting(shape: tuple[int, ...], pieces: list[SavedPiece]) -> bool:
    """Whether every element lies in one piece: each is counted."""
    counts = np.zeros(shape, dtype=int)
    for piece in pieces:
        counts[tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))] += 1
    return bool((counts == 1).all())


def is_accepted(shape: tuple[int, ...], pieces: list[SavedPiece]) -> bool:
    written = {
        "files": {A: {"num_bytes": 1, "sha256": "0"}},
        "tensors": {"w": asdict(TensorEntry("F32", shape, tuple(pieces)))},
    }
    try:
        merged([json.loads(json.dumps(written))])
    except ValueError as error:
        assert "do not cover it exactly once" in str(error)
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(cut_tensors([A]), st.data())
def test_pieces_cover_their_tensor_exactly_once(entry: TensorEntry, data: st.DataObject) -> None:
    """As it is cut, and after each of some mutations: as if every element were counted."""
    pieces = list(entry.pieces)
    assert is_accepted(entry.shape, pieces) and covered_by_counting(entry.shape, pieces)
    if pieces and entry.shape:
        for _ in range(data.draw(st.integers(1, 3))):
            number, dim = data.draw(st.integers(0, len(pieces) - 1)), data.draw(st.integers(0, len(entry.shape) - 1))
            piece = pieces[number]
            offset, size = list(piece.offset), list(piece.shape)
            offset[dim] = data.draw(st.integers(0, entry.shape[dim]))
            size[dim] = data.draw(st.integers(0, entry.shape[dim] - offset[dim]))
            # Moved or resized, and sometimes there twice: the volume is right and one lies on another.
            pieces[number] = replace(piece, offset=tuple(offset), shape=tuple(size))
            if data.draw(st.booleans()):
                pieces[data.draw(st.integers(0, len(pieces) - 1))] = pieces[number]
        assert is_accepted(entry.shape, pieces) == covered_by_counting(entry.shape, pieces)


def test_pieces_that_no_row_of_cuts_separates() -> None:
    """Four boxes around a fifth; two of them exchanged for boxes of the same volume."""
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    pieces = [SavedPiece(offset, size, A, str(i)) for i, (offset, size) in enumerate(wheel)]
    assert is_accepted((3, 3), pieces)
    for i, other in itertools.permutations(range(5), 2):
        wrong = list(pieces)
        wrong[i] = replace(pieces[other], key=str(i))
        assert not is_accepted((3, 3), wrong)


def test_checking_takes_steps_in_proportion_to_the_pieces() -> None:
    """Counted as lines of the index's module that run: twice the pieces, at most 2.2 times the lines."""
    counts = []
    for num in (400, 800):
        pieces = [SavedPiece((i, 0), (1, 4), A, str(i)) for i in range(num)]
        lines = 0

        def count(frame: Any, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count if frame.f_code.co_filename.endswith("index.py") else None

        before = sys.gettrace()
        sys.settrace(count)
        try:
            is_accepted((num, 4), pieces)
        finally:
            sys.settrace(before)
        counts.append(lines)
    assert counts[0] > 400 and counts[1] <= 2.2 * counts[0], counts


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_index_comes_back_equal(data: st.DataObject) -> None:
    contents = data.draw(st.dictionaries(st.sampled_from([A, B, "c"]), st.binary(max_size=50), min_size=1))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, content in contents.items():
            (directory / file).write_bytes(content)
        files = {file: hash_file(directory / file) for file in contents}
        tensors = data.draw(st.dictionaries(st.text(), cut_tensors(list(files)), max_size=3))
        state = data.draw(st.dictionaries(st.text(), JSON, max_size=3))
        index = Index(data.draw(st.integers(0, 2**60)), tensors, files, state)
        write_index(directory, index)
        assert read_index(directory) == index
        for file, entry in files.items():
            check_file(directory, file, entry)


def test_a_files_entry_is_its_size_and_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one block of hashing
    (tmp_path / "f").write_bytes(content)
    assert hash_file(tmp_path / "f") == FileEntry(len(content), hashlib.sha256(content).hexdigest())


def small(directory: Path) -> Index:
    """Two files, and two tensors of which one is cut in two; the text has letters that JSON escapes."""
    (directory / A).write_bytes(b"one file")
    (directory / B).write_bytes(b"another")
    tensors = {
        "w": TensorEntry(
            "F32", (4, 3), (SavedPiece((0, 0), (2, 3), A, "w@0,0"), SavedPiece((2, 0), (2, 3), B, "w@2,0"))
        ),
        "s": TensorEntry("BF16", (), (SavedPiece((), (), A, "s@"),)),
    }
    files = {name: hash_file(directory / name) for name in (A, B)}
    index = Index(7, tensors, files, {"path": "h\u00e9", "lr": 1e-05})
    write_index(directory, index)
    return index


def refusal(of: Callable[[], object]) -> str:
    """The message of the CheckpointError that the call must end with."""
    with pytest.raises(CheckpointError) as error:
        of()
    message = str(error.value)
    assert "\n" not in message, message
    return message


def damage(of: Callable[[], object]) -> str:
    """The message of an error for which an older checkpoint is the remedy."""
    with pytest.raises(DamagedCheckpoint):
        of()
    return refusal(of)


def index_refusal(directory: Path) -> str:
    """What read_index says about a damaged index: the rule, the file. The remedy is whatever is there besides."""
    message = damage(lambda: read_index(directory))
    assert message.startswith("a checkpoint") and str(directory / INDEX_FILE) in message, message
    return message


def test_no_index(tmp_path: Path) -> None:
    assert "needs a readable index" in index_refusal(tmp_path)
    assert "No such file" in index_refusal(tmp_path / "absent")
    (tmp_path / INDEX_FILE).mkdir()
    assert "Is a directory" in index_refusal(tmp_path)


def test_an_index_cut_anywhere(tmp_path: Path) -> None:
    small(tmp_path)
    whole = (tmp_path / INDEX_FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / INDEX_FILE).write_bytes(whole[:length])
        assert "cut short or altered" in index_refusal(tmp_path) or length == len(whole) - 1
    (tmp_path / INDEX_FILE).write_bytes(whole + b"\n")
    index_refusal(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(whole)
    assert read_index(tmp_path).step == 7


# By default a bit of every byte.
@pytest.mark.parametrize("num_bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_any_flipped_bit_of_an_index(tmp_path: Path, num_bits: int) -> None:
    """A flip is noticed even if the JSON's meaning stays: an escape's e9 as E9, an exponent's e as E."""
    small(tmp_path)
    whole = (tmp_path / INDEX_FILE).read_bytes()
    for place, number in itertools.product(range(len(whole)), range(num_bits)):
        altered = bytearray(whole)
        altered[place] ^= 1 << (place + number) % 8
        (tmp_path / INDEX_FILE).write_bytes(altered)
        index_refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"null", b"7", b'"index"', b"{}", b'{"index": {}}', b'{"sha256": "0", "index": 0}', b"\xff\xfe"),
        *(b'{"index": ' * 100_000, b"[" * 100_000, b'{"index": ' + b"9" * 5000 + b"}"),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_what_is_no_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX_FILE).write_bytes(content)
    assert "altered" in index_refusal(tmp_path)


def seal(directory: Path, body: Any) -> None:
    """Write an index whose own hash is right, whatever it says."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (directory / INDEX_FILE).write_text(f'{{"sha256": "{digest}",\n"index": {text}}}\n')


REMOVED = object()


def altered(body: Any, *path: Any, value: Any) -> Any:
    """A copy of the body with another value in one place."""
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return body


def renamed(body: Any, name: str) -> Any:
    """File A under another name, everywhere."""
    return json.loads(json.dumps(body).replace(json.dumps(A), json.dumps(name)))


FIRST, SECOND = ("tensors", "w", "pieces", 0), ("tensors", "w", "pieces", 1)
WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "overlap": ((*SECOND, "offset"), [1, 0], "do not cover it exactly once"),
    "the same piece twice": (
        SECOND,
        {"offset": [0, 0], "shape": [2, 3], "file": A, "key": "x"},
        "do not cover it exactly once",
    ),
    "a hole": ((*SECOND, "shape"), [1, 3], "do not cover it exactly once"),
    "no pieces": (("tensors", "w", "pieces"), [], "do not cover it exactly once"),
    "a scalar twice": (
        ("tensors", "s", "pieces"),
        [{"offset": [], "shape": [], "file": A, "key": "s"}] * 2,
        "exactly once",
    ),
    "outside by offset": ((*SECOND, "offset"), [3, 0], "has a piece of (2, 3) at (3, 0)"),
    "outside by shape": ((*SECOND, "shape"), [2, 4], "has a piece of (2, 4) at (2, 0)"),
    "other dims": ((*SECOND, "shape"), [6], "has a piece of (6,)"),
    "negative offset": ((*SECOND, "offset"), [-2, 0], "not natural numbers"),
    "negative size": (("tensors", "w", "shape"), [4, -3], "not natural numbers"),
    "boolean size": (("tensors", "w", "shape"), [True, 12], "not natural numbers"),
    "float size": ((*FIRST, "shape"), [2.0, 3], "not natural numbers"),
    "size in words": ((*FIRST, "shape"), "23", "not natural numbers"),
    "unknown dtype": (("tensors", "w", "dtype"), "F8", "has dtype 'F8'"),
    "dtype of no text": (("tensors", "w", "dtype"), ["F32"], "has dtype ['F32']"),
    "unlisted file": ((*FIRST, "file"), "rank-00002-of-00003.safetensors", "not a file of the checkpoint"),
    "a piece in the index": ((*FIRST, "file"), INDEX_FILE, "not a file of the checkpoint"),
    "pieces of no list": (("tensors", "w", "pieces"), {"a": 1}, "well-formed"),
    "a piece without offset": ((*FIRST, "offset"), REMOVED, "lacks 'offset'"),
    "tensors of no object": (("tensors",), [], "well-formed"),
    "no tensors": (("tensors",), REMOVED, "lacks 'tensors'"),
    "files of no object": (("files",), None, "well-formed"),
    "boolean file size": (("files", A, "num_bytes"), True, "not natural numbers"),
    "file without hash": (("files", A, "sha256"), REMOVED, "lacks 'sha256'"),
    "negative step": (("step",), -1, "not natural numbers"),
    "float step": (("step",), 7.0, "not natural numbers"),
    "another format": (("format",), "zip", "format 'zip' version 1"),
    "a future version": (("version",), 2, "version 2, this tpengine reads 'tpengine checkpoint' 1: use the tpengine"),
    "no version": (("version",), REMOVED, "lacks 'version'"),
    "state of no object": (("state",), [], "state is not an object"),
    "no state": (("state",), REMOVED, "lacks 'state'"),
}
# Whole, and no reason to go back to an older one.
OF_ANOTHER_PROGRAM = ("another format", "a future version")
BAD_NAMES = ("../x", "/etc/passwd", "a/b", ".", "..", "", "~", "a\\b", ".hidden", "a\nb", "a\0b", "\ud800", INDEX_FILE)


def test_every_damage_is_refused(tmp_path: Path, count_mutations: Callable[[str, int, int], None]) -> None:
    """The index's hash is right in all cases; its contents are checked all the same."""
    small(tmp_path)
    body = json.loads((tmp_path / INDEX_FILE).read_bytes())["index"]
    cases = {name: (altered(body, *path, value=value), text) for name, (path, value, text) in WRONG.items()}
    cases |= {repr(name): (renamed(body, name), "is not a plain name") for name in BAD_NAMES}
    cases |= {f"an index that is {other!r}": (other, "well-formed") for other in (None, 5, [], "text")}
    cases["an empty object"] = {}, "lacks 'format'"
    # A newline in a tensor's name must not break the line.
    cases["a newline"] = altered(body, "tensors", "w\n", value={**body["tensors"]["w"], "dtype": "F8"}), "has dtype"
    seal(tmp_path, body)
    assert read_index(tmp_path).step == 7
    survivors = []
    for name, (wrong, text) in cases.items():
        seal(tmp_path, wrong)
        try:
            read_index(tmp_path)
        except DamagedCheckpoint:
            assert text in index_refusal(tmp_path) and name not in OF_ANOTHER_PROGRAM, name
        except CheckpointError:
            assert text in refusal(lambda: read_index(tmp_path)) and name in OF_ANOTHER_PROGRAM, name
        else:
            survivors.append(name)
    count_mutations("checkpoints (reader)", len(cases) - len(survivors), len(cases))
    assert not survivors


def test_an_empty_piece_overlaps_nothing(tmp_path: Path) -> None:
    small(tmp_path)
    body = json.loads((tmp_path / INDEX_FILE).read_bytes())["index"]
    empty = {"offset": [1, 0], "shape": [0, 3], "file": A, "key": "empty"}
    seal(tmp_path, altered(body, "tensors", "w", "pieces", value=[*body["tensors"]["w"]["pieces"], empty]))
    assert len(read_index(tmp_path).tensors["w"].pieces) == 3


def file_refusal(directory: Path, of: Callable[[], object]) -> str:
    """What is said about file A where it is damaged: the rule, the file."""
    message = damage(of)
    assert message.startswith("a checkpoint") and f"{directory / A}" in message, message
    return message


def test_files_that_are_missing_or_of_another_size(tmp_path: Path) -> None:
    index = small(tmp_path)
    whole = (tmp_path / A).read_bytes()
    for content in (whole[:-1], whole + b"x", b""):
        (tmp_path / A).write_bytes(content)
        for of in (lambda: read_index(tmp_path), lambda: check_file(tmp_path, A, index.files[A])):
            assert f"has {len(content)} bytes, the index says {len(whole)}" in file_refusal(tmp_path, of)
    (tmp_path / A).unlink()
    for of in (lambda: read_index(tmp_path), lambda: check_file(tmp_path, A, index.files[A])):
        assert "No such file" in file_refusal(tmp_path, of)


def test_any_flipped_bit_of_a_file(tmp_path: Path) -> None:
    index = small(tmp_path)
    whole = (tmp_path / A).read_bytes()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        content = bytearray(whole)
        content[place] ^= 1 << bit
        (tmp_path / A).write_bytes(content)
        assert read_index(tmp_path) == index, "sizes are all that read_index checks"
        assert "must match their hashes" in file_refusal(tmp_path, lambda: check_file(tmp_path, A, index.files[A]))


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / A).write_bytes(b"x")

    def failing_disk(path: Path) -> FileEntry:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("tpengine.checkpoint.index.hash_file", failing_disk)
    message = file_refusal(tmp_path, lambda: check_file(tmp_path, A, FileEntry(1, "0" * 64)))
    assert "must be readable" in message and "Input/output error" in message


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_what_may_be_read_later_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whoever forgot a chmod is not to lose a hundred steps."""
    index = small(tmp_path)

    def refused(path: Path, *_: object) -> FileEntry:
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr("tpengine.checkpoint.index.hash_file", refused)
    monkeypatch.setattr(Path, "read_bytes", refused)
    for of in (lambda: read_index(tmp_path), lambda: check_file(tmp_path, A, index.files[A])):
        message = refusal(of)
        assert "refused: make it readable for this user" in message
        with pytest.raises(CheckpointError) as error:
            of()
        assert not isinstance(error.value, DamagedCheckpoint)


def test_an_index_that_is_a_pipe_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_FILE)
    with pytest.raises(CheckpointError, match="must be a regular file"):
        read_index(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Hashing a pipe would hang, and hashing a device would never end."""
    make(tmp_path / A)
    entry = FileEntry((tmp_path / A).lstat().st_size, "0" * 64)
    assert "must be regular files" in file_refusal(tmp_path, lambda: check_file(tmp_path, A, entry))


def written_by(rank: int, dtype: str = "F32", num_rows: int = 2) -> dict[str, Any]:
    file, offset = f"rank-{rank}.safetensors", [2 * rank, 0]
    piece = {"offset": offset, "shape": [num_rows, 3], "file": file, "key": "w"}
    files = {file: {"num_bytes": 24, "sha256": str(rank)}}
    return {"tensors": {"w": {"dtype": dtype, "shape": [4, 3], "pieces": [piece]}}, "files": files}


def test_what_ranks_have_written_is_one_checkpoint() -> None:
    tensors, files = merged([written_by(0), {"tensors": {}, "files": {}}, written_by(1)])
    assert [piece.file for piece in tensors["w"].pieces] == ["rank-0.safetensors", "rank-1.safetensors"]
    assert (tensors["w"].dtype, tensors["w"].shape, sorted(files)) == ("F32", (4, 3), sorted(files)[:2])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([written_by(0), written_by(1, dtype="BF16")], r"rank 1 has w as \('BF16', \[4, 3\]\), another as \('F32'"),
        ([written_by(0)], "pieces of tensor 'w' do not cover it exactly once"),
        ([written_by(0), written_by(0)], "pieces of tensor 'w' do not cover it exactly once"),
        ([written_by(0), {**written_by(1), "files": {}}], "'rank-1.safetensors', which is not a file"),
        ([written_by(0), {**written_by(1), "files": {"../x": {}}}], "is not a plain name"),
    ],
)
def test_what_makes_no_checkpoint_is_refused(written: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merged(written)
