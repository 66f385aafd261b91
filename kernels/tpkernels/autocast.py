"""What torch.autocast asks of operators: products in its dtype, and sums of two dtypes in the wider one.

    lowered     the operands of products and of attention, as autocast converts those of nn.Linear
    promoted    what is added, as torch's own addition converts it

torch converts the operands of its own operators alone. Ours, and layers whose products are Functions, call these at
their entry; behind it everything has one dtype, and backward needs no autocast. Conversions are recorded by autograd,
so a float32 parameter gets a float32 gradient. Statistics, sums, softmax and losses are in float32 in any case: what
autocast would have done in float32 needs nothing here.

What writes to a tensor that it is given (wgrad_, adamw_, embedding_backward_) does not convert it, as torch's in-place
operators do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVarTuple

import torch
from torch import Tensor

Operands = TypeVarTuple("Operands")


def lowered(x: Tensor, *others: *Operands) -> tuple[Tensor, *Operands]:
    """Return the operands of a product in the dtype that autocast computes products in; outside of it as they are.

    Args:
        x, others: tensors or None. Where autocast is on for x's device, floating-point numbers other than float64 are
            converted.

    Cost: outside of autocast one question. Inside, a converted weight is a copy per call that lives until backward:
        torch's own cache of them is closed to others.
    """
    if not _is_on(x):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    converted: Any = tuple([_converted(operand, dtype) for operand in (x, *others)])
    return converted


def promoted(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors to be added in the wider one's dtype where autocast is on; outside of it as they are."""
    if x.dtype == other.dtype or not _is_on(x):
        return x, other
    dtype = torch.promote_types(x.dtype, other.dtype)
    return x.to(dtype), other.to(dtype)


def dtype_conflict(what: str, x: Tensor, others: Sequence[Tensor]) -> str:
    """Return what is wrong with a product whose operands differ in dtype or device; empty if nothing is."""
    if all(t.dtype == x.dtype and t.device == x.device for t in others):
        return ""
    return (
        f"{what} needs one dtype and device: x {tuple(x.shape)} {x.dtype} on {x.device}, what it is multiplied by "
        f"{', '.join(sorted({f'{t.dtype} on {t.device}' for t in others}))}: convert x, or call it inside of "
        "torch.autocast, which converts all but float64"
    )


def _is_on(x: Tensor) -> bool:
    # torch.is_autocast_enabled raises for the meta device, which has no autocast.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _converted(operand: Any, dtype: torch.dtype) -> Any:
    if operand is None or not operand.is_floating_point() or operand.dtype == torch.float64:
        return operand
    return operand.to(dtype)
