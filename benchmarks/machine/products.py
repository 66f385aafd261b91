"""Matmuls as layers make them, by number of rows and by the size of a matrix that comes from memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from tpkernels.ops.matmul.host import PreparedMatrix, product
from tpkernels.ops.matmul.wgrad import accumulate_wgrad

from benchmarks.machine.clock import COLD_BYTES, Clock

Rates = dict[str, dict[int, list[tuple[float, float]]]]


def product_rates(
    clock: Clock, dtype: torch.dtype, rows: Sequence[int], matrices: Sequence[tuple[int, int]], cold_bytes: int = 0
) -> Rates:
    """Return operations per second by kind of product, rows and elements of the matrix.

    Args:
        clock: times calls.
        dtype: of the operands; gradients are added in float32, or in float64 for float64.
        rows: numbers of rows.
        matrices: (columns, inner) of the weights.
        cold_bytes: how many bytes of matrices take turns; default COLD_BYTES.
    """
    device, wide = clock.device, torch.promote_types(dtype, torch.float32)
    found: Rates = {}
    for columns, inner in matrices:
        number = max(2, -(-(cold_bytes or COLD_BYTES) // (columns * inner * dtype.itemsize)))
        weights = torch.randn(number, columns, inner, device=device).to(dtype)
        buffers = torch.zeros(number, columns, inner, device=device, dtype=wide)
        for num_rows in rows:
            x, dy = (torch.randn(num_rows, of, device=device).to(dtype) for of in (inner, columns))
            calls: dict[str, list[Callable[[], object]]] = {
                "forward": [functools.partial(product, x, w.T) for w in weights],
                "input_gradient": [functools.partial(product, dy, w) for w in weights],
                "weight_gradient": [functools.partial(accumulate_wgrad, b, dy, x) for b in buffers],
            }
            if device.type == "cpu":
                prepared = [(PreparedMatrix(w.T, num_rows), PreparedMatrix(w, num_rows)) for w in weights]
                calls["prepared_forward"] = [functools.partial(product, x, of) for of, _ in prepared]
                calls["prepared_input_gradient"] = [functools.partial(product, dy, of) for _, of in prepared]
            for kind, of_kind in calls.items():
                flops = 2 * num_rows * columns * inner
                points = found.setdefault(kind, {}).setdefault(num_rows, [])
                points.append((float(columns * inner), flops / clock.of_call(of_kind)))
    return found


def prepare_rates(clock: Clock, dtype: torch.dtype, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return the bytes per second of converting a square weight into one form, by bytes read and written.

    Copies are kept while the next are made, as in a step, in which they take new memory.
    """
    points = []
    for size in sizes:
        num_bytes = 2 * size * size * dtype.itemsize
        weights = [torch.randn(size, size).to(dtype) for _ in range(max(2, min(16, COLD_BYTES // num_bytes)))]
        kept: list[PreparedMatrix] = []

        def prepare(weights: list[torch.Tensor] = weights, kept: list[PreparedMatrix] = kept) -> None:
            if len(kept) == 2 * len(weights):
                kept.clear()
            kept.append(PreparedMatrix(weights[len(kept) % len(weights)].T, 128))

        points.append((float(num_bytes), num_bytes / clock.of_call([prepare])))
    return points
