"""Rung: gloo ranks. Zero 1 to 3 of any module against one process: weights, bytes held, masters, state dicts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.odd_module import world
from support.engine.stacked_module import STEPS, Weights, reference, stacked, train, weights_of
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn

from tpengine.data_parallel import DataParallel
from tpengine.data_parallel.any_module.sliced_replicas import SlicedReplicas
from tpengine.data_parallel.sliced_buckets import has_memory
from tpengine.layers.collectives import Communicator

TOLERANCE = 1e-9

Outcome = tuple[list[list[str]], Weights]


def compare(got: list[Outcome], wanted: Outcome) -> None:
    """Assert that every rank has one process's weights, and no gradient where that has none."""
    for rank, (without, weights) in enumerate(got):
        assert [sorted(names) for names in without] == [sorted(names) for names in wanted[0]], rank
        assert list(weights) == list(wanted[1])
        for name, value in wanted[1].items():
            worst = float((weights[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
            assert worst <= TOLERANCE, f"rank {rank} {name}: off by {worst}"


def slow_but_one(zero: int, num_ranks: int) -> Any:
    return pytest.param(zero, num_ranks, marks=() if (zero, num_ranks) == (3, 2) else pytest.mark.slow)


@pytest.mark.parametrize(("zero", "num_ranks"), [slow_but_one(zero, num) for zero in range(4) for num in (2, 3, 4)])
def test_replicas_train_as_one_process(ranks: RankPool, zero: int, num_ranks: int) -> None:
    """Frozen, shared, skipped, repeated, recomputed and unused weights; replicas with less to do, or nothing."""
    compare(ranks.run(train, num_ranks, zero), reference(num_ranks))


@pytest.mark.parametrize("zero", [3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2))])
def test_over_shared_memory(ranks: RankPool, zero: int) -> None:
    compare(ranks.run(train, 2, zero, STEPS, None, 100_000), reference(2))


# Mutations.


def no_mutation(stage: SlicedReplicas) -> None:
    """Change nothing: the same program must be green without a mutation."""


def scaled_twice(stage: SlicedReplicas) -> None:
    after(stage, "finish", lambda: [own.div_(2) for own in stage.gradients.slices.values()])


def added_twice(stage: SlicedReplicas) -> None:
    add = stage.add

    def twice(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        add(parameter)
        parameter.grad = gradient
        add(parameter)

    stage.add = twice  # type: ignore[method-assign]


def updates_not_gathered(stage: SlicedReplicas) -> None:
    stage.refresh = lambda: None  # type: ignore[method-assign]


def only_the_last_backward_counts(stage: SlicedReplicas) -> None:
    def forget() -> None:
        stage.is_cleared = False

    before(stage, "begin_backward" if stage.zero > 1 else "enter_backward", forget)


def one_bucket_not_summed(stage: SlicedReplicas) -> None:
    """Keep this replica's own term only."""
    sums = stage.sums
    start, left_out = sums.start_reduce_scatter, stage.gradients.flat[stage.order[0]]

    def start_other(x: Tensor, out: Tensor) -> Any:
        if x is not left_out:
            return start(x, out)
        out.copy_(x.view(sums.size, -1)[sums.rank])
        return SimpleNamespace(wait=lambda: None, is_complete=lambda: True)

    sums.start_reduce_scatter = start_other  # type: ignore[method-assign, assignment]


def usage_stays_at_home(stage: SlicedReplicas) -> None:
    """Let a replica know only what it used itself."""
    maximum = stage.comm.all_reduce_max_
    stage.comm.all_reduce_max_ = lambda x: x if x.dtype == torch.uint8 else maximum(x)  # type: ignore[method-assign]


def slices_of_the_neighbour(stage: SlicedReplicas) -> None:
    """Give the optimizer the gradients of other elements."""
    after(stage, "finish", lambda: [own.copy_(own.roll(1)) for own in stage.gradients.slices.values()])


def after(stage: SlicedReplicas, method: str, action: Callable[[], object]) -> None:
    inner = getattr(stage, method)

    def changed(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        action()

    setattr(stage, method, changed)


def before(stage: SlicedReplicas, method: str, action: Callable[[], object]) -> None:
    inner = getattr(stage, method)

    def changed(*args: Any, **kwargs: Any) -> None:
        action()
        inner(*args, **kwargs)

    setattr(stage, method, changed)


def train_mutated(zero: int, mutation: str) -> Outcome:
    def change(replicas: DataParallel) -> None:
        assert isinstance(replicas.stage, SlicedReplicas)
        globals()[mutation](replicas.stage)

    return train(zero, STEPS, change)


MUTATIONS = {
    1: (scaled_twice, added_twice, updates_not_gathered, usage_stays_at_home, slices_of_the_neighbour),
    2: (only_the_last_backward_counts, one_bucket_not_summed, added_twice, updates_not_gathered),
    3: (only_the_last_backward_counts, one_bucket_not_summed, scaled_twice, usage_stays_at_home),
}


@pytest.mark.slow
@pytest.mark.parametrize("zero", MUTATIONS)
def test_every_mutation_turns_the_comparison_red(
    ranks: RankPool, zero: int, count_mutations: Callable[[str, int, int], None]
) -> None:
    wanted = reference(2)
    compare(ranks.run(train_mutated, 2, zero, "no_mutation"), wanted)
    names = [mutation.__name__ for mutation in MUTATIONS[zero]]
    unnoticed = survivors(names, lambda name: ranks.run(train_mutated, 2, zero, name), lambda got: compare(got, wanted))
    count_mutations("sharded data parallelism for any module", len(names) - len(unnoticed), len(names))
    assert not unnoticed, f"the comparison did not notice {unnoticed}"


# Memory.

WIDTH, DEPTH = 32, 4


class Narrow(nn.Module):
    """Layers without bias, of which each divides by the slices' alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return the memory of all tensors that live in this process, by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in (x.untyped_storage() for x in tensors)}


def bytes_since(before: Mapping[int, torch.UntypedStorage]) -> int:
    """Count the memory made since `before`, whose storages live as long as it; a thread of gloo may let go late."""
    counts = []
    for _ in range(10):
        counts.append(sum(storage.nbytes() for at, storage in live_storages().items() if at not in before))
        time.sleep(0.01)
    return min(counts)


def bytes_after_a_step(zero: int, dtype: torch.dtype, arena_bytes: int = 0) -> tuple[int, list[int]]:
    """Return what a step leaves behind, and how many layers had memory at the beginning of each layer's forward."""
    # What torch makes once, and views of the arena, are there before anything is counted.
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    bytes_after_steps(zero, dtype, comm)
    return bytes_after_steps(zero, dtype, comm)


def bytes_after_steps(zero: int, dtype: torch.dtype, comm: Communicator) -> tuple[int, list[int]]:
    before = live_storages()
    model = Narrow().to(dtype)
    replicas = DataParallel(model, comm, zero=zero)
    optimizer = torch.optim.AdamW(replicas.parameters(), foreach=True)
    whole: list[int] = []
    assert isinstance(replicas.stage, SlicedReplicas)
    flat = replicas.stage.weights.flat.values()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: whole.append(sum(map(has_memory, flat))))
    for _ in range(2):
        for _ in range(1 if zero == 1 else 2):
            model(torch.ones(3, WIDTH, dtype=dtype)).float().square().mean().backward()
        replicas.finish()
        optimizer.step()
    replicas.gather()
    # AdamW counts the steps of each parameter in a float32.
    counts = sum(state["step"].nbytes for state in optimizer.state.values())
    held = bytes_since(before) - counts
    replicas.remove()
    return held, whole


@pytest.mark.parametrize(
    ("dtype", "per_weight"),
    [
        (torch.bfloat16, {2: lambda d: 2 + 16 / d, 3: lambda d: 18 / d}),
        pytest.param(torch.float32, {2: lambda d: 4 + 12 / d, 3: lambda d: 16 / d}, marks=pytest.mark.slow),
    ],
)
def test_bytes_held_are_those_of_the_table(
    ranks: RankPool, dtype: torch.dtype, per_weight: dict[int, Callable[[int], float]]
) -> None:
    numel = DEPTH * WIDTH * WIDTH
    for zero, wanted in per_weight.items():
        for held, whole in ranks.run(bytes_after_a_step, 2, zero, dtype):
            nans = DEPTH * dtype.itemsize if zero == 3 else 0
            assert held == wanted(2) * numel + nans
            # Zero 3: the layer that computes, and the next one.
            assert max(whole) == (2 if zero == 3 else DEPTH)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "once", "per_rank"), [(torch.bfloat16, 2, 16), (torch.float32, 4, 12)])
