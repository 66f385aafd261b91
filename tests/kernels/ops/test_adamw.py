"""Rung: host, interpreter, GPU. One AdamW step on flat shards against torch's fused AdamW.

Only a GPU shows the compiled kernel's numbers, and that what changes every step compiles nothing again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung
from torch import Tensor
from torch.optim.adamw import adamw
from tpkernels.ops.adamw import _adamw_kernel, adamw_, adamw_op_, adamw_reference

# Elements, and how often they are drawn: of few the largest error is a matter of chance.
SIZES = {0: 1, 1: 50, 63: 10, 1000: 3, 4097: 3}
PART = {0: 1, 63: 10}
SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def settings(step: int, **others: float) -> dict[str, Any]:
    """Return the settings of one step; the learning rate changes with the step."""
    return {**SETTINGS, "step": step, "lr": 1e-2 / step, **others}


def draw(num_elements: int, dtype: torch.dtype, device: str, num_steps: int, seed: int) -> dict[str, Tensor]:
    """Masters in float32, and moments as if of a step before; gradients with gaps."""
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, *grads = torch.randn(2 + num_steps, num_elements, generator=generator)
    state = {"master": master, "exp_avg": 0.1 * exp_avg, "exp_avg_sq": 0.05 * exp_avg**2}
    given = {name: tensor.to(device) for name, tensor in state.items()}
    given["grads"] = with_gaps(torch.stack(grads).to(device, dtype))
    return given | {"parameter": torch.zeros(num_elements, dtype=dtype, device=device)}


def several_steps(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grads: Tensor, parameter: Tensor, **others: float
) -> Sequence[Tensor]:
    """adamw_ once for each gradient, on copies."""
    state = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq)]
    parameter = torch.empty_like(parameter)
    for i, grad in enumerate(grads):
        adamw_(*state, grad, **settings(1 + i, **others), parameter=parameter)
    return *state, parameter


def several_steps_of_torch(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grads: Tensor, parameter: Tensor, **others: float
) -> Sequence[Tensor]:
    """The same by torch's fused AdamW; in float64, which says what is right, by the specification."""
    state: Sequence[Tensor] = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq)]
    for i, grad in enumerate(grads.to(master.dtype).contiguous()):
        given = settings(1 + i, **others)
        if master.dtype == torch.float64:
            state = adamw_reference(*state, grad, **given)
        else:
            fused_adamw(*state, grad, **given)
    return *state, state[0].to(parameter.dtype)


def fused_adamw(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: int, **given: float) -> None:
    steps_before = torch.tensor(step - 1.0, device=master.device)
    adamw(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [steps_before],
        fused=True,
        amsgrad=False,
        maximize=False,
        **given,
    )


def check_steps(device: str, dtype: torch.dtype, whole: bool) -> None:
    for num_elements, draws in (SIZES if whole else PART).items():
        for num_steps in (1, 2, 10) if whole else (2,):
            check_errors(
                f"{num_elements} elements, {num_steps} steps",
                several_steps,
                several_steps_of_torch,
                functools.partial(draw, num_elements, dtype, device, num_steps),
                draws=draws,
            )
    without_decay = [functools.partial(f, weight_decay=0.0) for f in (several_steps, several_steps_of_torch)]
    check_errors("no weight decay", *without_decay, functools.partial(draw, 1000, dtype, device, 2))


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_steps, dtype, whole)


