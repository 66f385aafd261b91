"""Rung: gloo ranks. A ShardedOptimizer's parts go on with any number of replicas; wrong ones are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.modules import ShardedOptimizer
from tpengine.modules.optimizer_parts import SavedParts


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(9, 23), nn.Linear(23, 2, dtype=torch.bfloat16), nn.Linear(3, 3).requires_grad_(False)
    )


def optimizer_of(model: nn.Module) -> ShardedOptimizer:
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [*model[1:].parameters()]}]
    return ShardedOptimizer(torch.optim.AdamW, groups, Communicator(dist.group.WORLD), masters=True, lr=0.1)


def steps(model: nn.Module, optimizer: ShardedOptimizer, first: int) -> None:
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(step)
        for parameter in model[:2].parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def save(directory: Path) -> list[Tensor]:
    """Save after two steps; return the weights after two more."""
    model = model_of()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 0)
    optimizer.param_groups[1]["lr"] = 0.01
    torch.save(optimizer.state_dict(), directory / f"{dist.get_rank()}.pt")
    torch.save(model.state_dict(), directory / "model.pt") if dist.get_rank() == 0 else None
    steps(model, optimizer, 2)
    return [p.detach() for p in model.parameters()]


def go_on(directory: Path, num_saved: int) -> list[Tensor]:
    model = model_of()
    optimizer = optimizer_of(model)
    model.load_state_dict(torch.load(directory / "model.pt"))
    optimizer.load_state_dict(
        [torch.load(directory / f"{r}.pt", weights_only=True) for r in reversed(range(num_saved))]
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    steps(model, optimizer, 2)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("num_saved", "num_loaded"), [(2, 3), (3, 2), (3, 1), (1, 2), (2, 2)])
def test_any_number_of_replicas_goes_on_with_the_same_bits(
    ranks: RankPool, tmp_path: Path, num_saved: int, num_loaded: int
) -> None:
    wanted = ranks.run(save, num_saved, tmp_path)[0]
    for weights in ranks.run(go_on, num_loaded, tmp_path, num_saved):
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))


def parts() -> list[dict[str, Any]]:
    """Two parts of one matrix and a bias."""
    group = {"lr": 1.0, "params": [0, 1]}
    shapes = {0: [4, 2], 1: [3]}
    state = {"m": torch.ones(2, 2), "step": torch.tensor(5.0)}
    return [
        {
            "state": {0: state},
            "param_groups": [group],
            "sharding": {"rows": {0: [0, 2]}, "shapes": shapes, "masters": {}},
        },
        {
            "state": {0: copy.deepcopy(state), 1: {"m": torch.ones(3), "step": torch.tensor(5.0)}},
            "param_groups": [group],
            "sharding": {"rows": {0: [2, 4], 1: [0, 3]}, "shapes": shapes, "masters": {}},
        },
    ]


def said_by(saved: list[dict[str, Any]], shapes: dict[int, list[int]], numbers: list[list[int]]) -> str:
    try:
        SavedParts(saved, shapes, numbers).state_of(0, 1, 4)
    except ValueError as error:
        return str(error)
    return ""


def test_parts_that_are_missing_overlap_or_are_of_another_model_are_refused() -> None:
    shapes, numbers = {0: [4, 2], 1: [3]}, [[0, 1]]
    one, two = parts()
    assert said_by([one, two], shapes, numbers) == ""
    assert said_by([], shapes, numbers).startswith("a state is loaded from the parts of all replicas: got none")
    assert "of parameter 0 with 4 rows the 1 parts have [[2, 4]]" in said_by([two], shapes, numbers)
    assert "of parameter 0 with 4 rows the 1 parts have [[0, 2]]" in said_by([one], shapes, numbers)
    assert "the 3 parts have [[0, 2], [0, 2], [2, 4]]" in said_by([one, two, one], shapes, numbers)
    assert "parameter 0 is [4, 2] in a part, [4, 3] here" in said_by([one, two], {0: [4, 3], 1: [3]}, numbers)
    assert "got groups of [2] parameters for groups of [1, 1]" in said_by([one, two], shapes, [[0], [1]])
    one["state"][0]["step"] = torch.tensor(6.0)
    assert "parts of parameter 0 differ in step" in said_by([one, two], shapes, numbers)


def test_parts_of_different_steps_are_refused() -> None:
    """Of whole tensors nothing overlaps that could show it."""
    shapes, numbers = {0: [4, 2], 1: [3]}, [[0, 1]]
    one, two = parts()
    one["sharding"]["steps"], two["sharding"]["steps"] = 1, 3
    assert said_by([one, two], shapes, numbers).startswith("parts are of one step: got those of steps [1, 3]: pass")
    one["sharding"]["steps"] = 3
    assert said_by([one, two], shapes, numbers) == ""
    assert SavedParts([one, two], shapes, numbers).num_steps == 3
    two["param_groups"] = [{"lr": 0.5, "params": [0, 1]}]
    assert "group 0 has 'lr 0.5' in part 1, 'lr 1.0' in part 0" in said_by([one, two], shapes, numbers)


def test_rows_are_cut_and_joined() -> None:
    one, two = parts()
    two["state"][0]["m"] += torch.tensor([[1.0], [2.0]])
    state, master = SavedParts([two, one], {0: [4, 2], 1: [3]}, [[0, 1]]).state_of(0, 1, 4)
    assert state["m"].tolist() == [[1, 1], [2, 2], [3, 3]] and state["step"] == 5 and master is None


def test_masters_are_not_dropped() -> None:
    """A part with masters is refused where there are none: the bits that the weights have not would be lost."""
    model = nn.Linear(2, 2).bfloat16()
    alone = Communicator(None)
    saved = ShardedOptimizer(torch.optim.SGD, model.parameters(), alone, masters=True).state_dict()
    assert [master.dtype for master in saved["sharding"]["masters"].values()] == [torch.float32] * 2
    with pytest.raises(ValueError, match="masters are loaded into masters"):
        ShardedOptimizer(torch.optim.SGD, model.parameters(), alone).load_state_dict(saved)
