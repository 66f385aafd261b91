"""Rung: gloo ranks. What DataParallel refuses: models that differ, forgotten calls, parameters it does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.engine.odd_module import odd_model, tokens_of, world
from support.ranks.rank_pool import RankPool
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpengine.modules import DataParallel


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forget_finish(second: str) -> str:
    model = odd_model(seed=0)
    replicas = DataParallel(model, world())
    model(tokens_of(0, 0), "").backward()
    if second == "no_sync":
        with replicas.no_sync():
            return error_of(model(tokens_of(0, 1), "").backward)
    if second == "other parameters":  # none of them had a gradient in the first backward
        return error_of(model.branch(torch.ones(6).double()).sum().backward)
    return error_of(model(tokens_of(0, 1), "").backward)


def checkpointed(use_reentrant: bool) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replicas = DataParallel(model, world())
    x = torch.ones(2, 3, requires_grad=True)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    error = error_of(x.sum().backward)
    replicas.finish()
    return error


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_reentrant_checkpointing_is_refused(ranks: RankPool, use_reentrant: bool) -> None:
    for error in ranks.run(checkpointed, 2, use_reentrant):
        assert ("use_reentrant=False" in error) == use_reentrant, error


@pytest.mark.parametrize("second", ["same", "other parameters", "no_sync"])
def test_a_forgotten_finish_is_an_error(ranks: RankPool, second: str) -> None:
    for error in ranks.run(forget_finish, 2, second):
        assert error.startswith("RuntimeError: each backward outside no_sync() must be followed by finish()")
        assert "\n" not in error


class Doubled(nn.Module):
    """Two linear layers, alike in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def refuse(difference: str) -> str:
    comm = world()
    model, bucket_bytes = Doubled(), 1000
    if comm.rank == 1:
        match difference:
            case "name":
                model.three = model.two
                del model.two
            case "number":
                model.three = nn.Linear(3, 3)
            case "shape":
                model.two = nn.Linear(3, 4)
            case "strides":
                model.two.weight = nn.Parameter(model.two.weight.detach().T)
            case "dtype":
                model.two.bfloat16()
            case "frozen":
                model.two.weight.requires_grad_(False)
            case "shared":
                model.two.weight = model.one.weight
            case "buffer":
                model.mask = torch.ones(4, dtype=torch.bool)
            case "buckets":
                bucket_bytes = 2000
    return error_of(lambda: DataParallel(model, comm, bucket_bytes))


@pytest.mark.parametrize(
    ("difference", "theirs"),
    [
        ("name", "'parameter three.weight [3, 3] strides [3, 1] torch.float32 trained device 0'"),
        ("number", "'parameter three.weight [3, 3] strides [3, 1] torch.float32 trained device 0'"),
        ("shape", "'parameter two.weight [4, 3] strides [3, 1] torch.float32 trained device 0'"),
        ("strides", "'parameter two.weight [3, 3] strides [1, 3] torch.float32 trained device 0'"),
        ("dtype", "'parameter two.weight [3, 3] strides [3, 1] torch.bfloat16 trained device 0'"),
        ("frozen", "'parameter two.weight [3, 3] strides [3, 1] torch.float32 frozen device 0'"),
        ("shared", "'parameter two.weight shared with one.weight'"),
        ("buffer", "'buffer mask [4] torch.bool'"),
        ("buckets", "'bucket_bytes 2000'"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(ranks: RankPool, difference: str, theirs: str) -> None:
    errors = ranks.run(refuse, 3, difference)
    assert errors[0].startswith("ValueError: all ranks must build the same model: ranks [1] differ from rank 0"), errors
    assert len(set(errors)) == 1 and "\n" not in errors[0] and theirs in errors[0], errors


def refuse_meta(_: int) -> str:
    return error_of(lambda: DataParallel(nn.Linear(3, 3, device="meta"), world()))


def test_a_model_without_values_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(refuse_meta, 2, 0):
        assert error.startswith("ValueError: a model must have its values before they are made equal"), error


def test_models_that_agree_are_not_refused(ranks: RankPool) -> None:
    assert ranks.run(refuse, 3, "nothing") == [""] * 3


def misuse() -> list[str]:
    errors = []
    embedding = nn.Embedding(5, 2, sparse=True)
    DataParallel(embedding, world())
    errors.append(error_of(embedding(torch.tensor([1, 2])).sum().backward))

    model = odd_model(seed=0)
    replicas = DataParallel(model, world())
    model.frozen.bias.requires_grad_(True)
    errors.append(error_of(replicas.finish))
    replicas.remove()
    replicas = DataParallel(model, world())
    model(tokens_of(dist.get_rank(), 0), "").backward()
    errors.append(error_of(replicas.finish))
    return errors


def test_sparse_gradients_and_thawed_parameters_are_refused(ranks: RankPool) -> None:
    for sparse, thawed, again in ranks.run(misuse, 2):
        assert sparse.startswith("ValueError: buckets hold dense gradients: a parameter of shape [5, 2]")
        assert thawed.startswith("RuntimeError: frozen parameters lie in no bucket: ['frozen.bias'] have been thawed")
        assert again == ""


def replaced(how: str) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    replicas = DataParallel(model, world())
    if how == "head":
        model[1] = nn.Linear(2, 1)
    else:
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    model(torch.randn(3, 2)).sum().backward()
    return error_of(replicas.finish)


@pytest.mark.parametrize("how", ["head", "assign"])
def test_replaced_parameters_are_refused(ranks: RankPool, how: str) -> None:
    """Their gradients would lie in no bucket, and silently differ between the replicas."""
    for said in ranks.run(replaced, 2, how):
        assert said.startswith("RuntimeError: trained parameters must be those of construction: ["), said
        assert "1.weight" in said and "make a new DataParallel" in said
