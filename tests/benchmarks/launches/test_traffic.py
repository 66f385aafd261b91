"""Rung: interpreter. The bytes that a kernel's programs load and store."""

from __future__ import annotations

import pytest
import torch
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from tpkernels.launch import Target, observed
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.norm.kernel import launch_norm

from benchmarks.launches import traffic
from benchmarks.launches.traffic import Call


def calls_of(name: str) -> list[Call]:
    """The launches of a norm, of a product or of attention's backward, of tensors without memory."""
    calls: list[Call] = []
    with observed(Target("cuda", 90), lambda *call: calls.append(Call.of(call))):
        x = torch.empty(96, 128, dtype=torch.bfloat16, device="meta")
        if name == "norm":
            launch_norm(x, x[0], None, None, 1e-5, False)
        elif name == "attention":
            q, lse = x.view(1, 96, 2, 64), torch.empty(1, 2, 96, device="meta")
            options = Options(True, 0, 0.125, False, 0.0, ())
            launch_attention_backward(q, q, q, q, q, lse, (q, q, q), Tables(None, None), Sides(None, None), options)
        else:
            launch_matmul(x, x.T)
    return calls


def counted(name: str, some: int) -> tuple[list[int], Call]:
    """The bytes that are counted, from no more than `some` programs."""
    calls = calls_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "_ALL", some)
        patch.setattr(traffic, "_SOME", some)
        return [traffic._moved(call) for call in calls], calls[0]


@pytest.mark.parametrize("some", [64, 2])
def test_a_norm_loads_its_weight_once_a_program(interpreters: RankPool, some: int) -> None:
    (((moved,), call),) = interpreters.run(counted, 1, "norm", some)
    x_bytes, rstd_bytes, weight_bytes = 96 * 128 * 2, 96 * 4, 128 * 2
    assert moved == 2 * x_bytes + rstd_bytes + call.grid[0] * weight_bytes


def test_a_product_loads_operands_once_a_tile(interpreters: RankPool) -> None:
    (((moved,), call),) = interpreters.run(counted, 1, "matmul", 64)
    rows, columns = (-(-96 // call.constants[name]) for name in ("BLOCK_M", "BLOCK_N"))
    assert moved == (columns + rows) * 96 * 128 * 2 + 96 * 96 * 2


def moved_by(calls: list[Call]) -> list[int]:
    return [traffic._moved(call) for call in calls]


def test_turns_of_a_gpus_warps_are_taken_by_one_thread(interpreters: RankPool) -> None:
    """Backward of attention with five products, launched as for a GPU: delta, the gradients, dq in its dtype."""
    calls = calls_of("attention")
    assert calls[1].constants["ARRIVALS"] == calls[1].constants["num_warps"] > 1
    ((delta, gradients, dq),) = interpreters.run(moved_by, 1, calls)
    size = 96 * 128
    assert delta >= 2 * 2 * size and dq == (4 + 2) * size
    # At least q, k, v and dy.
    assert gradients >= 4 * 2 * size
