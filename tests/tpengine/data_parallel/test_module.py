"""Rung: gloo ranks. Any module trained by several replicas against one process with plain autograd.

Only a GPU checks that the host does not wait in `finish` where every parameter was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.engine.odd_module import odd_model, tokens_of, world
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

from tpengine.modules import DataParallel

TOLERANCE = 1e-9

# By step: the gradients after `finish`; last: the parameters.
Record = list[dict[str, Tensor | None]]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare(got: list[Record], wanted: Record) -> None:
    """Every rank has one process's gradients, None where it has None, and parameters."""
    for rank, record in enumerate(got):
        for step, (ours, theirs) in enumerate(zip(record, wanted, strict=True)):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                mine = ours[name]
                where = f"rank {rank} step {step} {name}"
                assert (mine is None) == (value is None), f"{where}: {mine} instead of {value}"
                if mine is not None and value is not None:
                    assert mine.dtype == value.dtype, where
                    worst = float((mine - value).abs().max() / value.abs().max().clamp(min=1e-3))
                    assert worst <= TOLERANCE, f"{where}: off by {worst}"


# The model of tpengine/examples/images.py in float64, and smaller images.

IMAGE_BATCH, IMAGE_RANKS, IMAGE_STEPS, IMAGE_SIZE = 2, 4, 3, 32


def image_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    ).double()


def image_loader(rank: int) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    num_images = IMAGE_BATCH * IMAGE_RANKS * IMAGE_STEPS
    images = torch.randn(num_images, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator, dtype=torch.float64)
    data = TensorDataset(images, torch.randint(10, (num_images,), generator=generator))
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=IMAGE_RANKS, rank=rank, seed=7)
    return DataLoader(data, batch_size=IMAGE_BATCH, sampler=sampler)


def image_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, finish: Callable[[], None]) -> Any:
    images, labels = batch
    nn.functional.cross_entropy(model(images), labels).backward()
    finish()
    result = gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return result


def train_images() -> Record:
    comm = world()
    model = image_model(seed=comm.rank)  # rank 0's values are broadcast
    replicas = DataParallel(model, comm, bucket_bytes=4000)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = [image_step(model, optimizer, batch, replicas.finish) for batch in image_loader(comm.rank)]
    return [*steps, values(model)]


def test_images_with_a_distributed_sampler_train_as_in_one_process(ranks: RankPool) -> None:
    model = image_model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    record = []
    for batches in zip(*(image_loader(rank) for rank in range(IMAGE_RANKS)), strict=True):
        whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        record.append(image_step(model, optimizer, whole, lambda: None))
    compare(ranks.run(train_images, IMAGE_RANKS), [*record, values(model)])


STEPS = 6


def route(rank: int, num_ranks: int, step: int) -> str:
    """What a replica does in a step: "idle" runs no backward at all."""
    last = rank == num_ranks - 1
    return [
        "",
        "branch" if last else "",
        "branch rare",
        "idle" if last else "branch",
        "rare" if rank == 0 else "",
        "idle",
    ][step]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)


def odd_reference(num_ranks: int, set_to_none: bool) -> Record:
    model = odd_model(seed=0)
    optimizer = adamw(model)
    record = []
    for step in range(STEPS):
        for rank in range(num_ranks):
            way = route(rank, num_ranks, step)
            if way != "idle":
                (model(tokens_of(rank, step), way) / num_ranks).backward()
        record.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return [*record, values(model)]


def train_odd(set_to_none: bool, mutation: str = "no_mutation") -> Record:
    comm = world()
    model = odd_model(seed=comm.rank)
    replicas = DataParallel(model, comm, bucket_bytes=300)
    globals()[mutation](Replica(model, comm, replicas))
    optimizer = adamw(model)
    record = []
    for step in range(STEPS):
        way = route(comm.rank, comm.size, step)
        if way != "idle":
            model(tokens_of(comm.rank, step), way).backward()
        replicas.finish()
        record.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return [*record, values(model)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, *(pytest.param(num, marks=pytest.mark.slow) for num in (1, 4))])
