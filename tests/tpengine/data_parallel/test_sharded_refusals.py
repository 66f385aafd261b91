"""Rung: gloo ranks. What a ShardedOptimizer refuses, on all ranks alike: when it is made, and at a step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.given_gradients import differing, give_gradients, small
from support.ranks.rank_pool import RankPool
from torch import nn
from torch.optim import Optimizer
from tpkernels.exchange.communicator import Communicator

from tpengine.modules import DataParallel, ShardedOptimizer


class SumsOverAll(torch.optim.SGD):
    """Writes an option that it computes of all its tensors, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = float(sum(p.detach().norm() for p in group["params"]))
        return super().step(closure)


class CountsSteps(torch.optim.SGD):
    """Writes an option that is the same on all replicas, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    replicas = Communicator(dist.group.WORLD)
    model, said = small(), {}
    parameters = list(model.parameters())

    def made(optimizer_class: Any = torch.optim.SGD, params: Any = None, **options: Any) -> ShardedOptimizer:
        return ShardedOptimizer(optimizer_class, params or parameters, replicas, **options)

    said["closure"] = said_by(lambda: made(torch.optim.LBFGS))
    said["class"] = said_by(lambda: made(torch.optim.SGD(parameters)))
    said["replicas"] = said_by(lambda: ShardedOptimizer(torch.optim.SGD, parameters, DataParallel(model, replicas)))  # type: ignore[arg-type]
    said["bucket"] = said_by(lambda: made(bucket_bytes=0))
    said["option"] = said_by(lambda: made(rate=1.0))
    said["twice"] = said_by(lambda: made(params=[{"params": parameters}, {"params": parameters[:1]}]))
    optimizer = made()
    said["copy"] = said_by(lambda: copy.deepcopy(optimizer))
    said["pickle"] = said_by(lambda: pickle.dumps(optimizer))
    give_gradients(model, 0)
    said["one memory"] = said_by(made(params=[nn.Parameter(parameters[0].data), *parameters]).step)
    said["lr"] = said_by(made(lr=0.1 * (1 + replicas.rank)).step)
    said["number"] = said_by(made(params=parameters[replicas.rank :]).step)
    said["sums"] = said_by(made(SumsOverAll).step)
    said["counts"] = said_by(made(CountsSteps).step)
    half = nn.Linear(3, 3).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(half(torch.ones(1, 3).half()).float().sum()).backward()
    said["float16"] = said_by(lambda: scaler.step(made(params=list(half.parameters()))))
    later = made(masters=True)
    model.bfloat16()
    model.zero_grad()
    said["masters later"] = said_by(later.step)
    return said


def test_what_cannot_be_right_is_refused_on_all_ranks(ranks: RankPool) -> None:
    everywhere = ranks.run(refusals, 2)
    beginnings = {
        "closure": "ValueError: a sharded step evaluates the model once: LBFGS calls a closure",
        "class": "ValueError: a ShardedOptimizer is made of a class: got SGD (",
        "replicas": "ValueError: replicas are ranks: got a DataParallel: pass the Communicator",
        "bucket": "ValueError: bucket_bytes must be at least 1: got 0",
        "option": "TypeError: SGD.__init__() got an unexpected keyword argument 'rate'",
        "twice": "ValueError: some parameters appear in more than one parameter group",
        "copy": "TypeError: an optimizer whose state lies on several ranks cannot be copied or pickled",
        "pickle": "TypeError: an optimizer whose state lies on several ranks cannot be copied or pickled",
        "one memory": "ValueError: each parameter has memory of its own: two of [8, 3, 3, 3] and [8, 3, 3, 3]",
        "lr": "ValueError: replicas update the same parameters alike: ranks [1] differ from rank 0",
        "number": "ValueError: replicas update the same parameters alike: ranks [1] differ from rank 0",
        "sums": "ValueError: an option that a step writes must not depend on which tensors a replica owns",
        "float16": "ValueError: float16 gradients vanish when they are unscaled",
        "masters later": "ValueError: masters are made with the optimizer: a parameter has become torch.bfloat16 since",
    }
    for said in everywhere:
        assert said.keys() == beginnings.keys() | {"counts"}
        for name, beginning in beginnings.items():
            assert said[name].startswith(beginning), (name, said[name])
            assert name == "class" or "\n" not in said[name]
        assert said["counts"] == ""


# What one rank alone does, or what is done to the parameters behind the optimizer's back.


def replace(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][3] = nn.Parameter(model[2].bias.detach().clone())


def take_out(_: nn.Sequential, optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]["params"][3]


def append_a_group(_: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})


def grow(model: nn.Sequential, _: Optimizer) -> None:
    model[3].bias.data = torch.ones(3)


def raise_the_rate(_: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def share_memory(model: nn.Sequential, _: Optimizer) -> None:
    model[3].bias.data = model[2].bias.data[:2]


def make_sparse(model: nn.Sequential, _: Optimizer) -> None:
    model[2].weight.grad = model[2].weight.grad.to_sparse()


def move_there_and_back(model: nn.Sequential, _: Optimizer) -> None:
    model.double()
    model.float()


def change_one_step(change: Callable[[nn.Sequential, Optimizer], None], where: list[int]) -> tuple[str, list[str]]:
    """Do something on some ranks before the second step, and say what it raises; the rates change at every step."""
    replicas = Communicator(dist.group.WORLD)
    mine, wanted = small(), small()
    optimizer = ShardedOptimizer(torch.optim.SGD, mine.parameters(), replicas, lr=0.1)
    reference = torch.optim.SGD(wanted.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, reference)]
    said = ""
    for step in range(3):
        for model, one, scheduler in zip((mine, wanted), (optimizer, reference), schedulers, strict=True):
            give_gradients(model, step)
            if step == 1 and one is optimizer and replicas.rank in where:
                change(mine, optimizer)
            said = said or said_by(one.step)
            scheduler.step()
        if said:
            return said, []
    return said, differing(mine, wanted)


ON_ONE = "ValueError: replicas update the same parameters alike: ranks [1] differ from rank 0, rank 1 has "


@pytest.mark.parametrize(
    ("change", "where", "beginning"),
    [
        (replace, [0, 1], "ValueError: groups change by add_param_group: of group 0's 6 parameters 5 are left among 6"),
        (replace, [1], ON_ONE + "'groups change by add_param_group"),
        (
            take_out,
            [0, 1],
            "ValueError: groups change by add_param_group: of group 0's 6 parameters 5 are left",
        ),
        (take_out, [1], ON_ONE + "'group 0 parameter 3 [2, 60]"),
        (append_a_group, [0, 1], "ValueError: groups change by add_param_group: 1 groups have become 2"),
        (grow, [0, 1], "ValueError: a parameter keeps its shape: [2] has become [3]"),
        (grow, [1], ON_ONE + "'group 0 parameter 5 [3]"),
        (raise_the_rate, [1], ON_ONE + "'group 0 dampening 0"),
        (share_memory, [1], ON_ONE + "'each parameter has memory of its own"),
        (
            make_sparse,
            [0, 1],
            "ValueError: SGD over replicas takes dense gradients: a parameter of [60, 8] has",
        ),
        (make_sparse, [1], ON_ONE + "'SGD over replicas takes dense gradients"),
    ],
)
def test_a_step_that_ranks_do_not_do_alike_is_refused_on_all(
    ranks: RankPool, change: Callable[[nn.Sequential, Optimizer], None], where: list[int], beginning: str
) -> None:
    said = [said for said, _ in ranks.run(change_one_step, 2, change, where)]
    assert said[0] == said[1] and said[0].startswith(beginning) and "\n" not in said[0], said


def test_a_rank_that_moves_its_model_steps_with_the_others(ranks: RankPool) -> None:
    assert ranks.run(change_one_step, 2, move_there_and_back, [0]) == [("", [])] * 2
