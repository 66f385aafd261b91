"""Rung: host, interpreter, GPU. Attention, forward and every gradient: what a query sees, documents, rotation.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them. Dropout's mask, strides, and how the operators
are registered and compiled are in test_operators.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.attention_cases import (
    Case,
    attend,
    growing,
    operands,
    outcome,
    scores_by_definition,
    specification,
)
from support.kernels.precision import check_errors, with_gaps, with_longer_rows
from support.kernels.rungs import (
    Rung,
    every_grid_of_a_product,
    every_rung,
    every_rung_and_dtype_of_a_product,
    every_rung_and_grid,
)
from torch import Tensor
from tpkernels.launch import Target, accumulation_dtype, observed
from tpkernels.ops.attention import attention_qkv
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.launch import Sides, Tables
from tpkernels.ops.attention.operator import attention_op
from tpkernels.ops.attention.reference import attention_reference
from tpkernels.ops.rope import rope_reference
from tpkernels.ops.rope_tables import rope_tables

# Awkward lengths and every head size of models. The interpreter takes every other case in float32, the rest in float16.
CASES = [
    Case(63, 63, 6, 1, 80),
    Case(65, 65, 3, 1, 96, causal=False),
    Case(100, 65, 2, 1, 128),
    Case(65, 65, 1, 1, 256),
    Case(65, 100, 4, 1, 64),
    Case(257, 257, 4, 4, 2, window=64),
    Case(63, 100, 2, 2, 64, causal=False, window=7),
    Case(100, 63, 2, 2, 64, window=7),
    Case(100, 100, 2, 1, 64, query_starts=(0, 0, 1, 40, 40, 100)),
    Case(130, 20, 1, 1, 64, causal=False, window=64),
    Case(63, 100, 1, 1, 64, causal=False, window=7, query_starts=(0, 30, 63), key_starts=(0, 63, 100)),
    Case(63, 130, 2, 2, 64, query_starts=(0, 5, 5, 40, 63), key_starts=(0, 1, 30, 30, 130)),
    Case(63, 100, 2, 1, 64, causal=False, query_starts=(0, 30, 63), key_starts=(0, 63, 100), dropped=True),
    Case(65, 65, 2, 1, 64, batch=2, dropped=True),
    Case(0, 5, 2, 1, 16),
    Case(5, 0, 2, 1, 16),
    Case(5, 5, 2, 1, 16, batch=0),
    Case(0, 0, 2, 1, 64, query_starts=(0, 0)),
]
# Of the operator that takes the fused projection's output.
QKV_CASES = [
    Case(63, 63, 2, 1, 80, batch=2, rotated=False),
    Case(65, 65, 2, 2, 64, rotated=True, causal=False, window=7),
    Case(100, 100, 3, 1, 64, rotated=True, query_starts=(0, 1, 1, 70, 100)),
    Case(65, 65, 2, 1, 64, rotated=False, dropped=True),
    Case(65, 65, 1, 1, 64, window=7, query_starts=(0, 25, 65)),
    Case(0, 0, 2, 1, 16, rotated=True),
]


@pytest.mark.parametrize("case", [case for case in CASES if not case.dropped], ids=str)
def test_the_specification_is_the_definition(case: Case) -> None:
    q, k, v = operands(case, torch.float64, "cpu").values()
    p = scores_by_definition(case, q, k).softmax(-1).nan_to_num()
    y = p @ v.repeat_interleave(case.heads // case.kv_heads, dim=2).transpose(1, 2)
    for got in (
        specification(case, q, k, v),
        attention_reference(q, k, v, Tables(None, None), case.sides("cpu"), case.options),
    ):
        torch.testing.assert_close(got, y.transpose(1, 2))


def parts_of_groups(case: Case) -> tuple[int, int]:
    """(query heads of a group, parts that backward divides them into)."""
    found = set()

    def look(kernel: Any, grid: Any, arguments: Any, options: dict[str, Any]) -> None:
        if "NUM_SLOTS" in options:
            found.add((options["NUM_HEADS_PER_GROUP"], options["NUM_SLOTS"]))

    q, k, v = (t.detach().to("meta") for t in operands(case, torch.float32, "cpu").values())
    lse = q.new_empty(case.batch, case.heads, case.queries)
    with observed(Target("cuda", 90), look):
        launch_attention_backward(q, q, k, v, q, lse, (q, k, v), Tables(None, None), Sides(None, None), case.options)
    (only,) = found
    return only


def test_groups_are_divided_and_are_not() -> None:
    found = {parts_of_groups(case) for case in CASES if case.batch and case.keys}
    assert found == {(1, 1), (2, 2), (3, 1), (4, 4), (6, 2)}


def of_rung(rung: Rung, dtype: torch.dtype, cases: list[Case], part: list[Case], whole: bool) -> tuple[list[Case], int]:
    """Which cases to take, and how often to draw."""
    if rung.name == "interpreter":
        return cases[int(dtype == torch.float16) :: 2] if whole else part, 1
    return cases, 8


# Several blocks and query heads of a group; packed documents seen through a window; dropout; no keys.
PART = [Case(65, 65, 2, 1, 16), CASES[10], Case(33, 33, 2, 1, 16, dropped=True), CASES[15]]


def check_cases(device: str, dtype: torch.dtype, cases: list[Case], draws: int) -> None:
    for case in cases:
        check_errors(
            str(case),
            lambda case=case, **given: attend(case, **given),
            lambda case=case, **given: specification(case, **given),
            lambda seed, case=case: operands(case, dtype, device, seed),
            draws=draws,
        )


@every_grid_of_a_product
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_cases, dtype, *of_rung(rung, dtype, CASES, PART, whole))


def qkv_operands(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
    """The projection's output, some of a longer row."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = case.heads + 2 * case.kv_heads
    qkv = torch.randn(case.batch, case.queries, num_heads, case.columns, generator=generator)
    qkv[:, :, : case.heads] /= 2
    qkv[:, :, -case.kv_heads :] *= growing(case)
    rows = with_longer_rows(qkv.flatten(2).flatten(0, 1).to(device, dtype))
    return {"qkv": rows.requires_grad_()}


