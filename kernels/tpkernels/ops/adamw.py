"""AdamW over all tensors of a rank in one launch, which also writes the low-precision copies of the masters.

    g = g * factor                                                  m, v = exp_avg[n], exp_avg_sq[n] of each tensor
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * weight_decay) - step_size * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
    step_size = lr / (1 - beta1^step);   parameter[n] = p, rounded

A tensor is any range of the flat parameters, as ZeRO or a bucket cuts them: elements are independent.

What changes with every step is read from memory: a row of NUMBERS for each tensor, so that tensors may have rates and
decays of their own, and a factor of the gradients and a flag that skips, which the device itself computes (clip.py). So
clipping needs no pass over the gradients, and a recorded launch may be run again with other numbers.

The decision a reader will question: products and sums are not fused (enable_fp_fusion). So an element has the same bits
in every variant of the kernel, the interpreted one too, and a gradient that is scaled here has those of one that was
scaled before. The kernel waits for memory in any case.

How others do it: torch's fused AdamW, and multi_tensor_adam of apex and TransformerEngine, pass addresses by value, in
several launches, and take rate and step from the device where they are to be captured. torch's wants one dtype, so that
low-precision copies are a pass more. The table of addresses is tensor_table.py.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101; the formula is torch's.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tpkernels.launch import as_operator, by_triton, jit, tl, widened
from tpkernels.ops.tensor_table import (
    TensorTable,
    chunk_of,
    is_dense,
    launch_over,
    load_inside,
    table_of,
    tensor_at,
    triton_dtype,
)


class AdamWNumbers(NamedTuple):
    """A row of the table: what a tensor's update needs from the settings and the number of its step."""

    lr: float
    weight_decay: float
    step: float
    beta1: float
    beta2: float
    eps: float
    first_correction: float
    root_of_correction: float


