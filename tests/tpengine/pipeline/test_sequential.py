"""Rung: gloo ranks. Any nn.Sequential in stages trains to the parameters of one process.

What only a GPU checks: modules and transfers on devices.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import RMSNorm, SwiGLU
from tpengine.modules import DataParallel, Pipeline, pipeline
from tpengine.pipeline.executor import Trace

STEPS, MICRO, SIZE = 3, 6, 2
Shards = dict[str, Tensor]


def mlp() -> nn.Sequential:
    widths = [5, 64, 7, 7, 32, 3]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers).double()


def conv_net() -> nn.Sequential:
    """Working in place, with a frozen layer and a module without parameters at either end."""
    model = nn.Sequential(
        nn.Identity(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 6),
        nn.LeakyReLU(inplace=True),
        nn.Linear(6, 4),
    ).double()
    model[4].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "conv": (conv_net, (3, 8, 8)),
}


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    _, shape = MODELS[name]
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(MICRO * SIZE, *shape, dtype=torch.float64, generator=generator)
    outputs = 3 if name == "mlp" else 4
    return inputs, torch.randn(MICRO * SIZE, outputs, dtype=torch.float64, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-2) if parameters else None


def in_one_process(name: str) -> tuple[list[float], Shards]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    optimizer = optimizer_of(model)
    assert optimizer is not None
    losses = []
    for step in range(STEPS):
        inputs, targets = batch_of(name, step)
        loss = nn.functional.mse_loss(model(inputs.clone()), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def train(name: str, schedule: str, cut: list[int] | None, mutation: str = "") -> tuple[list[float], Shards, Any]:
    """Train this rank's stage; return losses, its state dict, and what ran against what was planned."""
    torch.manual_seed(dist.get_rank())  # only rank 0's weights may count
    model = MODELS[name][0]()
    trace = Trace()
    sample = batch_of(name, 0)[0][:SIZE]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    if mutation == "loss not divided":
        loss = lambda y, target: MICRO * nn.functional.mse_loss(y, target)  # noqa: E731
    pipe = Pipeline(model, sample, loss, num_micro_batches=MICRO, schedule=schedule, cut=cut, trace=trace)
    if mutation == "stage forgotten" and dist.get_rank() == 1:
        pipe.stage.requires_grad_(False)
    optimizer = optimizer_of(pipe.stage)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch_of(name, step)
        if mutation == "one micro-batch twice":
            inputs, targets = (torch.cat([rows[:SIZE], rows[:SIZE], rows[2 * SIZE :]]) for rows in (inputs, targets))
        losses.append(pipe.step(inputs if pipe.is_first else None, targets if pipe.is_last else None))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    planned = [str(action) for action in pipe.plan.actions[dist.get_rank()]]
    ran = [event.action for event in trace.events]
    return losses, dict(pipe.stage.state_dict()), ran == planned * STEPS


