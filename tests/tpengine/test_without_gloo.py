"""Rung: fake ranks, one after the other. A run's calls where the ranks are not gloo's, as on several GPUs.

What only GPUs check: NCCL itself, and that its streams wait for each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_ranks import Call, check_legal, fake_rank
from parity import config_of
from rank_pool import RankPool

from tpengine.config import Config
from tpengine.data import Corpus, open_corpus
from tpengine.forward_pass import held_out_loss, sample
from tpengine.trainer import Trainer

CPU = torch.device("cpu")


def cheap(config: Config, **train: Any) -> Config:
    return replace(config, train=replace(config.train, eval_micro_batches=2, **train))


LAYOUTS = {
    "all axes, tied ends, kv replicas": config_of(2, 2, 2, tied=True, kv_heads=1, num_layers=2),
    "exact sums": cheap(config_of(2, 2, 1, tied=True, kv_heads=2, num_layers=2), reduction="exact", dtype="float32"),
    "tp alone, plain, gathered again": config_of(1, 2, 1, tied=False, kv_heads=4, tp_comm="plain", gathered="again"),
    "tp 4 of 2 kv heads, bfloat16": cheap(config_of(1, 4, 1, tied=True, kv_heads=2, num_layers=1), dtype="bfloat16"),
    "pp alone, split backward": config_of(1, 1, 2, tied=False, kv_heads=2, schedule="zb-h1"),
    "pp alone, a V of chunks, tied": config_of(1, 1, 2, tied=True, kv_heads=2, schedule="zbv"),
    "pp alone, tied, a stage in the middle": config_of(1, 1, 3, tied=True, kv_heads=2, schedule="gpipe"),
    "dp alone": config_of(2, 1, 1, tied=False, kv_heads=2, num_layers=2),
}


def calls_of_run(config: Config) -> list[list[Call]]:
    """Train, evaluate and sample on every rank in turn."""
    parallel, calls = config.parallel, []
    assert parallel.tp and parallel.pp and parallel.dp
    corpus: Corpus = open_corpus(config)
    world = parallel.tp * parallel.pp * parallel.dp
    for rank in range(world):
        with fake_rank(rank, world) as recorder:
            trainer = Trainer(config, corpus, CPU)
            trainer.train_step(0)
            held_out_loss(trainer)
            sample(trainer, [1, 2], 1)
            calls.append(recorder.calls)
            del trainer
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calls_of_all_ranks_fit_together(ranks: RankPool, layout: str) -> None:
    (calls,) = ranks.run(calls_of_run, 1, cheap(LAYOUTS[layout]))
    check_legal(calls)
    assert {call.operation for of_rank in calls for call in of_rank} >= {"allreduce_", "allgather_"}
