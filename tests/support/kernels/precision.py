"""What an operator's numbers are held to: errors of at most twice plain torch's, nothing unwritten, equal bits again.

No tolerance is invented: a float64 run of the specification says what is right, and the specification in the tested
dtype how wrong torch is. Only where torch happens to be exact, as with one token, the rounding of the right result to
the dtype takes its error's place: no result in that dtype can be held to less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Operator = Callable[..., Tensor | Sequence[Tensor]]


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill what torch.empty and its like return with NaN, integers with their largest."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def results_of(operator: Operator, inputs: Mapping[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    """An operator's outputs, and the gradients of those inputs that require one, for these slopes of the outputs.

    Returns: "output 0" ..., "gradient of <input>" ..., detached.
    """
    outputs = operator(**inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    names = [name for name, tensor in inputs.items() if tensor.requires_grad]
    results = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    if names:
        grads = torch.autograd.grad(outputs, [inputs[name] for name in names], list(slopes))
        results |= {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}
    return results


def check_errors(
    what: str, operator: Operator, reference: Operator, draw: Callable[[int], Mapping[str, Tensor]], *, draws: int = 3
) -> None:
    """Assert that an operator is at most twice as wrong as its specification run in the same dtype.

    Args:
        what: the case, for the message.
        operator, reference: called with the inputs by name; return a tensor or several.
        draw: makes inputs from a seed. Floating-point ones with requires_grad get a gradient.
        draws: how often; the largest error of all counts. One draw of few elements may suit either by chance.
    """
    largest: dict[str, tuple[float, float]] = {}
    for seed in range(draws):
        for name, errors in _errors(what, operator, reference, draw(seed), seed).items():
            before = largest.get(name, errors)
            largest[name] = max(before[0], errors[0]), max(before[1], errors[1])
    for name, (error, allowed) in largest.items():
        assert error <= allowed, f"{what}: {name} is wrong by {error:.3g}, allowed are {allowed:.3g}"


def _errors(
    what: str, operator: Operator, reference: Operator, inputs: Mapping[str, Tensor], seed: int
) -> dict[str, tuple[float, float]]:
    """The error of each result of one draw, and the one allowed."""
    outputs = reference(**inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    exact = results_of(
        reference, {name: _wide(tensor) for name, tensor in inputs.items()}, [s.double() for s in slopes]
    )
    # Of dense operands: torch's product of 16 bits reads what lies behind a row, on a CPU with AMX.
    of_torch = results_of(reference, {name: _dense(tensor) for name, tensor in inputs.items()}, slopes)
    with unwritten_is_nan():
        ours = results_of(operator, inputs, slopes)
        again = results_of(operator, inputs, slopes) if seed == 0 else ours
    assert ours.keys() == exact.keys(), (what, list(ours), list(exact))
    errors = {}
    for name, got in ours.items():
        right = exact[name]
        assert got.shape == right.shape and got.dtype == of_torch[name].dtype, (what, name, got.shape, got.dtype)
        assert not got.isnan().any(), f"{what}: {name} has NaN"
        assert torch.equal(got, again[name]), f"{what}: {name} has other bits again"
        allowed = 2 * max(_error(of_torch[name], right), _error(right.to(got.dtype), right))
        errors[name] = _error(got, right), allowed
    return errors


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def _error(got: Tensor, right: Tensor) -> float:
    """The largest absolute difference."""
    if not right.numel():
        return 0.0
    same_infinity = (got == right) & got.isinf()
    return float((got.double() - right).masked_fill(same_infinity, 0).abs().max())


def with_gaps(t: Tensor, every: int = 2) -> Tensor:
    """The same values, `every` elements apart in memory along the last dim."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] * every), torch.nan)
    wide[..., ::every] = t
    return wide[..., ::every]


def with_longer_rows(t: Tensor) -> Tensor:
    """The same values as part of a tensor with three more columns on either side."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 6), torch.nan)
    wide[..., 3:-3] = t
    return wide[..., 3:-3]
