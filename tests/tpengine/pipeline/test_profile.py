"""Rung: pure, gloo ranks. Costs of modules are counted, the same on every start and replica; or measured, if asked for.

What only a GPU checks: flops of its kernels.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Attention, ColumnParallelLinear, SwiGLU
from tpengine.modules import Pipeline
from tpengine.modules.cut import FLOPS_PER_ELEMENT, profile
from tpengine.plan import TensorSpec

ALONE = Communicator(None)


class Attended(nn.Module):
    """Attention of the package, on one sequence of 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(32, 2, 2, ALONE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, seq=16)
        return y


def flops_of(module: nn.Module, sample: Tensor) -> float:
    """What is counted of a module that is not the first, without its elements."""
    (_, of_module) = profile(nn.Sequential(nn.Identity(), module), sample)
    elements = sum(p.numel() for p in module.parameters()) + torch.Size(of_module.output.shape).numel()
    return of_module.cost - FLOPS_PER_ELEMENT * elements


def test_products_are_counted_whichever_operator_makes_them() -> None:
    """Forward, and backward for input and weight: 2 flops each per weight and row; of attention, 2 products and 5."""
    assert flops_of(nn.Linear(8, 12), torch.randn(5, 8)) == 6 * 5 * 8 * 12
    assert flops_of(nn.Linear(8, 12).requires_grad_(False), torch.randn(5, 8)) == 4 * 5 * 8 * 12
    assert flops_of(SwiGLU(8, 12, ALONE), torch.randn(6, 8)) == 6 * 6 * 3 * 8 * 12
    # Large enough for oneDNN, where it is used.
    assert flops_of(SwiGLU(256, 256, ALONE), torch.randn(128, 256)) == 6 * 128 * 3 * 256 * 256
    products = 6 * 16 * 4 * 32 * 32
    assert products < flops_of(Attended(), torch.randn(16, 32)) <= products + 7 * 2 * 16 * 16 * 32
    assert flops_of(nn.ReLU(), torch.randn(5, 8)) == 0


def test_the_first_module_gives_no_gradient_to_the_input() -> None:
    (first,) = profile(nn.Sequential(nn.Linear(8, 12)), torch.randn(5, 8))
    assert first.cost == 4 * 5 * 8 * 12 + FLOPS_PER_ELEMENT * (8 * 12 + 12 + 5 * 12)


class Keeps(nn.Module):
    """Keeps what it has computed, as a table of rotations that is made by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(4, device=x.device)
        return x * self.weight * self.table


class Reads(nn.Module):
    """Looks at values, which the meta device has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if float(x.detach().sum()) < 1e9 else x


def awkward() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), Reads(), Keeps(), nn.BatchNorm1d(3), nn.Linear(4, 5)
    )


def test_modules_on_the_meta_device_cost_and_return_the_same_and_stay_there() -> None:
    sample = torch.randint(7, (2, 3))
    want = profile(awkward(), sample)
    with torch.device("meta"):
        model = awkward()
    assert profile(model, sample) == want
    assert want[-1].output == TensorSpec((2, 3, 5), "float32")
    assert [run.in_place for run in want] == [False, False, True, False, False, False, False]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())) and model[4].table is None


class Sleeps(nn.Module):
    """Takes longer on some ranks: on replica 1 the first module, on replica 0 the last."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y: Tensor = self.linear(x)
        return y


def cuts(cut: str | None) -> list[tuple[tuple[int, int], ...]]:
    """The cuts of two starts of 2 stages x 2 replicas, the clocks of which differ."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    slow = [0.0, 0.2] if rank < 2 else [0.1, 0.0]
    found = []
    for swap in (False, True):
        first, last = reversed(slow) if swap else slow
        model = nn.Sequential(Sleeps(first), *(nn.Linear(8, 8) for _ in range(6)), Sleeps(last))
        pipe = Pipeline(
            model, torch.randn(4, 8), nn.functional.mse_loss, num_micro_batches=2, group=groups[rank // 2], cut=cut
        )
        found.append(pipe.layers)
    return found


def test_the_default_cut_is_the_same_on_every_replica_and_every_start(ranks: RankPool) -> None:
    assert ranks.run(cuts, 4, None) == [[((0, 4), (4, 8))] * 2] * 4


def test_a_measured_cut_is_asked_for_and_agreed_over_the_world(ranks: RankPool) -> None:
    """The slowest pipeline of each module counts: 0.1 s in the first, 0.2 s in the last, and the other way round."""
    found = ranks.run(cuts, 4, "measured")
    assert all(of_rank == found[0] for of_rank in found)
    (_, second), (first, _) = found[0]
    assert second == (7, 8) and first == (0, 1)


def other_numbers(_: int) -> str:
    group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 + dist.get_rank())))
    try:
        Pipeline(model, torch.randn(1, 2), nn.functional.mse_loss, num_micro_batches=1, group=group, cut="measured")
    except ValueError as error:
        return str(error)
    return "accepted"


def test_pipelines_of_other_modules_are_not_measured_together(ranks: RankPool) -> None:
    for said in ranks.run(other_numbers, 2, 0):
        assert "numbers of modules by rank [2, 3]" in said


def one_fails(_: int) -> str:
    """Two pipelines; the sample of one does not fit its model."""
    rank = dist.get_rank()
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    model, loss = nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss
    try:
        Pipeline(model, torch.randn(1, 2 + rank), loss, num_micro_batches=1, group=group, cut="measured")
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_pipeline_that_cannot_be_measured_stops_all(ranks: RankPool) -> None:
    for said in ranks.run(one_fails, 2, 0):
        assert said.startswith("the sample must run through the model: ")
        assert said.endswith(": check the sample's shape, dtype and device (ranks [1] alone found this)")


def exchanging(_: int) -> tuple[tuple[int, int], ...]:
    """Tensor-parallel modules on the meta device: 2 stages x tp 2."""
    rank = dist.get_rank()
    tp = Communicator([dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with torch.device("meta"):
        model = nn.Sequential(*(SwiGLU(8, 12, tp) for _ in range(3)), ColumnParallelLinear(8, 8, tp))
    pipe = Pipeline(
        model,
        torch.randn(4, 8),
        lambda y, target: y.square().mean(),
        num_micro_batches=2,
        group=stages,
        init=lambda module, index: [nn.init.normal_(p) for p in module.parameters()],
    )
    loss = pipe.step(torch.randn(8, 8), torch.zeros(8))
    assert torch.isfinite(torch.tensor(loss))
    return pipe.layers


def test_modules_that_exchange_are_run_for_their_shapes(ranks: RankPool) -> None:
    assert ranks.run(exchanging, 4, 0) == [((0, 2), (2, 4))] * 4


def test_an_unknown_cut_is_refused(ranks: RankPool) -> None:
    assert "cut must be the modules of each part, or 'measured': got 'best'" in ranks.run(refused_cut, 1, 0)[0]


def refused_cut(_: int) -> str:
    with pytest.raises(ValueError) as error:
        Pipeline(
            nn.Sequential(nn.Linear(2, 2)),
            torch.randn(1, 2),
            nn.functional.mse_loss,
            num_micro_batches=1,
            cut="best",  # type: ignore[arg-type]
        )
    return str(error.value)
