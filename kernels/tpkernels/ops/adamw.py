"""AdamW over flat shards, with the low-precision copy of the masters written in the same pass.

    m = beta1 * m + (1 - beta1) * g                                m, v = exp_avg[n], exp_avg_sq[n]
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * weight_decay) - step_size * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
    step_size = lr / (1 - beta1^step);   parameter[n] = p, rounded

A shard is any range of the flat parameters, as ZeRO or a bucket cuts them: elements are independent.

The decision a reader will question: values that change every step are passed as numbers, not as a tensor on the device.
A float argument costs nothing and causes no recompilation. A tensor of seven numbers would be a copy to the device per
step, for which the host waits unless the memory is pinned. The arguments are float64, which Triton only passes if it is
declared, and the kernel rounds them to the masters' dtype: so float64 masters are updated with float64 numbers.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101; the formula is torch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tpkernels.launch import by_triton, cdiv, jit, only_if, run, tl, widened


class _Numbers(NamedTuple):
    """What a step's update needs from its number and the settings, in the kernel's order."""

    decay: float
    new_of_first: float
    beta2: float
    new_of_second: float
    step_size: float
    root_of_correction: float
    eps: float


def _numbers(step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> _Numbers:
    return _Numbers(
        decay=1 - lr * weight_decay,
        new_of_first=1 - beta1,
        beta2=beta2,
        new_of_second=1 - beta2,
        step_size=lr / (1 - beta1**step),
        root_of_correction=(1 - beta2**step) ** 0.5,
        eps=eps,
    )


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
    """Return the next (master, exp_avg, exp_avg_sq), computed in master's dtype: the specification."""
    grad = grad.to(master.dtype)
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    return master * (1 - lr * weight_decay) - lr / (1 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


@jit
def _root(b: tl.tensor) -> tl.tensor:
    """Return the square root, rounded correctly. tl.sqrt is not correctly rounded in float32."""
    return tl.sqrt(b) if b.dtype == tl.float64 else tl.sqrt_rn(b)


@jit
def _divided(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a / b, rounded correctly. In float32, `/` is not correctly rounded."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@jit(do_not_specialize=["num_elements"])
def _adamw_kernel(
    p_master: tl.tensor,
    p_exp_avg: tl.tensor,
    p_exp_avg_sq: tl.tensor,
    p_grad: tl.tensor,
    p_parameter: tl.tensor,
    p_skip: tl.tensor,
    num_elements: tl.int64,
    decay: tl.float64,
    new_of_first: tl.float64,
    beta2: tl.float64,
    new_of_second: tl.float64,
    step_size: tl.float64,
    root_of_correction: tl.float64,
    eps: tl.float64,
    BLOCK: tl.constexpr,
) -> None:
    """Update BLOCK elements per program, none of them where p_skip holds true; p_parameter and p_skip may be None."""
    # Round the step's numbers to the masters' dtype. Only tl.full works in the interpreter: there the numbers are
    # Python floats, and every other conversion makes them float32.
    dtype: tl.constexpr = p_master.dtype.element_ty
    decay = tl.full([], decay, dtype)
    new_of_first = tl.full([], new_of_first, dtype)
    beta2 = tl.full([], beta2, dtype)
    new_of_second = tl.full([], new_of_second, dtype)
    step_size = tl.full([], step_size, dtype)
    root_of_correction = tl.full([BLOCK], root_of_correction, dtype)
    eps = tl.full([], eps, dtype)
    o_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_inside = o_element < num_elements
    if p_skip is not None:
        m_inside = only_if(tl.load(p_skip) == 0, m_inside)
    # [BLOCK]
    b_grad = widened(tl.load(p_grad + o_element, mask=m_inside, other=0.0)).to(dtype)
    # [BLOCK]
    b_first = tl.load(p_exp_avg + o_element, mask=m_inside, other=0.0)
    # [BLOCK]
    b_second = tl.load(p_exp_avg_sq + o_element, mask=m_inside, other=0.0)
    # [BLOCK]
    b_master = tl.load(p_master + o_element, mask=m_inside, other=0.0)
    # torch computes it in this form too. beta1 rounded to float32 would add an error as large as the rounding of a
    # step, and always of the same sign.
    b_first += new_of_first * (b_grad - b_first)
    b_second = beta2 * b_second + new_of_second * b_grad * b_grad
    b_master = decay * b_master - _divided(step_size * b_first, _divided(_root(b_second), root_of_correction) + eps)
    tl.store(p_exp_avg + o_element, b_first, mask=m_inside)
    tl.store(p_exp_avg_sq + o_element, b_second, mask=m_inside)
    tl.store(p_master + o_element, b_master, mask=m_inside)
    if p_parameter is not None:
        tl.store(p_parameter + o_element, b_master.to(p_parameter.dtype.element_ty), mask=m_inside)


def launch_adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    parameter: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Run the operator tpkernels::adamw_ with its kernel."""
    num_elements = master.numel()
    # 16 bytes of float32 per thread and load. Twice that would need another layout for 16-bit values, and 140
    # registers. Not tuned on a GPU yet.
    block = 512
    run(
        _adamw_kernel,
        (cdiv(num_elements, block),),
        master,
        exp_avg,
        exp_avg_sq,
        grad.contiguous(),
        parameter,
        None if skip is None else skip.view(torch.uint8),
        num_elements,
        *_numbers(step, lr, beta1, beta2, eps, weight_decay),
        BLOCK=block,
        num_warps=4,
    )


def _on_host_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    parameter: Tensor | None,
    skip: Tensor | None,
) -> None:
    adamw(
        [master],
        [grad.to(master.dtype).contiguous()],  # the fused adamw reads it as if it were of this dtype and layout
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(step - 1.0)],  # the fused adamw counts the step itself
        fused=True,
        # As a GradScaler passes it: where this is 1, nothing changes.
        found_inf=None if skip is None else skip.float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if parameter is not None:
        parameter.copy_(master)


@torch.library.custom_op("tpkernels::adamw_", mutates_args=("master", "exp_avg", "exp_avg_sq", "parameter"))
def adamw_op_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    parameter: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Run adamw_ with all its arguments."""
    update = launch_adamw_ if by_triton(master) else _on_host_
    update(master, exp_avg, exp_avg_sq, grad, step, lr, beta1, beta2, eps, weight_decay, parameter, skip)


@adamw_op_.register_fake
def _(*_: Any) -> None:
    return None


def adamw_(
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
    parameter: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Take one AdamW step on a flat shard, in place, and write the parameters' low-precision copy.

        m[n] = beta1 * m + (1 - beta1) * g;   v[n] = beta2 * v + (1 - beta2) * g^2
        p[n] = p * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    The engine uses it on a GPU for 16-bit weights, whose masters it would else have to read again to round them.

    Args:
        master: p, [n], float32 or float64, contiguous.
        exp_avg, exp_avg_sq: m and v, as master; zeros before the first step.
        grad: g, [n], any floating-point dtype, any stride.
        step: the number of this step; the first is 1.
        lr: learning rate of this step.
        beta1, beta2: of the moments, 0 <= beta < 1.
        eps: added to the denominator.
        weight_decay: the fraction of p removed per step, times lr; 0 for none.
        parameter: [n], any floating-point dtype, contiguous: gets p, rounded. None if there is no copy of the masters.
        skip: bool, [], on the device: if it is true, nothing is written but parameter, on a CPU, with the unchanged p.
            The host does not wait to know it. None never skips.

    Raises:
        ValueError: tensors that do not fit; a step below 1, a beta outside [0, 1); skip is no bool of one element.

    Cost: with float32 masters, per element, reads 12 bytes and grad's and writes 12 bytes and parameter's: 28 with both
    in bfloat16. torch's fused AdamW moves 4 more for the copy and, since it takes only one dtype, 8 to convert such a
    grad. A CPU runs torch's.
    Numerics: in master's dtype, to which the step's numbers are rounded; parameter is rounded once. Deterministic; with
    the kernel an element's bits do not depend on where the shard is cut.
    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    if step < 1 or not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
        raise ValueError(
            f"AdamW counts steps from 1 and has betas in [0, 1): step {step}, beta1 {beta1}, beta2 {beta2}: "
            "pass the number of the step that this is"
        )
    if skip is not None and (skip.dtype != torch.bool or skip.numel() != 1 or skip.device != master.device):
        raise ValueError(
            f"skip is one bool on the device of the masters, {master.device}: got {skip.dtype} {tuple(skip.shape)} on "
            f"{skip.device}: pass a comparison's result"
        )
    written = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "parameter": parameter}
    for name, tensor in {**written, "grad": grad}.items():
        if tensor is None:
            continue
        fits = tensor.dim() == 1 and tensor.shape == master.shape and tensor.is_floating_point()
        if name in ("master", "exp_avg", "exp_avg_sq"):
            fits &= tensor.dtype == master.dtype and tensor.dtype in (torch.float32, torch.float64)
        if not fits or (name in written and not tensor.is_contiguous()):
            raise ValueError(
                "adamw_ takes flat shards [n], contiguous where it writes, master and moments in one of float32 and "
                f"float64: master {tuple(master.shape)} {master.dtype}, {name} {tuple(tensor.shape)} {tensor.dtype} of "
                f"strides {tensor.stride()}: flatten them, keep masters and moments in the accumulation dtype"
            )
    adamw_op_(master, exp_avg, exp_avg_sq, grad, step, lr, beta1, beta2, eps, weight_decay, parameter, skip)
