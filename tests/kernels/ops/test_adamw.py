"""Rung: host, interpreter, GPU. AdamW steps on one tensor and on many at once, against torch's fused AdamW.

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
from tpkernels.launch import Target, observed
from tpkernels.ops.adamw import (
    AdamWNumbers,
    _adamw_kernel,
    adamw_,
    adamw_numbers,
    adamw_op_,
    adamw_reference,
    launch_adamw_,
    launch_of_table,
)
from tpkernels.ops.tensor_table import CHUNK, TensorTable

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


def step_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    parameter: Tensor | None = None,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    **given: Any,
) -> None:
    """adamw_ of one tensor."""
    numbers = torch.tensor([adamw_numbers(**given)], dtype=torch.float64, device=master.device)
    parameters = [] if parameter is None else [parameter]
    state = [master], [exp_avg], [exp_avg_sq]
    adamw_(*state, [grad.contiguous()], numbers, parameters=parameters, factor=factor, skip=skip)


def several_steps(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grads: Tensor, parameter: Tensor, **others: float
) -> Sequence[Tensor]:
    """adamw_ once for each gradient, on copies."""
    state = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq)]
    parameter = torch.empty_like(parameter)
    for i, grad in enumerate(grads):
        step_(*state, grad, parameter, **settings(1 + i, **others))
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
        step_(*state, zeros, parameter, **settings(1, weight_decay=0.0))
        assert torch.equal(state[0], master) and torch.equal(parameter, master.to(dtype))
        assert not state[1].any() and not state[2].any()
    step_(*state, zeros, **settings(1))
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
        step_(*state, grad, parameter, skip=skip, **settings(3))
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
    step_(*inside, given["grads"][0][63:1063], **settings(1))
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
        step_(*state, given["grads"][0], given["parameter"], **settings(step))
        num_compiled.append(len(_adamw_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(set(num_compiled)) == 1


@pytest.mark.parametrize("as_in_the_engine", [False, True])
def test_opcheck(as_in_the_engine: bool) -> None:
    given = [draw(num_elements, torch.bfloat16, "cpu", 1, seed=0) for num_elements in (0, 5)]
    state = [[of_one[name] for of_one in given] for name in ("master", "exp_avg", "exp_avg_sq")]
    numbers = torch.tensor(2 * [adamw_numbers(**settings(3))], dtype=torch.float64)
    last = ([], numbers, None, None)
    if as_in_the_engine:
        factor, skip = torch.tensor(0.5, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        last = ([of_one["parameter"] for of_one in given], numbers, factor, skip)
    torch.library.opcheck(adamw_op_, (*state, [of_one["grads"][0].contiguous() for of_one in given], *last))


def test_compiled_as_eager() -> None:
    def update(state: list[Tensor], grad: Tensor, parameter: Tensor) -> Tensor:
        step_(*state, 2 * grad, parameter, **settings(3))
        return state[0] + 1

    outcomes = []
    compile_: Callable[[Any], Any]
    for compile_ in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        given = draw(65, torch.bfloat16, "cpu", 1, seed=0)
        state = [given[name] for name in ("master", "exp_avg", "exp_avg_sq")]
        y = compile_(update)(state, given["grads"][0], given["parameter"])
        outcomes.append((y, *state, given["parameter"]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def many(dtype: torch.dtype, device: str) -> list[dict[str, Tensor]]:
    """Tensors of many sizes and layouts, of which some do not begin at a multiple of 16 bytes, or only their copies."""
    given = []
    for seed, size in enumerate((0, 1, 511, 512, 1000, CHUNK - 1, CHUNK, CHUNK + 513, 2 * CHUNK)):
        tensors = draw(size, dtype, device, 1, seed)
        tensors["grad"] = tensors.pop("grads")[0].contiguous()
        given.append(tensors)
    matrix = {name: tensor[:999].view(27, 37) for name, tensor in given[4].items()}
    given.append({name: tensor.clone().T for name, tensor in matrix.items()})
    # Views of the middle of larger tensors: of all, and of the copy and the gradient alone, as ZeRO's slices are.
    for names in (tuple(given[4]), ("parameter", "grad")):
        cut = {name: tensor.clone() for name, tensor in given[4].items()}
        given.append({name: torch.cat([x, x, x])[1001:2001] if name in names else x for name, x in cut.items()})
    return given


def numbers_of_many(num_tensors: int) -> list[AdamWNumbers]:
    """Rates and decays of their own for each tensor."""
    return [adamw_numbers(**settings(2 + i, weight_decay=0.1 * (i % 2))) for i in range(num_tensors)]


def check_many(device: str, dtype: torch.dtype, exact: bool) -> None:
    """Many tensors at once are each as the specification says, to the last bit; what lies beside a view stays."""
    given = many(dtype, device)
    rows = numbers_of_many(len(given))
    generator = torch.Generator().manual_seed(0)
    factor = torch.rand(len(given), generator=generator, dtype=torch.float64).to(device)
    skip = (torch.arange(len(given)) % 5 == 4).to(device)
    before = [{name: tensor.clone() for name, tensor in of_one.items()} for of_one in given]
    beside = [of_one["master"]._base for of_one in given if of_one["master"]._base is not None]
    bases = [(base, base.clone()) for base in beside if base.dim() == 1 and len(base) == 3000]
    assert len(bases) == 1
    lists = ([of_one[name] for of_one in given] for name in ("master", "exp_avg", "exp_avg_sq", "grad"))
    adamw_(
        *lists,
        torch.tensor(rows, dtype=torch.float64, device=device),
        parameters=[of_one["parameter"] for of_one in given],
        factor=factor,
        skip=skip,
    )
    for i, (after, start) in enumerate(zip(given, before, strict=True)):
        assert torch.equal(after["grad"], start["grad"])
        row, want = rows[i], (start["master"], start["exp_avg"], start["exp_avg_sq"])
        if not skip[i]:
            grad = start["grad"].to(start["master"].dtype) * factor[i].to(start["master"].dtype)
            numbers = {**settings(int(row.step)), "lr": row.lr, "weight_decay": row.weight_decay}
            want = adamw_reference(*want, grad, **numbers)
        for name, tensor in zip(("master", "exp_avg", "exp_avg_sq"), want, strict=True):
            if exact:
                assert torch.equal(after[name], tensor), (i, name)
            else:
                torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-7)
        copy = start["parameter"] if skip[i] else after["master"].to(dtype)
        assert torch.equal(after["parameter"], copy), i
    for base, start in bases:
        changed = (base != start).nonzero()
        assert (changed.min(), changed.max()) == (1001, 2000)


@pytest.mark.parametrize(
    ("rung", "dtype", "exact"),
    [
        ("host", torch.bfloat16, False),
        ("interpreter", torch.float16, True),
        pytest.param("interpreter", torch.float32, True, marks=pytest.mark.slow),
        ("gpu", torch.bfloat16, True),
    ],
    indirect=["rung"],
)
def test_many_tensors_at_once(rung: Rung, dtype: torch.dtype, exact: bool) -> None:
    rung(check_many, dtype, exact)


def check_far(device: str) -> None:
    """A chunk behind 2**31 elements is updated where it lies. Nobody has that memory: its tensor begins before it."""
    given = draw(CHUNK, torch.float32, device, 1, seed=0)
    tensors = [given["master"], given["exp_avg"], given["exp_avg_sq"], given["grads"][0].contiguous()]
    want = adamw_reference(*tensors, **settings(1))
    number = 2**31 // CHUNK + 1
    begins = [tensor.data_ptr() - 4 * number * CHUNK for tensor in tensors]
    table = TensorTable(
        torch.tensor([[(number + 1) * CHUNK, 0, *begins]], device=device),
        ((torch.tensor([[0, number]], dtype=torch.int32, device=device), True),),
        1,
        None,
    )
    numbers = torch.tensor([adamw_numbers(**settings(1))], dtype=torch.float64, device=device)
    launch_of_table(table, numbers, None, None, torch.float32, torch.float32, None)
    assert all(torch.equal(tensor, right) for tensor, right in zip(tensors, want, strict=False))


@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_more_than_2_to_the_31_elements(rung: Rung) -> None:
    rung(check_far)


def launches(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the grids of the launches for tensors that are their own moments and gradients."""
    found: list[tuple[int, ...]] = []
    numbers = torch.zeros(len(tensors), 8, dtype=torch.float64)
    with observed(Target("cuda", 90), lambda kernel, grid, arguments, options: found.append(grid)):
        launch_adamw_(tensors, tensors, tensors, tensors, [], numbers, None, None)
    return found


