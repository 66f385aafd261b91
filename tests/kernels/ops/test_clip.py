"""Rung: host, interpreter, GPU. Sums of squares of many tensors, what follows from them, and passes over many tensors.

Only a GPU shows the compiled kernels' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.kernels.precision import unwritten_is_nan
from support.kernels.rungs import Rung, every_rung, every_rung_and_dtype
from torch import Tensor
from tpkernels.launch import Target, observed
from tpkernels.ops.buffers import launch_multiply_, multiply_op_, scale_all_, zero_all_
from tpkernels.ops.clip import (
    Judged,
    judged,
    judged_op,
    judged_reference,
    launch_judged,
    launch_square_sums,
    square_sums,
    square_sums_op,
)
from tpkernels.ops.tensor_table import CHUNK, _table

INF, NAN = math.inf, math.nan


def many(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of many sizes and layouts; the last begins at no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 1023, 1024, CHUNK, CHUNK + 1100, 3 * CHUNK)
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    return [*tensors, tensors[3].view(32, 32).T.clone(), torch.cat([tensors[2], tensors[2]])[500:1500]]


def check_squares(device: str, dtype: torch.dtype) -> None:
    """At most twice as wrong as torch's norms in the same dtype; zeros at the places of no tensor."""
    tensors = many(device, dtype)
    places = [2 + 2 * i for i in range(len(tensors))]
    with unwritten_is_nan():
        figures = square_sums(tensors, places, 2 * len(tensors) + 3)
        again = square_sums(tensors, places, 2 * len(tensors) + 3)
    assert figures.dtype == torch.float64 and torch.equal(figures, again)
    want = torch.stack([x.double().square().sum() for x in tensors])
    of_torch = torch.stack(torch._foreach_norm(tensors)).double().square()
    allowed = 2 * ((of_torch - want).abs() / want).nan_to_num().max()
    at_places = torch.tensor(places, device=device)
    assert ((figures[at_places] - want).abs() <= allowed * want).all()
    figures[at_places] = 0
    assert not figures.any()


@every_rung_and_dtype
def test_sums_of_squares(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_squares, dtype)


def check_accuracy(device: str) -> None:
    """The kernel adds few numbers in float32: its sums are as close as float32's rounding of the squares."""
    x = torch.randn(4 * CHUNK, generator=torch.Generator().manual_seed(0)).to(device)
    exact = x.double().square().sum()
    torch.testing.assert_close(square_sums([x], [0], 1)[0], exact, rtol=1e-7, atol=0)
    # What a second moment could not hold is no finite norm, although float64 could.
    assert square_sums([torch.full((5,), 1e20, device=device)], [0], 1).isinf()
    assert square_sums([torch.full((5,), NAN, device=device)], [0], 1).isnan()


@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_sums_of_squares_are_accurate_and_overflow_as_moments_do(rung: Rung) -> None:
    rung(check_accuracy)


STEPS: Sequence[dict[str, Any]] = (
    {},
    {"clip_norm": 1.0},
    {"clip_norm": 1.0, "scale": 4096.0},
    {"clip_norm": 1e9, "scale": 2.0},
    {"loss": NAN},
    {"loss": -INF},
    {"square": INF, "clip_norm": 1.0},
    {"square": NAN, "clip_norm": 1.0},
    {"usable": False},
    {"most_loss": 2.0},
    {"most_norm": 1.0},
    {"most_norm": 1.0, "loss": NAN},
    {"most_loss": 4.0, "most_norm": 1e5},
)


