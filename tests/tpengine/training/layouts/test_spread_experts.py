"""Rung: gloo ranks. Rows that travel to the experts of other ranks: layouts train to what one process trains to.

test_experts.py has where experts lie and how they are summed, clipped and saved, with a layer that is a loop. Here are
the model's own layer and its exchanges, in schedules that split backward, computed again, with weights that stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch.distributed as dist
from support.engine.parity import Outcome, compare, config_of, train
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config, ParameterGroup, validate
from tpengine.config.settings import ModelDetails
from tpengine.distributed.mesh import Communicators

DETAILS = ModelDetails(
    num_experts=8,
    experts_per_token=3,
    expert_ffn_size=24,
    has_experts=(False, True, True, False, True),
    normalizes_scores=True,
    shared_expert_size=24,
    gates_shared_expert=True,
)


def of(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    frozen: str = "",
    balance: Literal["none", "loss", "bias"] = "none",
    **parallel: Any,
) -> Config:
    config = config_of(dp, tp, pp, tied=False, kv_heads=4, **parallel)
    return validate(
        replace(
            config,
            model=replace(config.model, architecture="qwen3_moe", details=DETAILS),
            parallel=replace(config.parallel, ep=ep),
            train=replace(config.train, balance=balance, balance_rate=0.1),
            optim=replace(config.optim, groups=(ParameterGroup(frozen, frozen=True),) if frozen else ()),
        ),
        dp * tp * pp,
    )


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[..., Outcome]:
    """One process's outcome, by what is frozen, or how experts are balanced."""
    return functools.cache(lambda **settings: ranks.run(train, 1, of(**settings))[0])


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": dict(tp=2, ep=2),
    "tp 2, dp 2": dict(tp=2, dp=2, ep=4),
    "dp 2, computed again": dict(dp=2, ep=2, recompute="full"),
    "weight halves": dict(tp=2, pp=2, ep=2, schedule="zb-h1"),
    "blocks computed again": dict(tp=2, dp=2, ep=4, recompute="block", zero=3),
    "two of four": dict(tp=2, dp=2, ep=2, recompute="full", zero=2),
    "weight halves, experts of replicas": dict(dp=2, pp=2, ep=2, schedule="zb-h1", recompute="full"),
    "by collectives": dict(tp=2, dp=2, ep=4, tp_comm="plain"),
}
FAST = ("weight halves",)


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_layouts_train_as_one_process(ranks: RankPool, alone: Callable[..., Outcome], layout: str) -> None:
    config = of(**LAYOUTS[layout])
    parallel = config.parallel
    assert parallel.dp and parallel.tp and parallel.pp
    compare(ranks.run(train, parallel.dp * parallel.tp * parallel.pp, config), alone())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["*.mlp.gate.*", "*.mlp.experts.*"])
def test_what_stays_as_it_is(ranks: RankPool, alone: Callable[..., Outcome], frozen: str) -> None:
    config = of(tp=2, dp=2, ep=4, frozen=frozen)
    compare(ranks.run(train, 4, config), alone(frozen=frozen))


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["loss", "bias"])
@pytest.mark.parametrize("layout", ["tp 2", "two of four"])
def test_ranks_that_route_their_own_tokens_balance_all(
    ranks: RankPool, alone: Callable[..., Outcome], layout: str, balance: Literal["loss", "bias"]
) -> None:
    """The loss of a micro-batch is of the tokens of all tp ranks, and so are the counts that biases follow."""
    config = of(**LAYOUTS[layout], balance=balance)
    compare(ranks.run(train, 2 if layout == "tp 2" else 4, config), alone(balance=balance))


def ways_said() -> list[str]:
    alone, found = Communicator(None), []
    for arena_bytes in (0, 1 << 14):
        ep = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
        found.append(Communicators(alone, alone, alone, None, alone, alone, alone, ep, alone).describe(None))
    return found


def test_a_run_says_how_rows_travel(ranks: RankPool) -> None:
    for by_messages, through_memory in ranks.run(ways_said, 2):
        said = "ep by gloo; rows of experts all to all by gloo, whose numbers the host waits for once a layer"
        assert by_messages == said
        assert "rows of experts through shared memory" in through_memory
