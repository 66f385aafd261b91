"""Rung: fake ranks, one after the other. A run's calls where the ranks are not gloo's, as on several GPUs.

What only GPUs check: NCCL itself, and that its streams wait for each other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.fake_ranks import Call, check_legal, fake_rank
from support.ranks.rank_pool import RankPool
from torch import nn
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config
from tpengine.data import Corpus, open_corpus
from tpengine.modules import DataParallel, Pipeline
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer
from tpengine.training import step_batch

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


def calls_of_run(config: Config, splits: bool = False) -> list[list[Call]]:
    """Train, evaluate and sample on every rank in turn; splits: as over NCCL with a bound device."""
    parallel, calls = config.parallel, []
    assert parallel.tp and parallel.pp and parallel.dp
    corpus: Corpus = open_corpus(config)
    world = parallel.tp * parallel.pp * parallel.dp
    for rank in range(world):
        with fake_rank(rank, world, splits=splits) as recorder, pytest.MonkeyPatch.context() as patch:
            # A stage in the middle reads nothing, and hears only itself: that somebody has read.
            report = step_batch.Report
            patch.setattr(step_batch, "Report", lambda *said, report=report: report(*(said or (1, 0, 24))))
            trainer = Trainer(config, corpus, CPU)
            trainer.step.run(0)
            held_out_loss(trainer.state)
            sample(trainer.state, [1, 2], 1)
            calls.append(recorder.calls)
            del trainer
    return calls


@pytest.mark.by_default("exact sums", "all axes, tied ends, kv replicas", "pp alone, a V of chunks, tied")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calls_of_all_ranks_fit_together(ranks: RankPool, layout: str) -> None:
    (calls,) = ranks.run(calls_of_run, 1, cheap(LAYOUTS[layout]))
    check_legal(calls)
    assert {call.operation for of_rank in calls for call in of_rank} >= {"allreduce_", "allgather_"}


def test_each_direction_of_a_pipeline_has_a_group_over_nccl(ranks: RankPool) -> None:
    (calls,) = ranks.run(calls_of_run, 1, cheap(LAYOUTS["pp alone, a V of chunks, tied"]), True)
    check_legal(calls)
    splits = [call for call in calls[0] if call.operation == "split"]
    assert [call.detail[1] for call in splits] == ["mesh_pp", "mesh_pp_backward"]
    messages = [call for call in calls[0] if call.operation in ("send", "recv_")]
    groups = list(dict.fromkeys(call.group for call in messages))
    assert len(groups) == 2
    # A step sends as many activations as gradients; evaluation and sampling send activations only.
    activations, gradients = ([call for call in messages if call.group == group] for group in groups)
    assert len(activations) > len(gradients) > 0


def calls_of_users_model() -> list[list[Call]]:
    """A pipeline of two stages in two replicas, of a model that is no transformer."""
    calls, told = [], [""]

    def tell(value: Any, group: dist.ProcessGroup) -> Any:
        if dist.get_rank(group) == 0:
            told[0] = json.dumps(value)
        return json.loads(told[0])

    for rank in range(4):
        with fake_rank(rank, 4) as recorder, pytest.MonkeyPatch.context() as patch:
            # What rank 0 says no fake rank hears.
            patch.setattr("tpengine.modules.cut.broadcast_json", tell)
            pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
            loss = nn.functional.mse_loss
            pipe = Pipeline(model, torch.ones(2, 3), loss, num_micro_batches=2, group=pipelines[rank % 2], cut=(2, 1))
            replicas = DataParallel(pipe.stage, Communicator(stages[rank // 2]), bucket_bytes=20)
            with replicas.no_sync():
                pipe.step(torch.ones(4, 3), torch.ones(4, 2))
            replicas.finish()
            pipe.forward(torch.ones(4, 3))
            calls.append(recorder.calls)
    return calls


def test_the_calls_of_a_users_own_pipeline_and_replicas_fit_together(ranks: RankPool) -> None:
    (calls,) = ranks.run(calls_of_users_model, 1)
    check_legal(calls)
    assert all(call.members != (0, 1, 2, 3) for of_rank in calls for call in of_rank)
    assert {"send", "recv_", "allreduce_"} <= {call.operation for of_rank in calls for call in of_rank}