def tables(case: Case, qkv: Tensor) -> dict[str, Tensor]:
    if case.rotated is None:
        return {}
    cos, sin = rope_tables(100, case.columns, dtype=accumulation_dtype(qkv.dtype), device=qkv.device)
    return {"cos": cos, "sin": with_gaps(sin)}


def attend_qkv(case: Case, qkv: Tensor) -> Tensor:
    """The operator."""
    return attention_qkv(
        qkv,
        case.heads,
        case.kv_heads,
        seq=case.queries,
        starts=case.sides(str(qkv.device)).query_starts,
        interleaved=bool(case.rotated),
        causal=case.causal,
        window=case.window,
        dropout=case.dropout,
        **tables(case, qkv),
    )


def specification_qkv(case: Case, qkv: Tensor) -> Tensor:
    """Split, rotated by rope's specification, attended to by attention's."""
    heads = qkv.unflatten(1, (case.heads + 2 * case.kv_heads, case.columns))
    *rotated, v = heads.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    if case.rotated is not None:
        positions = torch.cat([torch.arange(some.stop - some.start) for some, _ in case.documents()])
        cos, sin = tables(case, qkv).values()
        given = (cos, sin, positions.repeat(case.batch).to(qkv.device), case.rotated, False)
        rotated = [rope_reference(t, *given) for t in rotated]
    q, k, v = (t.unflatten(0, (case.batch, case.queries)) for t in (*rotated, v))
    return specification(case, q, k, v).flatten(2).flatten(0, 1)


def check_qkv_cases(device: str, dtype: torch.dtype, cases: list[Case], draws: int) -> None:
    for case in cases:
        check_errors(
            f"qkv {case}",
            lambda case=case, **given: attend_qkv(case, **given),
            lambda case=case, **given: specification_qkv(case, **given),
            lambda seed, case=case: qkv_operands(case, dtype, device, seed),
            draws=draws,
        )


# Rotated, and packed with rotation.
QKV_PART = [
    Case(33, 33, 2, 1, 16, batch=2, rotated=False),
    Case(40, 40, 2, 1, 16, rotated=True, query_starts=(0, 1, 40)),
]


@every_grid_of_a_product
def test_qkv_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_qkv_cases, dtype, *of_rung(rung, dtype, QKV_CASES, QKV_PART, whole))


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def check_one_key_each(device: str, dtype: torch.dtype) -> None:
    """A query that sees one key has its value, and that value dy; no gradient goes to the scores. Exact in integers."""
    for case in (Case(1, 1, 2, 1, 64, batch=2), Case(65, 65, 2, 1, 64, window=1), Case(65, 9, 1, 1, 64, window=1)):
        shapes = [(case.batch, case.queries, case.heads, 64)] * 2 + [(case.batch, case.keys, 1, 64)] * 2
        q, dy, k, v = (integers(*shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes))
        y, dq, dk, dv = outcome(lambda *given, case=case: attend(case, *given), dy, q, k, v)
        unseen = case.queries - case.keys
        assert torch.equal(y[:, unseen:], v.expand(-1, -1, case.heads, -1)) and not y[:, :unseen].any(), case
        assert torch.equal(dv, dy[:, unseen:].sum(2, keepdim=True)) and not dq.any() and not dk.any(), case


@every_rung_and_dtype_of_a_product
def test_queries_that_see_one_key(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_one_key_each, dtype)


