"""The last sum of a block, left to the norm that comes next, which adds and normalises in one pass.

    x, branch[T/tp, D] -> (norm(x + branch), x + branch)         instead of a kernel that adds, and one that normalises
    dx = dbranch = dtotal + the norm's gradient                  in the norm's kernel, not by autograd's addition

A sum is made where nobody takes it over: at the end of a chunk, whose neighbour gets one tensor; before what backward
computes again, which keeps one tensor; for an order or a module of somebody's own; and where a block or a norm
is_watched. Its value is the same in all places: x + branch, rounded to their dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from tpkernels.launch import accumulation_dtype, by_triton

# Noted before anybody can put another in its place.
_CALL = nn.Module.__call__


class Sum:
    """x + branch, not made yet.

    It is taken once. Then it holds nothing, so that no caller's variable keeps the two tensors alive for as long as the
    next block runs.
    """

    def __init__(self, x: Tensor, branch: Tensor) -> None:
        self._parts: tuple[Tensor, Tensor] | None = (x, branch)

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return x and branch, and forget them."""
        assert self._parts is not None, "a sum is made once"
        (x, branch), self._parts = self._parts, None
        return x, branch


def whole(x: Tensor | Sum) -> Tensor:
    """Return a tensor as it is, a sum made."""
    if isinstance(x, Sum):
        x, branch = x.taken()
        return x + branch
    return x


def normed(norm: Any, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
    """Return (norm(x), x) of x[T/tp, D] or of a sum; the gradient of the x returned is added in the norm's own pass.

    On a CPU gradients of 16 bits are added by autograd, each rounded before: there the pass saves nothing, and a run
    keeps the bits that it always had.

    Args:
        norm: a Norm, or exact mode's, which adds before. Any other module, and a norm that is_watched, is called.
    """
    if is_watched(norm):
        x = whole(x)
        return norm(x), x
    if isinstance(x, Sum):
        x, branch = x.taken()
        if _adds_inside(x):
            y, total = norm.add(branch, x)
            return y, total
        x = x + branch
    if _adds_inside(x) and x.requires_grad:
        y, kept = norm.beside(x)
        return y, kept
    return norm(x), x


def normed_sum(norm: Any, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norm(x + branch), x + branch) of x, branch[T/tp, D], in the norm's pass.

    Args:
        norm: as of `normed`.
    """
    if is_watched(norm):
        total = x + branch
        return norm(total), total
    y, total = norm.add(branch, x)
    return y, total


def is_watched(module: nn.Module) -> bool:
    """Return whether a call of the module does more than what may be done in its place: then it must be called.

    That is so with hooks, its own or all modules'; where it is compiled (`module.compile()`); and where `forward` or
    `__call__`, of the module or of its class, is not the one that its class names `plain_forward`: a subclass's, one
    that somebody has put in its place, or any of a class that names none.
    """
    return bool(
        (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        or (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        or (torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        or module._compiled_call_impl is not None
        or "forward" in vars(module)
        or type(module).forward is not getattr(type(module), "plain_forward", None)
        or type(module).__call__ is not _CALL
    )


def _adds_inside(x: Tensor) -> bool:
    return by_triton(x) or accumulation_dtype(x.dtype) == x.dtype
