"""Rung: gloo ranks. Modules that are whole on every tp rank: right with `replicate`, refused without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    check_replicated,
    clip_grad_norm_,
    collectives,
    replicate,
    sharded,
    summed,
)
from tpengine.modules import DataParallel, Pipeline

DIM, WIDE, TOKENS = 6, 8, 12
DTYPE = torch.float64


class Bias(nn.Module):
    """x + b."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(size, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class FeedForward(nn.Module):
    """GPT-2's: x + W2 gelu(W1 norm(x) + b1) + b2. The norm and b2 are whole on every rank, b1 is cut."""

    def __init__(self, tp: Communicator, is_right: bool) -> None:
        super().__init__()
        right = replicate if is_right else lambda module, _: module
        self.norm: nn.Module = right(nn.LayerNorm(DIM, dtype=DTYPE), tp)
        self.up = ColumnParallelLinear(DIM, WIDE, tp, dtype=DTYPE)
        self.inner = sharded(Bias(WIDE // tp.size), tp)
        self.down = RowParallelLinear(WIDE, DIM, tp, dtype=DTYPE)
        self.outer: nn.Module = right(Bias(DIM), tp)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.inner(self.up(self.norm(x))))
        y: Tensor = x + self.outer(self.down(hidden))
        return y


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


WHOLE = {
    "norm.weight": numbers(DIM, seed=1),
    "norm.bias": numbers(DIM, seed=2),
    "up.weight": numbers(WIDE, DIM, seed=3),
    "inner.bias": numbers(WIDE, seed=4),
    "down.weight": numbers(DIM, WIDE, seed=5),
    "outer.bias": numbers(DIM, seed=6),
}
CUT = {"up.weight": 0, "inner.bias": 0, "down.weight": 1}


def part(name: str, whole: Tensor, tp: Communicator) -> Tensor:
    return whole.chunk(tp.size, CUT[name])[tp.rank] if name in CUT else whole


def gradients(tp: Communicator, is_right: bool, clip: float | None = None) -> dict[str, Tensor]:
    """Return the gradients, over two backward passes, of a weighted sum of the output; with their norm, if clipped."""
    torch.manual_seed(tp.rank)
    model = nn.Sequential(FeedForward(tp, is_right))
    block = model[0]
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if tp.rank == 0 or name in CUT or not is_right:
                parameter.copy_(part(name, WHOLE[name], tp))
    if is_right:
        # As a person starts: rank 0's values count, also where the others drew theirs.
        for module in (block.norm, block.outer):
            replicate(module, tp)
    for seed in (7, 8):
        x, weights = (numbers(TOKENS, DIM, seed=s).chunk(tp.size)[tp.rank] for s in (seed, seed + 10))
        (model(x) * weights).sum().backward()
    more = {} if clip is None else {"norm": clip_grad_norm_(model, clip, tp)}
    return more | {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


def clipped(max_norm: float) -> tuple[float, float, float]:
    """The norm at tp 2; that of one process; largest difference of the gradients, relative to the norm."""
    tp, alone = Communicator(dist.group.WORLD), Communicator(None)
    got, want = gradients(tp, True, max_norm), gradients(alone, True)
    parameters = [(got[name], part(name, whole, tp)) for name, whole in want.items()]
    norm = torch.stack([whole.norm() for whole in want.values()]).norm()
    scale = min(1.0, max_norm / float(norm))
    error = max((ours - whole * scale).abs().max() for ours, whole in parameters)
    return float(got["norm"]), float(norm), float(error / norm)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_clipping_counts_every_parameter_once(ranks: RankPool, max_norm: float) -> None:
    for norm, want, error in ranks.run(clipped, 2, max_norm):
        # torch too adds 1e-6 to the norm.
        assert norm == pytest.approx(want, rel=1e-12) and norm > 1 and error < 1e-6


def errors(is_right: bool) -> dict[str, float]:
    """Largest relative difference of each gradient at tp 2 to one process's."""
    tp, alone = Communicator(dist.group.WORLD), Communicator(None)
    want = gradients(alone, True)
    got = gradients(tp, is_right)
    assert got.keys() == want.keys() == WHOLE.keys()
    return {
        name: float((got[name] - part(name, whole, tp)).abs().max() / whole.abs().max()) for name, whole in want.items()
    }


def test_a_layer_norm_has_one_process_gradient_with_replicate_and_not_without(ranks: RankPool) -> None:
    for of_rank in ranks.run(errors, 2, True):
        assert max(of_rank.values()) < 1e-14, of_rank
    for of_rank in ranks.run(errors, 2, False):
        assert {name for name, error in of_rank.items() if error > 0.1} == {"norm.weight", "norm.bias", "outer.bias"}


class SummingBias(Bias):
    """x + b for this rank's tokens, of which b collects the gradient of all ranks' by itself."""

    def __init__(self, size: int, tp: Communicator) -> None:
        super().__init__(size)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return x + collectives.copy(self.bias, self._tp)


def norm_of_a_module_that_sums(on_meta: bool) -> tuple[float, float, list[float], str]:
    """The norm before clipping at tp 2 and of one process; the bias; what the guard says."""
    tp = Communicator(dist.group.WORLD)
    weights = numbers(TOKENS, DIM, seed=1)
    torch.manual_seed(tp.rank)
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(summed(SummingBias(DIM, tp), tp), ColumnParallelLinear(DIM, WIDE, tp, dtype=DTYPE))
    said = said_by(lambda: check_replicated(model, tp))
    if on_meta:
        group = [dist.new_group([0]), dist.new_group([1])][tp.rank]
        x = torch.zeros(TOKENS // 2, DIM, dtype=DTYPE)
        loss = lambda y, _: y.sum()  # noqa: E731
        pipe = Pipeline(model, x, loss, num_micro_batches=1, group=group, init=draw_parameters)
        model = pipe.stage
    model[0](weights.new_zeros(TOKENS // 2, DIM)).backward(weights.chunk(2)[tp.rank])
    norm = clip_grad_norm_(model, 1e6, tp)
    return float(norm), float(weights.sum(0).norm()), model[0].bias.tolist(), said


def draw_parameters(module: nn.Module, _: int) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_module_that_sums_by_itself_is_clipped_as_one(ranks: RankPool, on_meta: bool) -> None:
    first, second = ranks.run(norm_of_a_module_that_sums, 2, on_meta)
    norm, want, bias, said = first
    assert norm == pytest.approx(want, rel=1e-12) and said == ""
    assert second == first and any(bias)


def started_values(_: int) -> list[Tensor]:
    tp = Communicator(dist.group.WORLD)
    torch.manual_seed(tp.rank)
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.running_mean)
    replicate(norm, tp)
    return [norm.weight.detach(), norm.running_mean]


def test_replicated_modules_start_from_the_first_ranks_values(ranks: RankPool) -> None:
    first, second = ranks.run(started_values, 2, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.1


def gradients_after_assigning(is_inside: bool) -> tuple[list[float], list[float]]:
    """Of rank-dependent gradients: that of a module whose parameters were replaced in loading, and of a copy of it.

    Args:
        is_inside: what is loaded is a module around each.
    """
    tp = Communicator(dist.group.WORLD)
    module = replicate(nn.LayerNorm(DIM), tp)
    copied = copy.deepcopy(module)
    for each in (module, copied):
        loaded = nn.Sequential(nn.Identity(), each) if is_inside else each
        loaded.load_state_dict({name: value.clone() for name, value in loaded.state_dict().items()}, assign=True)
        each(torch.zeros(1, DIM)).backward(torch.full((1, DIM), tp.rank + 1.0))
    return module.bias.grad.tolist(), copied.bias.grad.tolist()


@pytest.mark.parametrize("is_inside", [False, True])
def test_loaded_parameters_that_replace_summed_ones_are_summed(ranks: RankPool, is_inside: bool) -> None:
    for rank, (of_module, of_copy) in enumerate(ranks.run(gradients_after_assigning, 2, is_inside)):
        assert of_module == [3.0] * DIM and of_copy == [rank + 1.0] * DIM


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refusals(is_right: bool) -> list[str]:
    """What the three that look say."""
    tp = Communicator(dist.group.WORLD)
    replicas = Communicator([dist.new_group([0]), dist.new_group([1])][tp.rank])
    model = nn.Sequential(FeedForward(tp, is_right), FeedForward(tp, is_right))
    group = replicas.group

    def pipeline() -> None:
        Pipeline(
            model,
            numbers(TOKENS // 2, DIM, seed=0),
            nn.functional.mse_loss,
            num_micro_batches=1,
            group=group,
        )

    return [
        said_by(lambda: check_replicated(model, tp)),
        said_by(lambda: DataParallel(model, replicas)),
        said_by(pipeline),
    ]


def test_parameters_that_nothing_sums_are_refused_by_all_three_that_look(ranks: RankPool) -> None:
    for of_rank in ranks.run(refusals, 2, False):
        for said in of_rank:
            assert "tp 2, nothing sums 0.norm.weight, 0.norm.bias, 0.outer.bias, 1.norm.weight" in said
            assert "tpengine.layers.replicate(module, tp)" in said and "\n" not in said and "up." not in said


def test_a_model_that_is_right_passes(ranks: RankPool) -> None:
    assert ranks.run(refusals, 2, True) == [["", "", ""]] * 2


def judged(what: str) -> str:
    tp = Communicator(dist.group.WORLD)
    model = nn.Sequential(SwiGLU(DIM, WIDE, tp), nn.LayerNorm(DIM))
    match what:
        case "frozen":
            model[1].requires_grad_(False)
        case "declared":
            sharded(model[1], tp)
        case "sums by itself":
            summed(model, tp)
        case "tp 1":
            return said_by(lambda: check_replicated(model, Communicator(None)))
        case "a copy":
            replicate(model[1], tp)
            model[1] = copy.deepcopy(model[1])
        case "replaced":
            replicate(model[1], tp)
            model[1].weight = nn.Parameter(torch.ones(DIM))
        case "alone":
            model[1] = RMSNorm(DIM, Communicator(None))
        case "alone, replicated":
            return said_by(lambda: replicate(RMSNorm(DIM, Communicator(None)), tp))
        case "ours":
            model[1] = RMSNorm(DIM, tp)
        case "whole model":
            replicate(model, tp)
        case "many":
            model.extend(nn.LayerNorm(DIM) for _ in range(9))
    return said_by(lambda: check_replicated(model, tp))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("frozen", ""),
        ("declared", ""),
        ("sums by itself", ""),
        ("tp 1", ""),
        ("a copy", "nothing sums 1.weight, 1.bias: wrap"),
        ("replaced", "nothing sums 1.weight: wrap"),
        ("alone", "nothing sums 1.weight: wrap"),
        ("alone, replicated", "weight is over 1 ranks, tp 2: make the layer with tp"),
        ("ours", ""),
        ("whole model", ""),
        ("many", "nothing sums 1.weight, 1.bias, 2.weight, 2.bias, 3.weight, 3.bias, 4.weight, 4.bias and 12 more"),
    ],
)
def test_what_counts_as_summed(ranks: RankPool, what: str, message: str) -> None:
    for said in ranks.run(judged, 2, what):
        assert message in said if message else said == ""


def twice_differentiated(_: int) -> str:
    norm = replicate(nn.LayerNorm(4), Communicator(dist.group.WORLD))
    loss = norm(torch.randn(3, 4)).square().sum()
    return said_by(lambda: torch.autograd.grad(loss, list(norm.parameters()), create_graph=True))


def test_a_second_derivative_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(twice_differentiated, 2, 0):
        assert "differentiable once: leave create_graph out" in said


def shared_heads_on_meta(_: int) -> Any:
    """Layers whose shards several ranks hold, and a norm, on the meta device under a pipeline of one stage per rank."""
    tp = Communicator(dist.group.WORLD)
    torch.manual_seed(tp.rank)
    with torch.device("meta"):
        model = nn.Sequential(
            ColumnParallelLinear(DIM, WIDE, tp, replicas=tp), replicate(nn.LayerNorm(WIDE), tp), nn.Identity()
        )
    pipe = Pipeline(
        model,
        torch.randn(TOKENS, DIM),
        lambda y, _: y.square().mean(),
        num_micro_batches=1,
        group=[dist.new_group([0]), dist.new_group([1])][tp.rank],
        init=lambda module, index: [nn.init.normal_(p) for p in module.parameters()],
    )
    check_replicated(pipe.stage, tp)
    pipe.step(torch.randn(TOKENS, DIM), torch.zeros(TOKENS))
    return {name: (p.detach(), p.grad) for name, p in pipe.stage.named_parameters()}


def test_what_is_whole_starts_equal_on_all_ranks_also_from_the_meta_device(ranks: RankPool) -> None:
    first, second = ranks.run(shared_heads_on_meta, 2, 0)
    assert first.keys() == {"0.weight", "1.weight", "1.bias"}
    for name, (value, gradient) in first.items():
        assert torch.equal(value, second[name][0]) and torch.equal(gradient, second[name][1]), name
        assert value.std() > 0.1 and gradient.abs().max() > 0


class Doubled(nn.Module):
    """2 w."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def check_parametrized_layers() -> None:
    """A computed weight's original lies as the weight: nothing overwrites it, sums it again, or counts it twice."""
    tp = Communicator(dist.group.WORLD)
    grads, norms = [], []
    for is_computed in (False, True):
        torch.manual_seed(tp.rank)
        model = nn.Sequential(RMSNorm(DIM, tp, dtype=DTYPE), SwiGLU(DIM, WIDE, tp, dtype=DTYPE))
        parts: tuple[Any, ...] = (model[0], model[1].gate_proj)
        for layer in parts:
            if is_computed:
                parametrize.register_parametrization(layer, "weight", Doubled())
            else:
                layer.weight.data.mul_(2)
        before = [p.detach().clone() for p in model.parameters()]
        check_replicated(replicate(model, tp), tp)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        model(numbers(TOKENS, DIM, seed=tp.rank)).square().sum().backward()
        found = [layer.parametrizations.weight.original if is_computed else layer.weight for layer in parts]
        for parameter in found if not is_computed else ():
            parameter.grad *= 2
        grads.append([parameter.grad for parameter in found])
        norms.append(clip_grad_norm_(model, 1e9, tp))
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(norms[1], norms[0])
    parametrizations.weight_norm(model[1].up_proj)
    for check in (replicate, check_replicated):
        with pytest.raises(ValueError, match=r"original0.*tpengine\.layers\.sharded") as error:
            check(model, tp)
        assert "replicate(" not in str(error.value)
    check_replicated(sharded(model, tp), tp)


def test_parametrized_layers_lie_as_without(ranks: RankPool) -> None:
    ranks.run(check_parametrized_layers, 2)