def check_large_scores(device: str, dtype: torch.dtype) -> None:
    """Scores of 10**5, each query's largest far above the others: it alone counts, and nothing overflows."""
    generator = torch.Generator().manual_seed(0)
    case = Case(100, 100, 2, 2, 64)
    k = integers(1, 100, 2, 64, seed=1).add(0.5).sign()
    chosen = (torch.rand(100, generator=generator) * torch.arange(1, 101)).long()
    q, v, dy = 1e4 * k[:, chosen], integers(1, 100, 2, 64, seed=2), integers(1, 100, 2, 64, seed=3).abs()
    given = [t.to(device, dtype) for t in (dy, q, k, v)]
    y, dq, dk, dv = outcome(lambda *given: attend(case, *given), *given)
    assert torch.equal(y.float().cpu(), v[:, chosen]) and not dq.any() and not dk.any()
    # Backward computes p again, the exponential of the difference of two numbers between 2**16 and 2**17: these come
    # from four roundings to float32's 24 bits, each wrong by at most 2**-8. Then p and dv are rounded to the dtype.
    rounding = 4 * 2**-8 + 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(dv.float().cpu(), torch.zeros_like(v).index_add(1, chosen, dy), rtol=rounding, atol=0)


@every_rung_and_dtype_of_a_product
def test_large_scores(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_large_scores, dtype)


def check_log_sum_exp(device: str, whole: bool) -> None:
    """Check the log-sum-exp of the scores that are seen, and -inf where none is seen.

    Some rows are met in a kernel's masked tiles only.
    """
    for case in (CASES[2], CASES[7], Case(63, 0, 1, 1, 16)) if whole else (Case(40, 29, 1, 1, 16, window=7),):

        def operator(case: Case = case, **given: Tensor) -> Tensor:
            return attention_op(*given.values(), None, None, *case.sides(device), *case.options.packed)[1]

        def definition(q: Tensor, k: Tensor, v: Tensor, case: Case = case) -> Tensor:
            return scores_by_definition(case, q, k).logsumexp(-1)

        def draw(seed: int, case: Case = case) -> dict[str, Tensor]:
            return {name: t.detach() for name, t in operands(case, torch.float32, device, seed).items()}

        check_errors(f"lse {case}", operator, definition, draw)
        unseen = max(0, case.queries - case.keys)
        lse = operator(**draw(0))
        assert (lse[:, :, :unseen] == -torch.inf).all() and lse[:, :, unseen:].isfinite().all()


@every_rung_and_grid
def test_log_sum_exp(rung: Rung, whole: bool) -> None:
    rung(check_log_sum_exp, whole)


def check_queries_without_keys(device: str) -> None:
    """y and gradients of 0, not NaN, in a document without keys and before the first key of one with fewer."""
    case = Case(40, 29, 2, 1, 16, query_starts=(0, 7, 40), key_starts=(0, 0, 29))
    q, k, v = operands(case, torch.float32, device).values()
    y, dq, *_ = outcome(lambda *given: attend(case, *given), torch.ones_like(q), q, k, v)
    for t in (y, dq):
        assert not t[:, :11].any() and t[:, 12:].all()


@every_rung
def test_queries_without_keys(rung: Rung) -> None:
    rung(check_queries_without_keys)


def check_no_leak(device: str, whole: bool) -> None:
    """What is in one document changes no bit of another's outputs and gradients."""
    case = Case(100, 80, 2, 1, 16, query_starts=(0, 37, 100), key_starts=(0, 35, 80))
    if not whole:
        case = Case(30, 25, 1, 1, 16, query_starts=(0, 17, 30), key_starts=(0, 15, 25))
    q, k, v = operands(case, torch.float32, device).values()
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).to(device)
    before = outcome(lambda *given: attend(case, *given), dy, q, k, v)
    documents = list(case.documents())
    for changed, other in (documents, documents[::-1]):
        tensors = [t.detach().clone() for t in (dy, q, k, v)]
        for t, side in zip(tensors, (0, 0, 1, 1), strict=True):
            t[:, changed[side]] *= -100
        after = outcome(lambda *given: attend(case, *given), *tensors)
        for old, new, side in zip(before, after, (0, 0, 1, 1), strict=True):
            assert torch.equal(old[:, other[side]], new[:, other[side]])
            assert not torch.equal(old[:, changed[side]], new[:, changed[side]])


@every_rung_and_grid
def test_documents_see_nothing_of_each_other(rung: Rung, whole: bool) -> None:
    rung(check_no_leak, whole)


def check_float64(device: str) -> None:
    """There are no kernels for it: on every rung it is computed in float64."""
    for case in (CASES[8], Case(65, 65, 2, 1, 16)):
        q, k, v = operands(case, torch.float64, device).values()
        dy = torch.ones_like(q)
        got, right = (
            outcome(lambda *given, way=way, case=case: way(case, *given), dy, q, k, v)
            for way in (attend, specification)
        )
        torch.testing.assert_close(got, right)


@every_rung
def test_float64(rung: Rung) -> None:
    rung(check_float64)
