"""Rung: gloo ranks. What DataParallel refuses from zero 1 on, in one line."""

from __future__ import annotations

import pytest
import torch
from support.engine.odd_module import world
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn

from tpengine.data_parallel import DataParallel
from tpengine.layers import clip_grad_norm_, sharded
from tpengine.layers.collectives import Communicator
from tpengine.pipeline import Pipeline


class Twice(nn.Module):
    """Uses its first layer again after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.second(self.first(x)))
        return y


class Hidden:
    """Holds a tensor that no one finds."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class DynamicCache(Hidden):
    """Of the name that transformers' has."""


class Caches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return DynamicCache(super().forward(x))  # type: ignore[return-value]


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Hidden(super().forward(x))  # type: ignore[return-value]


class Two(Communicator):
    """Two ranks that nothing is exchanged with."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2


def refused(case: str) -> str:
    comm = world()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    try:
        match case:
            case "stage":
                DataParallel(model, comm, zero=4)
            case "alone":
                DataParallel(model, Communicator(None), zero=3)
            case "stages differ":
                DataParallel(model, comm, zero=1 + comm.rank)
            case "foreign unit":
                DataParallel(model, comm, zero=3, units=[nn.Linear(3, 3)])
            case "nested units":
                outer = nn.Sequential(model)
                DataParallel(outer, comm, zero=3, units=[model, model[0]])
            case "own parameters":
                replicas = DataParallel(model, comm, zero=1)
                model(x).sum().backward()
                replicas.finish()
                torch.optim.AdamW(model.parameters()).step()
            case "state dict":
                DataParallel(model, comm, zero=2)
                model[1].state_dict()
            case "loading":
                DataParallel(model, comm, zero=3)
                model.load_state_dict({})
            case "unit alone":
                DataParallel(model, comm, zero=3)
                model[1](x)
            case "used again":
                twice = Twice()
                DataParallel(twice, comm, zero=3)
                twice(x)
            case "hidden output":
                hides = nn.Sequential(Hides(3, 3), nn.Identity())
                DataParallel(hides, comm, zero=3)
                hides(x)
            case "clip the model":
                DataParallel(model, comm, zero=2)
                clip_grad_norm_(model, 1.0, Communicator(None))
            case "clip without tp":
                DataParallel(sharded(model, Two()), comm, zero=1).clip_grad_norm_(1.0)
            case "clip without pp":
                pipe = Pipeline(model, x, lambda y, _: y.sum(), num_micro_batches=1)
                DataParallel(pipe.stage, Communicator(None)).clip_grad_norm_(1.0)
            case "cache":
                caches = nn.Sequential(Caches(3, 3), nn.Identity())
                DataParallel(caches, comm, zero=2)
                caches(x)
            case "two backwards":
                DataParallel(model, comm, zero=1)
                model(x).sum().backward()
                model(x).sum().backward()
            case "thawed":
                model[0].requires_grad_(False)
                replicas = DataParallel(model, comm, zero=2)
                model[0].requires_grad_(True)
                replicas.finish()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


WANTED = {
    "stage": "ValueError: zero must be one of the stages 0 to 3: got 4: use 0, 1, 2 or 3",
    "alone": "ValueError: zero shards what replicas hold alike: zero 3 with one replica saves nothing:",
    "stages differ": "ValueError: all ranks must build the same model: ranks [1] differ from rank 0",
    "foreign unit": "ValueError: units are modules inside the model: got a Linear that is not:",
    "nested units": "ValueError: a module lies in one unit only: 0.0 is given twice, or lies inside another one:",
    "own parameters": "RuntimeError: at zero 1 an optimizer updates slices: got the model's own 0.weight:",
    "state dict": "RuntimeError: at zero 2 weights are whole inside replicas.whole() only:",
    "loading": "RuntimeError: at zero 3 weights are whole inside replicas.whole() only:",
    "unit alone": "RuntimeError: zero 3 gathers weights inside the model's forward: unit '1' was called alone:",
    "used again": "RuntimeError: zero 3 gathers each unit once in a pass, and in one order: 'first' is used after",
    "hidden output": "ValueError: backward begins at tensors that a module returns: got a Hidden:",
    "cache": "ValueError: backward begins at tensors that a module returns: got a DynamicCache: call the model with",
    "clip the model": "ValueError: from zero 1 on a DataParallel holds slices of the gradients: 0.weight has none",
    "clip without tp": "ValueError: a norm is taken over all ranks that hold a part of the model: it is over 2",
    "clip without pp": "ValueError: a norm is taken over all ranks that hold a part of the model: it is one of 2",
    "two backwards": "RuntimeError: each backward outside no_sync() must be followed by finish():",
    "thawed": "RuntimeError: frozen parameters lie in no bucket: ['0.weight', '0.bias'] have been thawed since:",
}
FAST = ("alone", "own parameters", "state dict", "used again")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in WANTED])
def test_misuse_is_refused_in_one_line(ranks: RankPool, case: str) -> None:
    for said in ranks.run(refused, 2, case):
        assert said.startswith(WANTED[case]), said
        assert "\n" not in said