def test_a_launch_for_all_tensors_and_one_for_those_that_are_not_aligned() -> None:
    whole = [torch.zeros(size) for size in (1, CHUNK, CHUNK + 1, 0, 5 * CHUNK)]
    assert launches(whole) == [(9,)]
    assert launches([*whole, torch.zeros(2 * CHUNK)[3:]]) == [(9,), (2,)]
    assert launches(100 * [torch.zeros(3)]) == [(100,)]


def test_memory_that_was_taken_away_is_refused() -> None:
    gone = torch.zeros(5)
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"numbers \[1\] of 2 have none: give it back"):
        launches([torch.zeros(5), gone])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master": torch.ones(4).half()}, r"float32 and float64.* masters\[0\] \(4,\) torch.float16"),
        ({"exp_avg": torch.ones(4).double()}, r"exp_avgs\[0\] \(4,\) torch.float64"),
        ({"exp_avg_sq": torch.ones(3)}, r"exp_avg_sqs\[0\] \(3,\)"),
        ({"exp_avg_sq": torch.ones(8)[::2]}, r"exp_avg_sqs\[0\] .* \(2,\) on cpu: give them the same strides"),
        ({"grad": torch.ones(4).int()}, r"grads\[0\] \(4,\) torch.int32"),
        ({"grad": torch.ones(5)}, r"grads\[0\] \(5,\)"),
        ({"parameter": torch.ones(8).half()[::2]}, r"parameters\[0\] \(4,\) torch.float16 \(2,\)"),
        ({"numbers": torch.ones(2, 8).double()}, r"numbers are float64 \(1, 8\) .* got torch.float64 \(2, 8\)"),
        ({"numbers": torch.ones(1, 8)}, "got torch.float32"),
        (
            {"skip": torch.zeros(())},
            r"skip is one number .* torch.bool or torch.float64 on cpu: got torch.float32 \(\)",
        ),
        ({"skip": torch.zeros(4, dtype=torch.bool)}, r"got torch.bool \(4,\) on cpu: pass"),
        ({"factor": torch.zeros(())}, r"factor is one number .* got torch.float32 \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {name: torch.ones(4) for name in ("master", "exp_avg", "exp_avg_sq", "grad")} | arguments
    lists = ([given[name]] for name in ("master", "exp_avg", "exp_avg_sq", "grad"))
    numbers = given.get("numbers", torch.tensor([adamw_numbers(**settings(1))], dtype=torch.float64))
    parameters = [given["parameter"]] if "parameter" in given else []
    with pytest.raises(ValueError, match=message):
        adamw_(*lists, numbers, parameters=parameters, factor=given.get("factor"), skip=given.get("skip"))


def test_lists_of_different_lengths_are_refused() -> None:
    one, numbers = [torch.ones(4)], torch.tensor([adamw_numbers(**settings(1))], dtype=torch.float64)
    with pytest.raises(ValueError, match="got 1 masters, 2 exp_avgs: pass lists of one length"):
        adamw_(one, 2 * one, one, one, numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0}, "counts steps from 1 .* step 0, .*: pass the number of the step"),
        ({"beta1": 1.0}, r"betas in \[0, 1\): step 1, beta1 1.0"),
        ({"beta2": -0.1}, "beta2 -0.1"),
    ],
)
def test_numbers_of_no_step_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adamw_numbers(**{**settings(1), **arguments})
