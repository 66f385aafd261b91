"""Rung: gloo ranks. ShardedOptimizer against the optimizer itself: every bit, whatever is done to the model meanwhile.

Gradients are given, the same on all replicas; with DataParallel and in pipelines: test_sharded_training.py. Saved
parts: test_optimizer_parts.py. Only a GPU checks fused kernels of CUDA.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.given_gradients import differing, give_gradients, small
from support.ranks.rank_pool import RankPool
from torch import nn
from torch.optim import Optimizer
from tpkernels.exchange.communicator import Communicator

from tpengine.modules import ShardedOptimizer
from tpengine.modules.ownership import ELEMENTWISE

OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    torch.optim.AdamW: {"lr": 0.01, "amsgrad": True},
    torch.optim.RMSprop: {"lr": 0.01, "momentum": 0.9, "centered": True},
}


class ElementwiseToo(torch.optim.Adam):
    """A subclass may do anything: it gets whole tensors."""


class Strided(nn.Module):
    """Parameters whose elements lie in every order: channels last, transposed, with gaps, one element, none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 40).T)
        self.with_gaps = nn.Parameter(torch.randn(9, 8)[:, :5])
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.narrow = nn.Linear(3, 4).bfloat16()
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = nn.Parameter(torch.randn(3, 4))
        self.again = self.tied


def strided() -> nn.Module:
    torch.manual_seed(3)
    return Strided()


def run_every_class(arena_bytes: int) -> dict[str, list[str]]:
    replicas = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    wrong = {}
    for optimizer_class in (*ELEMENTWISE, ElementwiseToo):
        mine, wanted = strided(), strided()
        options = OPTIONS.get(optimizer_class, {})
        optimizer = ShardedOptimizer(optimizer_class, mine.parameters(), replicas, bucket_bytes=150, **options)
        reference = optimizer_class(wanted.parameters(), **options)
        for step in range(3):
            for model, one in ((mine, optimizer), (wanted, reference)):
                give_gradients(model, step)
                one.step()
                one.zero_grad()
        wrong[optimizer_class.__name__] = differing(mine, wanted)
        is_cut = any(len(pieces) > 1 for pieces in optimizer._pieces.values())
        assert is_cut == (optimizer_class in ELEMENTWISE), optimizer_class
    return wrong


@pytest.mark.by_default("2-10000")
@pytest.mark.parametrize(("num_ranks", "arena_bytes"), [(3, 0), (2, 10_000)])
def test_every_class_of_torch_gives_its_own_bits(ranks: RankPool, num_ranks: int, arena_bytes: int) -> None:
    for wrong in ranks.run(run_every_class, num_ranks, arena_bytes):
        assert len(wrong) == len(ELEMENTWISE) + 1 and not any(wrong.values()), wrong


def run_matrices(optimizer_class: type[Optimizer]) -> list[str]:
    replicas = Communicator(dist.group.WORLD)

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, size, bias=False) for size in (40, 5, 6)))

    mine, wanted = model_of(), model_of()
    options: dict[str, Any] = {"lr": 0.1}
    sharded = ShardedOptimizer(optimizer_class, mine.parameters(), replicas, **options)
    reference = optimizer_class(wanted.parameters(), **options)
    for step in range(3):
        for model, one in ((mine, sharded), (wanted, reference)):
            give_gradients(model, step)
            one.step()
    return differing(mine, wanted)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Muon, torch.optim.Adafactor])
def test_optimizers_of_matrices_see_whole_ones(ranks: RankPool, optimizer_class: type[Optimizer]) -> None:
    assert ranks.run(run_matrices, 2, optimizer_class) == [[], []]


# What users do to a model and its optimizer between steps. Each is done to both; every bit must stay equal.


def write_weights(model: nn.Module, _: Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.5, 0.5)
        if step == 1:
            nn.init.constant_(model[2].weight, 0.25)


