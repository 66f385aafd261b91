"""Matrix products on the CPU, by the faster of the two libraries in torch.

torch.mm in float32 calls MKL, which does not use processors other than Intel's fully. oneDNN, which torch calls for
compiled linear layers, does (rows overlap/... of benchmarks/results). oneDNN also multiplies faster by a matrix that
was converted once into its own layout (`PreparedMatrix`), and is as fast with parts of the rows as with all of them. A
weight needs both: several micro-batches, cut over the ranks, are multiplied by it. For a single row it is the other way
round: the product takes as long as reading the matrix, and MKL reads it faster where the longer side is contiguous.

This is the only file that uses these operators, which are not part of torch's documented interface; if they are
missing, MKL does everything. The choice depends on the machine and the shapes, never on timing, so the same run gives
the same bits.

oneDNN, which torch.mm calls for 16 bits, reads rows of the left operand to the end of an AMX tile's row, and multiplies
what it reads there by zero. A NaN or an infinity behind a row so makes NaN of that row's product: `rows_apart`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tpkernels.launch import constant_while_traced

# For smaller products the call costs more than the faster product saves.
FEWEST_MULTIPLICATIONS = 8_000_000
# Of a row of an AMX tile.
_TILE_BYTES = 64


class PreparedMatrix:
    """A matrix in the layout that products read fastest: a copy, or as it lies.

    Args:
        matrix: m [K, N], any strides. It must not change: what was copied would not. Prepare it again after a change.
        num_rows: of the left-hand sides, approximately; 1 means that most have a single row.

    Attributes:
        shape: (K, N).
        num_rows: as given.
        plain: the matrix as it lies, for products without a copy.
        laid_out: in oneDNN's own layout, for any number of rows; None if oneDNN is not used, or for one row.
        for_one_row: rows contiguous where N >= K, else columns, for one row; None if prepared for more, and where MKL
            is not slow anyway (`_mkl_is_slow`).

    Memory: K*N elements if it is copied, which for one row it is not where it lies that way.
    """

    def __init__(self, matrix: Tensor, num_rows: int) -> None:
        self.shape, self.num_rows = tuple(matrix.shape), num_rows
        self.plain = matrix
        self.laid_out: Tensor | None = None
        self.for_one_row: Tensor | None = None
        if num_rows == 1 and _mkl_is_slow(matrix):
            # Rows of a square one are read up to a fifth faster than its columns.
            self.for_one_row = matrix.contiguous() if matrix.shape[1] >= matrix.shape[0] else matrix.T.contiguous().T
        elif _is_for_onednn(matrix, num_rows) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            self.laid_out = torch.ops.mkldnn._reorder_linear_weight(matrix.t(), num_rows)


Matrix = Tensor | PreparedMatrix


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply: y[M, N] = x[M, K] @ m[K, N].

    Args:
        x: any strides, on any device.
        matrix: m, any strides, or prepared.
        out: where the product is written; default a new tensor.

    Numerics: in the operands' dtype, under autocast too; the same bits for the same operands and shapes.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return product(x, matrix, out)
    y = _by_onednn(x, matrix)
    if y is not None:
        return y if out is None else out.copy_(y)
    x, plain = rows_apart(x), _for_mkl(matrix, x.shape[0])
    return torch.mm(x, plain) if out is None else torch.mm(x, plain, out=out)


def accumulate_product(out: Tensor, x: Tensor, matrix: Matrix) -> Tensor:
    """Multiply and add: out[M, N] += x[M, K] @ m[K, N]. Returns out."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return accumulate_product(out, x, matrix)
    y = _by_onednn(x, matrix)
    if y is not None:
        return out.add_(y)
    return out.addmm_(rows_apart(x), _for_mkl(matrix, x.shape[0]))


def rows_apart(x: Tensor) -> Tensor:
    """Return a left operand x[M, K] of torch.mm behind whose rows lie zeros, where a CPU's product may read them.

    Returns:
        x itself, unless it has 16 bits per element, contiguous rows, on a CPU, and K does not fill the rows of AMX
        tiles; then a copy, its rows as far apart as whole tiles.
    """
    num_columns = x.shape[1]
    tail = -num_columns % (_TILE_BYTES // x.dtype.itemsize)
    if x.device.type != "cpu" or x.dtype.itemsize != 2 or x.stride(1) != 1 or not tail:
        return x
    wide = x.new_zeros(x.shape[0], num_columns + tail)
    rows = wide[:, :num_columns]
    rows.copy_(x)
    return rows


def rows_are_independent(matrix: Matrix, num_rows: int, parts: Sequence[int]) -> bool:
    """Return whether multiplying rows in parts gives the same bits as multiplying all at once.

    The order of sums depends on the sizes, not on the values, so it is tried once per combination of sizes, with random
    values. It is not tried if the order may also depend on the operands' addresses (MKL).

    Args:
        matrix: m.
        num_rows: of the left-hand side.
        parts: rows of each part, in order; their sum is num_rows.

    Cost: two products the first time for each combination of sizes.
    """
    if not isinstance(matrix, PreparedMatrix) or matrix.laid_out is None:
        return False
    return _parts_give_the_same(matrix.shape, matrix.num_rows, num_rows, tuple(parts), torch.get_num_threads())


@functools.lru_cache(maxsize=1024)
def _parts_give_the_same(
    shape: tuple[int, ...], prepared_rows: int, num_rows: int, parts: tuple[int, ...], num_threads: int
) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[0], generator=generator)
    matrix = PreparedMatrix(torch.randn(shape, generator=generator), prepared_rows)
    return torch.equal(product(x, matrix), torch.cat([product(part, matrix) for part in x.split(parts)]))


def _for_mkl(matrix: Matrix, num_rows: int) -> Tensor:
    """Return the matrix as MKL multiplies so many rows by it."""
    if isinstance(matrix, Tensor):
        return matrix
    return matrix.plain if matrix.for_one_row is None or num_rows != 1 else matrix.for_one_row


def _by_onednn(x: Tensor, matrix: Matrix) -> Tensor | None:
    """Return x @ m by oneDNN, or None where MKL is the one to ask."""
    num_rows = x.shape[0]
    if isinstance(matrix, Tensor):
        right = matrix.t() if _is_for_onednn(matrix, num_rows) else None
    elif matrix.for_one_row is None:
        right = matrix.laid_out if num_rows else None
    else:
        right = matrix.plain.t() if num_rows > 1 and _is_for_onednn(matrix.plain, num_rows) else None
    if right is None:
        return None
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, right, None, "none", [], "")
    return y


def _is_for_onednn(matrix: Tensor, num_rows: int) -> bool:
    return num_rows * matrix.shape[0] * matrix.shape[1] >= FEWEST_MULTIPLICATIONS and _mkl_is_slow(matrix)


def _mkl_is_slow(matrix: Tensor) -> bool:
    """Return whether MKL does not use this processor fully for such a matrix, and there is oneDNN: see above."""
    return matrix.dtype == torch.float32 and matrix.device.type == "cpu" and has_onednn()


@constant_while_traced
def has_onednn() -> bool:
    """Return whether oneDNN's linear operator exists, and MKL is slower on this processor."""
    return _has_onednn()


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise") and not _is_intel()


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
