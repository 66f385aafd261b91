"""Rung: gloo ranks. For each action of a plan, whom a rank waits for."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.runs.waiting import AwaitedRanks, Peers, awaited


def who_waits_for_whom(config: Config) -> dict[str, dict[str, list[int]]]:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    actions = trainer.state.part.plan.actions[trainer.state.rank.mesh.at.pp]
    return {str(action): awaited(trainer.state, action) for action in actions} | {
        "words": awaited(trainer.state, "words")
    }


@pytest.mark.slow
def test_each_action_names_its_peers(ranks: RankPool) -> None:
    """Rank = (pp * dp + dp index) * tp + tp index, so rank 5 is stage 1, replica 0, shard 1 of 2 x 2 x 2."""
    config = config_of(2, 2, 2, tied=True, kv_heads=1)
    by_action = ranks.run(who_waits_for_whom, 8, config)[5]
    assert by_action["1F0"] == by_action["1B0"] == {"tp": [4]}
    assert by_action["w[1RECV_F0]"] == {"pp": [1]}
    assert by_action["CLIP"] == {"tp": [4], "pp": [1], "dp": [7]}  # the losses of the last stage
    assert by_action["t0"] == {"pp": [1]}
    assert by_action["STEP"] == {}
    assert by_action["words"] == {"all": [0, 1, 2, 3, 4, 6, 7]}
    (reductions,) = [action for action in by_action if action.startswith("w[") and " r" in action]
    peers = by_action[reductions]
    # One KV head is shared by both shards, norm weights by both shards of both replicas.
    assert peers["dp"] == [7] and peers["dp_replica"] == peers["dp_tp"] == [4, 6, 7]


def test_slices_are_gathered_and_summed_by_the_replicas(ranks: RankPool) -> None:
    config = config_of(2, 2, 1, tied=True, kv_heads=1, zero=3)
    for rank, by_action in enumerate(ranks.run(who_waits_for_whom, 4, config)):
        other = {"dp": [(rank + 2) % 4]}
        waits = [action for action in by_action if action.startswith("w[")]
        assert any("g" in action for action in waits) and any("r" in action for action in waits)
        assert all(by_action[action] == other for action in waits)
        assert by_action["CLIP"]["dp"] == other["dp"]


@pytest.mark.parametrize(
    ("ep", "reduction"),
    [
        (1, "fast"),
        pytest.param(4, "fast", marks=pytest.mark.slow),
        (4, "exact"),
        pytest.param(2, "exact", marks=pytest.mark.slow),
    ],
)
def test_counts_of_experts_are_summed_by_those_that_route(
    ranks: RankPool, ep: int, reduction: Literal["fast", "exact"]
) -> None:
    """By the replicas; in fast mode, where ranks share experts, before that by the tp ranks of each."""
    base = config_of(2, 2, 1, tied=False, kv_heads=2)
    details = ModelDetails(num_experts=4, experts_per_token=2, expert_ffn_size=128)
    model, parallel = replace(base.model, architecture="qwen3_moe", details=details), replace(base.parallel, ep=ep)
    train = replace(base.train, reduction=reduction)
    config = validate(replace(base, model=model, parallel=parallel, train=train), 4)
    for rank, by_action in enumerate(ranks.run(who_waits_for_whom, 4, config)):
        (counts,) = [action for action in by_action if action.startswith("r")]
        (end,) = [action for action in by_action if action.startswith("w[") and counts in action]
        dp = {"dp": [(rank + 2) % 4]}
        apart = {"tp": [rank ^ 1]} if ep == 4 and reduction == "fast" else {}
        assert by_action[counts] == {**apart, **dp}
        assert by_action[end]["dp"] == dp["dp"] and "tp" not in by_action[end]


def test_every_rank_of_a_plan_waits_for_somebody_else(ranks: RankPool) -> None:
    for rank, by_action in enumerate(ranks.run(who_waits_for_whom, 4, config_of(1, 1, 4, tied=False, kv_heads=1))):
        for action, peers in by_action.items():
            for members in peers.values():
                assert rank not in members and members, action
        waits = [action for action in by_action if action.startswith("w[")]
        assert waits and all(by_action[action] for action in waits)


def explanation(config: Config) -> tuple[str, str, int]:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    peers = Peers(torch.device("cpu"))
    explain = AwaitedRanks(trainer.state, peers, None).explain
    alive = explain("words")
    # A process that has ended and was not waited for is a zombie: gone as well.
    child = os.fork()
    if child == 0:
        os._exit(0)
    peers.local[1 - dist.get_rank()] = child
    while not peers.gone([1 - dist.get_rank()]):
        pass
    dead = explain("words")
    os.waitpid(child, 0)
    assert explain("words") == dead
    return alive, dead, dist.get_rank()


def test_the_words_of_a_report(ranks: RankPool) -> None:
    for alive, dead, rank in ranks.run(explanation, 2, config_of(1, 1, 2, tied=False, kv_heads=1)):
        assert alive == f", waiting for rank {1 - rank} (all)"
        assert dead == f", waiting for rank {1 - rank} (all); rank {1 - rank} is gone"
