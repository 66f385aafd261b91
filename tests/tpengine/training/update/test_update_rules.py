"""Rung: host. Every listed optimizer against torch.optim or a loop, in float64; moments in bfloat16; own optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tpengine.config import Config, OptimConfig, validate
from tpengine.config.optimizers import OPTIMIZERS
from tpengine.layout.parameters import ParameterSpec, pieces_of
from tpengine.training import elementwise
from tpengine.training.elementwise import ElementwiseOptimizer, Place, UpdateNumbers, UpdateRule, round_at_random
from tpengine.training.update_rules import listed_rule, with_rule

CONFIG = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6, moments="float32")
# UpdateNumbers of classes that are called otherwise than AdamW's.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.8},
    "Adagrad": {"eps": 1e-6},
    "Adadelta": {"rho": 0.9, "eps": 1e-6},
    "RMSprop": {"alpha": 0.9, "momentum": 0.8, "eps": 1e-6},
}
# A matrix and a vector: (factor of the rate, weight decay).
UPDATES = {"matrix": (0.5, 0.1), "vector": (1.0, 0.0)}
LR, STEPS = 0.02, 4


def starts(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(37, 11, generator=generator, dtype=torch.float64).to(dtype),
        "vector": torch.randn(13, generator=generator, dtype=torch.float64).to(dtype),
    }


def gradients_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(dtype) for n, w in starts().items()}


def places_of(weights: Mapping[str, Tensor]) -> dict[str, Place]:
    pieces = {name: pieces_of(ParameterSpec(name, tuple(w.shape), None), 1, range(1))[0] for name, w in weights.items()}
    return {name: Place(piece) for name, piece in pieces.items()}


def optimizer_of(
    config: OptimConfig, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rule: UpdateRule | None = None
) -> ElementwiseOptimizer:
    rule = rule or listed_rule(config)
    assert rule is not None
    return ElementwiseOptimizer(rule, weights, gradients, UPDATES, config, places_of(weights), seed=7)


def trained(config: OptimConfig, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], ElementwiseOptimizer]:
    """After STEPS updates, with a step before each whose gradient is not finite and which is skipped."""
    weights, gradients = starts(dtype), {n: torch.zeros_like(w) for n, w in starts(dtype).items()}
    optimizer = optimizer_of(config, weights, gradients)
    for update in range(1, STEPS + 1):
        for gradient in gradients.values():
            gradient.fill_(torch.inf)
        optimizer.step(LR, update, torch.tensor(1.0, dtype=torch.float64))
        for name, values in gradients_of(update, dtype).items():
            gradients[name].copy_(values)
        optimizer.step(LR, update, torch.tensor(False))
    return weights, optimizer


def by_torch(name: str) -> dict[str, Tensor]:
    weights = {n: Parameter(w) for n, w in starts().items()}
    groups = [{"params": [weights[n]], "lr": LR * f, "weight_decay": d} for n, (f, d) in UPDATES.items()]
    options = OPTIONS.get(name, {"betas": (0.8, 0.9), "eps": 1e-6})
    optimizer = getattr(torch.optim, name)(groups, lr=LR, **options)
    for update in range(1, STEPS + 1):
        for n, values in gradients_of(update, torch.float64).items():
            weights[n].grad = values
        optimizer.step()
    return {n: w.detach() for n, w in weights.items()}


def by_lion() -> dict[str, Tensor]:
    weights, moments = starts(), {n: torch.zeros_like(w) for n, w in starts().items()}
    for update in range(1, STEPS + 1):
        for n, g in gradients_of(update, torch.float64).items():
            factor, decay = UPDATES[n]
            lr = LR * factor
            weights[n] = weights[n] - lr * (torch.sign(0.8 * moments[n] + 0.2 * g) + decay * weights[n])
            moments[n] = 0.9 * moments[n] + 0.1 * g
    return weights


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_an_optimizer_is_torchs_or_its_paper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with rates and decays of their own, in blocks that end anywhere; skipped steps leave no trace."""
    monkeypatch.setattr(elementwise, "_CPU_BLOCK", 100)
    found, optimizer = trained(replace(CONFIG, name=name))
    want = by_lion() if name == "lion" else by_torch({"sgd": "SGD"}.get(name, name.removeprefix("torch.")))
    # torch counts steps and NAdam's product in float32.
    rtol = 1e-6 if name in ("torch.NAdam", "torch.RAdam") else 1e-12
    for n, weight in found.items():
        torch.testing.assert_close(weight, want[n], rtol=rtol, atol=rtol)
        assert tuple(optimizer.state_of(n)) == OPTIMIZERS[name].states


def test_adamw_with_rounded_moments_follows_adamw() -> None:
    """8 bits of mantissa are an error of a moment of 2^-8 at most, and of an update of some percent."""
    found, optimizer = trained(replace(CONFIG, name="adamw", moments="bfloat16"))
    want, start = by_torch("AdamW"), starts()
    for name, weight in found.items():
        assert all(tensor.dtype == torch.bfloat16 for tensor in optimizer.state_of(name).values())
        moved = (want[name] - start[name]).abs().max()
        assert 0 < (weight - want[name]).abs().max() < 0.05 * moved


