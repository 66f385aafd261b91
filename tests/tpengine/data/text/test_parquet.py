"""Rung: pure. Rows of parquet files are documents; without the library, and where a file is none, it is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tpengine.data.text.documents import Documents

TEXTS = [f"row {number} \u00e9" for number in range(10)]


def written(path: Path, columns: dict[str, Any], rows_per_group: int = 4) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_each_row_is_a_document_and_reading_goes_on_behind_any(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"id": list(range(11)), "text": [*TEXTS, ""]})
    documents = Documents([path])
    found = list(documents)
    assert [piece.content.decode() for piece in found] == TEXTS
    assert all(piece.begins and piece.ends for piece in found)
    assert (documents.num_documents, documents.num_empty) == (10, 1)
    assert documents.num_read_bytes == documents.num_bytes == path.stat().st_size
    for number, piece in enumerate(found, 1):
        again = Documents([path], start=piece.after)
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
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=words):
        list(Documents([path]))


@pytest.mark.parametrize("size", [0, 3, 100, -5])
def test_a_file_that_is_cut_short_is_one_line(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "a.parquet", {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"a parquet file must be whole: .*a\.parquet: .*: copy it again") as error:
        list(Documents([path]))
    assert "\n" not in str(error.value)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"needs the library pyarrow: .*a\.parquet: pip install 'tpengine\[parquet\]'"):
        list(Documents([tmp_path / "a.parquet"]))