def test_parameters_that_take_part_now_and_then(ranks: RankPool, num_ranks: int, set_to_none: bool) -> None:
    wanted = odd_reference(num_ranks, set_to_none)
    assert [step["unused.weight"] for step in wanted[:-1]] == [None] * STEPS
    assert (wanted[0]["rare"] is None, wanted[4]["rare"] is None) == (True, False)
    compare(ranks.run(train_odd, num_ranks, set_to_none), wanted)


# Mutations: each breaks one promise, and the comparison above must go red.


class Replica(NamedTuple):
    """One rank of a training, to be broken."""

    model: nn.Module
    comm: Communicator
    parallel: DataParallel


def no_mutation(replica: Replica) -> None:
    """The same program must be green without a mutation."""


def not_divided_by_the_replicas(replica: Replica) -> None:
    """What is divided afterwards is the sum times the number of replicas."""
    buckets = replica.parallel.buckets
    wait = buckets.wait

    def wait_for_more(index: int) -> Work:
        work = wait(index)
        buckets[index].sums.mul_(replica.comm.size)
        return work

    buckets.wait = wait_for_more  # type: ignore[method-assign]


def usage_not_summed(replica: Replica) -> None:
    """The counts stay at home: a replica knows only what it used itself."""
    buckets = replica.parallel.buckets
    for index in buckets.flat:
        buckets[index].usage = buckets[index].usage.clone()


def all_counted_as_used(replica: Replica) -> None:
    buckets = replica.parallel.buckets
    wait = buckets.wait

    def claim(index: int) -> Work:
        work = wait(index)
        buckets[index].usage.fill_(1)
        return work

    buckets.wait = claim  # type: ignore[method-assign]


def one_bucket_not_summed(replica: Replica) -> None:
    comm = replica.comm
    start, left_out = comm.start_all_reduce, replica.parallel.buckets.flat[1]
    done = SimpleNamespace(wait=lambda: None)
    comm.start_all_reduce = lambda x: done if x is left_out else start(x)  # type: ignore[method-assign]


