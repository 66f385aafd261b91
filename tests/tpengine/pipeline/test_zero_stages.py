"""Rung: gloo ranks. DataParallel of zero 1 to 3 on the stages of pipelines, against one process, in float64.

A foreign model on all three axes is in tests/tpengine/model/test_foreign.py.
"""

from __future__ import annotations

import pytest
import torch
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpengine.data_parallel import DataParallel
from tpengine.data_parallel.any_module.sliced_replicas import SlicedReplicas
from tpengine.layers import ColumnParallelLinear
from tpengine.layers.collectives import Communicator
from tpengine.pipeline import Pipeline

DIM, STEPS, MICRO, ROWS = 8, 3, 4, 2
CUTS = {"1f1b": [4, 2], "interleaved": [2, 1, 2, 1], "zb-h1": [4, 2], "zbv": [1, 2, 2, 1]}


def model_of(schedule: str) -> nn.Sequential:
    """Six layers: ours where backward is split; else torch's, one shared by two chunks of a rank, one frozen."""
    torch.manual_seed(0)
    if schedule.startswith("zb"):
        one = Communicator(None)
        return nn.Sequential(*(ColumnParallelLinear(DIM, DIM, one, dtype=torch.float64) for _ in range(6)))
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(6)]
    layers[3][0].weight = layers[0][0].weight
    layers[4].requires_grad_(False)
    return nn.Sequential(*layers).double()


def loss_of(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean()


def batch_of(replica: int, step: int, again: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + again)
    x, y = torch.randn(2, MICRO * ROWS, DIM, generator=generator, dtype=torch.float64)
    return x, y


def batches(replica: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """The first replica has a batch more."""
    return [batch_of(replica, step, again) for again in range(2 - replica)]


def in_one_process(schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(schedule)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        both = [loss_of(model(x), y) for replica in range(2) for x, y in batches(replica, step)]
        (sum(both, torch.zeros(())) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss.detach()) for loss in both]
    return losses, dict(model.state_dict())


def train(zero: int, schedule: str, arena_bytes: int = 0) -> tuple[int, list[float], dict[str, Tensor], int]:
    """Train a stage; return the replica, its losses, the stage's weights, and how many layers had memory at most."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = (Communicator(mesh.get_group(axis), arena_bytes=arena_bytes) for axis in ("pp", "dp"))
    sample = batch_of(0, 0, 0)[0][:ROWS]
    model = model_of(schedule)
    how = dict(num_micro_batches=MICRO, group=pp.group, schedule=schedule, cut=CUTS[schedule])
    pipe = Pipeline(model, sample, loss_of, **how)  # type: ignore[arg-type]
    replicas = DataParallel(pipe.stage, dp, zero=zero)
    assert isinstance(replicas.stage, SlicedReplicas)
    whole: list[int] = []
    for layer in pipe.stage:
        layer.register_forward_pre_hook(lambda *_: whole.append(num_whole(pipe.stage)))
        if zero == 3:
            layer.register_full_backward_hook(lambda *_: whole.append(num_whole(pipe.stage)))
    optimizer = torch.optim.AdamW(replicas.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for x, y in batches(dp.rank, step):
            with replicas.no_sync():
                losses.append(pipe.step(x, y))
            pipe.forward(x)
        replicas.finish()
        replicas.clip_grad_norm_(0.1, pp=pp)
        optimizer.step()
    with replicas.whole():
        state = {name: tensor.clone() for name, tensor in pipe.stage.state_dict().items()}
    replicas.remove()
    return dp.rank, losses, state, max(whole)


def num_whole(stage: nn.Sequential) -> int:
    """How many layers have values: the others' weights are one NaN."""
    return sum(not any(p.isnan().any() for p in layer.parameters()) for layer in stage)


@pytest.mark.parametrize(
    ("zero", "schedule"),
    [
        (3, "interleaved"),
        (2, "zbv"),
        (1, "1f1b"),
        *(
            pytest.param(zero, schedule, marks=pytest.mark.slow)
            for zero in (1, 2, 3)
            for schedule in CUTS
            if (zero, schedule) not in {(3, "interleaved"), (2, "zbv"), (1, "1f1b")}
        ),
    ],
)
def test_stages_train_as_one_process(ranks: RankPool, zero: int, schedule: str) -> None:
    losses, wanted = in_one_process(schedule)
    for replica, got, state, whole in ranks.run(train, 4, zero, schedule):
        assert got == pytest.approx([loss for i, loss in enumerate(losses) if (i % 3 == 2) == replica], abs=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12)
        # Zero 3: the layer that computes and the next one, however many micro-batches wait for their backward.
        assert whole <= 3 or zero < 3


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "schedule"), [(1, "zbv"), (2, "1f1b"), (3, "interleaved"), (3, "zb-h1")])
def test_stages_whose_replicas_share_memory(ranks: RankPool, zero: int, schedule: str) -> None:
    """Weights exist once on the host, and replicas take turns to read and write them."""
    losses, wanted = in_one_process(schedule)
    for replica, got, state, _ in ranks.run(train, 4, zero, schedule, 100_000):
        assert got == pytest.approx([loss for i, loss in enumerate(losses) if (i % 3 == 2) == replica], abs=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12)
