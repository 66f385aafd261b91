"""Rung: interpreter, several processes; GPU. Rows of experts that kernels bring into buffers: the bits of exact sizes.

All of the engine's kernels are interpreted, on ranks that share memory, or run by ranks that share a GPU. A run whose
buffers have room for all rows, one whose rows do not fit in some steps, and one without buffers give the same bits.
What only several GPUs check: that the host waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.engine.parity import config_of
from support.ranks.gpu_ranks import needs_gpu
from support.ranks.rank_pool import RankPool
from tpkernels.exchange import experts as exact
from tpkernels.fused import bounded_rows

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.data import open_corpus
from tpengine.layers import row_buffers
from tpengine.layout.decided import Decided
from tpengine.runs.trainer import Trainer
from tpengine.training import train_step
from tpengine.training.expert_loads import ExpertLoads
from tpengine.training.spikes import StepResult

pytest.importorskip("triton")

DETAILS = ModelDetails(
    num_experts=4, experts_per_token=2, expert_ffn_size=16, has_experts=(True,), normalizes_scores=True
)


def config_with_experts(tp: int, dp: int, pp: int, ep: int, num_layers: int = 1, **parallel: Any) -> Config:
    """One short sequence in a micro-batch: the interpreter is slow."""
    base = config_of(dp, tp, pp, tied=False, kv_heads=2, heads=2, num_layers=num_layers, **parallel)
    details = replace(DETAILS, has_experts=(True,) * num_layers)
    config = replace(
        base,
        model=replace(base.model, architecture="qwen3_moe", ffn_size=16, details=details),
        parallel=replace(base.parallel, ep=ep),
        train=replace(base.train, seq_len=8, micro_batch_size=1, num_micro_batches=pp, dtype="float32", balance="bias"),
    )
    return validate(config, tp * dp * pp)


# What is overlooked, by what replaces what.
MUTATIONS: dict[str, dict[str, Any]] = {
    "the step is not computed again": {"must_compute_again": lambda self, named: False},
    "the update is not skipped": {"is_incomplete": property(lambda self: torch.zeros((), dtype=torch.float64))},
    "nobody sees it": {
        "must_compute_again": lambda self, named: False,
        "is_incomplete": property(lambda self: torch.zeros((), dtype=torch.float64)),
    },
}


class Trained(NamedTuple):
    """What a rank has after some steps: their results, its weights, how often counts were exchanged each way."""

    results: list[StepResult]
    weights: dict[str, torch.Tensor]
    bounded: int
    exact: int
    said: str


def trained(
    config: Config, device: str, row_load: float, num_steps: int, hot: Sequence[int] = (), mutation: str = ""
) -> tuple[Any, ...]:
    """Train, and return what Trained has; in the steps `hot` biases send all rows to the experts of the first rank."""
    counted = {"bounded": 0, "exact": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*args: Any) -> Any:
            counted[name] += 1
            return function(*args)

        return counted_call

    with pytest.MonkeyPatch.context() as patch:
        for name, by in MUTATIONS.get(mutation, {}).items():
            patch.setattr(ExpertLoads, name, by)
        patch.setattr(row_buffers, "exchange_bounded_counts", counting("bounded", bounded_rows.exchange_bounded_counts))
        patch.setattr(row_buffers, "exchange_counts", counting("exact", exact.exchange_counts))
        # As over NCCL: pipelines first launch every kernel once.
        patch.setattr(train_step, "must_preload", lambda group: dist.get_world_size(group) > 1)
        trainer = Trainer(config, open_corpus(config), torch.device(device), decided=Decided(row_load=row_load))
        comms = trainer.state.rank.comms
        said = comms.describe(trainer.state.rank.mailbox)
        assert comms.ep is not None
        # As on GPUs, which have no memory of the host: there the same kernels add up what came.
        comms.ep.arena = None
        biases = [weight for name, weight in trainer.state.held.items() if name.endswith("e_score_correction_bias")]
        assert biases
        results = []
        for step in range(num_steps):
            for bias in biases:
                # Choices follow it: experts 0 and 1 are the first rank's.
                bias.data[:2] = 10.0 if step in hot else 0.0
            results.append(trainer.step.run(step))
    weights = {name: weight.detach().cpu() for name, weight in trainer.state.held.items()}
    return results, weights, counted["bounded"], counted["exact"], said


def same_numbers(one: Trained, other: Trained) -> bool:
    """Whether losses, norms and weights have the same bits."""
    pairs = zip(one.results, other.results, strict=True)
    return all((a.loss, a.grad_norm) == (b.loss, b.grad_norm) for a, b in pairs) and all(
        torch.equal(weight, other.weights[name]) for name, weight in one.weights.items()
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": dict(tp=2, dp=1, pp=1, ep=2),
    "dp 2": dict(tp=1, dp=2, pp=1, ep=2),
    "dp 2, blocks computed again": dict(tp=1, dp=2, pp=1, ep=2, recompute="block"),
    "dp 2, pp 2, weight halves": dict(tp=1, dp=2, pp=2, ep=2, num_layers=2, schedule="zb-h1", recompute="full"),
    "tp 2, dp 2": dict(tp=2, dp=2, pp=1, ep=4),
    "two of four, zero 2": dict(tp=2, dp=2, pp=1, ep=2, zero=2),
}
FAST, STEPS, HOT, TIGHT = ("dp 2",), 3, (0,), 1.75


def of_layout(pool: RankPool, device: str, layout: str, row_load: float, mutation: str = "") -> list[Trained]:
    """Train on the ranks of a layout."""
    config = config_with_experts(**LAYOUTS[layout])
    world = math.prod(size or 1 for size in (config.parallel.tp, config.parallel.dp, config.parallel.pp))
    return [Trained(*found) for found in pool.run(trained, world, config, device, row_load, STEPS, HOT, mutation)]


def calls_of(layout: str) -> int:
    """How often a rank exchanges counts in a step."""
    config = config_with_experts(**LAYOUTS[layout])
    return config.train.num_micro_batches * config.model.num_layers // (config.parallel.pp or 1)


def preloads(layout: str) -> bool:
    """Whether ranks run the plan once before, over NCCL: those of a pipeline."""
    return LAYOUTS[layout]["pp"] > 1


def in_slow(layout: str) -> Any:
    return layout if layout in FAST else pytest.param(layout, marks=pytest.mark.slow)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where ranks compute."""
    return str(request.param)


