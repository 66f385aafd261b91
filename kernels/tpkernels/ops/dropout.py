"""Dropout whose mask is a function of global coordinates: the same bits for any cut, on the CPU and in Triton.

    y[t, j] = x[t, j] / (1 - rate)  if word(t, j) >= rate * 2**32,  else 0
    word(t, j) = word j % 4 of Philox(key(seed, site), counter(t * ceil(row_length / 4) + j // 4, microbatch, step))

t and j are the element's row (token) and column (feature) in the global matrix. So a rank that holds some tokens or
features drops what one process would drop. Backward draws the mask again or keeps it, whichever is cheaper. Every row
begins a new Philox call, which wastes up to three words per row. Otherwise a row's position within its call would
depend on the row's number, and no kernel could load four words for four neighbours.

Here are the mask, the specification and the operator. dropout_kernel.py has the Triton kernel, host_attention.py the
dropout of attention probabilities.

Source: Srivastava et al., "Dropout", JMLR 15 (2014), section 10 (scaled while training, as usual since); Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.derivatives import refuse_tangents
from tpkernels.launch import by_triton
from tpkernels.ops.dropout_kernel import launch_dropout
from tpkernels.random import counters_at_a_time, philox_4x32, stream_key

_MASK = 0xFFFFFFFF
_MAX_STEPS, _MAX_MICROBATCHES = 1 << 40, 1 << 24


class StreamNumbers(NamedTuple):
    """A stream as plain numbers, which an operator's schema can hold: the rate, the key, counter words 2 and 3."""

    rate: float
    key0: int
    key1: int
    counter2: int
    counter3: int


@dataclass(frozen=True)
class DropoutStream:
    """What a mask depends on besides an element's position.

    Args:
        rate: the fraction dropped, 0 <= rate < 1; exact to 2**-33.
        seed: any integer.
        site: where in the model; unique there: "layer 3/attention".
        step: 0 to 2**40 - 1.
        microbatch: 0 to 2**24 - 1.

    Raises:
        ValueError: a number outside its range.
    """

    rate: float
    seed: int
    site: str
    step: int
    microbatch: int

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"a dropout rate must be at least 0 and below 1: {self.site} has {self.rate}: pass the fraction dropped"
            )
        if not 0 <= self.step < _MAX_STEPS or not 0 <= self.microbatch < _MAX_MICROBATCHES:
            raise ValueError(
                f"a dropout mask counts steps from 0 to 2**40 - 1 and microbatches from 0 to 2**24 - 1: "
                f"{self.site} is at step {self.step}, microbatch {self.microbatch}: number a step's microbatches from 0"
            )

    @property
    def numbers(self) -> StreamNumbers:
        """Return the stream as plain numbers."""
        high_step, low_step = self.step >> 32, self.step & _MASK
        key = stream_key(self.seed, f"dropout/{self.site}")
        return StreamNumbers(self.rate, *key, self.microbatch | high_step << 24, low_step)


def keep_at(stream: DropoutStream, rows: Tensor, first_column: int, num_columns: int, row_length: int) -> Tensor:
    """Draw the mask of these rows and of a range of columns.

        keep[..., j] = word(rows[...], first_column + j) >= rate * 2**32

    Args:
        stream: what the mask depends on besides the position.
        rows: int64, any shape, each >= 0: global rows.
        first_column, num_columns: global columns; the first can be any.
        row_length: columns of the global matrix.

    Returns:
        bool [*rows.shape, num_columns] on rows' device, contiguous: True where kept.

    Raises:
        ValueError: columns outside the row.

    Cost: 0.010 s per 10**6 elements on one core (AMD EPYC with AVX-512, torch 2.13), more for fewer than 10**5 elements
    or columns; extra memory 2 MB (on a GPU 500 MB).
    """
    _check_columns(stream.site, first_column, num_columns, row_length)
    return keep_by_numbers(stream.numbers, rows, first_column, num_columns, row_length)


def _check_columns(what: str, first_column: int, num_columns: int, row_length: int) -> None:
    if not 0 <= first_column <= first_column + num_columns <= row_length:
        raise ValueError(
            f"columns must lie inside their row: {what} has {num_columns} columns from {first_column} on in a row of "
            f"{row_length}: pass the global row_length and the first column's place in it"
        )


