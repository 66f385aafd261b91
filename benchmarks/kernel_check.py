"""Whether contestants of `benchmarks.run kernels` compute what they should, before anything is timed.

One rule for all, and no tolerance: an error of at most twice torch's in the same dtype, both against plain torch in
float64, forward and every gradient, at the very shape that is timed. A rival that breaks it is left out, and said to
be; where ours does there is no number.

Attention has two yardsticks, plain torch and torch's fused operator: the first is better at rows that see few keys,
whose gradient nearly cancels, the second elsewhere in 16 bits, since it does not round scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case, Contestant, Draw, Shape

# One draw may suit either by chance where a result has few elements.
_DRAWS = 3


def failures(case: Case, shape: Shape, contestants: Mapping[str, Contestant]) -> dict[str, str]:
    """What is wrong with each contestant that is not right, in one line.

    Cost: three draws, each run in float64, in plain torch and by every contestant.
    """
    found: dict[str, str] = {}
    largest: dict[tuple[str, str], float] = {}
    allowed: dict[str, float] = {}
    for seed in range(_DRAWS):
        draw = functools.partial(_drawn, case, shape, seed)
        slopes = slopes_of(case.reference(**_detached(draw())), seed)
        wide = {name: _wide(tensor) for name, tensor in draw().items()}
        exact = _results(case.reference, wide, [slope.double() for slope in slopes])
        for yardstick in filter(None, (case.reference, case.also_torch)):
            of_torch = _results(yardstick, draw(), slopes)
            for what, right in exact.items():
                # No result in the dtype can be held to less than half a unit in its last place.
                rounding = _largest(right) * torch.finfo(of_torch[what].dtype).eps / 2
                allowed[what] = max(allowed.get(what, 0.0), 2 * rounding, 2 * _error(of_torch[what], right))
        for name, contestant in contestants.items():
            if name in found:
                continue
            try:
                with contestant.context():
                    got = _results(contestant.function, draw(), slopes)
                for what, right in exact.items() if contestant.is_checked else ():
                    error = _compared(got[what], right, of_torch[what])
                    largest[name, what] = max(largest.get((name, what), 0.0), error)
            except Exception as error:  # a rival that cannot run here is no reason to stop
                found[name] = _one_line(error)
    for (name, what), error in largest.items():
        if error > allowed[what]:
            found.setdefault(name, f"{what} is wrong by {error:.2g}, allowed are {allowed[what]:.2g}")
    return found


def slopes_of(outputs: Any, seed: int) -> list[Tensor]:
    """Random gradients of these outputs, of their shapes, dtypes and device."""
    slopes = []
    for i, y in enumerate(as_list(outputs)):
        generator = torch.Generator(y.device).manual_seed(1000 * (seed + 1) + i)
        slopes.append(torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype))
    return slopes


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