def check_judged(device: str) -> None:
    """What the kernel says of steps of every kind is what the specification says; only the sum's order differs."""
    squares = torch.rand(700, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for step in STEPS:
        some = squares.clone()
        some[-1] = step.get("square", 0.5)
        loss = torch.tensor(step.get("loss", 2.5), dtype=torch.float64, device=device)
        usable = torch.tensor(step.get("usable", True), device=device)
        numbers = [step.get(name, INF) for name in ("most_loss", "most_norm")]
        numbers += [step.get("clip_norm", 0.0), step.get("scale", 1.0)]
        want = judged_reference(some, loss, usable, *numbers)
        ours = judged(
            some,
            loss,
            usable,
            most_loss=numbers[0],
            most_norm=numbers[1],
            clip_norm=numbers[2],
            loss_scale=numbers[3],
        )
        # Of a step that is skipped nobody reads the factor.
        read = slice(0, Judged.FACTOR if want[Judged.SKIP] else None)
        torch.testing.assert_close(ours[read], want[read], rtol=1e-14, atol=0, equal_nan=True, msg=str(step))


@every_rung
def test_what_follows_from_a_step(rung: Rung) -> None:
    rung(check_judged)


def test_a_step_that_is_skipped_and_one_that_leaps() -> None:
    squares, loss, yes = torch.tensor([9.0, 16.0]).double(), torch.tensor(2.0).double(), torch.tensor(True)
    of_step = judged(squares, loss, yes, clip_norm=1.0, loss_scale=0.5)
    assert of_step.tolist() == [2.0, 10.0, 0.0, 0.0, 1.0, 0.2]
    assert judged(squares, loss, yes, most_norm=4.0)[[Judged.SKIP, Judged.SPIKE]].tolist() == [1, 1]
    assert judged(squares, loss, ~yes)[[Judged.SKIP, Judged.SPIKE, Judged.USABLE]].tolist() == [1, 0, 0]


def check_passes(device: str, dtype: torch.dtype) -> None:
    """Cleared and multiplied, of two dtypes at once; what lies beside a view stays."""
    for factor in (None, torch.tensor(0.25, device=device), torch.tensor(3.0, dtype=torch.float64, device=device)):
        tensors = [*many(device, dtype), torch.ones(5, dtype=torch.float64, device=device)]
        before, base = [x.clone() for x in tensors], tensors[-2]._base
        assert base is not None
        outside = base.clone()
        if factor is None:
            zero_all_(tensors)
        else:
            scale_all_(tensors, factor)
        for x, start in zip(tensors, before, strict=True):
            wide = torch.promote_types(x.dtype, torch.float32)
            want = torch.zeros_like(start) if factor is None else (start.to(wide) * factor.to(wide)).to(x.dtype)
            assert torch.equal(x, want), (x.shape, factor)
        outside[500:1500] = tensors[-2]
        assert torch.equal(base, outside)


@every_rung_and_dtype
def test_passes_over_many_tensors(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_passes, dtype)


def test_launches() -> None:
    """Squares: one launch over all chunks and one over all figures. Everything else: one."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def observe(kernel: Any, grid: tuple[int, ...], arguments: Any, options: Any) -> None:
        found.append((kernel.fn.__name__, grid))

    tensors = [torch.zeros(size) for size in (3, CHUNK, 2 * CHUNK + 1)]
    with observed(Target("cuda", 90), observe):
        launch_square_sums(tensors, [1, 2, 3], 5)
        launch_multiply_(tensors, None)
        launch_judged(torch.ones(5).double(), torch.ones(()).double(), torch.tensor(True), 1.0, 1.0, 0.0, 1.0)
    names = ["_squares_kernel", "_figures_kernel", "_multiply_kernel", "_judge_kernel"]
    assert found == list(zip(names, [(5,), (5,), (5,), (1,)], strict=True))


def test_opcheck() -> None:
    tensors, factor = [torch.ones(3), torch.ones(2, 2)], torch.tensor(2.0)
    torch.library.opcheck(square_sums_op, (tensors, [0, 2], 4))
    torch.library.opcheck(multiply_op_, (tensors, factor))
    torch.library.opcheck(multiply_op_, (tensors, None))
    squares = torch.ones(4, dtype=torch.float64)
    torch.library.opcheck(judged_op, (squares, squares[0].clone(), torch.tensor(True), INF, INF, 1.0, 1.0))


@pytest.mark.parametrize(
    ("tensors", "places", "message"),
    [
        ([torch.ones(2), torch.ones(2).double()], [0, 1], r"one dtype and device: got \['torch.float32 on cpu', "),
        ([torch.ones(2).int()], [0], "torch.int32 on cpu.*: call it for each dtype"),
        ([torch.ones(2)], [3], r"a place in \[0, 3\) for each of 1 tensors.*got \[3\]"),
        ([torch.ones(2), torch.ones(2)], [1, 1], r"all different: got \[1, 1\]: number them anew"),
        ([torch.ones(2)], [0, 1], "for each of 1 tensors"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: list[Tensor], places: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        square_sums(tensors, places, 3)


def clear_other_dtypes(device: str) -> None:
    others = [torch.ones(5, dtype=dtype, device=device) for dtype in (torch.complex64, torch.bool, torch.int32)]
    others.append(torch.ones(5, device=device).to(torch.float8_e4m3fn))
    zero_all_(others)
    assert not any(x.to(torch.complex64).any() for x in others)


@every_rung
def test_dtypes_that_no_kernel_has_are_cleared_too(rung: Rung) -> None:
    rung(clear_other_dtypes)


def test_a_new_table_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to be copied to the device. With a device that says it captures; nothing is on it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no call has seen them: run the same once before the capture"):
        _table(torch.device("cuda"), (1,), ((16,),))
