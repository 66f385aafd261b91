"""Rung: host, interpreter, GPU. The counting sort of rows by experts: stable, exact, nothing unwritten."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE, modules_of
from support.kernels.precision import unwritten_is_nan
from support.kernels.routing_cases import drawn_experts
from support.kernels.rungs import Rung, every_rung, every_rung_and_grid
from support.ranks.rank_pool import RankPool
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


# Rows of an expert that do not lie in the order of their tokens.
MUTATIONS = {
    "the last pair of a block first": (
        "o_before[None, :] < o_inside[:, None]",
        "o_before[None, :] > o_inside[:, None]",
    ),
    "counts of another block": (
        "o_expert * num_blocks + i_block, count",
        "o_expert * num_blocks + (i_block + 1) % num_blocks, count",
    ),
}


def is_noticed(name: str, directory: str) -> bool:
    module: Any = importlib.import_module("tpkernels.ops.experts.order")
    source, (old, new) = Path(module.__file__).read_text(), MUTATIONS[name]
    assert source.count(old) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, directory)
        # An operator of this name is registered already.
        changed = source.replace(old, new).replace("tpkernels::", f"mutant{[*MUTATIONS].index(name)}::")
        mutant = modules_of({"order": changed})["order"]
        for function in ("sort_forward", "sort_by_expert"):
            patch.setitem(globals(), function, getattr(mutant, function))
        try:
            check_order("cpu", [(100, 7, 3)])
        except AssertionError:
            return True
    return False


def test_rows_by_arrival_are_noticed(interpreters: RankPool, count_mutations: CountMutations, tmp_path: Path) -> None:
    unnoticed = [name for name in MUTATIONS if interpreters.run(is_noticed, 1, name, str(tmp_path)) == [False]]
    count_mutations("the order of an expert's rows", len(MUTATIONS) - len(unnoticed), len(MUTATIONS))
    assert not unnoticed


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
