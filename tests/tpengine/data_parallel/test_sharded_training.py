"""Rung: gloo ranks. ShardedOptimizer with DataParallel, in a pipeline and beside tensor parallelism: torch's optimizer.

Every bit of the weights is that of the same program with the optimizer on every replica. A foreign model on all three
axes is in tests/tpengine/model/test_foreign.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.engine.odd_module import odd_model, tokens_of
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import ColumnParallelLinear, RowParallelLinear
from tpengine.modules import DataParallel, Pipeline, ShardedOptimizer

DIM, MICRO, ROWS, STEPS = 8, 4, 2, 3


def optimizer_of(model: nn.Module, replicas: Communicator, sharded: bool) -> torch.optim.Optimizer:
    if sharded:
        return ShardedOptimizer(torch.optim.AdamW, model.parameters(), replicas, bucket_bytes=300, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train_odd(sharded: bool, arena_bytes: int) -> list[Tensor]:
    """Shared, frozen, unused parameters, and one that only one replica uses."""
    replicas = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    model = odd_model(seed=replicas.rank)
    parallel = DataParallel(model, replicas, bucket_bytes=300)
    optimizer = optimizer_of(model, replicas, sharded)
    for step in range(STEPS):
        model(tokens_of(replicas.rank, step), "branch rare" if replicas.rank == 0 else "").backward()
        parallel.finish()
        parallel.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def train_stage(sharded: bool, schedule: str) -> list[Tensor]:
    """A stage of pp 2 x dp 2, clipped over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = (Communicator(mesh.get_group(axis)) for axis in ("pp", "dp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(6)))
    x, y = torch.randn(2, MICRO * ROWS, DIM, generator=torch.Generator().manual_seed(dp.rank))
    loss = nn.functional.mse_loss
    pipe = Pipeline(model, x[:ROWS], loss, num_micro_batches=MICRO, group=pp.group, schedule=schedule)
    parallel = DataParallel(pipe.stage, dp)
    optimizer = optimizer_of(pipe.stage, dp, sharded)
    for _ in range(STEPS):
        with parallel.no_sync():
            pipe.step(x, y)
        parallel.finish()
        parallel.clip_grad_norm_(0.1, pp=pp)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(pipe.stage)


def train_cut(sharded: bool, _: str) -> list[Tensor]:
    """A model of tp 2 x dp 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("dp", "tp"))
    torch.manual_seed(tp.rank)
    model = nn.Sequential(ColumnParallelLinear(DIM, 6 * DIM, tp), nn.Tanh(), RowParallelLinear(6 * DIM, DIM, tp))
    parallel = DataParallel(model, dp)
    optimizer = optimizer_of(model, dp, sharded)
    for step in range(STEPS):
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        parallel.finish()
        parallel.clip_grad_norm_(0.1, tp)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def equal(ours: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    pairs = [pair for mine, theirs in zip(ours, wanted, strict=True) for pair in zip(mine, theirs, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("num_ranks", "arena_bytes"), [(3, 0), (2, 5_000)])
def test_any_module_trains_as_with_whole_state(ranks: RankPool, num_ranks: int, arena_bytes: int) -> None:
    sharded = ranks.run(train_odd, num_ranks, True, arena_bytes)
    assert equal(sharded, ranks.run(train_odd, num_ranks, False, arena_bytes))
    assert all(equal([weights], [sharded[0]]) for weights in sharded), "replicas differ"


@pytest.mark.by_default("train_stage-1f1b", "train_cut-")
@pytest.mark.parametrize(("program", "how"), [(train_stage, "1f1b"), (train_stage, "interleaved"), (train_cut, "")])
def test_stages_and_cut_layers_train_as_with_whole_state(ranks: RankPool, program: object, how: str) -> None:
    assert equal(*(ranks.run(program, 4, sharded, how) for sharded in (True, False)))  # type: ignore[arg-type]