def bucket_summed_before_its_last_gradient(replica: Replica) -> None:
    """One gradient of each bucket that has several is counted before it is there."""
    buckets = replica.parallel.buckets
    arm = buckets.arm

    def count_one(order: Iterable[int]) -> None:
        for index in order:
            if len(buckets[index].usage) > 1:
                buckets.contributed(index)

    def arm_early(order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        arm(order, on_start)
        count_one(order)

    count_one(buckets.flat)  # armed when they were made
    buckets.arm = arm_early  # type: ignore[method-assign]


def absent_gradients_not_zeroed(replica: Replica) -> None:
    """What the bucket held in the step before is summed once more."""
    parallel: Any = replica.parallel._gradients
    move = parallel._move_to_bucket
    parallel._move_to_bucket = lambda parameter, *by: parameter.grad is not None and move(parameter, *by)


def unsynchronised_start(replica: Replica) -> None:
    """Rank 1 begins from values of its own."""
    if replica.comm.rank == 1:
        with torch.no_grad():
            for parameter in replica.model.parameters():
                parameter.mul_(1 + 1e-6)


MUTATIONS = (
    not_divided_by_the_replicas,
    usage_not_summed,
    all_counted_as_used,
    one_bucket_not_summed,
    bucket_summed_before_its_last_gradient,
    absent_gradients_not_zeroed,
    unsynchronised_start,
)


@pytest.mark.parametrize(
    "mutations", [MUTATIONS[:2], pytest.param(MUTATIONS, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_mutation_turns_the_comparison_red(
    ranks: RankPool,
    mutations: tuple[Callable[[Replica], None], ...],
    count_mutations: Callable[[str, int, int], None],
) -> None:
    wanted = odd_reference(2, True)
    compare(ranks.run(train_odd, 2, True, "no_mutation"), wanted)
    names = [mutation.__name__ for mutation in mutations]
    unnoticed = survivors(names, lambda name: ranks.run(train_odd, 2, True, name), lambda got: compare(got, wanted))
    count_mutations("data parallel for any module", len(names) - len(unnoticed), len(names))
    assert not unnoticed, f"the comparison did not notice {unnoticed}"


# Dtypes and strides.


class Mixed(nn.Module):
    """Integer-valued sums, exact in every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.ones(3, 5))
        self.c = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.d = nn.Parameter(torch.ones(6, dtype=torch.float16))
        self.e = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))


def mixed_gradients() -> tuple[list[tuple[torch.dtype, tuple[str, ...]]], dict[str, Tensor | None], bool]:
    comm = world()
    model = Mixed()
    replicas = DataParallel(model, comm)
    torch.stack([((comm.rank + 1) * 2 * p.float()).sum() for p in model.parameters()]).sum().backward()
    replicas.finish()
    buckets = replicas.buckets
    layout = [
        (flat.dtype, tuple(name for name in buckets.gradients if buckets.place(name)[1] == i))
        for i, flat in buckets.flat.items()
    ]
    assert model.e.grad is not None
    return layout, gradients(model), model.e.grad.stride() == model.e.stride()


def test_a_bucket_holds_one_dtype_and_gradients_the_parameters(ranks: RankPool) -> None:
    for layout, grads, strides_agree in ranks.run(mixed_gradients, 3):
        assert layout == [(torch.float16, ("d",)), (torch.float32, ("e", "b")), (torch.bfloat16, ("c", "a"))]
        for name, parameter in Mixed().named_parameters():
            assert torch.equal(grads[name], torch.full_like(parameter, 4))
        assert strides_agree


# Accumulation.


def accumulated() -> tuple[list[int], Record]:
    comm = RecordingCommunicator(dist.group.WORLD)
    model = odd_model(seed=0)
    replicas = DataParallel(model, comm, bucket_bytes=300)
    optimizer = adamw(model)
    started, record = [], []
    for step in range(2):
        with replicas.no_sync():
            model(tokens_of(comm.rank, 2 * step), "rare" if comm.rank == 0 else "branch").backward()
        started.append(len(comm.events))
        model(tokens_of(comm.rank, 2 * step + 1), "").backward()
        replicas.finish()
        comm.events.clear()
        record.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    # What only no_sync saw is reduced by `finish` alone, and a gradient not cleared is accumulated upon.
    with replicas.no_sync():
        model(tokens_of(comm.rank, 8), "branch").backward()
    replicas.finish()
    model(tokens_of(comm.rank, 9), "").backward()
    replicas.finish()
    record.append(gradients(model))
    return started, record


def test_no_sync_accumulates_and_the_next_finish_reduces_all(ranks: RankPool) -> None:
    model = odd_model(seed=0)
    optimizer = adamw(model)
    wanted: Record = []
    for step in range(2):
        for rank in range(2):
            (model(tokens_of(rank, 2 * step), "rare" if rank == 0 else "branch") / 2).backward()
            (model(tokens_of(rank, 2 * step + 1), "") / 2).backward()
        wanted.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(2):
        (model(tokens_of(rank, 8), "branch") / 2).backward()
        (model(tokens_of(rank, 9), "") / 2).backward()
    wanted.append(gradients(model))
    results = ranks.run(accumulated, 2)
    assert [started for started, _ in results] == [[0, 0]] * 2
    compare([record for _, record in results], wanted)


# Order.


class RecordingCommunicator(Communicator):
    """Records which sums begin, by their size, among what else its owner records."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.events: list[Any] = []

    def start_all_reduce(self, x: Tensor) -> Work:
        self.events.append(x.numel())
        return super().start_all_reduce(x)


def events_of_a_backward(reuse: bool) -> tuple[list[Any], list[Any]]:
    """A backward pass in which, on rank 1, one parameter in the middle is not used."""
    comm = RecordingCommunicator(dist.group.WORLD)
    model = nn.Sequential(*(nn.Linear(n, n + 1, bias=False) for n in range(2, 8)))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: comm.events.append(name))
    replicas = DataParallel(model, comm, bucket_bytes=1)
    x = torch.ones(1, 2)
    for i, layer in enumerate(model):
        x = nn.functional.pad(x, (0, 1)) if i == 3 and comm.rank == 1 and reuse else layer(x)
    x.sum().backward()
    in_backward = list(comm.events)
    replicas.finish()
    return in_backward, comm.events[len(in_backward) :]


def test_sums_begin_before_backward_ends(ranks: RankPool) -> None:
    for in_backward, in_finish in ranks.run(events_of_a_backward, 3, False):
        wanted: list[Any] = []
        for layer in reversed(range(6)):
            n = layer + 2
            wanted += [f"{layer}.weight", n * (n + 1) + 1]  # one element more: the count
        assert (in_backward, in_finish) == (wanted, [])


def test_the_order_of_sums_is_the_same_on_all_ranks(ranks: RankPool) -> None:
    results = ranks.run(events_of_a_backward, 3, True)
    orders = [[event for event in before + after if isinstance(event, int)] for before, after in results]
    assert orders[0] == orders[1] == orders[2] and len(orders[0]) == 6
    # Where a parameter is missing, its bucket and those after it wait for `finish`.
    assert results[0][1] == [] and results[1][1] == orders[1][2:]


# Memory.


def places_of_gradients() -> list[bool]:
    model = nn.Linear(5, 3)
    replicas = DataParallel(model, world())
    flat = replicas.buckets.flat[0].untyped_storage().data_ptr()
    found = []
    for set_to_none in (True, False, True):
        model(torch.ones(2, 5)).sum().backward()
        replicas.finish()
        found += [p.grad is not None and p.grad.untyped_storage().data_ptr() == flat for p in model.parameters()]
        model.zero_grad(set_to_none)
        if not set_to_none:
            places = replicas.buckets.gradients
            found += [p.grad.data_ptr() == places[name].data_ptr() for name, p in model.named_parameters()]
    return found


def test_gradients_are_views_of_the_bucket(ranks: RankPool) -> None:
    assert ranks.run(places_of_gradients, 2) == [[True] * 8] * 2


# What it leaves alone.


def finish_twice() -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    comm = world()
    model = odd_model(seed=0)
    replicas = DataParallel(model, comm)
    model(tokens_of(comm.rank, 0), "").backward()
    replicas.finish()
    once = gradients(model)
    replicas.finish()
    return once, gradients(model)


def test_finish_twice_is_harmless(ranks: RankPool) -> None:
    for once, twice in ranks.run(finish_twice, 2):
        assert all(twice[name] is value or torch.equal(twice[name], value) for name, value in once.items())


def statistics() -> tuple[list[str], list[dict[str, Tensor]]]:
    comm = world()
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    model.register_buffer("flag", torch.tensor(comm.rank == 0))
    model.register_buffer("empty", torch.empty(0))
    model(torch.randn(3, 1, 4, 4))
    before = list(model.state_dict())
    replicas = DataParallel(model, comm)
    states = [{name: value.clone() for name, value in model.state_dict().items()}]
    model(torch.randn(3, 1, 4, 4)).sum().backward()
    replicas.finish()
    assert list(model.state_dict()) == before
    return before, [*states, {name: value.clone() for name, value in model.state_dict().items()}]


def test_everything_begins_as_on_rank_0_and_names_stay(ranks: RankPool) -> None:
    (names, (start, end)), (_, (start_1, end_1)) = ranks.run(statistics, 2)
    assert "1.running_mean" in names
    assert all(torch.equal(value, start_1[name]) for name, value in start.items())
    # Statistics are each replica's own afterwards.
    assert not torch.equal(end["1.running_mean"], end_1["1.running_mean"])