def compare(outcomes: list[tuple[list[float], Shards, Any]], reference: tuple[list[float], Shards]) -> None:
    want_losses, want = reference
    seen: Shards = {}
    for losses, shards, _ in outcomes:
        for got, expected in zip(losses, want_losses, strict=True):
            assert abs(got - expected) <= 1e-9 * abs(expected), (losses, want_losses)
        assert not seen.keys() & shards.keys(), "a parameter lies on two stages"
        seen |= shards
    assert seen.keys() == want.keys()
    for name, tensor in want.items():
        assert (seen[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


# Either model, a schedule of one chunk per rank and one of several; the others are slow.
BY_DEFAULT = [("1f1b", "mlp", 2), ("1f1b", "conv", 3), ("interleaved", "conv", 2)]


@pytest.mark.parametrize(
    ("schedule", "name", "world"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
        for case in itertools.product(["1f1b", "gpipe", "interleaved"], MODELS, [1, 2, 3, 4])
    ],
)
def test_stages_train_to_the_parameters_of_one_process(ranks: RankPool, schedule: str, name: str, world: int) -> None:
    (seeded,) = ranks.run(in_one_process, 1, name)
    cuts: list[list[int] | None] = [None]
    if world == 2:
        by_hand = [1, 5, 1, 3] if schedule == "interleaved" else [1, 9]
        cuts.append([*by_hand[:-1], by_hand[-1] + (name == "conv")])
    for cut in cuts:
        outcomes = ranks.run(train, world, name, schedule, cut)
        compare(outcomes, seeded)
        assert all(ran_as_planned for _, _, ran_as_planned in outcomes)


class Block(nn.Module):
    """Our layers in a block of their own: tokens pass through a norm and two matrices."""

    def __init__(self, alone: Communicator) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64}
        self.norm = RMSNorm(8, alone, **options)
        self.mlp = SwiGLU(8, 12, alone, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def without_matrices(alone: Communicator) -> nn.Sequential:
    """Modules without a matrix among ours, and parts of nothing else."""
    options: dict[str, Any] = {"dtype": torch.float64}
    vectors = [nn.LayerNorm(8, **options), nn.PReLU(8, **options), nn.ReLU(), nn.Dropout(0.0), nn.Identity()]
    return nn.Sequential(Block(alone), *vectors, Block(alone), RMSNorm(8, alone, **options), nn.LayerNorm(8, **options))


def train_blocks(schedule: str, world: int, cut: list[int] | None = None) -> tuple[list[float], Shards]:
    """Train a Sequential of our own layers, or with a cut `without_matrices`, on one rank alone or in a pipeline."""
    alone = Communicator(dist.new_subgroups(1)[0])
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(alone) for _ in range(6))) if cut is None else without_matrices(alone)
    inputs, targets = (torch.randn(MICRO * 4, 8, dtype=torch.float64) for _ in range(2))
    loss_of = nn.functional.mse_loss
    if world == 1:
        losses = []
        for _ in range(2):
            loss = sum(loss_of(model(x), y) for x, y in zip(inputs.split(4), targets.split(4), strict=True)) / MICRO
            assert isinstance(loss, Tensor)
            loss.backward()
            losses.append(loss.item())
        return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    pipe = Pipeline(model, inputs[:4], loss_of, num_micro_batches=MICRO, schedule=schedule, cut=cut)
    losses = [pipe.step(inputs, targets) for _ in range(2)]
    return losses, {name: p.grad for name, p in pipe.stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zbv", marks=pytest.mark.slow)])
def test_our_layers_split_their_backward(ranks: RankPool, schedule: str) -> None:
    """Zero-bubble schedules over modules that give weight gradients to a sink; two steps' gradients add up."""
    (reference,) = ranks.run(train_blocks, 1, schedule, 1)
    outcomes = ranks.run(train_blocks, 2, schedule, 2)
    compare([(losses, gradients, None) for losses, gradients in outcomes], reference)


@pytest.mark.parametrize(("schedule", "cut"), [("zb-h1", [2, 7]), ("zbv", [1, 4, 3, 1])], ids=["zb-h1", "zbv"])
def test_modules_without_a_matrix_do_not_forbid_it(ranks: RankPool, schedule: str, cut: list[int]) -> None:
    """With zbv one part has no sink at all, and one only norms: their weight halves are empty, or a norm's."""
    (reference,) = ranks.run(train_blocks, 1, schedule, 1, cut)
    outcomes = ranks.run(train_blocks, 2, schedule, 2, cut)
    compare([(losses, gradients, None) for losses, gradients in outcomes], reference)


def evaluate_many(world: int) -> float:
    """Largest error of a forward pass of far more micro-batches than a mailbox has slots."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 * world)))
    inputs = torch.randn(64, 3)
    pipe = Pipeline(model, inputs[:1], nn.functional.mse_loss, num_micro_batches=64, schedule="interleaved")
    outputs = pipe.forward(inputs)
    pipe.step(inputs, torch.randn(64, 3))
    return 0.0 if outputs is None else float((outputs - model(inputs)).abs().max())


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_many_micro_batches_pass_forward_through_several_chunks_a_rank(ranks: RankPool, world: int) -> None:
    assert max(ranks.run(evaluate_many, world, world)) < 1e-6


MUTATIONS = ["loss not divided", "one micro-batch twice", "stage forgotten"]


# Unmutated it is the first case above.
@pytest.mark.parametrize(
    "mutations", [MUTATIONS[:1], pytest.param(MUTATIONS, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_every_mutation_turns_the_comparison_red(
    ranks: RankPool, mutations: list[str], count_mutations: Callable[[str, int, int], None]
) -> None:
    (reference,) = ranks.run(in_one_process, 1, "mlp")
    unnoticed = survivors(
        mutations,
        lambda name: ranks.run(train, 2, "mlp", "1f1b", None, name),
        lambda outcomes: compare(outcomes, reference),
    )
    count_mutations("a pipeline of any modules", len(mutations) - len(unnoticed), len(mutations))
    assert not unnoticed


def evaluate(name: str) -> Tensor | None:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    inputs, _ = batch_of(name, 9)
    whole = model(inputs.clone()).detach()
    pipe = Pipeline(model, inputs[:SIZE], nn.functional.mse_loss, num_micro_batches=MICRO)
    got = pipe.forward(inputs if pipe.is_first else None)
    assert all(p.grad is None for p in pipe.stage.parameters())
    return None if got is None else (got - whole).abs().max()


def test_forward_returns_the_outputs_on_the_last_rank(ranks: RankPool) -> None:
    *others, error = ranks.run(evaluate, 3, "conv")
    assert others == [None, None]
    assert error is not None and error < 1e-12


def two_pipelines(name: str) -> tuple[int, list[float], Shards]:
    """2 stages x 2 replicas, each replica half of every micro-batch's rows."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank)
    model = MODELS[name][0]()
    sample = batch_of(name, 0)[0][: SIZE // 2]
    pipe = Pipeline(
        model, sample, nn.functional.mse_loss, num_micro_batches=MICRO, group=pipelines[rank % 2], cut=[4, 6]
    )
    replicas = DataParallel(pipe.stage, Communicator(stages[rank // 2]))
    optimizer = torch.optim.AdamW(pipe.stage.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = (tensor[rank % 2 :: 2] for tensor in batch_of(name, step))
        with replicas.no_sync():
            losses.append(pipe.step(inputs, targets))
        replicas.finish()
        optimizer.step()
        optimizer.zero_grad()
    return rank, losses, dict(pipe.stage.state_dict())


def test_two_pipelines_side_by_side(ranks: RankPool) -> None:
    (reference,) = ranks.run(in_one_process, 1, "mlp")
    outcomes = ranks.run(two_pipelines, 4, "mlp")
    for replica in (0, 1):
        shards: Shards = {}
        for rank, _, held in outcomes:
            if rank % 2 == replica:
                shards |= held
        assert shards.keys() == reference[1].keys()
        for name, tensor in reference[1].items():
            assert (shards[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name
    means = [(a + b) / 2 for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True)]
    assert all(abs(a - b) <= 1e-9 * b for a, b in zip(means, reference[0], strict=True))


def batch_norm(_: int) -> tuple[int, int]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    pipe = Pipeline(model, torch.randn(2, 4), nn.functional.mse_loss, num_micro_batches=3, cut=[2, 1])
    tracked = [int(b) for name, b in pipe.stage.named_buffers() if "tracked" in name]
    pipe.step(torch.randn(6, 4), torch.randn(6, 1))
    return sum(tracked), sum(int(b) for name, b in pipe.stage.named_buffers() if "tracked" in name)


def test_construction_leaves_running_statistics_alone(ranks: RankPool) -> None:
    assert ranks.run(batch_norm, 2, 0) == [(0, 3), (0, 0)]


class InPlace(nn.Module):
    """Works in place and has no attribute that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh_()


def gradient_error(what: str, cut: list[int]) -> float:
    """Largest relative difference of this rank's gradients to those of the whole batch in one process."""
    torch.manual_seed(0)
    inputs: Tensor = torch.randn(8, 2, 3, dtype=torch.float64)
    head = nn.Linear(6, 4)
    model = {
        "nothing to train first": nn.Sequential(nn.Flatten(), nn.ReLU(), head),
        "frozen first": nn.Sequential(nn.Flatten(), nn.Linear(6, 6).requires_grad_(False), head),
        "views between": nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Identity(), head),
        "in place": nn.Sequential(nn.Flatten(), nn.Linear(6, 6), InPlace(), head),
        "one module twice": nn.Sequential(nn.Flatten(), relu := nn.ReLU(), nn.Linear(6, 6), relu, head),
        "integers in": nn.Sequential(nn.Embedding(5, 3, dtype=torch.float64), nn.Flatten(), head),
    }[what].double()
    if what == "integers in":
        inputs = torch.randint(5, (8, 2))
    targets = torch.randn(8, 4, dtype=torch.float64)
    whole = copy.deepcopy(model)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    pipe = Pipeline(model, inputs[:1], nn.functional.mse_loss, num_micro_batches=8, cut=cut)
    pipe.step(inputs, targets)
    errors = [0.0]
    for name, parameter in pipe.stage.named_parameters():
        want = whole.get_parameter(name).grad
        assert (parameter.grad is None) == (want is None), name
        if parameter.grad is not None and want is not None:
            errors.append(float((parameter.grad - want).abs().max() / want.abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    ("what", "cut"),
    [
        ("nothing to train first", [1, 2]),
        ("nothing to train first", [2, 1]),
        ("frozen first", [2, 1]),
        ("views between", [1, 1, 2]),
        ("views between", [1, 1, 1, 1]),
        ("in place", [2, 2]),
        ("one module twice", [2, 3]),
        ("integers in", [1, 2]),
    ],
)
def test_gradients_of_awkward_stages(ranks: RankPool, what: str, cut: list[int]) -> None:
    assert max(ranks.run(gradient_error, len(cut), what, cut)) <= 1e-9


def sent_from_slots(mutated: bool) -> tuple[int, bool]:
    """Over the process group, send from a stage of views.

    Returns:
        (sends out of a receive slot, whether `forward` gave the whole's outputs).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Identity())
    inputs = torch.randn(8, 2, 3)
    with patch.object(pipeline, "open_mailbox", lambda *_: None):
        pipe = Pipeline(model, inputs[:1], nn.functional.mse_loss, num_micro_batches=8)
    if mutated:
        pipe.apart = lambda tensor: tensor  # type: ignore[method-assign]
    count, exchange = 0, dist.batch_isend_irecv
    slots: dict[int, Tensor] = {}

    def spy(operations: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal count
        for operation in operations:
            place = operation.tensor.untyped_storage().data_ptr()
            if operation.op is dist.irecv:
                slots[place] = operation.tensor  # kept, so that no other tensor comes to lie there
            else:
                count += place in slots
        return exchange(operations)

    with patch.object(dist, "batch_isend_irecv", spy):
        pipe.step(inputs, torch.randn(8, 6))
        outputs = pipe.forward(inputs)
    return count, outputs is None or torch.allclose(outputs, model(inputs))


def test_nothing_is_sent_or_kept_in_a_receive_slot(ranks: RankPool) -> None:
    """A slot is written again while the send may be under way, and before the outputs are read."""
    assert ranks.run(sent_from_slots, 3, False) == [(0, True)] * 3
    counts, right = zip(*ranks.run(sent_from_slots, 3, True), strict=True)
    assert counts[1] > 0 and not right[2]


def evaluating(_: int) -> bool:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    return Pipeline(model, torch.randn(1, 2), nn.functional.mse_loss, num_micro_batches=2).stage.training


def test_a_stage_is_in_the_models_mode(ranks: RankPool) -> None:
    assert ranks.run(evaluating, 2, 0) == [False, False]
