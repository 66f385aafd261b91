"""Grouped products on a CPU: one torch product for each expert that has rows, on parts of tensors, without copies.

In float64 they serve a GPU too, where the host then waits for the offsets.

torch.mm writes where it is told. oneDNN (matmul/host.py) cannot, and is not faster on parts of so few rows.

With `fixed` an expert's operands and its result begin at a cache line, as copies if they do not: a library may add in
another order elsewhere, and where an expert's rows lie depends on how many rows the experts before it have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.ops.activation import activation_forward
from tpkernels.ops.matmul.host import rows_apart
from tpkernels.ops.matmul.wgrad import accumulate_wgrad

# Of a cache line; torch's own memory begins at one.
_LINE_BYTES = 64

Term = tuple[Tensor, Tensor]


def multiply_by_expert(terms: Sequence[Term], offsets: Tensor, transposed: bool, fixed: bool) -> Tensor:
    """Return y[R, N], the sum of the terms' products x_r w_e(r).T, or x_r w_e(r) if transposed; zeros beyond the last.

    Args:
        terms: x[R, K] and w[E, N, K], or w[E, K, N] if transposed; one or several.
    """
    x, w = terms[0]
    y = x.new_empty(len(x), w.shape[2] if transposed else w.shape[1])
    for expert, rows in _rows_of_experts(offsets, len(x), (y,)):
        y_e = y[rows]
        out = at_a_line(y_e) if fixed else y_e
        for i, (x, w) in enumerate(terms):
            x_e, w_e = x[rows], w[expert]
            if fixed:
                x_e, w_e = at_a_line(x_e), at_a_line(w_e)
            torch.addmm(out, rows_apart(x_e), w_e if transposed else w_e.T, beta=min(i, 1), out=out)
        if out is not y_e:
            y_e.copy_(out)
    return y


def swiglu_by_expert(
    x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, keeps_y: bool, fixed: bool
) -> tuple[Tensor, Tensor]:
    """Return h[R, F] and y[R, 2F], gate and up side by side, which has no elements unless it is kept."""
    width = w_gate.shape[1]
    h, y = x.new_empty(len(x), width), x.new_empty((len(x), 2 * width) if keeps_y else 0)
    for expert, rows in _rows_of_experts(offsets, len(x), (h, y) if keeps_y else (h,)):
        x_e, weights = x[rows], (w_gate[expert], w_up[expert])
        y_e = y[rows] if keeps_y else x.new_empty(len(x_e), 2 * width)
        out = y_e
        if fixed:
            x_e, out, weights = at_a_line(x_e), at_a_line(y_e), (at_a_line(weights[0]), at_a_line(weights[1]))
        x_e = rows_apart(x_e)
        for half, weight in zip(out.split(width, dim=1), weights, strict=True):
            torch.mm(x_e, weight.T, out=half)
        if out is not y_e:
            y_e.copy_(out)
        h[rows] = activation_forward(out, "silu", True)
    return h, y


def accumulate_by_expert(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, fixed: bool) -> None:
    """Add dy_e.T @ x_e to buffer[e], of each expert that has rows."""
    for expert, rows in _rows_of_experts(offsets, len(x)):
        of_expert, dy_e, x_e = buffer[expert], dy[rows], x[rows]
        if not fixed:
            accumulate_wgrad(of_expert, dy_e, x_e)
            continue
        total = at_a_line(of_expert)
        accumulate_wgrad(total, at_a_line(dy_e), at_a_line(x_e))
        if total is not of_expert:
            of_expert.copy_(total)


def _rows_of_experts(offsets: Tensor, num_rows: int, outputs: Sequence[Tensor] = ()) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which they are; write zeros to the outputs' rows beyond the last.

    Raises:
        ValueError: the offsets fall, do not begin with 0, or end beyond the rows.
    """
    starts: list[int] = offsets.tolist()
    if starts[0] or starts[-1] > num_rows or any(start > end for start, end in itertools.pairwise(starts)):
        raise ValueError(
            f"offsets must rise from 0 to at most the number of rows, {num_rows}: got {starts}: pass those of "
            "sort_by_expert"
        )
    for output in outputs:
        output[starts[-1] :].zero_()
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        if start < end:
            yield expert, slice(start, end)


def at_a_line(x: Tensor) -> Tensor:
    """Return x contiguous and beginning at a cache line: itself, or a copy."""
    if x.is_contiguous() and x.data_ptr() % _LINE_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
