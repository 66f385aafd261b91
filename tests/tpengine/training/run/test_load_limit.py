"""Rung: gloo ranks. A run whose routing passes the memory limit ends by name, on all ranks alike; one below goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.data import open_corpus
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.planner.modelled.memory import memory_of, most_load
from tpengine.runs.load_limit import LoadLimit, held_together, hottest
from tpengine.runs.trainer import Trainer
from tpengine.train import wings

LAYERS = (0, 1, 3)


def config(limit: int = 0, ep: int = 2, pp: int = 1, **parallel: Any) -> Config:
    base = config_of(2, 1, pp, tied=False, kv_heads=4, num_layers=4, memory_limit=limit, **parallel)
    details = ModelDetails(
        num_experts=4, experts_per_token=2, expert_ffn_size=64, has_experts=(True, True, False, True)
    )
    model = replace(base.model, architecture="qwen3_moe", details=details)
    return validate(replace(base, model=model, parallel=replace(base.parallel, ep=ep)), 2 * pp)


def peak(load: float) -> int:
    layout = layout_of(config())
    return max(rank.peak for rank in memory_of(config(), layout, training_plan(config(), layout), load=load))


def judged(limits: list[int]) -> tuple[list[list[int]], list[str]]:
    """The counts of a step, and what is said of it with each limit."""
    found = []
    for limit in limits:
        trainer = Trainer(config(limit), open_corpus(config()), torch.device("cpu"))
        trainer.step.run(0)
        found.append(LoadLimit(wings(limit), "cpu").failure(0, trainer.step))
    assert trainer.step.loads is not None
    return trainer.step.loads.counts.tolist(), found


def test_a_step_above_the_load_that_fits_ends_the_run(ranks: RankPool) -> None:
    (counts, (no_limit,)), _ = ranks.run(judged, 2, [0])
    load, rank = by_loop(counts)
    assert no_limit == "" and load > 1.03, "of an even step nothing can be judged"
    below, above = peak(load - 0.02), peak(load + 0.02)
    layout = layout_of(config())
    most = most_load(config(below), layout, training_plan(config(below), layout), below)
    assert 1.0 <= most < load
    (_, (passed, fits)), (_, others) = ranks.run(judged, 2, [below, above])
    assert [passed, fits] == others and fits == ""
    where = (
        f"in step 1, in the experts of layers 0 to 3, experts {2 * rank} to {2 * rank + 1}, which one of 2 ranks has"
    )
    assert passed == (
        f"memory must be enough for the rows of experts: {where}, got {load:.2f} times the mean of a rank's rows, and "
        f"by the plan --parallel.memory-limit {below} is enough up to {most:.2f}: use --train.balance loss or bias, "
        "another layout, or a larger limit"
    )


def by_loop(counts: list[list[int]]) -> tuple[float, int]:
    rows = [0, 0]
    for of_layer in counts:
        for expert, number in enumerate(of_layer):
            rows[expert // 2] += number
    return max(rows) * 2 / sum(rows), rows.index(max(rows))


def test_layers_whose_rows_are_held_at_once_count_together() -> None:
    """Layer by layer where backward computes blocks again; a hot rank of one layer is no hot rank of all."""
    counts = torch.tensor([[8, 0, 0, 0], [0, 0, 6, 2], [2, 2, 2, 2]])
    assert hottest(counts, 2) == (1.0, 0) and hottest(counts[1:2], 2) == (2.0, 1) and hottest(counts, 4)[0] == 10 / 6

    def of(**parallel: Any) -> list[list[int]]:
        made = config(**parallel)
        return [layers for places, layers in held_together(made, layout_of(made)) if places]

    assert of() == [[0, 1, 3]] and of(recompute="attention") == [[0, 1, 3]]
    assert of(recompute="block") == [[0], [1], [3]]
    assert of(pp=2) == of(pp=2, recompute="full") == [[0, 1], [3]]
    assert of(pp=2, schedule="interleaved") == [[0], [1, 3]] or of(pp=2, schedule="interleaved") == [[0, 1], [3]]
    assert of(pp=2, schedule="interleaved", recompute="full") == [[0], [1], [3]]
    assert list(held_together(config(pp=2), layout_of(config(pp=2))))[1] == ([2], [3])


@pytest.mark.parametrize("ep", [1, 2])
def test_where_no_limit_is_set_or_no_experts_are_shared_nothing_is_judged(ranks: RankPool, ep: int) -> None:
    limit = 0 if ep == 2 else 2**40
    assert ranks.run(said_nothing, 2, config(limit, ep)) == ["", ""]


def said_nothing(config: Config) -> str:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))

    def never(*_: Any) -> float:
        raise AssertionError("nobody asks the planner")

    trainer.step.run(0)
    return LoadLimit(replace(wings(), most_load=never), "cpu").failure(0, trainer.step)
