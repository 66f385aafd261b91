"""The last sum of a block, left to the norm that comes next, which adds and normalises in one pass.

    x, branch[T/tp, D] -> (norm(x + branch), x + branch)         instead of a kernel that adds, and one that normalises
    dx = dbranch = dtotal + the norm's gradient                  in the norm's kernel, not by autograd's addition

A sum is made where nobody takes it over: at the end of a chunk, whose neighbour gets one tensor; before what backward
computes again, which keeps one tensor; for an order of somebody's own; and where a hook sees a block's output
(transformer.py). Its value is the same in all places: x + branch, rounded to their dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from tpkernels.launch import accumulation_dtype, by_triton


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
        norm: a Norm, or exact mode's, which adds before.
    """
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


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, which are to see what it is given and returns."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(hooks or module._backward_pre_hooks)


def _adds_inside(x: Tensor) -> bool:
    return by_triton(x) or accumulation_dtype(x.dtype) == x.dtype
