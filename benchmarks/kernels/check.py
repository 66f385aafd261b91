"""Check that contestants of `benchmarks.run kernels` compute the right results, before anything is timed.

There is no fixed tolerance: an error may be at most twice torch's in the same dtype, both against plain torch in
float64, for forward and every gradient, at the very shape that is timed. If ours breaks the rule, no number is printed.
A rival that breaks it is reported as less exact, and still timed if half of the dtype's digits are right: sums of
torch.compile are such a case, and leaving it out would flatter ours. With fewer right digits it computes something else
and is left out.

Attention has two yardsticks, plain torch and torch's fused operator. The first is better for rows that see few keys,
whose gradient nearly cancels; the second elsewhere in 16 bits, since it does not round scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.cases.cases import OURS, Case, Contestant, Draw, Shape

# One draw may suit one side by chance, and a whole row may cancel. With 3 draws of a few thousand elements, errors that
# were on average no larger than torch's broke the rule once in 50 times. So small cases are drawn more often.
FEWEST_DRAWS, _MOST_DRAWS = 3, 32
_INPUT_ELEMENTS = 2**20


class Findings(NamedTuple):
    """Findings about contestants, by name, one line each.

    Attributes:
        wrong: about those that must not be timed.
        less_exact: about rivals whose results are worse than torch's.
    """

    wrong: dict[str, str]
    less_exact: dict[str, str]


def check(case: Case, shape: Shape, contestants: Mapping[str, Contestant], most_draws: int = _MOST_DRAWS) -> Findings:
    """Check every contestant's results against the rule.

    Cost: 3 draws, for small inputs up to 32; each runs in float64, in plain torch and with every contestant.
    """
    wrong: dict[str, str] = {}
    less_exact: dict[str, str] = {}
    largest: dict[tuple[str, str], float] = {}
    allowed: dict[str, float] = {}
    half_digits: dict[str, float] = {}
    for seed in range(min(_num_draws(case, shape), most_draws)):
        draw = functools.partial(_drawn, case, shape, seed)
        slopes = slopes_of(case, shape, seed)
        wide = {name: _wide(tensor) for name, tensor in draw().items()}
        exact = _results(case.reference, wide, [slope.double() for slope in slopes])
        for yardstick in filter(None, (case.reference, case.also_torch)):
            try:
                of_torch = _results(yardstick, draw(), slopes)
            except RuntimeError:  # no backend, or not enough memory
                if yardstick is case.reference:
                    raise
                continue
            for what, right in exact.items():
                # A result in the dtype is off by up to half a unit in its last place; twice that is allowed here.
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
            except Exception as raised:  # a rival that cannot run here must not stop the benchmark
                wrong[name] = _one_line(raised)
    for (name, what), error in largest.items():
        if error > allowed[what]:
            found = wrong if name == OURS or error > half_digits[what] else less_exact
            found.setdefault(name, f"{what} is wrong by {error:.2g}, allowed are {allowed[what]:.2g}")
    return Findings(wrong, {name: text for name, text in less_exact.items() if name not in wrong})


def slopes_of(case: Case, shape: Shape, seed: int) -> list[Tensor]:
    """Return random gradients for a case's outputs; none if no input needs a gradient."""
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
    return min(max(FEWEST_DRAWS, _INPUT_ELEMENTS // num_elements), _MOST_DRAWS)


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return one output or several as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _drawn(case: Case, shape: Shape, seed: int) -> dict[str, Tensor]:
    return dict(case.inputs(Draw(shape, seed)))


def _results(function: Callable[..., Any], inputs: Mapping[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return outputs and gradients by name, detached; outputs that backward changes are copied before it."""
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
    """Return the largest absolute difference; infinite if there is a NaN."""
    if not right.numel():
        return 0.0
    return float((got.double() - right).nan_to_num_(nan=torch.inf).abs().max())


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}"