def adamw_numbers(*, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> AdamWNumbers:
    """Return the row of a tensor, which `adamw_` reads as float64.

    Args:
        step: the number of this step; the first is 1.
        lr: learning rate of this step.
        beta1, beta2: of the moments, 0 <= beta < 1.
        eps: added to the denominator.
        weight_decay: the fraction of p removed per step, times lr; 0 for none.

    Raises:
        ValueError: a step below 1, a beta outside [0, 1).
    """
    if step < 1 or not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
        raise ValueError(
            f"AdamW counts steps from 1 and has betas in [0, 1): step {step}, beta1 {beta1}, beta2 {beta2}: "
            "pass the number of the step that this is"
        )
    first_correction, root_of_correction = 1 - beta1**step, (1 - beta2**step) ** 0.5
    return AdamWNumbers(lr, weight_decay, step, beta1, beta2, eps, first_correction, root_of_correction)


def adamw_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next (master, exp_avg, exp_avg_sq), computed in master's dtype: the specification, to the last bit."""
    grad = grad.to(master.dtype)
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    # By float64: torch's roots of float32 are not all rounded correctly on a CPU.
    root = exp_avg_sq.double().sqrt().to(master.dtype)
    denominator = root / (1 - beta2**step) ** 0.5 + eps
    return master * (1 - lr * weight_decay) - lr / (1 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


@jit
def _root(b: tl.tensor) -> tl.tensor:
    """Return the square root, rounded correctly. tl.sqrt is not correctly rounded in float32."""
    return tl.sqrt(b) if b.dtype == tl.float64 else tl.sqrt_rn(b)


@jit
def _divided(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a / b, rounded correctly. In float32, `/` is not correctly rounded."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@jit
def _update(
    tensors: tl.tensor, p_parameter: tl.tensor, o_block: tl.tensor, m_inside: tl.tensor, numbers: tl.tensor
) -> None:
    """Update a block of elements, those inside a mask or, if it is None, all; p_parameter may be None."""
    p_master, p_exp_avg, p_exp_avg_sq, p_grad = tensors
    factor, decay, new_of_first, beta2, new_of_second, step_size, root_of_correction, eps = numbers
    # [BLOCK]
    b_grad = widened(load_inside(p_grad + o_block, m_inside)).to(p_master.dtype.element_ty) * factor
    # [BLOCK]
    b_first = load_inside(p_exp_avg + o_block, m_inside)
    # [BLOCK]
    b_second = load_inside(p_exp_avg_sq + o_block, m_inside)
    # [BLOCK]
    b_master = load_inside(p_master + o_block, m_inside)
    # torch computes it in this form too. beta1 rounded to float32 would add an error as large as the rounding of a
    # step, and always of the same sign.
    b_first += new_of_first * (b_grad - b_first)
    b_second = beta2 * b_second + new_of_second * b_grad * b_grad
    b_master = decay * b_master - _divided(step_size * b_first, _divided(_root(b_second), root_of_correction) + eps)
    tl.store(p_exp_avg + o_block, b_first, mask=m_inside)
    tl.store(p_exp_avg_sq + o_block, b_second, mask=m_inside)
    tl.store(p_master + o_block, b_master, mask=m_inside)
    if p_parameter is not None:
        tl.store(p_parameter + o_block, b_master.to(p_parameter.dtype.element_ty), mask=m_inside)


@jit
def _adamw_kernel(
    p_places: tl.tensor,
    p_chunks: tl.tensor,
    p_numbers: tl.tensor,
    p_factor: tl.tensor,
    p_skip: tl.tensor,
    MASTER: tl.constexpr,
    GRAD: tl.constexpr,
    PARAMETER: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr,
    SKIP_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update a chunk of a tensor; p_factor and p_skip may be None, PARAMETER is None where there are no copies."""
    i_tensor, p_place, first, num_elements = chunk_of(p_places, p_chunks, COLUMNS, CHUNK)
    if p_skip is not None:
        num_elements = tl.where(tl.load(p_skip + i_tensor * SKIP_STRIDE) == 0, num_elements, 0)
    # The numbers of this tensor, in the order of AdamWNumbers: computed in float64, rounded to the masters' dtype once.
    p_row = p_numbers + i_tensor * 8
    lr, weight_decay = tl.load(p_row), tl.load(p_row + 1)
    beta1, beta2, eps = tl.load(p_row + 3), tl.load(p_row + 4), tl.load(p_row + 5)
    first_correction, root_of_correction = tl.load(p_row + 6), tl.load(p_row + 7)
    factor = tl.full([], 1, tl.float64)
    if p_factor is not None:
        factor = tl.load(p_factor + i_tensor * FACTOR_STRIDE)
    numbers = (
        factor.to(MASTER),
        (1 - lr * weight_decay).to(MASTER),
        (1 - beta1).to(MASTER),
        beta2.to(MASTER),
        (1 - beta2).to(MASTER),
        (lr / first_correction).to(MASTER),
        root_of_correction.to(MASTER) + tl.zeros([BLOCK], MASTER),  # a division that rounds correctly takes blocks only
        eps.to(MASTER),
    )
    o_element = first + tl.arange(0, BLOCK)
    tensors = (
        tensor_at(p_place, 0, MASTER, ALIGNED) + o_element,
        tensor_at(p_place, 1, MASTER, ALIGNED) + o_element,
        tensor_at(p_place, 2, MASTER, ALIGNED) + o_element,
        tensor_at(p_place, 3, GRAD, ALIGNED) + o_element,
    )
    p_parameter = None
    if PARAMETER is not None:
        p_parameter = tensor_at(p_place, 4, PARAMETER, ALIGNED) + o_element
    # Whole blocks without a mask: a mask that the compiler knows nothing about makes every load one of one element.
    for i in range(0, num_elements // BLOCK):
        _update(tensors, p_parameter, i * BLOCK, None, numbers)
    # What is left, in the tensor's last chunk.
    rest = num_elements % BLOCK
    if rest != 0:
        _update(tensors, p_parameter, num_elements - rest, tl.arange(0, BLOCK) < rest, numbers)


def launch_adamw_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Run the operator tpkernels::adamw_ with its kernel."""
    copies = [parameters] if parameters else []
    table = table_of(masters, exp_avgs, exp_avg_sqs, grads, *copies)
    parameter = parameters[0].dtype if parameters else None
    launch_of_table(table, numbers, factor, skip, masters[0].dtype, grads[0].dtype, parameter)


def launch_of_table(
    table: TensorTable,
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
    master: torch.dtype,
    grad: torch.dtype,
    parameter: torch.dtype | None,
) -> None:
    """Launch the kernel for the tensors of a table, of these dtypes."""
    launch_over(
        table,
        _adamw_kernel,
        numbers,
        factor,
        skip.view(torch.uint8) if skip is not None and skip.dtype == torch.bool else skip,
        MASTER=triton_dtype(master),
        GRAD=triton_dtype(grad),
        PARAMETER=None if parameter is None else triton_dtype(parameter),
        FACTOR_STRIDE=_row_stride(factor),
        SKIP_STRIDE=_row_stride(skip),
        # 16 bytes of float32 per thread and load. Twice that would need another layout for 16-bit values. Not tuned on
        # a GPU yet.
        BLOCK=512,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _row_stride(of_rows: Tensor | None) -> int:
    """Return the stride between the rows of what all tensors may share; constant: 0 or 1."""
    return 0 if of_rows is None or not of_rows.dim() else of_rows.stride(0)


def _on_host_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    rows = [AdamWNumbers(*row) for row in numbers.tolist()]
    factors = [1.0] * len(rows) if factor is None else factor.expand(len(rows)).tolist()
    skips = [False] * len(rows) if skip is None else skip.expand(len(rows)).tolist()
    alike: dict[AdamWNumbers, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if not skips[i]:
            alike[row].append(i)
    # All tensors of the same numbers at once, by torch's fused AdamW, which takes only one dtype.
    for row, some in alike.items():
        wide = [grads[i].to(masters[i].dtype) for i in some]
        adamw(
            [masters[i] for i in some],
            [grad if factors[i] == 1 else grad * factors[i] for i, grad in zip(some, wide, strict=True)],
            [exp_avgs[i] for i in some],
            [exp_avg_sqs[i] for i in some],
            [],
            [torch.tensor(row.step - 1.0) for _ in some],  # the fused adamw counts the step itself
            fused=True,
            amsgrad=False,
            beta1=row.beta1,
            beta2=row.beta2,
            lr=row.lr,
            weight_decay=row.weight_decay,
            eps=row.eps,
            maximize=False,
        )
        for i in some if parameters else ():
            parameters[i].copy_(masters[i])


@torch.library.custom_op("tpkernels::adamw_", mutates_args=("masters", "exp_avgs", "exp_avg_sqs", "parameters"))
def adamw_op_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Run adamw_ with all its arguments."""
    update = launch_adamw_ if by_triton(masters[0]) else _on_host_
    update(masters, exp_avgs, exp_avg_sqs, grads, parameters, numbers, factor, skip)


@adamw_op_.register_fake
def _(*_: Any) -> None:
    return None


def adamw_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    numbers: Tensor,
    *,
    parameters: Sequence[Tensor] = (),
    factor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Take one AdamW step on many tensors, in place, and write the parameters' low-precision copies.

        g = factor * g;   m[n] = beta1 * m + (1 - beta1) * g;   v[n] = beta2 * v + (1 - beta2) * g^2
        p[n] = p * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    Args:
        masters: p of each tensor, of any shape, dense in any order of its dims; all float32 or all float64.
        exp_avgs, exp_avg_sqs: m and v, as masters, laid out as they are; zeros before the first step.
        grads: g, of one floating-point dtype, laid out as masters.
        numbers: float64 [tensors, 8], on the device: a row of `adamw_numbers` for each tensor.
        parameters: of one floating-point dtype, laid out as masters: get p, rounded. Empty if there are no copies.
        factor: float64 [] or [tensors], on the device: of the gradients, which stay as they are. None is 1.
        skip: bool or float64, [] or [tensors], on the device: where it is not zero, nothing is written. The host does
            not wait to know it. None never skips.

    Raises:
        ValueError: tensors that do not fit, numbers for other tensors.

    Cost: with float32 masters, per element, reads 12 bytes and grad's and writes 12 bytes and parameter's: 28 with both
        in bfloat16. torch's fused AdamW moves 4 more for the copy and, since it takes only one dtype, 8 to convert such
        a grad. One launch; two where some tensors do not begin at a multiple of 16 bytes. A CPU runs torch's.
    Numerics: in the masters' dtype, to which the numbers are rounded; parameters are rounded once. Deterministic; with
        the kernel an element's bits do not depend on where a tensor is cut, or on which others there are.
    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    if not masters:
        return
    _check(masters, exp_avgs, exp_avg_sqs, grads, parameters, numbers, factor, skip)
    if as_operator(masters[0]):
        update: Callable[..., None] = adamw_op_
    else:
        update = launch_adamw_ if by_triton(masters[0]) else _on_host_
        # Autograd does not notice what a kernel writes.
        torch.autograd.graph.increment_version([*masters, *exp_avgs, *exp_avg_sqs, *parameters])
    update(masters, exp_avgs, exp_avg_sqs, grads, parameters, numbers, factor, skip)


def _check(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Raise ValueError unless everything fits."""
    first = masters[0]
    named = {"masters": masters, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "grads": grads}
    for name, tensors in {**named, **({"parameters": parameters} if parameters else {})}.items():
        if len(tensors) != len(masters):
            raise ValueError(
                f"adamw_ takes one of each for every master: got {len(masters)} masters, {len(tensors)} {name}: pass "
                "lists of one length"
            )
        dtype = tensors[0].dtype
        fits_dtype = dtype.is_floating_point if name in ("grads", "parameters") else dtype == first.dtype
        for i, (tensor, master) in enumerate(zip(tensors, masters, strict=True)):
            shape, strides = master.shape, master.stride()
            if not (
                fits_dtype
                and tensor.dtype == dtype
                and first.dtype in (torch.float32, torch.float64)
                and tensor.device == first.device
                and tensor.shape == shape
                and (tensor.stride() == strides or _order(shape, tensor.stride()) == _order(shape, strides))
                and is_dense(master)
            ):
                raise ValueError(
                    "adamw_ takes dense tensors that are laid out as their masters, masters and moments in one of "
                    f"float32 and float64, all on one device: masters[{i}] {tuple(shape)} {master.dtype} {strides} on "
                    f"{master.device}, {name}[{i}] {tuple(tensor.shape)} {tensor.dtype} {tensor.stride()} on "
                    f"{tensor.device}: give them the same strides, keep masters and moments in the accumulation dtype"
                )
    rows = len(masters), len(AdamWNumbers._fields)
    if (
        numbers.dtype != torch.float64
        or numbers.shape != rows
        or not numbers.is_contiguous()
        or _elsewhere(numbers, first)
    ):
        raise ValueError(
            f"numbers are float64 {rows} on {first.device}, a row of adamw_numbers for each tensor: got "
            f"{numbers.dtype} {tuple(numbers.shape)} on {numbers.device}: make a row for each"
        )
    for name, shared, dtypes in (("factor", factor, (torch.float64,)), ("skip", skip, (torch.bool, torch.float64))):
        if shared is not None and (
            shared.dtype not in dtypes or shared.shape not in ((), rows[:1]) or _elsewhere(shared, first)
        ):
            raise ValueError(
                f"{name} is one number for all tensors or one for each, {' or '.join(map(str, dtypes))} on "
                f"{first.device}: got {shared.dtype} {tuple(shared.shape)} on {shared.device}: pass a result of the "
                "device"
            )


def _elsewhere(x: Tensor, first: Tensor) -> bool:
    return x.device != first.device


@functools.lru_cache
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that decide where elements lie: not those of dims of one element."""
    return tuple(stride for size, stride in zip(shape, strides, strict=True) if size > 1)
