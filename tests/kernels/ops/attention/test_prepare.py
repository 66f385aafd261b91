"""Rung: host, interpreter, GPU. Heads split, normed and rotated for attention in one pass, and one pass back.

Only a GPU shows the compiled kernel's numbers, and bfloat16 in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.kernels.precision import check_errors, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung
from torch import Tensor
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.attention.prepare import Heads, Rotary, Weights, prepare_heads
from tpkernels.ops.attention.prepare.operator import prepare_heads_op, prepare_heads_reference
from tpkernels.ops.rope_tables import rope_tables


class Case(NamedTuple):
    """Sequences, tokens of each, query and key heads, columns; how many of them are rotated, and how.

    Attributes:
        offset: of the norms' weights; None without norms.
        placed: whether positions are given.
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    columns: int
    rotary: int = 0
    interleaved: bool = False
    offset: float | None = None
    placed: bool = False
    heads_first: bool = False


CASES = [
    Case(2, 9, 5, 1, 16, rotary=16),
    Case(1, 70, 2, 1, 8, rotary=8, interleaved=True, placed=True),
    Case(2, 7, 6, 2, 80, rotary=80, offset=0.0),  # halves that are no power of two
    Case(3, 5, 2, 1, 256, rotary=256, offset=1.0, heads_first=True),
    Case(1, 5, 2, 1, 12, rotary=4, offset=1.0, placed=True),  # partial
    Case(2, 3, 5, 1, 8, rotary=6, interleaved=True, offset=0.0, heads_first=True),
    Case(2, 3, 3, 1, 10),  # split alone
    Case(1, 6, 2, 2, 32, offset=0.0),
    Case(1, 0, 2, 1, 8, rotary=8, offset=0.0),
]
PART = [CASES[4], CASES[5]]


def draw(case: Case, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, columns = case.batch * case.seq, (case.heads + 2 * case.kv_heads) * case.columns
    qkv = torch.randn(tokens, columns, generator=generator).to(device, dtype)
    found = {"qkv": with_longer_rows(qkv).requires_grad_()}
    if case.offset is not None:
        # Of other dtypes than the product, and with gaps.
        q_weight, k_weight = torch.randn(2, case.columns, generator=generator).to(device) + 1 - case.offset
        found |= {"q_weight": with_gaps(q_weight).requires_grad_(), "k_weight": k_weight.to(dtype).requires_grad_()}
    if case.rotary:
        names = ("cos", "sin")
        num_positions = case.seq + 3
        tables = rope_tables(num_positions, case.rotary, dtype=accumulation_dtype(dtype), device=device)
        found |= dict(zip(names, tables, strict=True))
    if case.placed:
        found["positions"] = torch.randint(case.seq, (tokens,), generator=generator).to(device)
    return found


def options(case: Case) -> dict[str, Any]:
    return dict(interleaved=case.interleaved, eps=1e-5, offset=case.offset or 0.0, heads_first=case.heads_first)


def check_case(case: Case, dtype: torch.dtype, device: str, draws: int) -> None:
    def ours(qkv: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
        return prepare_heads(qkv, case.heads, case.kv_heads, seq=max(1, case.seq), **tensors, **options(case))

    def reference(qkv: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
        heads = Heads(case.batch, case.heads, case.kv_heads, **options(case))
        rotary = Rotary(*(tensors.get(name) for name in ("cos", "sin", "positions")))
        weights = Weights(tensors.get("q_weight"), tensors.get("k_weight"))
        return prepare_heads_reference(qkv, heads, rotary, weights)

    check_errors(f"prepare_heads {case}", ours, reference, lambda seed: draw(case, dtype, device, seed), draws=draws)


def check_cases(device: str, dtype: torch.dtype, whole: bool) -> None:
    for case in CASES if whole else PART:
        check_case(case, dtype, device, 3 if whole else 1)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_cases, dtype, whole)


def check_layouts(device: str) -> None:
    """The layout asked for, with the same bits; gradients of any strides."""
    case = CASES[5]
    inputs = draw(case, torch.float32, device, 0)
    tensors = {name: of.detach() for name, of in inputs.items() if name != "qkv"}
    found = {}
    for heads_first in (False, True):
        leaf = inputs["qkv"].detach().clone().requires_grad_()
        made = prepare_heads(
            leaf, case.heads, case.kv_heads, seq=case.seq, **tensors, interleaved=True, heads_first=heads_first
        )
        for of in made:
            assert (of.transpose(1, 2) if heads_first else of).is_contiguous()
        generator = torch.Generator().manual_seed(1)
        slopes = [torch.randn(of.shape, generator=generator).to(device) for of in made]
        slopes = [with_gaps(of) if heads_first else of.transpose(1, 2).contiguous().transpose(1, 2) for of in slopes]
        found[heads_first] = [*made, torch.autograd.grad(made, leaf, slopes)[0]]
    for token_first, heads_first in zip(found[False], found[True], strict=True):
        assert torch.equal(token_first, heads_first)


@pytest.mark.by_default("host", "gpu")
@every_rung
def test_layouts_have_the_same_bits(rung: Rung) -> None:
    rung(check_layouts)


@pytest.mark.by_default("split")
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[6]], ids=["rotated", "partial, normed", "split"])
def test_registration(case: Case) -> None:
    inputs = draw(case, torch.float32, "cpu", 0)
    tensors = [inputs.get(name) for name in ("qkv", "q_weight", "k_weight", "cos", "sin", "positions")]
    integers = [case.batch, case.heads, case.kv_heads, int(case.interleaved), int(case.heads_first)]
    torch.library.opcheck(prepare_heads_op, (*tensors, integers, [1e-5, case.offset or 0.0]))


def test_a_second_derivative_is_refused() -> None:
    qkv = torch.randn(4, 24, requires_grad=True)
    q, k, v = prepare_heads(qkv, 1, 1)
    (dqkv,) = torch.autograd.grad(q.sum() + k.sum() + v.square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dqkv.sum().backward()


QKV, TABLE = torch.zeros(6, 32), torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qkv": torch.zeros(6, 33)}, "qkv must be"),
        ({"qkv": QKV.long()}, "qkv must be"),
        ({"seq": 4}, "whole sequences"),
        ({"cos": TABLE}, "cos and sin must both"),
        ({"cos": TABLE.double(), "sin": TABLE.double()}, "cos and sin must both"),
        ({"cos": TABLE[:, :3], "sin": TABLE[:, :3]}, "contiguous"),
        ({"cos": TABLE[:2], "sin": TABLE[:2]}, "a row for every place"),
        ({"cos": TABLE, "sin": TABLE, "positions": torch.arange(5)}, "one integer per token"),
        ({"cos": TABLE, "sin": TABLE, "positions": torch.arange(1, 7)}, "rows of the tables, 0 to 5: they are 1 to 6"),
        ({"q_weight": torch.ones(8)}, "pass both, or none"),
        ({"q_weight": torch.ones(4), "k_weight": torch.ones(8)}, "norms of heads"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    given = {"qkv": QKV, **arguments}
    with pytest.raises(ValueError, match=message):
        prepare_heads(given.pop("qkv"), 2, 1, **given)
