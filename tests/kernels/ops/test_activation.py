"""Rung: host, interpreter, GPU. SwiGLU, GEGLU and GELU, forward and backward.

Only a GPU shows the compiled kernels' numbers, bfloat16 in them, and its own exp and erf.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung, every_rung_and_dtype, every_rung_and_grid
from torch import Tensor
from tpkernels.ops.activation import (
    activation_backward_op,
    activation_op,
    activation_reference,
    geglu,
    gelu,
    swiglu,
)

# Rows and columns of the result: one row, rows and columns that fill no block, no row, several blocks.
SIZES = [(1, 1500), (63, 65), (0, 65), (13, 257)]
PART = [(13, 65)]
FEW = [(1, 1), (1, 100), (65, 1), (3, 257)]
KINDS = ["silu", "gelu", "gelu_tanh"]
KIND_AND_GATED = [(kind, gated) for kind in KINDS for gated in (False, True)]


def public(kind: str, gated: bool) -> Callable[[Tensor], Tensor]:
    """The function that a user calls; silu alone has none."""
    if kind == "silu":
        return swiglu if gated else lambda y: activation_op(y, "silu", False)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return lambda y: (geglu if gated else gelu)(y, approximate)


def operand(rows: int, columns: int, gated: bool, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """y where every activation bends and some way beyond, with gaps or as the middle of longer rows.

    Even, not normal: the largest errors of many elements tell more than those of the one largest element.
    """
    generator = torch.Generator().manual_seed(seed)
    y = 16 * torch.rand(rows, columns * (1 + gated), generator=generator) - 8
    return (with_gaps if seed == 1 else with_longer_rows)(y.to(device, dtype)).requires_grad_()


def check_all(device: str, dtype: torch.dtype, whole: bool) -> None:
    for kind, gated in KIND_AND_GATED:
        function = public(kind, gated)
        sizes = SIZES if gated else SIZES[1:3]
        for rows, columns in sizes if whole else PART:
            check_errors(
                f"{kind} {gated=} {(rows, columns)}",
                lambda y, function=function: function(y),
                # torch's own exp and erf differ between vectors and single elements by more than a rounding.
                lambda y, kind=kind, gated=gated: activation_reference(y.contiguous(), kind, gated),
                lambda seed, rows=rows, columns=columns, gated=gated: {
                    "y": operand(rows, columns, gated, dtype, device, seed)
                },
            )


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all, dtype, whole)


def check_few(device: str, whole: bool, same_bits: bool) -> None:
    """A few elements are what they are among many."""
    tolerance = {"rtol": 0, "atol": 0} if same_bits else {}
    for kind, gated in KIND_AND_GATED if whole else KIND_AND_GATED[1::4]:
        many = operand(65, 257, gated, torch.float32, device)
        slope = torch.randn(65, 257, generator=torch.Generator().manual_seed(1)).to(device)
        h = public(kind, gated)(many)
        (dy,) = torch.autograd.grad(h, many, slope)
        for rows, columns in FEW:
            y = torch.cat([part[:rows, :columns] for part in many.detach().chunk(1 + gated, dim=1)], dim=1)
            y.requires_grad_()
            with unwritten_is_nan():
                got = public(kind, gated)(y)
                (got_dy,) = torch.autograd.grad(got, y, slope[:rows, :columns])
            torch.testing.assert_close(got, h[:rows, :columns], **tolerance)
            expected = torch.cat([part[:rows, :columns] for part in dy.chunk(1 + gated, dim=1)], dim=1)
            torch.testing.assert_close(got_dy, expected, **tolerance)


@pytest.mark.by_default("host", "gpu")
@every_rung_and_grid
def test_few_elements(rung: Rung, whole: bool) -> None:
    # torch's own exp and erf differ between vectors and single elements.
    rung(check_few, whole, rung.name != "host")


def check_large_gates(device: str, dtype: torch.dtype) -> None:
    """Far from 0 every activation is the larger of gate and 0, exactly, and its slope 1 or 0."""
    gate = torch.tensor([[1e4, -1e4, 3e4, -3e4, 50, -200]], device=device, dtype=dtype)
    up = torch.tensor([[2.0, 2, -1, -1, 0.5, 3]], device=device, dtype=dtype)
    for kind in KINDS:
        y = torch.cat([gate, up], dim=1).requires_grad_()
        h = public(kind, True)(y)
        (dy,) = torch.autograd.grad(h.sum(), y)
        assert torch.equal(h, gate.clamp(min=0) * up), (kind, h)
        assert torch.equal(dy, torch.cat([(gate > 0) * up, gate.clamp(min=0)], dim=1)), (kind, dy)


@every_rung_and_dtype
def test_large_gates(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_large_gates, dtype)


def check_infinities(device: str) -> None:
    """NaN stays NaN, and infinities are torch's; but of inf its gelu makes inf or NaN, and inf is always right."""
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]], device=device)
    for kind in KINDS:
        y = values.clone().requires_grad_()
        results = []
        for function in (public(kind, False), lambda y, kind=kind: activation_reference(y, kind, False)):
            h = function(y)
            results.append((h.detach(), torch.autograd.grad(h.sum(), y)[0]))
        (h, dy), (expected, expected_dy) = results
        assert h[0, 0] == torch.inf or (h[0, 0].isnan() and expected[0, 0].isnan()), (kind, h)
        assert torch.equal(h[:, 1:].isnan(), expected[:, 1:].isnan()), (kind, h)
        assert torch.equal(dy.isnan(), expected_dy.isnan()), (kind, dy)


