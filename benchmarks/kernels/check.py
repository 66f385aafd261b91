"""Whether contestants of `benchmarks.run kernels` compute what they should, before anything is timed.

No tolerance: an error of at most twice torch's in the same dtype, both against plain torch in float64, forward and
every gradient, at the very shape that is timed. Where ours breaks that rule there is no number. A rival that breaks it
is said to be less exact and timed all the same, as long as half of the dtype's digits are right: torch.compile's sums
are such, and leaving it out would flatter ours. With fewer right it computes something else, and is left out.

Attention has two yardsticks, plain torch and torch's fused operator: the first is better at rows that see few keys,
whose gradient nearly cancels, the second elsewhere in 16 bits, since it does not round scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.cases.cases import OURS, Case, Contestant, Draw, Shape

# One draw may suit either by chance, and a whole row may cancel: over 3 draws of a few thousand elements, errors no
# larger than torch's on average broke the rule once in 50 times. So small cases are drawn more often.
_FEWEST_DRAWS, _MOST_DRAWS = 3, 32
_INPUT_ELEMENTS = 2**20


class Findings(NamedTuple):
    """What is to be said of contestants, by name, in one line each.

    Attributes:
        wrong: of those that must not be timed.
        less_exact: of rivals whose results are worse than torch's.
    """

    wrong: dict[str, str]
    less_exact: dict[str, str]


def check(case: Case, shape: Shape, contestants: Mapping[str, Contestant]) -> Findings:
    """Hold every contestant's results to the rule.

    Cost: 3 draws, of small inputs up to 32, each run in float64, in plain torch and by every contestant.
    """
    wrong: dict[str, str] = {}
    less_exact: dict[str, str] = {}
    largest: dict[tuple[str, str], float] = {}
    allowed: dict[str, float] = {}
    half_digits: dict[str, float] = {}
    for seed in range(_num_draws(case, shape)):
        draw = functools.partial(_drawn, case, shape, seed)
        slopes = slopes_of(case, shape, seed)
        wide = {name: _wide(tensor) for name, tensor in draw().items()}
        exact = _results(case.reference, wide, [slope.double() for slope in slopes])
        for yardstick in filter(None, (case.reference, case.also_torch)):
            try:
                of_torch = _results(yardstick, draw(), slopes)
            except RuntimeError:  # no backend, or no memory
                if yardstick is case.reference:
                    raise
                continue
            for what, right in exact.items():
                # No result in the dtype can be held to less than half a unit in its last place, here twice that.
                size, eps = _largest(right), torch.finfo(of_torch[what].dtype).eps
                allowed[what] = max(allowed.get(what, 0.0), size * eps, 2 * _error(of_torch[what], right))
                half_digits[what] = max(half_digits.get(what, 0.0), size * eps**0.5)
        for name, contestant in contestants.items():
            if name in wrong:
                continue
            try:
                with contestant.context():
                    got = _results(contestant.function, draw(), slopes)
                for what, right in exact.items() if contestant.is_checked else ():
                    error = _compared(got[what], right, of_torch[what])
                    largest[name, what] = max(largest.get((name, what), 0.0), error)
            except Exception as raised:  # a rival that cannot run here is no reason to stop
                wrong[name] = _one_line(raised)
    for (name, what), error in largest.items():
        if error > allowed[what]:
            found = wrong if name == OURS or error > half_digits[what] else less_exact
            found.setdefault(name, f"{what} is wrong by {error:.2g}, allowed are {allowed[what]:.2g}")
    return Findings(wrong, {name: text for name, text in less_exact.items() if name not in wrong})


def slopes_of(case: Case, shape: Shape, seed: int) -> list[Tensor]:
    """Random gradients of a case's outputs; none if no input takes one."""
    inputs = _drawn(case, shape, seed)
    if not any(tensor.requires_grad for tensor in inputs.values()):
        return []
    slopes = []
    for i, y in enumerate(as_list(case.reference(**_detached(inputs)))):
        generator = torch.Generator(y.device).manual_seed(1000 * (seed + 1) + i)
        slopes.append(torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype))
    return slopes


def _num_draws(case: Case, shape: Shape) -> int:
    num_elements = sum(tensor.numel() for tensor in _drawn(case, shape, 0).values())
    return min(max(_FEWEST_DRAWS, _INPUT_ELEMENTS // num_elements), _MOST_DRAWS)


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One output or several, as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _drawn(case: Case, shape: Shape, seed: int) -> dict[str, Tensor]:
    return dict(case.inputs(Draw(shape, seed)))


def _results(function: Callable[..., Any], inputs: Mapping[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name, detached; those outputs that change with backward are taken before it."""
    outputs = as_list(function(**inputs))
    found = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if leaves:
        grads = torch.autograd.grad(outputs, list(leaves.values()), [slope.clone() for slope in slopes])
        found |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def _detached(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in inputs.items()}


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _compared(got: Tensor, right: Tensor, of_torch: Tensor) -> float:
    if got.shape != right.shape or got.dtype != of_torch.dtype:
        raise ValueError(
            f"{tuple(got.shape)} {got.dtype} instead of {tuple(right.shape)} {of_torch.dtype}: another result"
        )
    return _error(got, right)


def _error(got: Tensor, right: Tensor) -> float:
    """The largest absolute difference; infinite where there is NaN."""
    if not right.numel():
        return 0.0
    return float((got.double() - right).nan_to_num_(nan=torch.inf).abs().max())


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}"
