"""Rung: pure. Documents come whole and in order out of text files and lines of JSONL; bad lines are named.

Rows of parquet files are documents; without the library, and where a file is none, it is one line.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tpengine.data import documents as module
from tpengine.data.documents import DocumentPiece, DocumentReader
from tpengine.data.encode import bytes_of

TEXTS = [f"row {number} \u00e9" for number in range(10)]


def whole(pieces: list[DocumentPiece]) -> list[bytes]:
    """The documents that the pieces are of, each of which begins and ends once."""
    found: list[bytes] = []
    is_open = False
    for piece in pieces:
        assert piece.content and piece.begins != is_open
        if piece.begins:
            found.append(b"")
        assert ".jsonl" in piece.path.suffixes or piece.offset == len(found[-1])
        found[-1] += piece.content
        is_open = not piece.ends
    assert not is_open
    return found


@pytest.mark.parametrize("size", [1, 6, 7, 8, 14, 15])
def test_a_text_file_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", 7)
    text = bytes(range(size))
    (tmp_path / "a").write_bytes(text)
    (tmp_path / "b").write_bytes(b"")
    documents = DocumentReader([tmp_path / "b", tmp_path / "a"])
    pieces = list(documents)
    assert whole(pieces) == [text] and len(pieces) == -(-size // 7)
    assert documents.num_bytes == documents.num_read_bytes == size
    assert (documents.num_documents, documents.num_empty) == (1, 1)


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    texts = ["one\ntwo", "", "\u00e9\U0001f600", "a" * 3_000_000]
    lines = [json.dumps({"id": number, "body": text}) for number, text in enumerate(texts)]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([lines[0], " ", *lines[1:]]))
    documents = DocumentReader([path], "body")
    assert whole(list(documents)) == [text.encode() for text in texts if text]
    assert (documents.num_documents, documents.num_empty) == (3, 1)
    assert documents.num_read_bytes == documents.num_bytes


def squeezed(path: Path, content: bytes) -> Path:
    """Write a file as its name says, in two parts that are unpacked as one."""
    middle = len(content) // 2
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:middle]) + gzip.compress(content[middle:]))
    else:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress(content[:middle]) + zstandard.compress(content[middle:]))
    return path


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_those_of_the_file(tmp_path: Path, suffix: str) -> None:
    """Also where reading goes on behind a document; damage is one line."""
    content = b"".join(json.dumps({"text": f"{number} " * 99}).encode() + b"\n" for number in range(300))
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(content)
    path = squeezed(tmp_path / f"a.jsonl{suffix}", content)
    documents = DocumentReader([path])
    found = list(documents)
    assert whole(found) == whole(list(DocumentReader([plain]))) and documents.num_documents == 300
    assert documents.num_read_bytes == documents.num_bytes == path.stat().st_size
    again = DocumentReader([path], start=found[100].after)
    assert whole(list(again)) == whole(found[101:]) and again.num_documents == 300
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a compressed file must be whole: .*copy it again"):
        list(DocumentReader([path]))
    path.write_bytes(b"no such thing at all")
    with pytest.raises(ValueError, match=r"a compressed file must be whole: .*copy it again"):
        list(DocumentReader([path]))


def test_a_window_is_as_long_as_zstd_makes_it(tmp_path: Path) -> None:
    """That of zstd --long=28, whose buffer is 256 MB: the library by itself takes half of it."""
    pytest.importorskip("zstandard")
    line = b'{"text": "far"}\n'
    # The magic number, no checksum and no size, the window, one block that is stored as it is.
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(28 - 10) << 3]) + (len(line) << 3 | 1).to_bytes(3, "little") + line
    (tmp_path / "a.jsonl.zst").write_bytes(frame * 2)
    assert whole(list(DocumentReader([tmp_path / "a.jsonl.zst"]))) == [b"far", b"far"]


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"needs the library of that name: .*a\.jsonl\.zst: pip install 'tpengine"):
        list(DocumentReader([tmp_path / "a.jsonl.zst"]))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "half', "is none: Unterminated string"),
        ("[1]", "is list"),
        ('{"body": "x", "id": 3}', "has 'body', 'id'"),
        ("{}", "has no fields"),
        ('{"text": null}', "has NoneType there"),
        ('{"text": "\\ud800"}', "has half of a surrogate pair there"),
        (b'{"text": "\xff"}', "is none: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "is none: maximum recursion depth"),
    ],
    ids=lambda value: "" if len(value) > 100 else None,
)
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str | bytes, what: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError) as error:
        list(DocumentReader([path]))
    message = str(error.value)
    assert message.startswith(f"a line of JSONL must be an object with a text in 'text': {path}, line 2 {what}")
    assert message.endswith(": correct the line, or name the field with --field") and "\n" not in message


def test_every_document_has_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", 2)
    (tmp_path / "a").write_bytes(b"abcde")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c.jsonl").write_text('{"text": "f"}\n{"text": ""}\n{"text": "gh"}\n')
    paths = [tmp_path / name for name in ("a", "b", "c.jsonl")]

    def text(begin: int | None, end: int | None) -> bytes:
        return b"".join(chunk.ids.tobytes() for chunk in bytes_of(DocumentReader(paths), begin, end))

    assert text(None, None) == b"abcdefgh"
    assert text(0, None) == b"\0abcde\0f\0gh"
    assert text(2, 255) == b"\2abcde\xff\2f\xff\2gh\xff"


def parquet_of(path: Path, columns: dict[str, Any], rows_per_group: int = 4) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_each_row_is_a_document_and_reading_goes_on_behind_any(tmp_path: Path) -> None:
    path = parquet_of(tmp_path / "a.parquet", {"id": list(range(11)), "text": [*TEXTS, ""]})
    documents = DocumentReader([path])
    found = list(documents)
    assert [piece.content.decode() for piece in found] == TEXTS
    assert all(piece.begins and piece.ends for piece in found)
    assert (documents.num_documents, documents.num_empty) == (10, 1)
    assert documents.num_read_bytes == documents.num_bytes == path.stat().st_size
    for number, piece in enumerate(found, 1):
        again = DocumentReader([path], start=piece.after)
        assert [other.content.decode() for other in again] == TEXTS[number:]
        assert again.num_documents == 10


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["x"]}, "must have a column of text 'text': .* has 'body': name the column"),
        ({"text": [3]}, "must have a column of text 'text': .* has int64 there: name the column"),
        ({"text": ["x", None]}, "must have a text in 'text': .*, row 2 has none"),
    ],
)
def test_rows_without_a_text_are_named(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    path = parquet_of(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=words):
        list(DocumentReader([path]))


@pytest.mark.parametrize("size", [0, 3, 100, -5])
def test_a_file_that_is_cut_short_is_one_line(tmp_path: Path, size: int) -> None:
    path = parquet_of(tmp_path / "a.parquet", {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"a parquet file must be whole: .*a\.parquet: .*: copy it again") as error:
        list(DocumentReader([path]))
    assert "\n" not in str(error.value)


def test_a_missing_library_of_parquet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"needs the library pyarrow: .*a\.parquet: pip install 'tpengine\[parquet\]'"):
        list(DocumentReader([tmp_path / "a.parquet"]))
