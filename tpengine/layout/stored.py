"""Where a parameter of ours lies in a directory of Hugging Face weights. No torch.

A file's tensor may hold a product transposed (GPT-2's Conv1D), or several parameters of ours below each other (a packed
q, k, v), and has no padding rows. Or the matrices that ours stacks lie apart, a tensor each (the experts of a layer).
`Stored` says this for one parameter; reading, checking and writing all follow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpengine.architectures.table import NUMBER


@dataclass(frozen=True)
class FileBox:
    """The part of a file's tensor, folded to a matrix, that a box of a parameter covers.

    Attributes:
        first_row: of the matrix.
        num_rows: from there on.
        first_column: of the matrix.
        num_columns: from there on.
    """

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True)
class Stored:
    """One parameter, as a part of one tensor of a file, or as several of them.

    Attributes:
        name: the tensor's, in the file; with `#` for the number of each of several.
        shape: the whole tensor's, in the file.
        transposed: the file holds columns where the parameter has rows; of matrices only.
        rows: the parameter's row 0 is row rows[0] of the file's tensor, and so on to rows[1], excluded; rows of the
            parameter beyond are padding, zero. Rows are counted as the parameter has them: of a transposed tensor they
            are its columns. None: all.
        num_stacked: the parameter stacks so many tensors of the file, of that shape each; 0 where it is one tensor.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    rows: tuple[int, int] | None = None
    num_stacked: int = 0

    def __post_init__(self) -> None:
        """Check what a table of an architecture's own may get wrong.

        Raises:
            ValueError: transposed but no matrix, or rows that the tensor does not have.
        """
        if self.transposed and len(self.shape) != 2:
            raise ValueError(
                f"only a matrix is stored transposed: {self.name} has shape {list(self.shape)}: correct the table"
            )
        if self.rows is not None and not 0 <= self.rows[0] <= self.rows[1] <= self.num_file_rows:
            raise ValueError(
                f"a parameter's rows must lie in the tensor that holds them: {self.name} {list(self.shape)} has "
                f"{self.num_file_rows} rows, not {self.rows[0]} to {self.rows[1]}: correct the table"
            )

    def apart(self, first: int = 0, num: int | None = None) -> Iterator[Stored]:
        """Yield the tensors of the files that are the parameter: itself, or of those that it stacks some.

        Args:
            first: the first of them.
            num: how many; None for all behind it.
        """
        if not self.num_stacked:
            yield self
            return
        for number in range(first, self.num_stacked if num is None else first + num):
            yield replace(self, name=self.name.replace(NUMBER, str(number)), num_stacked=0)

    @property
    def num_file_rows(self) -> int:
        """Rows of the file's tensor, counted as the parameter has them."""
        return (self.shape[1] if self.transposed else self.shape[0]) if self.shape else 1

    @property
    def row_range(self) -> tuple[int, int]:
        """The rows of the file's tensor that are the parameter's: from the first to the second, excluded."""
        return self.rows or (0, self.num_file_rows)

    @property
    def matrix(self) -> tuple[int, int]:
        """The file's tensor as a matrix: its first dim, and all others folded into one."""
        return (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)

    def file_box(self, offset: tuple[int, ...], size: tuple[int, ...]) -> FileBox:
        """Return what a box of the parameter covers in the file; padding rows are left out.

        Args:
            offset: of the box in the parameter, an entry a dim.
            size: of the box.

        Raises:
            ValueError: the box cuts a third dim of one tensor, which no layout does.
        """
        assert not self.num_stacked, f"{self.name} is several tensors: ask each (apart)"
        if not self.shape:
            return FileBox(0, 1, 0, 1)
        inner = self.shape[2:]
        if any(offset[2:]) or tuple(size[2:]) != inner:
            raise ValueError(
                f"a layout cuts a parameter's first two dims only: {self.name} {list(self.shape)}, box of "
                f"{list(size)} at {list(offset)}: leave the others whole"
            )
        begin, end = self.row_range
        first = min(begin + offset[0], end)
        rows = first, min(begin + offset[0] + size[0], end) - first
        fold = math.prod(inner)
        columns = (offset[1] * fold, size[1] * fold) if len(size) > 1 else (0, 1)
        return FileBox(*columns, *rows) if self.transposed else FileBox(*rows, *columns)
