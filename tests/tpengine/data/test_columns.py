"""Rung: pure. Columns come back beside their tokens, whatever cuts and joins these; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpengine.data import Column, TokenWriter, open_file, open_source, open_tokens, write_column, write_tokens
from tpengine.data.columns import column_path, open_column

TYPES = (Column("weights", "float16"), Column("top_ids", "int32", 3))


def write(path: Path, *lengths: int, first: int = 0) -> None:
    """Documents of tokens first, first + 1, ...; a token's weight is its number, its ids 10, 11 and 12 times that."""
    with TokenWriter(path, 256, TYPES) as writer:
        for length in lengths:
            ids = np.arange(first, first + length)
            writer.add(ids, weights=ids, top_ids=ids[:, None] * [10, 11, 12])
            first += length


def test_a_column_has_the_values_of_its_tokens(tmp_path: Path) -> None:
    write(tmp_path / "t", 4, 1, 5)
    file = open_file(tmp_path / "t")
    assert file.tokens.written_with == ("weights", "top_ids") and file.starts is not None
    assert file.starts[:].tolist() == [0, 4, 5]
    for column in TYPES:
        found, values, _ = open_column(file, column.name)
        assert found == column
        assert values[:].dtype == column.dtype
        expected = np.arange(10) if column.width == 1 else np.arange(10)[:, None] * [10, 11, 12]
        np.testing.assert_array_equal(values[:], expected)
        np.testing.assert_array_equal(values[3:7], expected[3:7])


def test_a_file_of_one_writer_has_the_bytes_of_the_other(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a", 256) as writer:
        for document in ([3, 1], [2]):
            writer.add(document)
    write_tokens(tmp_path / "b", [3, 1, 2], 256, lengths=lambda: [2, 1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert writer.num_tokens == 3 and writer.num_documents == 2


def test_a_column_is_added_to_tokens_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, range(100), 256)
    before = path.read_bytes()
    pieces = (np.arange(low, low + 25) / 8 for low in range(0, 100, 25))
    assert write_column(open_file(path), Column("score", "float32"), pieces) == 100
    assert path.read_bytes() == before
    np.testing.assert_array_equal(open_column(open_file(path), "score")[1][:], np.arange(100) / 8)
    with pytest.raises(ValueError, match=r"has them of 3, .* has 100 tokens"):
        write_column(open_file(path), Column("score"), [1.0, 2.0, 3.0])
    assert len(open_column(open_file(path), "score")[1]) == 100


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    message = "document 1 has 2 tokens and 3 values of weights"
    with pytest.raises(ValueError, match=message), TokenWriter(tmp_path / "t", 256, TYPES[:1]) as writer:
        writer.add([1, 2], weights=[0, 1])
        writer.add([1, 2], weights=[0, 1, 1])
    assert not list(tmp_path.iterdir())


def test_a_document_that_is_refused_leaves_the_writer_as_it_was(tmp_path: Path) -> None:
    """Nothing of it is written, though its first column fits."""
    write(tmp_path / "want", 2, 1)
    with TokenWriter(tmp_path / "t", 256, TYPES) as writer:
        writer.add([0, 1], weights=[0, 1], top_ids=[[0, 0, 0], [10, 11, 12]])
        with pytest.raises(ValueError, match="document 1 has 1 tokens and 2 values of top_ids"):
            writer.add([9], weights=[9], top_ids=[[9, 9, 9]] * 2)
        writer.add([2], weights=[2], top_ids=[[20, 22, 24]])
    assert (tmp_path / "t").read_bytes() == (tmp_path / "want").read_bytes()
    for column in TYPES:
        found, want = (column_path(tmp_path / name, column.name).read_bytes() for name in ("t", "want"))
        assert found == want


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (Column("Weights"), [1.0], "small letters"),
        (Column("labels"), [1.0], "none of tokens, labels, documents"),
        (Column("a", "float23"), [1.0], "has 'float23': use one of"),
        (Column("a", "float32", 0), [1.0], "1 to 4096 values of each token: a has width 0"),
        (Column("weights", "float32", 2), [[1.0, 1.0]], "weights are one number of each token"),
        (Column("weights"), [-1.0], "finite and at least 0: token 0 has -1.0"),
        (Column("a", "float16"), [1.0, 1e6], "that float16 holds: token 1 has 1000000.0"),
        (Column("a", "uint8"), [256], "that uint8 holds: token 0 has 256"),
        (Column("a"), [2**24, 2**24 + 1], "that float32 holds: token 1 has 16777217"),
        (Column("a", "int32"), [0.5], "must be whole numbers: a was given float64"),
        (Column("a", "float32", 2), [0.5], r"\[tokens, 2\]: a was given \[1\]"),
    ],
)
def test_what_a_column_cannot_be_is_refused(tmp_path: Path, column: Column, values: Any, message: str) -> None:
    write_tokens(tmp_path / "t", [1], 256)
    with pytest.raises(ValueError, match=message):
        write_column(open_file(tmp_path / "t"), column, values)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_column_that_does_not_fit_its_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path, 4, 3)
    weights = column_path(path, "weights")
    content = weights.read_bytes()

    def refuses(message: str) -> None:
        with pytest.raises(ValueError, match=message) as found:
            open_column(open_file(path), "weights")
        assert "\n" not in str(found.value)

    weights.write_bytes(content[:-1])
    refuses("has 142 bytes: .* has 141, cut short")
    weights.write_bytes(content[:12] + b"float99\0" + content[20:])
    refuses("has 'float99': use one of")
    weights.write_bytes(content[:8] + b"\7" + content[9:])
    refuses("version of a column must be 1: .* has 7")
    weights.write_bytes(b"TPTOKENS" + content[8:])
    refuses("starts with b'TPCOLUMN'")
    weights.unlink()
    refuses(r"has no weights, .* there is top_ids")
    # Tokens that were written anew, as many as before; and more.
    weights.write_bytes(content)
    write_tokens(path, [9, 2, 3, 4, 5, 6, 7], 256)
    refuses("written for other tokens")
    write_tokens(path, range(9), 256)
    refuses("has them of 7, .* has 9 tokens")


def test_a_directory_and_a_glob_leave_columns_out(tmp_path: Path) -> None:
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 3)
    for path in (f"{tmp_path}", f"{tmp_path}/*"):
        assert [file.path.name for file in open_source(path).files] == ["a", "b"]
    assert open_tokens(tmp_path / "a").about is not None
