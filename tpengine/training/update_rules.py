"""The rules of optim.name, in the order of config/optimizers.py: AdamW, Lion, SGD, and classes of torch.

Rules multiply, add, divide and take roots in operations of their own, which are rounded as IEEE 754 says wherever an
element lies in a loop. AdamW in float32 moments is none of them: it has kernels (optimizer.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.ops.adamw import adamw_reference

from tpengine.config import Config, OptimConfig
from tpengine.config.optimizers import OPTIMIZERS, OptimizerKind, OwnName
from tpengine.training.elementwise import MOST_STATES, UpdateNumbers, UpdateRule

_TORCH = "torch."


class _Listed:
    """A rule that config/optimizers.py lists.

    Args:
        name: its name there.
    """

    def __init__(self, name: str) -> None:
        kind = OPTIMIZERS[name]
        self.name, self.states, self.operations = name, kind.states, kind.operations


class AdamWRule(_Listed):
    """AdamW by operations of torch, for moments that are rounded (tpkernels.ops.adamw: adamw_reference)."""

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return weight and moments after an update."""
        weight, first, second = adamw_reference(
            weight,
            states["exp_avg"],
            states["exp_avg_sq"],
            gradient,
            step=numbers.update,
            lr=numbers.lr,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            eps=numbers.eps,
            weight_decay=numbers.weight_decay,
        )
        return weight, {"exp_avg": first, "exp_avg_sq": second}


class Lion(_Listed):
    """Lion: steps of one size, by the sign of a mean of gradients; one moment.

        w = (1 - lr decay) w - lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g

    Its rate is some 3 to 10 times smaller, and its decay as much larger, than AdamW's.
    Source: Chen et al., "Symbolic discovery of optimization algorithms", arXiv 2302.06675, algorithm 2.
    """

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return weight and moment after an update."""
        moment = states["exp_avg"]
        direction = (numbers.beta1 * moment + (1 - numbers.beta1) * gradient).sign()
        weight = (1 - numbers.lr * numbers.weight_decay) * weight - numbers.lr * direction
        return weight, {"exp_avg": numbers.beta2 * moment + (1 - numbers.beta2) * gradient}


class Sgd(_Listed):
    """Stochastic gradient descent with momentum beta1, as torch.optim.SGD has it.

    g = g + decay w;  m = beta1 m + g;  w = w - lr m
    """

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return weight and momentum after an update."""
        momentum = numbers.beta1 * states["momentum_buffer"] + (gradient + numbers.weight_decay * weight)
        return weight - numbers.lr * momentum, {"momentum_buffer": momentum}


class TorchRule(_Listed):
    """A class of torch.optim, made anew for every block, with what is kept of its elements.

    Its count of steps is the number of updates, which a checkpoint has once. NAdam's product of momenta follows from
    it too, as if beta1 had been from the first update what it is now.

    Args:
        name: "torch.X".
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._class = getattr(torch.optim, name.removeprefix(_TORCH))
        self._options = inspect.signature(self._class).parameters
        self._product = _MomentumProduct(self._options["momentum_decay"].default) if name == "torch.NAdam" else None

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return weight and states after an update: torch's own step on copies."""
        parameter = Parameter(weight.clone())
        parameter.grad = gradient
        optimizer = self._class([parameter], **self._numbers(numbers))
        kept = {name: tensor.clone() for name, tensor in states.items()}
        # Where rounding could cost: torch counts in float32, or float64 if that is the default.
        state: dict[str, Any] = {"step": torch.tensor(float(numbers.update - 1)), **kept}
        if self._product is not None:
            product = self._product.before(numbers.update, numbers.beta1)
            state["mu_product"] = torch.tensor(product, dtype=state["step"].dtype)
        optimizer.state[parameter] = state
        optimizer.step()
        return parameter.detach(), {name: state[name] for name in kept}

    def _numbers(self, numbers: UpdateNumbers) -> dict[str, Any]:
        """Return our numbers under the class's names of them."""
        ours = {
            "lr": numbers.lr,
            "weight_decay": numbers.weight_decay,
            "eps": numbers.eps,
            "betas": (numbers.beta1, numbers.beta2),
            "momentum": numbers.beta1,
            "alpha": numbers.beta2,
            "rho": numbers.beta2,
        }
        return {name: value for name, value in ours.items() if name in self._options}


