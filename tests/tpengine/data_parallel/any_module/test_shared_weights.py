"""Rung: gloo ranks. Weights that exist once for all replicas of a host: turns, copies, refused memory, mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.stacked_module import STEPS, reference, train
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.room import Room
from tpkernels.symmetric.host_memory import MemoryRefused

from tpengine.data_parallel import DataParallel
from tpengine.data_parallel.any_module.sliced_replicas import SlicedReplicas
from tpengine.layers.collectives import Communicator

SLOW_SECONDS = 0.2
WIDTH = 6

Losses = list[float]


def others_slow(zero: int) -> Any:
    return pytest.param(zero, marks=() if zero == 3 else pytest.mark.slow)


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def one_process(num_ranks: int) -> tuple[Losses, list[Tensor]]:
    """Return the loss before each update of held-out inputs, and the weights in the end."""
    model, losses = model_of(0), []
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (model(inputs_of(rank, step)).square().sum() / num_ranks).backward()
        losses.append(model(inputs_of(99, step)).square().sum().item())
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()]


# Turns.


def written_too_early(stage: SlicedReplicas) -> None:
    """Let a turn to write begin while other replicas still read."""
    meet_only(stage, to_write=False)


def read_too_early(stage: SlicedReplicas) -> None:
    """Let a turn to read begin while other replicas still write."""
    meet_only(stage, to_write=True)


def meet_only(stage: SlicedReplicas, *, to_write: bool) -> None:
    room = stage.weights._room
    assert room is not None
    meet = room.meet

    def meet_sometimes(**turn: bool) -> None:
        if turn == {"to_write": to_write}:
            meet(**turn)

    room.meet = meet_sometimes  # type: ignore[method-assign, assignment]


def no_mutation(stage: SlicedReplicas) -> None:
    """Change nothing."""


def train_out_of_step(zero: int, mutation: str) -> tuple[Losses, list[Tensor]]:
    """As `one_process`, where the last rank is slow in the held-out forward, and in its steps."""
    comm = Communicator(dist.group.WORLD, arena_bytes=100_000)
    model, losses = model_of(comm.rank), []
    replicas = DataParallel(model, comm, 100, zero=zero)
    assert isinstance(replicas.stage, SlicedReplicas) and replicas.stage.weights.is_once
    globals()[mutation](replicas.stage)
    optimizer = sgd(replicas)
    is_slow = comm.rank == comm.size - 1
    # This hook comes after the one that meets the other replicas.
    optimizer.register_step_pre_hook(lambda *_: time.sleep(SLOW_SECONDS if is_slow else 0.0))
    for step in range(3):
        model(inputs_of(comm.rank, step)).square().sum().backward()
        replicas.finish()
        hook = model[0].register_forward_hook(lambda *_: time.sleep(SLOW_SECONDS if is_slow else 0.0))
        losses.append(model(inputs_of(99, step)).square().sum().item())
        hook.remove()
        optimizer.step()
    with replicas.whole():
        weights = [p.detach().clone() for p in model.parameters()]
    replicas.remove()
    return losses, weights


def compare(got: list[tuple[Losses, list[Tensor]]], wanted: tuple[Losses, list[Tensor]]) -> None:
    for losses, weights in got:
        assert losses == pytest.approx(wanted[0], rel=1e-9)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(weights, wanted[1], strict=True))


@pytest.mark.parametrize("zero", [others_slow(zero) for zero in (1, 2, 3)])
def test_weights_are_whole_and_of_one_step_whoever_is_slow(
    ranks: RankPool, zero: int, count_mutations: Callable[[str, int, int], None]
) -> None:
    """The losses between `finish` and the step are of the old weights, on the slow rank too."""
    wanted = one_process(2)
    compare(ranks.run(train_out_of_step, 2, zero, "no_mutation"), wanted)
    names = [written_too_early.__name__, read_too_early.__name__]
    unnoticed = survivors(
        names, lambda name: ranks.run(train_out_of_step, 2, zero, name), lambda got: compare(got, wanted)
    )
    count_mutations("weights that exist once on a host", len(names) - len(unnoticed), len(names))
    assert not unnoticed, f"the comparison did not notice {unnoticed}"


# Copies.


def write_whole(zero: int, writer: int) -> tuple[bool, list[Tensor], list[Tensor], list[Tensor]]:
    """Let one rank write inside `whole`, and another after `remove`; return what the weights are in between."""
    comm = Communicator(dist.group.WORLD, arena_bytes=100_000)
    model = model_of(comm.rank)
    replicas = DataParallel(model, comm, 100, zero=zero)
    assert isinstance(replicas.stage, SlicedReplicas)
    flat = replicas.stage.weights.flat[0].data  # whose writes are not counted
    before = float(flat[0])
    dist.barrier()
    if comm.rank == 0:
        flat[0] += 1.0
    dist.barrier()
    is_once = float(flat[0]) == before + 1.0
    dist.barrier()
    if comm.rank == 0:
        flat[0] -= 1.0
    dist.barrier()
    with replicas.whole():
        if comm.rank == writer:
            model.load_state_dict(model_of(5).state_dict())
        dist.barrier()
        inside = [p.detach().clone() for p in model.parameters()]
        dist.barrier()
    with replicas.whole():
        outside = [p.detach().clone() for p in model.parameters()]
    replicas.remove()
    if comm.rank == 0:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    dist.barrier()
    return is_once, inside, outside, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("zero", [others_slow(zero) for zero in (1, 2, 3)])
def test_whole_weights_are_copies_and_rank_0_decides(ranks: RankPool, zero: int) -> None:
    old, new = ([p.detach() for p in model_of(seed).parameters()] for seed in (0, 5))
    for writer in (0, 1):
        results = ranks.run(write_whole, 2, zero, writer)
        for rank, (is_once, inside, outside, removed) in enumerate(results):
            assert is_once
            after = new if writer == 0 else old
            left = after if rank else [torch.zeros_like(p) for p in after]
            for got, wanted in ((inside, new if rank == writer else old), (outside, after), (removed, left)):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# Memory that is refused.


def train_without_room(zero: int) -> Any:
    def refuse(*_: Any, **__: Any) -> Room:
        raise MemoryRefused("no room")

    opened, Room.open = Room.open, refuse  # type: ignore[method-assign, assignment]
    try:
        return train(zero, STEPS, None, 100_000)
    finally:
        Room.open = opened  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_without_a_room_every_replica_has_its_own(ranks: RankPool, zero: int) -> None:
    without, weights = reference(2)
    for got_without, got in ranks.run(train_without_room, 2, zero):
        assert [sorted(names) for names in got_without] == [sorted(names) for names in without]
        assert all(torch.allclose(got[name], value, rtol=1e-9, atol=1e-12) for name, value in weights.items())


# Mistakes.


def write_after_a_forward(zero: int) -> str:
    comm = Communicator(dist.group.WORLD, arena_bytes=100_000)
    model = model_of(0)
    replicas = DataParallel(model, comm, zero=zero)
    with torch.no_grad():
        model(inputs_of(0, 0))
        for master in replicas.parameters():
            master.add_(1.0)
    with pytest.raises(RuntimeError) as caught:
        replicas.gather()
    return str(caught.value)


@pytest.mark.parametrize("zero", [others_slow(zero) for zero in (1, 3)])
def test_a_master_written_while_others_may_read_is_refused(ranks: RankPool, zero: int) -> None:
    for said in ranks.run(write_after_a_forward, 2, zero):
        assert said.startswith("weights that replicas share change in turns: a master in the bucket of '0.weight' was")
        assert "\n" not in said
