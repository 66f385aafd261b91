"""Rung: pure. What a search must not leave out, and parts that add up, on machines like a measured CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.question import Candidate, Question, candidates, shapes
from tpengine.planner.advice.search import CLOSE, search
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.advice.words import shares
from tpengine.planner.machine import CPU_CORE, MACHINES, Curve, Machine, Measured
from tpengine.planner.machine.measured import PRODUCTS

SMALL = ModelConfig(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=8, ffn_size=512, vocab_size=512)
# Products are measured, copies of weights are dear, and what moves buckets computes too.
MEASURED = replace(
    CPU_CORE,
    measured={
        "float32": Measured(
            {kind: {64: Curve.flat(5e10)} for kind in PRODUCTS}, {"prepare": Curve.flat(1e8), "zero": Curve.flat(1e10)}
        )
    },
    reduce_share=1.0,
)


def question_of(
    num_ranks: int, batch: int, machine: Machine = MEASURED, reduction: Any = "fast", **fixed: Any
) -> Question:
    train = TrainConfig(seq_len=64, dtype="float32", reduction=reduction)
    return Question(Config(model=SMALL, train=train), machine, num_ranks, batch, fixed)


def fitting(question: Question) -> dict[Candidate, float]:
    """The steps of all layouts that a run accepts and that fit."""
    found: dict[Candidate, float] = {}
    for layout in (layout for shape in shapes(question) for layout in candidates(question, shape)):
        try:
            sheet = Sheet.of(layout.config(question), question.machine)
        except ValueError:
            continue
        if sheet.peak_bytes <= question.memory_limit:
            found[layout] = sheet.seconds
    return found


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_weights_that_come_and_go_are_not_copied_and_may_be_the_fastest(reduction: str) -> None:
    """A CPU copies weights that stay for its products: stage 3 of ZeRO exchanges more, and copies none."""
    question = question_of(2, 2, reduction=reduction, tp=1, pp=1, recompute="none", bucket_bytes=25_000_000)
    steps = fitting(question)
    found = search(question, num_rows=1, limit_seconds=1e9).rows[0]
    assert (1 - CLOSE) * found.sheet.seconds <= min(steps.values())
    fastest = min(steps, key=steps.__getitem__)
    assert fastest.zero == (3 if reduction == "exact" else 1)
    # More memory is never slower.
    limited = replace(question.base, parallel=ParallelConfig(memory_limit=int(found.sheet.peak_bytes)))
    less = search(replace(question, base=limited), num_rows=1, limit_seconds=1e9).rows[0]
    assert found.sheet.seconds <= less.sheet.seconds


def test_a_micro_batch_may_have_any_size_that_divides() -> None:
    question = question_of(8, 24, MACHINES["h200"], dp=8)
    assert [size for *_, size in shapes(question)] == [1, 3]
    assert [size for *_, size in shapes(question_of(1, 12, MACHINES["h200"]))] == [1, 2, 3, 4, 6, 12]
    best = search(question, num_rows=1, limit_seconds=1e9).rows[0]
    assert best.layout.micro_batch_size == 3


def test_chunks_that_are_asked_for_are_those_of_the_schedule() -> None:
    question = question_of(2, 8, pp=2, chunks_per_rank=2)
    assert {(layout.schedule, layout.chunks_per_rank) for layout in fitting(question)} == {
        ("interleaved", 2),
        ("zbv", 2),
    }
    one = {layout.schedule for layout in fitting(question_of(2, 8, pp=2, chunks_per_rank=1))}
    assert one == {"gpipe", "1f1b", "zb-h1", "interleaved"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [(1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_what_buckets_slow_down_is_a_part(axes: tuple[int, int, int], zero: int) -> None:
    tp, pp, dp = axes
    layout = Candidate(tp, pp, dp, "1f1b", 1, 1, 4, zero, "step", "none", "keep", "fused")
    question = question_of(tp * pp * dp, 4 * dp)
    sheet = Sheet.of(layout.config(question), question.machine)
    assert sheet.parts.step == pytest.approx(sheet.seconds, rel=1e-9)
    alone = Sheet.of(layout.config(question), replace(question.machine, reduce_share=0.0))
    assert sheet.parts.dp > alone.parts.dp and sheet.parts.compute == pytest.approx(alone.parts.compute)


def test_a_part_that_is_a_gain_is_told() -> None:
    question = question_of(2, 4)
    layout = Candidate(2, 1, 1, "1f1b", 1, 1, 4, 0, "step", "none", "keep", "fused")
    parts = Sheet.of(layout.config(question), question.machine).parts
    assert "exact mode -10 %" in shares(
        replace(parts, compute=parts.compute + 0.1 * parts.step, exact=-0.1 * parts.step)
    )


def every_bound_is_below(question: Question) -> int:
    """How many layouts there are; a bound of none is above its plan."""
    bounds, steps = Bounds(question), fitting(question)
    for layout, seconds in steps.items():
        assert bounds.seconds(layout) <= seconds * (1 + 1e-9), layout.words()
        assert bounds.played_seconds(layout) <= seconds * (1 + 1e-9), layout.words()
    return len(steps)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_a_run_was_started_with_bounds_no_layout(zero: Any) -> None:
    """Its stage of ZeRO says whether weights are converted for products, which bounds must not take over."""
    fast = {"prepared_forward": 3e11, "prepared_input_gradient": 3e11}
    products = {kind: {64: Curve.flat(fast.get(kind, 5e10))} for kind in PRODUCTS}
    machine = replace(MEASURED, measured={"float32": Measured(products, {"prepare": Curve.flat(1e10)})})
    question = question_of(2, 2, machine, recompute="none")
    started = replace(question.base, parallel=ParallelConfig(zero=zero, dp=2, tp=1, pp=1))
    assert every_bound_is_below(replace(question, base=started)) > 20


def test_a_network_that_is_faster_than_a_node_bounds_no_pipeline() -> None:
    fast = replace(MACHINES["h100-pcie"], ranks_per_node=2)
    fast = replace(fast, between=replace(fast.between, bytes_per_s=85e9, latency_s=0.0))
    assert every_bound_is_below(question_of(4, 4, fast, pp=4, tp=1, recompute="none")) > 5


def test_converted_weights_bound_no_product_from_above() -> None:
    """Where their product is the slower one, a layout that converts none is faster."""
    rates = {
        "forward": {1: Curve.flat(9.0), 8: Curve.flat(9.0)},
        "prepared_forward": {1: Curve.flat(5.0), 8: Curve.flat(20.0)},
    }
    best = Measured(rates).at_best()
    assert [best.flops_per_s("prepared_forward", rows, 1) for rows in (1, 8)] == [9.0, 20.0]
    assert [best.flops_per_s("forward", rows, 1) for rows in (1, 8)] == [9.0, 20.0]
