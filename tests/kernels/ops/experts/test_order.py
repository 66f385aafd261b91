"""Rung: host, interpreter, GPU. The counting sort of rows by experts: stable, exact, nothing unwritten."""

from __future__ import annotations

import pytest
import torch
from support.kernels.precision import unwritten_is_nan
from support.kernels.routing_cases import drawn_experts
from support.kernels.rungs import Rung, every_rung, every_rung_and_grid
from torch import Tensor
from tpkernels.launch import INTERPRETED
from tpkernels.ops.experts.order import sort_by_expert, sort_by_expert_op, sort_by_expert_reference, sort_forward

ROUTINGS = ("uniform", "zipf", "one expert", "alternating")
# Tokens, experts, k.
SIZES = [(0, 4, 2), (1, 1, 1), (65, 7, 3), (100, 128, 8)]
PART = [(0, 4, 2), (65, 7, 3)]
# Interpreted, a block of 64 pairs takes 10 ms.
INTERPRETED_SIZES = [(1, 8, 2), (63, 1, 1), (64, 65, 8), (4096, 128, 8)]
WHOLE = [(t, e, k) for t in (0, 1, 63, 64, 4096) for e in (1, 8, 65, 128) for k in (1, 2, 8) if k <= e]


def check_order(device: str, sizes: list[tuple[int, int, int]]) -> None:
    for tokens, num_experts, k in sizes:
        for routing in ROUTINGS[1:2] if INTERPRETED and tokens == 4096 else ROUTINGS:
            experts = drawn_experts(routing, tokens, num_experts, k, seed=0).to(device)
            with unwritten_is_nan():
                order, offsets, places = sort_forward(experts, num_experts)
            want = sort_by_expert_reference(experts, num_experts)
            what = (routing, tokens, num_experts, k)
            assert torch.equal(order, want[0]) and torch.equal(offsets, want[1]), what
            assert order.dtype == offsets.dtype == places.dtype == torch.int32
            assert torch.equal(order[places.long()], torch.arange(tokens * k, dtype=torch.int32, device=device)), what
            again = sort_by_expert(experts, num_experts)
            assert torch.equal(again[0], order) and torch.equal(again[1], offsets)


@every_rung_and_grid
def test_as_specified(rung: Rung, whole: bool) -> None:
    rung(check_order, SIZES if whole else PART)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "sizes"),
    [("host", WHOLE), ("interpreter", INTERPRETED_SIZES)],
    indirect=["rung"],
    ids=["host", "interpreter"],
)
def test_all_sizes_are_as_specified(rung: Rung, sizes: list[tuple[int, int, int]]) -> None:
    rung(check_order, sizes)


def check_outside(device: str) -> None:
    """Experts that do not exist are taken for the nearest; any strides."""
    experts = torch.tensor([[5, -1], [2, 1], [-7, 0]], dtype=torch.int32, device=device)
    order, offsets = sort_by_expert(experts, 3)
    assert order.tolist() == [1, 4, 5, 3, 0, 2] and offsets.tolist() == [0, 3, 4, 6]
    transposed = experts.T.contiguous().T
    assert torch.equal(sort_by_expert(transposed, 3)[0], order)


@every_rung
def test_other_experts_stay_inside(rung: Rung) -> None:
    rung(check_outside)


@pytest.mark.parametrize("tokens", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_opcheck(tokens: int) -> None:
    torch.library.opcheck(sort_by_expert_op, (drawn_experts("zipf", tokens, 4, 2, seed=0), 4))


@pytest.mark.parametrize(
    ("experts", "num_experts", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), 2, r"experts\[T, k\] of int32.*: experts are \(3,\) torch.int32"),
        (torch.zeros(3, 2, dtype=torch.int64), 2, r"\(3, 2\) torch.int64, .*: pass what route returns"),
        (torch.zeros(3, 2, dtype=torch.int32), 0, "num_experts is 0"),
        (torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2), 2, r"T \* k to 2147483647"),
    ],
)
def test_experts_that_do_not_fit_are_refused(experts: Tensor, num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sort_by_expert(experts, num_experts)
