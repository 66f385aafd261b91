"""Matrix products on the CPU by the faster of the two libraries that torch carries.

torch.mm in float32 calls MKL, which on processors that are not Intel's leaves some of the machine unused; oneDNN, which
torch calls for compiled linear layers, does not (rows overlap/... of benchmarks/results). oneDNN also multiplies faster
by a matrix that was brought into its own layout once (`PreparedMatrix`), and by parts of the rows as fast as by all of
them: what a weight needs that several micro-batches, cut over the ranks, are multiplied by.

This is the only file that touches these operators, which are not part of torch's documented interface; where they are
missing, MKL does it all. The choice follows from the machine and the shapes, never from a time: the same run gives the
same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# Below, the call costs more than the faster product saves.
_FEWEST_MULTIPLICATIONS = 8_000_000


class PreparedMatrix:
    """A copy of a matrix in the layout that its products read fastest.

    Args:
        matrix: m [K, N], any strides. Later changes of it are not seen: make another one after each.
        num_rows: of the left-hand sides, about.

    Attributes:
        shape: (K, N).
        num_rows: as given.

    Memory: K*N elements; none where oneDNN is not used, and `matrix` itself is.
    """

    def __init__(self, matrix: Tensor, num_rows: int) -> None:
        self.shape, self.num_rows = tuple(matrix.shape), num_rows
        self.plain = matrix
        self.laid_out: Tensor | None = None
        reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
        if reorder is not None and _is_for_onednn(matrix, num_rows):
            self.laid_out = reorder(matrix.t(), num_rows)


Matrix = Tensor | PreparedMatrix


def product(x: Tensor, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply: y[M, N] = x[M, K] @ m[K, N].

    Args:
        x: any strides, on any device.
        matrix: m, any strides; or prepared.
        out: where the product goes; default a new tensor.

    Numerics: in the operands' dtype, under autocast too; the same bits for the same operands and shapes.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return product(x, matrix, out)
    y = _by_onednn(x, matrix)
    if y is not None:
        return y if out is None else out.copy_(y)
    plain = matrix.plain if isinstance(matrix, PreparedMatrix) else matrix
    return torch.mm(x, plain) if out is None else torch.mm(x, plain, out=out)


def accumulate_product(out: Tensor, x: Tensor, matrix: Matrix) -> Tensor:
    """Multiply and add: out[M, N] += x[M, K] @ m[K, N]. Returns out."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return accumulate_product(out, x, matrix)
    y = _by_onednn(x, matrix)
    if y is not None:
        return out.add_(y)
    return out.addmm_(x, matrix.plain if isinstance(matrix, PreparedMatrix) else matrix)


def rows_are_independent(matrix: Matrix, num_rows: int, parts: Sequence[int]) -> bool:
    """Whether multiplying rows in parts gives the bits of multiplying them all at once.

    The order of sums in a product follows from its sizes, not from its values, hence it is tried once for each sizes,
    with random ones. It is not asked where the order may also follow from where operands lie (MKL).

    Args:
        matrix: m.
        num_rows: of the left-hand side.
        parts: rows of each part, in order; their sum is num_rows.

    Cost: two products the first time for each sizes.
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


def _by_onednn(x: Tensor, matrix: Matrix) -> Tensor | None:
    if isinstance(matrix, PreparedMatrix):
        right = matrix.laid_out if len(x) else None
    else:
        right = matrix.t() if _is_for_onednn(matrix, len(x)) else None
    if right is None:
        return None
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, right, None, "none", [], "")
    return y


def _is_for_onednn(matrix: Tensor, num_rows: int) -> bool:
    return (
        matrix.dtype == torch.float32
        and matrix.device.type == "cpu"
        and num_rows * matrix.shape[0] * matrix.shape[1] >= _FEWEST_MULTIPLICATIONS
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    """Whether oneDNN's linear operator is there and MKL does not serve the processor as well."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise") and not _is_intel()


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