class _MomentumProduct:
    """NAdam's product of momenta: beta1 (1 - 0.96^(i decay) / 2) over updates i from 1.

    Args:
        decay: momentum_decay of the class.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._known: tuple[float, int, float] = (0.0, 0, 1.0)

    def before(self, update: int, beta1: float) -> float:
        """Return the product over all updates before this one."""
        known_beta, count, product = self._known
        if known_beta != beta1 or count >= update:
            count, product = 0, 1.0
        for i in range(count + 1, update):
            product *= beta1 * (1 - 0.5 * 0.96 ** (i * self._decay))
        self._known = beta1, update - 1, product
        return product


_OWN_CODE: Mapping[str, Callable[[str], UpdateRule]] = MappingProxyType({"adamw": AdamWRule, "lion": Lion, "sgd": Sgd})


def listed_rule(optim: OptimConfig) -> UpdateRule | None:
    """Return the rule of optim.name; None for AdamW whose moments are float32, which needs none."""
    if optim.name == "adamw" and optim.moments == "float32":
        return None
    return _OWN_CODE.get(optim.name, TorchRule)(optim.name)


def with_rule(config: Config, rule: UpdateRule) -> Config:
    """Return a configuration whose optimizer is a user's own, which plans and checkpoints then know by its name.

    Raises:
        ValueError: it is no rule, has a name that is taken, or does not work element by element.
    """
    missing = [name for name in ("name", "states", "operations", "update") if not hasattr(rule, name)]
    if missing:
        raise ValueError(
            f"an optimizer of one's own is an UpdateRule (tpengine.training.elementwise): got {type(rule).__name__} "
            f"without {', '.join(missing)}: give it what is missing"
        )
    states = tuple(rule.states)
    if rule.name in OPTIMIZERS or not rule.name or not all(map(str.isidentifier, states)) or "master" in states:
        raise ValueError(
            "an optimizer of one's own has a name of its own, and identifiers other than master for what it keeps: "
            f"got {rule.name!r} with {', '.join(map(repr, states)) or 'nothing'}: choose others"
        )
    if config.optim.moments == "bfloat16" and len(states) > MOST_STATES:
        raise ValueError(
            f"optim.moments bfloat16 has random bits for {MOST_STATES} states of a weight: {rule.name} has "
            f"{len(states)}: use optim.moments float32"
        )
    _check_update(rule, states)
    kind = OptimizerKind(states, rule.operations)
    return replace(config, optim=replace(config.optim, name=OwnName.of(rule.name, kind)))


def _check_update(rule: UpdateRule, states: Sequence[str]) -> None:
    """Try a rule on a few elements, whole and cut."""
    size = 6
    weight, gradient = torch.linspace(-1, 1, size), torch.linspace(0.5, -2, size)
    kept = {name: torch.linspace(0.1, 0.2, size) for name in states}
    numbers = UpdateNumbers(update=2, lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8)

    def updated(of: slice) -> dict[str, Tensor]:
        before = weight[of], gradient[of], *(tensor[of] for tensor in kept.values())
        given = [tensor.clone() for tensor in before]
        try:
            new_weight, new = rule.update(given[0], given[1], dict(zip(kept, given[2:], strict=True)), numbers)
            result = {"the weight": new_weight, **new}
        except Exception as error:
            raise ValueError(
                f"an optimizer's update must work on 1 to {size} elements: that of {rule.name} fails: "
                f"{type(error).__name__}: {error}: correct it, and give an object, not its class"
            ) from error
        if result.keys() != {"the weight", *states} or any(
            not isinstance(x, Tensor) or x.shape != given[0].shape or x.dtype != given[0].dtype for x in result.values()
        ):
            raise ValueError(
                f"an optimizer's update returns a weight and what is kept of it, as it is given them: {rule.name} "
                f"is given float32 {list(given[0].shape)} and {', '.join(states) or 'nothing'}, and returns "
                + ", ".join(f"{name} {_told(x)}" for name, x in result.items())
                + ": return tensors of these shapes and names"
            )
        if not all(map(torch.equal, given, before)):
            raise ValueError(
                f"an optimizer's update returns new tensors: {rule.name} writes into what it is given: use operations "
                "that return their result"
            )
        return result

    whole, cut = updated(slice(0, size)), [updated(slice(i, i + 1)) for i in range(size)]
    for name, tensor in whole.items():
        if not torch.allclose(tensor, torch.cat([part[name] for part in cut]), rtol=1e-5, atol=1e-7):
            raise ValueError(
                "an optimizer must work element by element, because ranks update slices of tensors: with "
                f"{rule.name} {name} of an element depends on the others: compute nothing of the tensor as a whole"
            )


def _told(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