@pytest.fixture
def pool(device: str, request: pytest.FixtureRequest) -> RankPool:
    """Ranks that interpret kernels, or share a GPU."""
    found: RankPool = request.getfixturevalue("interpreters" if device == "cpu" else "ranks")
    return found


@pytest.mark.parametrize("layout", [in_slow(layout) for layout in LAYOUTS])
def test_a_step_whose_rows_do_not_fit_is_computed_again(pool: RankPool, device: str, layout: str) -> None:
    exactly, tight = (of_layout(pool, device, layout, row_load) for row_load in (0.0, TIGHT))
    for without, part in zip(exactly, tight, strict=True):
        assert (without.bounded, without.exact) == (0, 0)  # the layers call it themselves
        assert same_numbers(without, part)
        # Buffers are used unless rows of the step before had no room; what then has none is computed twice.
        have_no_room = [result.loads["expert_rows_over"] > 0 for result in part.results]
        use_buffers = [True, *(not had_none for had_none in have_no_room[:-1])]
        twice = [uses and has_none for uses, has_none in zip(use_buffers, have_no_room, strict=True)]
        assert [result.is_second for result in part.results] == twice and twice[0]
        assert not any(result.skipped for result in part.results)
        num_exact = STEPS - sum(use_buffers) + sum(twice)
        # In a pipeline each way has been run once before, so that nothing is loaded while receives are posted.
        passes = [number + preloads(layout) for number in (sum(use_buffers), num_exact)]
        assert [part.bounded, part.exact] == [number * calls_of(layout) for number in passes]
        # After the hot step rows fit again.
        assert layout not in FAST or use_buffers == [True, False, True]
        assert "into buffers with room for 1.75 times the mean" in part.said
        assert "whose numbers the host waits for once a layer" in without.said


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_room_for_all_rows_nothing_is_computed_twice(pool: RankPool, device: str, layout: str) -> None:
    exactly, roomy = (of_layout(pool, device, layout, row_load) for row_load in (0.0, 8.0))
    for without, whole in zip(exactly, roomy, strict=True):
        assert same_numbers(without, whole)
        assert (whole.bounded, whole.exact) == ((STEPS + preloads(layout)) * calls_of(layout), 0)
        assert not any(result.is_second or result.loads["expert_rows_over"] for result in whole.results)
        assert "into buffers with room for all" in whole.said


def decided_apart(config: Config) -> float:
    """Rank 0 has memory for all rows, the other for none."""
    decided = Decided(row_load=2.0 if dist.get_rank() == 0 else 0.0)
    return Trainer(config, open_corpus(config), torch.device("cpu"), decided=decided).state.rank.comms.row_load


def test_ranks_take_the_smallest_buffers(ranks: RankPool) -> None:
    assert ranks.run(decided_apart, 2, config_with_experts(**LAYOUTS["dp 2"])) == [0.0, 0.0]


@pytest.mark.slow
def test_an_overflow_that_nobody_sees_is_noticed(interpreters: RankPool, count_mutations: CountMutations) -> None:
    exactly = of_layout(interpreters, "cpu", "dp 2", 0.0)
    unnoticed = [
        name
        for name in MUTATIONS
        if all(map(same_numbers, exactly, of_layout(interpreters, "cpu", "dp 2", TIGHT, mutation=name)))
    ]
    count_mutations("rows of experts that have no room", len(MUTATIONS) - len(unnoticed), len(MUTATIONS))
    assert not unnoticed
