"""Rung: gloo ranks. `.grad` under DataParallel is what it is in torch, whatever is done to a wrapped model.

Each is done to one model on two replicas and to one in a single process, which sees both replicas' data.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.modules import DataParallel

NUM_RANKS, STEPS = 2, 4


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 1)).double()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x.to(next(model.parameters()).dtype)).square().mean()
    return loss


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty: a second derivative."""
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


# Before each backward, and after the gradients are there.
Change = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, step: int) -> None:
    pass


def layouts(model: nn.Module, step: int) -> None:
    model.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)


def round_trip(model: nn.Module, step: int) -> None:
    """model.to gives `.grad`, the same object, other memory."""
    model.float().double()


def dtypes(model: nn.Module, step: int) -> None:
    model.to(torch.float32 if step == 1 else torch.float64)


def exchanged(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def written_gradients(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5


def loaded(model: nn.Module, step: int) -> None:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def dropped(model: nn.Module, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        if i % 2:
            parameter.grad = None


def replaced(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 1


def copied(model: nn.Module, step: int) -> None:
    """A copy trains by itself, and is saved by itself."""
    ema = copy.deepcopy(model)
    loss_of(ema, inputs(7, step)).backward()
    torch.save(ema, io.BytesIO())


def compiled(model: nn.Module, step: int) -> None:
    if step == 0:
        model.compile(backend="eager")


CHANGES = {
    change.__name__: change
    for change in (
        nothing,
        layouts,
        round_trip,
        dtypes,
        exchanged,
        written_gradients,
        loaded,
        dropped,
        replaced,
        copied,
        compiled,
    )
}


def train(name: str, penalty: bool, keeps: bool, rank: int | None) -> list[list[Tensor | None]]:
    """Return the gradients of each step; on one replica, or of all in this process."""
    model, change = model_of(), CHANGES[name]
    loss = penalised if penalty else loss_of
    parallel = None if rank is None else DataParallel(model, Communicator(dist.group.WORLD), bucket_bytes=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[Tensor | None]] = []
    for step in range(STEPS):
        change(model, step)
        if parallel is None:
            sum((loss(model, inputs(r, step)) for r in range(NUM_RANKS)), torch.zeros(())).div(NUM_RANKS).backward()
        else:
            assert rank is not None
            loss(model, inputs(rank, step)).backward()
            parallel.finish()
        found.append([None if p.grad is None else p.grad.double().clone() for p in model.parameters()])
        optimizer.step()
        if not keeps:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found


def on_replicas(name: str, penalty: bool, keeps: bool) -> list[list[Tensor | None]]:
    return train(name, penalty, keeps, dist.get_rank())


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_are_those_of_one_process(ranks: RankPool, name: str, keeps: bool) -> None:
    """`keeps`: gradients are not cleared, so that each backward adds to what is there."""
    compare(
        ranks.run(on_replicas, NUM_RANKS, name, False, keeps),
        train(name, False, keeps, None),
        1e-5 if name in ("dtypes", "round_trip") else 1e-11,
    )


def test_a_gradient_penalty_trains_as_in_one_process(ranks: RankPool) -> None:
    compare(ranks.run(on_replicas, NUM_RANKS, "nothing", True, False), train("nothing", True, False, None), 1e-11)


def compare(got: list[list[list[Tensor | None]]], wanted: list[list[Tensor | None]], tolerance: float) -> None:
    for of_rank in got:
        for mine, theirs in zip(of_rank, wanted, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a is not None and b is not None
                assert float((a - b).abs().max()) <= tolerance


def refused(zero: object) -> str:
    with pytest.raises(ValueError, match="zero must be 0") as error:
        DataParallel(nn.Linear(2, 2), Communicator(None), zero=zero)  # type: ignore[arg-type]
    return str(error.value)


def test_other_stages_name_what_is_for_them() -> None:
    assert "got 1: leave zero out, and divide the optimizer's state by tpengine.modules.ShardedOptimizer" in refused(1)
    for zero in (2, 3):
        assert "torch.distributed.fsdp.fully_shard" in refused(zero)
        assert "--model.architecture FILE.py with --parallel.zero" in refused(zero)
    for odd in (4, -1, True, False, 1.0, "1", None):
        assert refused(odd).endswith(f"got {odd!r}: leave it out")


def moved_in_between() -> str:
    model = model_of()
    parallel = DataParallel(model, Communicator(dist.group.WORLD))
    loss_of(model, inputs(0, 0)).backward()
    model.float()
    try:
        parallel.finish()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_that_moves_while_its_gradients_are_summed_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(moved_in_between, 2):
        assert said.startswith("parameters stay where they are between backward and finish(): ")