def exact_steps(given: dict[str, Tensor]) -> list[list[Decimal]]:
    """Master and moments after several steps, in decimals of 50 digits."""
    state = [[Decimal(number) for number in given[name].tolist()] for name in ("master", "exp_avg", "exp_avg_sq")]
    with localcontext() as context:
        context.prec = 50
        for i, grad in enumerate(given["grads"].tolist()):
            one, step = Decimal(1), 1 + i
            lr, beta1, beta2, eps, weight_decay = (
                Decimal(settings(step)[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
            )
            for j, g in enumerate(map(Decimal, grad)):
                m = state[1][j] = beta1 * state[1][j] + (one - beta1) * g
                v = state[2][j] = beta2 * state[2][j] + (one - beta2) * g * g
                denominator = v.sqrt() / (one - beta2**step).sqrt() + eps
                state[0][j] = state[0][j] * (one - lr * weight_decay) - lr / (one - beta1**step) * m / denominator
    return state


def check_float64(device: str) -> None:
    """Numbers of a step reach the kernel as float64: errors are at most twice those of torch's fused AdamW."""
    given = {name: tensor.double() for name, tensor in draw(65, torch.float64, device, 3, seed=0).items()}
    right = exact_steps(given)

    def errors(state: Sequence[Tensor]) -> list[Decimal]:
        return [
            max(abs(Decimal(got) - want) for got, want in zip(tensor.tolist(), wants, strict=True))
            for tensor, wants in zip(state, right, strict=True)
        ]

    of_torch = [given[name].clone() for name in ("master", "exp_avg", "exp_avg_sq")]
    for i, grad in enumerate(given["grads"].contiguous()):
        fused_adamw(*of_torch, grad, **settings(1 + i))
    allowed = [2 * error for error in errors(of_torch)]
    ours = errors(several_steps(**given)[:3])
    of_reference = errors(several_steps_of_torch(**given)[:3])
    assert all(error <= most for error, most in zip(ours, allowed, strict=True)), (ours, allowed)
    assert all(error <= most for error, most in zip(of_reference, allowed, strict=True)), (of_reference, allowed)


@every_rung
def test_float64_masters(rung: Rung) -> None:
    rung(check_float64)


def check_nothing_to_do(device: str) -> None:
    """Masters stay as they are without decay and gradient, and the copy is the masters rounded; it may be left out."""
    master = draw(100, torch.float32, device, 1, seed=0)["master"]
    zeros = torch.zeros(100, device=device)
    for dtype in (torch.float16, torch.float32):
        with unwritten_is_nan():
            state, parameter = [master.clone(), zeros.clone(), zeros.clone()], torch.empty_like(master, dtype=dtype)
        adamw_(*state, zeros, **settings(1, weight_decay=0.0), parameter=parameter)
        assert torch.equal(state[0], master) and torch.equal(parameter, master.to(dtype))
        assert not state[1].any() and not state[2].any()
    adamw_(*state, zeros, **settings(1))
    torch.testing.assert_close(state[0], master * (1 - 1e-2 * 0.1))


@every_rung
def test_without_gradient(rung: Rung) -> None:
    rung(check_nothing_to_do)


def check_skip(device: str) -> None:
    """With a flag that is true nothing changes, whatever the gradients are; with one that is false it makes no odds."""
    given = draw(1000, torch.float16, device, 1, seed=0)
    after = []
    for skip in (None, torch.tensor(False, device=device), torch.tensor(True, device=device)):
        state = [given[name].clone() for name in ("master", "exp_avg", "exp_avg_sq")]
        parameter, grad = given["master"].half(), given["grads"][0].clone()
        if skip is not None and skip:
            grad[::3], grad[1] = torch.inf, torch.nan
        adamw_(*state, grad, **settings(3), parameter=parameter, skip=skip)
        after.append((*state, parameter))
    before = (given["master"], given["exp_avg"], given["exp_avg_sq"], given["master"].half())
    assert all(torch.equal(a, b) for a, b in zip(after[2], before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after[0], after[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(after[1], before, strict=True))


@every_rung
def test_a_flag_on_the_device_skips_the_step(rung: Rung) -> None:
    rung(check_skip)


def check_cuts(device: str) -> None:
    """A shard's elements have the bits they have in the whole, and its neighbours are left alone."""
    given = draw(1300, torch.float16, device, 2, seed=0)
    whole = several_steps(**given)
    for part in (slice(0, 63), slice(63, 1063), slice(1299, 1300)):
        alone = several_steps(**{name: tensor[..., part] for name, tensor in given.items()})
        assert all(torch.equal(a, b[part]) for a, b in zip(alone, whole, strict=True))
    state = [given[name].clone() for name in ("master", "exp_avg", "exp_avg_sq")]
    inside = [tensor[63:1063] for tensor in state]
    adamw_(*inside, given["grads"][0][63:1063], **settings(1))
    for name, after in zip(("master", "exp_avg", "exp_avg_sq"), state, strict=True):
        changed = (after != given[name]).nonzero()
        assert (changed.min(), changed.max()) == (63, 1062)


@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_bits_do_not_depend_on_the_cut(rung: Rung) -> None:
    rung(check_cuts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_compile_nothing_again() -> None:
    """Another step number, learning rate or size of the shard compiles nothing again."""
    num_compiled = []
    for num_elements, step in ((1, 1), (16, 2), (1000, 1000)):
        given = draw(num_elements, torch.bfloat16, "cuda", 1, seed=0)
        state = [given[name] for name in ("master", "exp_avg", "exp_avg_sq")]
        adamw_(*state, given["grads"][0], **settings(step), parameter=given["parameter"])
        num_compiled.append(len(_adamw_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(set(num_compiled)) == 1


@pytest.mark.parametrize("num_elements", [0, 5])
@pytest.mark.parametrize("as_in_the_engine", [False, True])
def test_opcheck(num_elements: int, as_in_the_engine: bool) -> None:
    given = draw(num_elements, torch.bfloat16, "cpu", 1, seed=0)
    state = [given[name] for name in ("master", "exp_avg", "exp_avg_sq")]
    last = (given["parameter"], torch.tensor(False)) if as_in_the_engine else (None, None)
    torch.library.opcheck(adamw_op_, (*state, given["grads"][0], 3, 1e-2, 0.9, 0.95, 1e-8, 0.1, *last))


def test_compiled_as_eager() -> None:
    def update(state: list[Tensor], grad: Tensor, parameter: Tensor) -> Tensor:
        adamw_(*state, 2 * grad, **settings(3), parameter=parameter)
        return state[0] + 1

    outcomes = []
    compile_: Callable[[Any], Any]
    for compile_ in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        given = draw(65, torch.bfloat16, "cpu", 1, seed=0)
        state = [given[name] for name in ("master", "exp_avg", "exp_avg_sq")]
        y = compile_(update)(state, given["grads"][0], given["parameter"])
        outcomes.append((y, *state, given["parameter"]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0}, "counts steps from 1 .* step 0, .*: pass the number of the step"),
        ({"beta1": 1.0}, r"betas in \[0, 1\): step 1, beta1 1.0"),
        ({"beta2": -0.1}, "beta2 -0.1"),
        ({"master": torch.ones(4).half()}, "one of float32 and float64: master .* torch.float16"),
        ({"master": torch.ones(2, 2)}, r"flat shards \[n\].* master \(2, 2\)"),
        ({"exp_avg": torch.ones(4).double()}, r"exp_avg \(4,\) torch.float64"),
        ({"exp_avg_sq": torch.ones(3)}, r"exp_avg_sq \(3,\)"),
        ({"exp_avg_sq": torch.ones(8)[::2]}, r"contiguous where it writes.* of strides \(2,\): flatten them"),
        ({"grad": torch.ones(4).int()}, r"grad \(4,\) torch.int32"),
        ({"grad": torch.ones(5)}, r"grad \(5,\)"),
        ({"parameter": torch.ones(8).half()[::2]}, r"parameter \(4,\) torch.float16 of strides \(2,\)"),
        ({"skip": torch.zeros(())}, r"skip is one bool on the device of the masters, cpu: got torch.float32 \(\)"),
        ({"skip": torch.zeros(4, dtype=torch.bool)}, r"got torch.bool \(4,\) on cpu: pass"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    tensors = {name: torch.ones(4) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}
    with pytest.raises(ValueError, match=message):
        adamw_(**{**tensors, **settings(1), **arguments})