def keep_by_numbers(
    numbers: StreamNumbers, rows: Tensor, first_column: int, num_columns: int, row_length: int
) -> Tensor:
    """Return the same as `keep_at`, without its checks."""
    rate, key0, key1, *counter = numbers
    skipped = first_column % 4
    groups = torch.arange(first_column // 4, -(-(first_column + num_columns) // 4), device=rows.device)
    flat_rows = rows.reshape(-1, 1)
    keep = torch.empty(len(flat_rows), len(groups), 4, dtype=torch.bool, device=rows.device)
    num_rows = max(1, counters_at_a_time(rows.device) // max(1, len(groups)))
    for block, block_rows in zip(keep.split(num_rows), flat_rows.split(num_rows), strict=True):
        index = block_rows * -(-row_length // 4) + groups
        fixed = [torch.full_like(index, word) for word in counter]
        words = philox_4x32((index & _MASK, (index >> 32) & _MASK, *fixed), (key0, key1))
        for lane, word in enumerate(words):
            torch.ge(word, round(rate * 2**32), out=block[:, :, lane])
    whole_groups = keep.view(*rows.shape, 4 * len(groups))
    if whole_groups.shape[-1] == num_columns:
        return whole_groups
    return whole_groups[..., skipped : skipped + num_columns].clone(memory_format=torch.contiguous_format)


def _scale_kept(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Return x / (1 - rate) where kept, in x's dtype; exactly 0 elsewhere, whatever x is there."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.tensor(1 / (1 - rate), dtype=wide, device=x.device)
    # contiguous() would keep the stride of a dim of size 1, which the fake tensor does not know.
    return torch.where(keep, x.to(wide) * scale, 0).to(x.dtype).reshape(-1).view(x.shape)


def dropout_reference(x: Tensor, stream: DropoutStream, first_row: int, first_column: int, row_length: int) -> Tensor:
    """Return a block of a global matrix after dropout: the specification."""
    rows = torch.arange(first_row, first_row + x.shape[0], device=x.device)
    return _scale_kept(x, keep_at(stream, rows, first_column, x.shape[1], row_length), stream.rate)


@torch.library.custom_op("tpkernels::dropout", mutates_args=())
def _forward(
    x: Tensor,
    rate: float,
    key0: int,
    key1: int,
    counter2: int,
    counter3: int,
    first_row: int,
    first_column: int,
    row_length: int,
) -> tuple[Tensor, Tensor]:
    """Return y, and on the host path the mask for backward (with the kernel an empty tensor)."""
    if by_triton(x):
        y = launch_dropout(x, rate, (key0, key1), (counter2, counter3), first_row, first_column, row_length)
        return y, x.new_empty(0, dtype=torch.bool)
    rows = torch.arange(first_row, first_row + x.shape[0])
    keep = keep_by_numbers(
        StreamNumbers(rate, key0, key1, counter2, counter3), rows, first_column, x.shape[1], row_length
    )
    return _scale_kept(x, keep, rate), keep


@_forward.register_fake
def _(x: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    keep_shape = (0,) if by_triton(x) else x.shape
    return x.new_empty(x.shape), x.new_empty(keep_shape, dtype=torch.bool)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *ctx.numbers = inputs
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Any, ...]:
    (keep,) = ctx.saved_tensors
    dx = _forward(dy, *ctx.numbers)[0] if by_triton(dy) else _scale_kept(dy, keep, ctx.numbers[0])
    return dx, *(None for _ in ctx.numbers)


_forward.register_autograd(_backward, setup_context=_setup_context)


def dropout(
    x: Tensor, stream: DropoutStream, first_row: int = 0, first_column: int = 0, row_length: int | None = None
) -> Tensor:
    """Set random elements to 0 and scale the others, with a mask that does not depend on how the matrix is cut.

        y[i, j]  = x[i, j] / (1 - rate) if keep(first_row + i, first_column + j) else 0
        dx[i, j] = dy[i, j] / (1 - rate) by the same mask

    Args:
        x: [rows, columns], floating point, any strides, possibly without rows: a block of the global matrix.
        stream: what the mask depends on besides the position.
        first_row, first_column: the block's position in the global matrix.
        row_length: columns of the global matrix; by default x's columns are all of them.

    Returns:
        [rows, columns] of x's dtype, new and contiguous; x itself if the rate is 0.

    Raises:
        ValueError: x is not a matrix of floating-point numbers, or is not inside the global one.

    Cost: a Philox call per 4 elements: on a CPU 0.012 to 0.016 s per 10**6 elements (one core of an AMD EPYC with
    AVX-512, torch 2.13), 0.010 of it for the mask. There the mask is kept, 1 byte per element, and backward takes 0.003
    s. Elsewhere nothing is kept and the mask is drawn again; x with gaps between columns is copied first.
    Numerics: one multiplication in float32 (float64 for float64) by 1 / (1 - rate) rounded to it, rounded to x's dtype:
    equal bits on every device. A dropped element is 0 even where x is infinite or NaN.
    Source: Srivastava et al., JMLR 15 (2014); Salmon et al., SC 2011.
    """
    if x.dim() != 2 or not x.is_floating_point() or first_row < 0:
        raise ValueError(
            f"dropout takes rows of floating-point numbers at a row >= 0: {stream.site} has {tuple(x.shape)} {x.dtype} "
            f"at row {first_row}: flatten x to [rows, columns]"
        )
    row_length = x.shape[1] if row_length is None else row_length
    _check_columns(stream.site, first_column, x.shape[1], row_length)
    if stream.rate == 0:
        return x
    refuse_tangents("dropout", x)
    y: Tensor = _forward(x, *stream.numbers, first_row, first_column, row_length)[0]
    return y