@pytest.mark.parametrize("name", ["adamw", "lion", "torch.RMSprop"])
def test_rounded_moments_do_not_depend_on_the_cut(name: str) -> None:
    """A weight that is cut into columns, and a column's elements into slices, has the bits of the whole."""
    config = replace(CONFIG, name=name, moments="bfloat16")
    whole, optimizer = trained(config, torch.float32)
    state = optimizer.state_of("matrix")
    spec = ParameterSpec("matrix", (37, 12), 1)
    start, pieces = starts(torch.float32)["matrix"], pieces_of(replace(spec, shape=(37, 11)), 11, range(1))
    assert pieces[0].block == ((0, 0), (37, 1))
    for column, first, stop in ((0, 0, 37), (7, 5, 30)):
        (piece,) = pieces_of(replace(spec, shape=(37, 11)), 11, range(column, column + 1))
        weight, gradient = start[first:stop, column].clone(), torch.zeros(stop - first)
        rule = listed_rule(config)
        assert rule is not None
        part = ElementwiseOptimizer(
            rule, {"w": weight}, {"w": gradient}, {"w": UPDATES["matrix"]}, config, {"w": Place(piece, first)}, seed=7
        )
        for update in range(1, STEPS + 1):
            gradient.copy_(gradients_of(update, torch.float32)["matrix"][first:stop, column])
            part.step(LR, update)
        assert torch.equal(weight, whole["matrix"][first:stop, column])
        for kind, tensor in part.state_of("w").items():
            assert torch.equal(tensor, state[kind][first:stop, column]), kind


def test_rounding_is_right_on_average_and_moves_to_a_neighbour() -> None:
    x = torch.tensor([1.0, 1.001, -1.001, 3e-41, 0.0, torch.inf, torch.nan])[:, None].expand(-1, 1 << 16)
    found = round_at_random(x, torch.arange(1 << 16).expand_as(x)).double()
    torch.testing.assert_close(found[:5].mean(1), x[:5, 0].double(), rtol=1e-6, atol=1e-45)
    assert found[0].unique().tolist() == [1.0] and found[1].unique().tolist() == [1.0, 1.0078125]
    assert found[5].isinf().all() and found[6].isnan().all()


def test_small_changes_add_up_in_rounded_moments() -> None:
    """Rounded to the nearest a second moment of beta2 0.999 would stay at 1; at random it falls as it should."""
    config = OptimConfig(name="torch.RMSprop", moments="bfloat16", beta1=0.0, beta2=0.999)
    size = 4096
    weights, gradients = {"vector": torch.zeros(size)}, {"vector": torch.zeros(size)}
    optimizer = optimizer_of(config, weights, gradients)
    optimizer.state_of("vector")["square_avg"].fill_(1.0)
    for update in range(1, 201):
        optimizer.step(0.0, update)
    mean = optimizer.state_of("vector")["square_avg"].double().mean().item()
    assert abs(mean - 0.999**200) < 0.003


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "torch.Muon"}, ["element by element", "torch.Muon: it multiplies whole matrices", "torch.RMSprop"]),
        ({"name": "torch.Adafactor"}, ["sums of a matrix's rows"]),
        ({"name": "torch.LBFGS"}, ["several times a step"]),
        ({"name": "torch.Rprop"}, ["not as zeros"]),
        ({"name": "adamv"}, ["optim.name must be one of adamw, lion", "'adamv'", "use adamw", "tpengine.run"]),
        ({"name": "torch.adam"}, ["must be one of", "use torch.Adam"]),
        ({"moments": "float16"}, ["optim.moments must be one of float32, bfloat16: got 'float16'"]),
    ],
)
def test_an_optimizer_that_is_not_listed_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate(Config(optim=OptimConfig(**settings)), 1)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


class SignSgd:
    """An optimizer of somebody's own, which may be wrong in one way."""

    operations = 4

    def __init__(self, fault: str = "", name: str = "sign", states: tuple[str, ...] = ("mean",)) -> None:
        self.fault, self.name, self.states = fault, name, states

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        mean = numbers.beta1 * states.get("mean", torch.zeros(())) + gradient
        if self.fault == "norm":
            mean = mean / mean.norm()
        if self.fault == "writes":
            gradient.zero_()
        if self.fault == "writes a state":
            mean = states["mean"].copy_(mean)
        if self.fault == "dtype":
            mean = mean.double()
        if self.fault == "fails":
            raise KeyError(self.fault)
        return weight - numbers.lr * mean.sign(), {} if self.fault == "state" else {"mean": mean}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (SignSgd("norm"), ["element by element", "mean of an element depends on the others"]),
        (SignSgd("writes"), ["returns new tensors", "writes into what it is given"]),
        (SignSgd("writes a state"), ["returns new tensors", "writes into what it is given"]),
        (SignSgd("dtype"), ["mean torch.float64"]),
        (SignSgd("state"), ["given float32 [6] and mean, and returns the weight torch.float32 [6]"]),
        (SignSgd(name="lion"), ["a name of its own"]),
        (SignSgd("fails"), ["that of sign fails: KeyError: 'fails'", "give an object, not its class"]),
        (SignSgd(states=("master",)), ["other than master"]),
        (object(), ["is an UpdateRule", "got object without name, states, operations, update"]),
    ],
)
def test_an_own_optimizer_that_is_none_is_refused(rule: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        with_rule(Config(), rule)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_an_own_optimizer_is_known_by_its_name() -> None:
    config = with_rule(Config(), SignSgd())
    assert config.optim.name == "sign" and validate(config, 1).optim.name == "sign"
    # Without the object, as a later command sees it, the name says nothing.
    with pytest.raises(ValueError, match=r"hand one of your own to tpengine\.run"):
        validate(replace(config, optim=replace(config.optim, name="sign")), 1)