@every_rung
def test_infinities(rung: Rung) -> None:
    rung(check_infinities)


def check_layouts(device: str) -> None:
    """A slope without memory of its own, rows anywhere, columns apart: the same bits as of contiguous tensors."""
    y = operand(7, 65, True, torch.float32, device).detach().contiguous()
    for kind, gated in KIND_AND_GATED:
        function, leaf = public(kind, gated), y.clone().requires_grad_()
        h = function(leaf)
        (expected,) = torch.autograd.grad(h, leaf, torch.ones_like(h), retain_graph=True)
        assert torch.equal(torch.autograd.grad(h.sum(), leaf)[0], expected)
        for view in (y.t().contiguous().t(), y.repeat_interleave(2, dim=0)[::2]):
            with unwritten_is_nan():
                got = function(view)
                dy = activation_backward_op(with_longer_rows(torch.ones_like(h)), view, kind, gated)
            assert got.is_contiguous() and dy.is_contiguous()
            assert torch.equal(got, h) and torch.equal(dy, expected)


@every_rung
def test_layouts(rung: Rung) -> None:
    rung(check_layouts)


def check_float64(device: str) -> None:
    """Nothing passes through float32 in float64, not even constants."""
    for kind, gated in KIND_AND_GATED:
        y = operand(9, 5, gated, torch.float64, device)
        results = []
        for function in (public(kind, gated), lambda y, kind=kind, gated=gated: activation_reference(y, kind, gated)):
            h = function(y)
            results.append((h, torch.autograd.grad(h.square().sum(), y)[0]))
        torch.testing.assert_close(*results)


@every_rung
def test_float64(rung: Rung) -> None:
    rung(check_float64)


@pytest.mark.parametrize(("kind", "gated"), KIND_AND_GATED)
def test_gradcheck_of_host_path_and_reference(kind: str, gated: bool) -> None:
    y = operand(3, 5, gated, torch.float64, "cpu")
    assert torch.autograd.gradcheck(public(kind, gated), y)
    assert torch.autograd.gradcheck(lambda y: activation_reference(y, kind, gated), y)


# By default all kinds of 5 rows.
@pytest.mark.by_default("gelu-False-5", "silu-True-5")
@pytest.mark.parametrize("rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (0, 1)), 5])
@pytest.mark.parametrize(("kind", "gated"), KIND_AND_GATED)
def test_opcheck(kind: str, gated: bool, rows: int) -> None:
    y = operand(rows, 7, gated, torch.float32, "cpu")
    torch.library.opcheck(activation_op, (y, kind, gated))
    torch.library.opcheck(activation_backward_op, (torch.ones(rows, 7), y.detach(), kind, gated))


def test_compiled_as_eager() -> None:
    y = operand(6, 5, True, torch.float32, "cpu")

    def double(y: Tensor) -> Tensor:
        return gelu(geglu(2 * y, "tanh")) + swiglu(y)

    outcomes = []
    for function in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        h = function(y)
        outcomes.append((h, torch.autograd.grad(h.square().sum(), y)[0]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def test_any_shape_before_the_columns() -> None:
    y = torch.randn(2, 3, 4, 6)
    assert torch.equal(swiglu(y).view(24, 3), swiglu(y.view(24, 6)))
    assert gelu(y[0, 0, 0]).shape == (6,) and geglu(y[:, :, 1:3].transpose(0, 2)).shape == (2, 3, 2, 3)


def test_only_the_input_is_kept() -> None:
    kept = []
    y = operand(4, 6, True, torch.float32, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda _: y):
        swiglu(y)
    assert kept == [y.data_ptr()]


@pytest.mark.parametrize(
    ("function", "y", "message"),
    [
        (swiglu, torch.ones(3, 5), r"gated activation takes y\[..., 2F\] .* y is \(3, 5\) .* lay gate and up side"),
        (geglu, torch.ones(3, 0), r"F at least 1: y is \(3, 0\)"),
        (gelu, torch.ones(3, 4, dtype=torch.int64), r"an activation takes y\[..., F\] .* torch.int64: reshape"),
        (gelu, torch.ones(()), r"y is \(\)"),
        (lambda y: gelu(y, "erf"), torch.ones(3, 4), "one of none, tanh: got erf"),
        (lambda y: geglu(y, "sigmoid"), torch.ones(3, 4), "one of none, tanh: got sigmoid"),
    ],
)
def test_what_does_not_fit_is_refused(function: Callable[[Tensor], Tensor], y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(y)
