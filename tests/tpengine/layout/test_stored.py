"""Rung: pure. Where a box lies in a file's tensor; a wrong table is refused. Reading follows it: test_read.py."""

from __future__ import annotations

import pytest

from tpengine.layout.stored import FileBox, Stored


def test_a_box_in_the_file() -> None:
    # q, k, v of a Conv1D: v's rows 2 to 6 of columns 1 to 3 are 4 columns in 2 rows.
    v = Stored("qkv", (8, 24), transposed=True, rows=(16, 24))
    assert v.file_box((2, 1), (4, 2)) == FileBox(1, 2, 18, 4)
    # A vocabulary of 10 padded to 16: the second of two ranks holds 2 rows of it.
    assert Stored("table", (10, 4)).file_box((8, 0), (8, 4)) == FileBox(8, 2, 0, 4)
    assert Stored("table", (10, 4)).file_box((12, 0), (4, 4)).num_rows == 0


@pytest.mark.parametrize(
    ("shape", "transposed", "rows", "message"),
    [
        ((4,), True, None, "only a matrix is stored transposed: a has shape [4]: correct the table"),
        (
            (4, 3),
            False,
            (2, 5),
            "a parameter's rows must lie in the tensor that holds them: a [4, 3] has 4 rows, not 2 to 5: correct the "
            "table",
        ),
        (
            (4, 3),
            True,
            (0, 4),
            "a parameter's rows must lie in the tensor that holds them: a [4, 3] has 3 rows, not 0 to 4: correct the "
            "table",
        ),
    ],
)
def test_a_wrong_table_is_refused(
    shape: tuple[int, ...], transposed: bool, rows: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        Stored("a", shape, transposed, rows)
    assert str(refused.value) == message