def exchange_data(model: nn.Module, _: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 0.1


def move(model: nn.Module, _: Optimizer, step: int) -> None:
    model.to(memory_format=torch.channels_last if step == 0 else torch.contiguous_format)


def drop_gradients(model: nn.Module, _: Optimizer, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        if (i + step) % 2:
            parameter.grad = None


def clip(model: nn.Module, _: Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def freeze_and_thaw(model: nn.Module, _: Optimizer, step: int) -> None:
    model[0].requires_grad_(step != 1)


def add_a_group(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 0:
        torch.manual_seed(9)
        model.added = nn.Linear(30, 3)
        optimizer.add_param_group({"params": model.added.parameters(), "lr": 0.5})


def change_rates(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
    optimizer.param_groups[-1]["weight_decay"] = 0.2


def assign_no_state(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state = defaultdict(dict)


def clear_state(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state.clear()
        assert not optimizer.state_dict()["state"]


def write_state(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if state:
            state["exp_avg"] = 0.5 * state["exp_avg"]


def copy_the_model(model: nn.Module, _: Optimizer, step: int) -> None:
    ema = copy.deepcopy(model)
    ema.load_state_dict(pickle.loads(pickle.dumps(ema)).state_dict())
    give_gradients(ema, step)
    torch.optim.SGD(ema.parameters(), lr=9.0).step()


CHANGES = {
    change.__name__: change
    for change in (
        write_weights,
        exchange_data,
        move,
        drop_gradients,
        clip,
        freeze_and_thaw,
        add_a_group,
        change_rates,
        assign_no_state,
        clear_state,
        write_state,
        copy_the_model,
    )
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, chosen by dims."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": (p for p in parameters if p.dim() < 2), "weight_decay": 0.0},
    ]


def run_changes(masters: bool) -> dict[str, list[str]]:
    replicas, wrong = Communicator(dist.group.WORLD), {}
    options: dict[str, Any] = {"lr": 0.05}
    for name, change in CHANGES.items():
        mine, wanted = small(), small()
        if masters:  # of float32 weights there are none, so nothing is another
            optimizer: Optimizer = ShardedOptimizer(
                torch.optim.AdamW, groups_of(mine), replicas, masters=True, **options
            )
        else:
            optimizer = ShardedOptimizer(torch.optim.AdamW, groups_of(mine), replicas, **options)
        reference = torch.optim.AdamW(groups_of(wanted), **options)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, reference)]
        for step in range(4):
            for (model, one), scheduler in zip(((mine, optimizer), (wanted, reference)), schedulers, strict=True):
                give_gradients(model, step)
                change(model, one, step)
                one.step()
                scheduler.step()
                one.zero_grad(set_to_none=step % 2 == 0)
        wrong[name] = differing(mine, wanted)
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    return wrong


@pytest.mark.by_default("True")
@pytest.mark.parametrize("masters", [False, True])
def test_what_users_do_between_steps_means_what_it_means_in_torch(ranks: RankPool, masters: bool) -> None:
    for wrong in ranks.run(run_changes, 2, masters):
        assert wrong == {name: [] for name in CHANGES}


# Masters.


def run_masters(change_name: str) -> list[str]:
    """Sixteen-bit weights against masters kept by hand; a written weight counts."""
    replicas = Communicator(dist.group.WORLD)
    mine, wanted = small().bfloat16(), small().bfloat16()
    optimizer = ShardedOptimizer(torch.optim.SGD, mine.parameters(), replicas, masters=True, lr=1e-3, momentum=0.9)
    masters = [nn.Parameter(p.detach().float()) for p in wanted.parameters()]
    reference = torch.optim.SGD(masters, lr=1e-3, momentum=0.9)
    for step in range(4):
        for model in (mine, wanted):
            give_gradients(model, step)
        if change_name:
            before = [p.detach().clone() for p in wanted.parameters()]
            CHANGES[change_name](mine, optimizer, step)
            CHANGES[change_name](wanted, reference, step)
            for p, m, old in zip(wanted.parameters(), masters, before, strict=True):
                m.data = torch.where(p == old, m, p.float()).detach()
        for p, m in zip(wanted.parameters(), masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        reference.step()
        for p, m in zip(wanted.parameters(), masters, strict=True):
            p.detach().copy_(m)
    return differing(mine, wanted)


@pytest.mark.parametrize("change", ["", "write_weights", "exchange_data", "drop_gradients"])
def test_masters_are_float32_and_follow_what_is_written(ranks: RankPool, change: str) -> None:
    assert ranks.run(run_masters, 2, change) == [[], []]


# Overflows.


def run_scaler(where: str, unscales: bool, half: bool) -> tuple[list[float], list[bool]]:
    """Scales after each step, and whether weights changed in it; in step 1 one rank alone overflows."""
    replicas, world = Communicator(None), Communicator(dist.group.WORLD)
    axes: dict[str, Communicator] = {where: world} if where in ("tp", "pp") else {}
    if where == "replicas":
        replicas = world
    torch.manual_seed(0)
    model = nn.Linear(4, 4).half() if half else nn.Linear(4, 4)
    optimizer = ShardedOptimizer(torch.optim.SGD, model.parameters(), replicas, masters=half, lr=1e-3, **axes)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, changed = [], []
    for step in range(3):
        loss = model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().mean()
        scaler.scale(loss).backward()
        if step == 1 and world.rank == 1:
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        changed.append(not torch.equal(before, model.weight))
    return scales, changed


@pytest.mark.parametrize(
    ("where", "unscales", "half"),
    [
        ("replicas", False, False),
        ("replicas", True, False),
        ("tp", True, False),
        ("pp", False, False),
        ("replicas", False, True),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    ranks: RankPool, where: str, unscales: bool, half: bool
) -> None:
    assert ranks.run(run_scaler, 2, where, unscales, half) == [([1024.0, 512.0, 512.0], [True, False, True])] * 2


def run_unscaled() -> float:
    """How far unscaled updates are from those without a scaler."""
    replicas = Communicator(dist.group.WORLD)
    models = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    replicas.broadcast_(models[0].weight.detach())
    models[1].load_state_dict(models[0].state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [ShardedOptimizer(torch.optim.SGD, model.parameters(), replicas, lr=0.5) for model in models]
    losses = [model(torch.ones(2, 4)).square().mean() for model in models]
    scaler.scale(losses[0]).backward()
    losses[1].backward()
    scaler.step(optimizers[0])
    optimizers[1].step()
    assert torch.equal(models[0].weight.grad, models[1].weight.grad)
    return float((models[0].weight - models[1].weight).detach().abs().max())


def test_a_scaled_step_is_the_step_without_a_scale(ranks: RankPool) -> None:
    assert ranks.run(run_unscaled, 2) == [0.0, 0.0]


def calls() -> tuple[list[str], float | None]:
    model, events = small(), []
    optimizer = ShardedOptimizer(torch.optim.SGD, model.named_parameters(), Communicator(dist.group.WORLD), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: events.append("before"))
    optimizer.register_step_post_hook(lambda *_: events.append("after"))

    def closure() -> float:
        events.append("closure")
        loss = model(torch.ones(1, 3, 3, 3)).square().sum()
        loss.backward()
        return 3.0

    loss = optimizer.step(closure)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    return events, loss


def test_hooks_and_a_closure_are_called_once(ranks: RankPool) -> None:
    assert ranks.run(calls, 2) == [(["before", "closure", "after"], 3.0)] * 2


def test_one_replica_is_the_optimizer_itself() -> None:
    mine, wanted = small(), small()
    optimizer = ShardedOptimizer(torch.optim.Adam, mine.parameters(), Communicator(None))
    reference = torch.optim.Adam(wanted.parameters())
    for model, one in ((mine, optimizer), (wanted, reference)):
        give_gradients(model, 0)
        one.step()
    assert differing(mine, wanted) == []
    # Each loads what the other has saved.
    of_ours, of_torch = copy.deepcopy((optimizer.state_dict(), reference.state_dict()))
    reference.load_state_dict(of_ours)
    optimizer.load_state_dict(of_torch)
    for model, one in ((mine, optimizer), (wanted, reference)):
        give_gradients(model, 1)
        one.step()
    assert differing(mine, wanted) == []
    assert all(
        torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        for p, q in zip(mine.parameters(), wanted.parameters(), strict=True)
    )


def memory_of_state(num_frozen: int) -> list[int]:
    """Elements of this rank's state, before and after the first layers thaw."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(6)))
    model[:num_frozen].requires_grad_(False)
    optimizer = ShardedOptimizer(torch.optim.Adam, model.parameters(), Communicator(dist.group.WORLD))
    numels = []
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
        numels.append(sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.dim()))
        model.requires_grad_(True)
    return numels


@pytest.mark.parametrize(("num_frozen", "numels"), [(0, [400, 400]), (3, [200, 400])])
def test_each_replica_has_its_share_of_the_state(ranks: RankPool, num_frozen: int, numels: list[int]) -> None:
    assert ranks.run(memory_of_state, 3, num_frozen) == [numels] * 3


# Mutations: each breaks one promise, and the comparison of every bit must go red.


def run_mutation(name: str) -> list[str]:
    import tpengine.modules.sharded_optimizer as module

    replicas = Communicator(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        if name == "nothing is sent":
            patch.setattr(module, "send_updates", lambda *_: None)
        if name == "options are not passed on":
            patch.setattr(module, "options_of", lambda group: {})
        mine, wanted = small(), small()
        optimizer = ShardedOptimizer(torch.optim.SGD, mine.parameters(), replicas, lr=0.1)
        reference = torch.optim.SGD(wanted.parameters(), lr=0.1)
        if name == "rows are of construction":
            patch.setattr(module, "_give", lambda *_: None)
        for step in range(2):
            for model, one in ((mine, optimizer), (wanted, reference)):
                one.param_groups[0]["lr"] = 0.1 * (step + 1)
                give_gradients(model, step)
                one.step()
    return differing(mine, wanted)


@pytest.mark.parametrize("name", ["", "nothing is sent", "options are not passed on", "rows are of construction"])
def test_every_mutation_is_noticed(ranks: RankPool, name: str) -> None:
    assert any(ranks.run(run_mutation, 2, name)) == bool(name)