@pytest.mark.parametrize("zero", [2, 3])
def test_bytes_held_through_shared_memory(
    ranks: RankPool, zero: int, dtype: torch.dtype, once: int, per_rank: int
) -> None:
    """The weights are counted on each rank here, and are the same memory on all (test_shared_weights.py)."""
    for held, whole in ranks.run(bytes_after_a_step, 2, zero, dtype, 100_000):
        # NaNs, the room's address, and the numbers that ranks gave each other when they opened it.
        few_bytes = held - (once + per_rank / 2) * DEPTH * WIDTH * WIDTH
        assert 0 <= few_bytes < 64
        assert set(whole) == {DEPTH}


def what_a_forward_keeps() -> tuple[list[int], list[int]]:
    """Return the gathers of each pass, and how many layers have memory after different ways to end a forward."""
    comm = world()
    model, gathers = Narrow(), 0
    replicas = DataParallel(model, comm, zero=3)
    assert isinstance(replicas.stage, SlicedReplicas)
    start = comm.start_all_gather

    def counted(own: Tensor, full: Tensor) -> Any:
        nonlocal gathers
        gathers += 1
        return start(own, full)

    comm.start_all_gather = counted  # type: ignore[method-assign]
    flat = replicas.stage.weights.flat.values()
    counts, whole = [], []

    def enter_whole() -> None:
        with replicas.whole():
            pass

    for then in (
        lambda y: y.backward(),
        lambda y: replicas.finish(),
        lambda y: replicas.gather(),
        lambda y: enter_whole(),
    ):
        gathers = 0
        y = model(torch.ones(3, WIDTH)).square().mean()
        counts.append(gathers)
        whole.append(sum(map(has_memory, flat)))
        gathers = 0
        then(y)
        counts.append(gathers)
        whole.append(sum(map(has_memory, flat)))
    replicas.remove()
    return counts, whole


