"""Matmuls as layers make them, by number of rows and by the size of a matrix that comes from memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tpkernels.ops.matmul.host import PreparedMatrix, product
from tpkernels.ops.matmul.wgrad import accumulate_wgrad

from tpengine.doctor.measure.clock import CallClock

# Of a difference between two times; a curve has no zero.
_LEAST_SHARE = 0.01
# Where caches gain less than this, times differ by noise: then all comes from memory.
_LEAST_GAIN = 0.1

Rates = dict[str, dict[int, list[tuple[float, float]]]]


def product_rates(
    clock: CallClock, dtype: torch.dtype, rows: Sequence[int], matrices: Sequence[tuple[int, int]]
) -> Rates:
    """Return operations per second by kind of product, rows and elements of the matrix.

    Args:
        clock: times calls.
        dtype: of the operands; gradients are added in float32, or in float64 for float64.
        rows: numbers of rows.
        matrices: (columns, inner) of the weights.
    """
    device, wide = clock.device, torch.promote_types(dtype, torch.float32)
    found: Rates = {}
    for columns, inner in matrices:
        weight = torch.randn(columns, inner, device=device).to(dtype)
        buffer = torch.zeros(columns, inner, device=device, dtype=wide)
        for num_rows in rows:
            x, dy = (torch.randn(num_rows, of, device=device).to(dtype) for of in (inner, columns))
            calls: dict[str, tuple[Tensor, Callable[[], object]]] = {
                "forward": (x, functools.partial(product, x, weight.T)),
                "input_gradient": (dy, functools.partial(product, dy, weight)),
                "weight_gradient": (dy, functools.partial(accumulate_wgrad, buffer, dy, x)),
            }
            if device.type == "cpu":
                forward, backward = PreparedMatrix(weight.T, num_rows), PreparedMatrix(weight, num_rows)
                calls["prepared_forward"] = x, functools.partial(product, x, forward)
                calls["prepared_input_gradient"] = dy, functools.partial(product, dy, backward)
            for kind, (hot, call) in calls.items():
                flops = 2 * num_rows * columns * inner
                points = found.setdefault(kind, {}).setdefault(num_rows, [])
                points.append((float(columns * inner), flops / clock.of_call([call], hot=[hot])))
    return found


def reference_seconds(clock: CallClock, dtype: torch.dtype, references: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return the times of products [rows, inner] @ [inner, columns], timed as a machine's file has timed them.

    Args:
        clock: times calls.
        dtype: of the operands.
        references: rows, columns and inner size of each.
    """
    found = []
    for rows, columns, inner in references:
        weight, x = (torch.randn(number, inner, device=clock.device).to(dtype) for number in (columns, rows))
        found.append(clock.of_call([functools.partial(product, x, weight.T)], hot=[x]))
    return found


def cold_shares(
    clock: CallClock, warm: CallClock, dtype: torch.dtype, sizes: tuple[int, int, int], totals: Sequence[int]
) -> list[tuple[float, float]]:
    """Return how much of what memory costs more than caches is left, by the bytes of matrices that take turns.

    Args:
        clock, warm: time calls whose operands come from memory, and as earlier calls have left them.
        dtype: of the operands.
        sizes: rows, columns and inner size of the products.
        totals: bytes of all matrices, rising.
    """
    rows, columns, inner = sizes
    num_bytes = columns * inner * dtype.itemsize
    x = torch.randn(rows, inner, device=clock.device).to(dtype)
    weights = torch.randn(max(totals) // num_bytes, columns, inner, device=clock.device).to(dtype)
    calls = [functools.partial(product, x, weight.T) for weight in weights]
    cold, hot = clock.of_call(calls[:1], hot=[x]), warm.of_call(calls[:1], hot=[x])
    # Ranks time the same calls, whatever each of them finds.
    has_gain = cold - hot >= _LEAST_GAIN * cold
    points = []
    for total in totals:
        turns = calls[: total // num_bytes]
        for call in turns:
            call()
        taken = warm.of_call(turns, hot=[x])
        share = (taken - hot) / (cold - hot) if has_gain else 1.0
        points.append((float(total), min(1.0, max(_LEAST_SHARE, share))))
    return points


def prepare_rates(clock: CallClock, dtype: torch.dtype, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return the bytes per second of converting a square weight into both forms, by bytes read and written."""
    points = []
    for size in sizes:
        num_bytes = 4 * size * size * dtype.itemsize
        weight = torch.randn(size, size).to(dtype)

        def prepare(weight: Tensor = weight) -> None:
            PreparedMatrix(weight.T, 128)
            PreparedMatrix(weight, 128)

        points.append((float(num_bytes), num_bytes / clock.of_call([prepare])))
    return points
