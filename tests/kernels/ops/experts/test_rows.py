"""Rung: host, interpreter, GPU. Rows taken in the order of experts and combined: values, gradients, order of sums.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_longer_rows
from support.kernels.routing_cases import drawn_experts
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung, every_rung_and_grid
from torch import Tensor
from tpkernels.launch import INTERPRETED
from tpkernels.ops.experts.order import sort_by_expert, sort_forward
from tpkernels.ops.experts.rows import (
    combine_backward,
    combine_forward,
    combine_rows,
    combine_rows_backward_op,
    combine_rows_op,
    combine_rows_reference,
    take_backward,
    take_rows,
    take_rows_backward_op,
    take_rows_op,
    take_rows_reference,
)

ROUTINGS = ("uniform", "zipf", "one expert", "alternating")
# Tokens, experts, k, columns.
SIZES = [(0, 4, 2, 5), (1, 1, 1, 1), (33, 7, 3, 100), (20, 128, 8, 1025)]
PART = [(0, 4, 2, 5), (12, 7, 3, 100)]
# Interpreted, a program of one token takes some ms: 4,096 tokens with one expert each.
INTERPRETED_SIZES = [(1, 8, 2, 24), (50, 128, 8, 24), (4096, 128, 1, 8)]
WHOLE = [(t, e, k, 24) for t in (0, 1, 100, 4096) for e in (1, 8, 128) for k in (1, 2, 8) if k <= e]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcome(function: Callable[..., Tensor], *inputs: Any) -> list[Tensor]:
    """The result and the gradients of the floating-point inputs; whatever is not written is NaN."""
    leaves = [x.requires_grad_() for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    with unwritten_is_nan():
        y = function(*inputs)
        dy = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check_in_float64(device: str, sizes: list[tuple[int, int, int, int]]) -> None:
    for tokens, num_experts, k, columns in sizes:
        for routing in ROUTINGS[1:3] if sizes == PART or (INTERPRETED and tokens == 4096) else ROUTINGS:
            order, _ = sort_by_expert(drawn_experts(routing, tokens, num_experts, k, seed=0).to(device), num_experts)
            x, ys = drawn(tokens, columns, seed=1).to(device), drawn(tokens * k, columns, seed=2).to(device)
            weights = drawn(tokens, k, seed=3).to(device)
            for operator, reference, inputs in (
                (take_rows, take_rows_reference, (x, order, k)),
                (combine_rows, combine_rows_reference, (ys, order, weights)),
            ):
                got, want = outcome(operator, *inputs), outcome(reference, *inputs)
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@every_rung_and_grid
def test_as_specified_in_float64(rung: Rung, whole: bool) -> None:
    rung(check_in_float64, SIZES if whole else PART)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "sizes"),
    [("host", WHOLE), ("interpreter", INTERPRETED_SIZES)],
    indirect=["rung"],
    ids=["host", "interpreter"],
)
def test_all_sizes_are_as_specified(rung: Rung, sizes: list[tuple[int, int, int, int]]) -> None:
    rung(check_in_float64, sizes)


def check_dtypes(device: str, dtype: torch.dtype, whole: bool) -> None:
    for tokens, num_experts, k, columns in SIZES if whole else PART:
        order, _ = sort_by_expert(drawn_experts("zipf", tokens, num_experts, k, seed=0).to(device), num_experts)

        def draw_x(seed: int, shape: tuple[int, int] = (tokens, columns)) -> dict[str, Tensor]:
            return {"x": with_longer_rows(drawn(*shape, seed=seed).to(device, dtype)).requires_grad_()}

        def draw_ys(seed: int, shape: tuple[int, int, int] = (tokens, k, columns)) -> dict[str, Tensor]:
            tokens, k, columns = shape
            ys = with_longer_rows(drawn(tokens * k, columns, seed=seed).to(device, dtype))
            weights = drawn(tokens, k, seed=seed + 1).to(device, dtype)
            return {"ys": ys.requires_grad_(), "weights": weights.requires_grad_()}

        def take(x: Tensor, order: Tensor = order, k: int = k) -> Tensor:
            return take_rows(x, order, k)

        def take_plainly(x: Tensor, order: Tensor = order, k: int = k) -> Tensor:
            return take_rows_reference(x, order, k)

        def combine(ys: Tensor, weights: Tensor, order: Tensor = order) -> Tensor:
            return combine_rows(ys, order, weights)

        def combine_plainly(ys: Tensor, weights: Tensor, order: Tensor = order) -> Tensor:
            return combine_rows_reference(ys, order, weights)

        check_errors(f"take {tokens, k, columns}", take, take_plainly, draw_x)
        check_errors(f"combine {tokens, k, columns}", combine, combine_plainly, draw_ys)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_dtypes, dtype, whole)


def check_order_of_sums(device: str) -> None:
    """The terms of a token are added in the order of its choice, in float32, not in that of its experts.

    Weights are powers of two: products are exact, also where a multiplication and an addition are one instruction.
    """
    for dtype in (torch.float32, torch.float16):
        experts = drawn_experts("uniform", 12, 16, 5, seed=0).to(device)
        order, _, places = sort_forward(experts, 16)
        ys = drawn(60, 33, seed=1).to(device, dtype)
        weights = torch.tensor([1.0, 0.5, 4.0, 0.25, 2.0], device=device).expand(12, 5).contiguous()
        by_pair = ys[places.long()].view(12, 5, 33).float()
        for factors, got in (
            (weights, combine_forward(ys, places, weights)),
            (torch.ones_like(weights), take_backward(ys, places, 5)),
        ):
            want = factors[:, :1] * by_pair[:, 0]
            for j in range(1, 5):
                want = want + factors[:, j : j + 1] * by_pair[:, j]
            assert torch.equal(got, want.to(dtype))
        assert torch.equal(combine_rows(ys, order, weights), combine_forward(ys, places, weights))


@every_rung
def test_terms_are_added_in_the_order_of_the_choice(rung: Rung) -> None:
    rung(check_order_of_sums)


def check_independence(device: str) -> None:
    """Any tokens alone have the bits that they have among others, and again the same."""
    experts = drawn_experts("zipf", 16, 16, 3, seed=0).to(device)
    by_pair = drawn(48, 100, seed=1).to(device, torch.float32).view(16, 3, 100)
    weights, dy = drawn(16, 3, seed=2).float().to(device), drawn(16, 100, seed=3).float().to(device)

    def of(some: slice) -> list[Tensor]:
        order, _, places = sort_forward(experts[some], 16)
        ys = by_pair[some].reshape(-1, 100)[order.long()]
        dys, dweights = combine_backward(dy[some], ys, order, places, weights[some])
        dys = dys[places.long()].view(-1, 3, 100)
        return [combine_forward(ys, places, weights[some]), take_backward(ys, places, 3), dys, dweights]

    whole = of(slice(None))
    for first, end in ((0, 16), (0, 1), (5, 8)):
        for a, b in zip(of(slice(first, end)), whole, strict=True):
            assert torch.equal(a, b[first:end])


@every_rung
def test_a_tokens_bits_do_not_depend_on_the_others(rung: Rung) -> None:
    rung(check_independence)


def test_gradcheck() -> None:
    order, _ = sort_by_expert(drawn_experts("zipf", 5, 4, 2, seed=0), 4)
    x, ys, weights = drawn(5, 3, seed=0), drawn(10, 3, seed=1), drawn(5, 2, seed=2)
    assert torch.autograd.gradcheck(lambda x: take_rows(x, order, 2), x.requires_grad_())
    inputs = (ys.requires_grad_(), weights.requires_grad_())
    assert torch.autograd.gradcheck(lambda ys, w: combine_rows(ys, order, w), inputs)


@pytest.mark.parametrize("tokens", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_opcheck(tokens: int) -> None:
    order, _ = sort_by_expert(drawn_experts("zipf", tokens, 4, 2, seed=0), 4)
    x, ys = drawn(tokens, 3, seed=0).float(), drawn(2 * tokens, 3, seed=1).float()
    weights = drawn(tokens, 2, seed=2).float()
    torch.library.opcheck(take_rows_op, (x.requires_grad_(), order, 2))
    torch.library.opcheck(take_rows_backward_op, (ys, order, 2))
    torch.library.opcheck(combine_rows_backward_op, (x.detach(), ys, order, weights))
    torch.library.opcheck(combine_rows_op, (ys.clone().requires_grad_(), order, weights.clone().requires_grad_()))


ORDER = torch.arange(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: take_rows(torch.ones(3, 4), ORDER, 3), r"take_rows takes x\[T, D\] .* here 3, order int32 .*\(3, 4\)"),
        (lambda: take_rows(torch.ones(3), ORDER, 2), r"they are \(3,\) torch.float32"),
        (lambda: take_rows(torch.ones(3, 4), ORDER.long(), 2), "torch.int64: pass the order that sort_by_expert"),
        (lambda: take_rows(torch.ones(3, 4).int(), ORDER, 2), "torch.int32, order"),
        (lambda: combine_rows(torch.ones(6, 4), ORDER, torch.ones(3, 3)), r"weights\[T, k\] .* here \(3, 3\)"),
        (lambda: combine_rows(torch.ones(5, 4), ORDER, torch.ones(3, 2)), r"they are \(5, 4\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