def test_a_forward_keeps_what_its_backward_needs_first(ranks: RankPool) -> None:
    """The last two layers are gathered once; whatever follows frees them."""
    for counts, whole in ranks.run(what_a_forward_keeps, 2):
        assert counts == [DEPTH, DEPTH - 2, DEPTH, 0, DEPTH, 0, DEPTH, DEPTH]
        assert whole == [2, 0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fixed"), [(torch.bfloat16, 6), (torch.float32, 8)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_held_at_zero_1(ranks: RankPool, num_ranks: int, dtype: torch.dtype, fixed: int) -> None:
    own = 12 if dtype == torch.bfloat16 else 8
    for held, _ in ranks.run(bytes_after_a_step, num_ranks, 1, dtype):
        assert held == (fixed + own / num_ranks) * DEPTH * WIDTH * WIDTH


# 16 bits.


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


def narrow_model() -> nn.Module:
    torch.manual_seed(0)
    return Narrow().bfloat16()


def train_in_bfloat16(zero: int, arena_bytes: int = 0) -> tuple[Weights, Weights, bool]:
    """Return the weights, the masters of this rank, and whether masters hold more than the weights."""
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    model = narrow_model()
    replicas = DataParallel(model, comm, zero=zero)
    optimizer = torch.optim.SGD(replicas.parameters(), lr=1e-3)
    for step in range(3):
        model(inputs_of(comm.rank, step)).float().square().sum().backward()
        replicas.finish()
        optimizer.step()
    with replicas.whole():
        weights = weights_of(model)
    masters = {name: p.detach().clone() for name, p in replicas.named_parameters()}
    replicas.remove()
    finer = any(not torch.equal(p, p.bfloat16().float()) for p in masters.values())
    return weights, masters, finer


@pytest.mark.parametrize("arena_bytes", [0, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_16_bit_weights_are_rounded_masters(ranks: RankPool, zero: int, arena_bytes: int) -> None:
    model = narrow_model()
    wide = {name: p.detach().float() for name, p in model.named_parameters()}
    for step in range(3):
        total = {name: torch.zeros_like(p) for name, p in wide.items()}
        for rank in range(2):
            model.zero_grad()
            model(inputs_of(rank, step)).float().square().sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                total[name] += p.grad.float() / 2
        with torch.no_grad():
            for name, p in model.named_parameters():
                wide[name] -= 1e-3 * total[name]
                p.copy_(wide[name])
    results = ranks.run(train_in_bfloat16, 2, zero, arena_bytes)
    for name, p in wide.items():
        parts = torch.cat([masters[name] for _, masters, _ in results])
        assert torch.allclose(parts, p.flatten(), rtol=1e-5, atol=1e-6)
        for weights, _, finer in results:
            assert finer
            assert torch.equal(weights[name].flatten(), parts.bfloat16())


# State dicts, norms, gradients that come late.


def load_on_rank_0(zero: int) -> tuple[list[str], Weights, Weights, float, float]:
    """Load on one rank; return names, weights after it, weights after a step and gather, and gradient norms."""
    comm = world()
    model = stacked(comm.rank)
    names = list(model.state_dict())
    replicas = DataParallel(model, comm, zero=zero)
    with replicas.whole():
        assert list(model.state_dict()) == names
        if comm.rank == 0:
            model.load_state_dict(stacked(5).state_dict())
    with replicas.whole():
        loaded = weights_of(model)
    model(torch.arange(9), "").backward()
    replicas.finish()
    norm = float(replicas.clip_grad_norm_(0.5))
    clipped = float(replicas.clip_grad_norm_(100.0))
    torch.optim.SGD(replicas.parameters(), lr=0.1).step()
    with replicas.whole():
        stepped = weights_of(model)
    replicas.remove()
    return names, loaded, stepped, norm, clipped


@pytest.mark.parametrize("zero", [3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2))])
def test_weights_are_loaded_and_saved_whole(ranks: RankPool, zero: int) -> None:
    model = stacked(5)
    before_step = weights_of(model)
    model(torch.arange(9), "").backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    for names, loaded, stepped, norm, clipped in ranks.run(load_on_rank_0, 2, zero):
        assert names == list(before_step)
        assert all(torch.equal(loaded[name], value) for name, value in before_step.items())
        assert norm == pytest.approx(wanted, rel=1e-9)
        assert clipped == pytest.approx(min(0.5, wanted), rel=1e-5)
        for name, value in weights_of(model).items():
            assert torch.allclose(stepped[name], value, rtol=1e-7, atol=1e-9), name


class Early(nn.Module):
    """Reads a layer's weight before the layer is called, so that its gradient comes after the layer's backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.second.weight).sum()
        y: Tensor = self.second(self.first(x)).square().sum() + early
        return y


def late_gradients() -> tuple[bool, Weights]:
    comm = world()
    model = Early()
    replicas = DataParallel(model, comm, zero=2)
    (model(torch.ones(2, 3).double()) * (comm.rank + 1)).backward()
    assert isinstance(replicas.stage, SlicedReplicas)
    was_late = replicas.stage.is_late
    replicas.finish()
    torch.optim.SGD(replicas.parameters(), lr=0.1).step()
    with replicas.whole():
        return was_late, weights_of(model)


@pytest.mark.slow
def test_a_gradient_after_its_bucket_began_is_summed_by_finish(ranks: RankPool) -> None:
    model = Early()
    (model(torch.ones(2, 3).double()) * 1.5).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for was_late, weights in ranks.run(late_gradients, 2):
        assert was_late
        assert all(torch.allclose(weights[name], value, rtol=1e-12) for name, value in weights_of(model).items())
