"""What operators do where a derivative is asked for that they do not have: they raise, instead of leaving it out.

differentiable_once     a backward whose gradients have no derivative, for create_graph=True
refuse_tangents         an operator without a forward-mode derivative, for torch.func.jvp and forward_ad
applied                 a Function whose forward runs alone where nobody can ask for a derivative
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_NO_DERIVATIVE = (
    b"this operator's gradient has no derivative: the operator is differentiable once: for a second derivative use its "
    b"reference, or torch's own operator"
)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Have the gradients of a backward raise RuntimeError where they are differentiated again.

    As torch.autograd.function.once_differentiable, which leaves gradients without a graph where the gradient of the
    output needs none (a sum's): a second derivative would then lack terms, without a word.

    Args:
        backward: (ctx, *gradients) -> gradients, of an operator or a Function.

    Cost: without create_graph a question.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        return _marked(found)

    return once


def refuse_second_order(what: str) -> None:
    """Raise RuntimeError in a backward under create_graph=True whose weight gradients have no derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} is differentiable once, and so are its weights: got create_graph=True: leave it out"
        )


class _Unrecorded:
    """The ctx of a forward that nobody differentiates: it keeps nothing beyond the call."""

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return function.apply(*args); where autograd records nothing, its forward alone.

    Forward may use ctx.save_for_backward, ctx.mark_dirty and ctx.set_materialize_grads, and set attributes.

    Cost: `apply` costs the host some 10 us even where nothing is recorded: a tenth of a pass over one token.
    """
    is_plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if is_plain and forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return function.forward(_Unrecorded(), *args)
    return function.apply(*args)


def _marked(found: Any) -> Any:
    """Gradients, or lists of them, as results of an operation whose derivative raises."""
    if isinstance(found, Tensor):
        return torch._C._functions.DelayedError(_NO_DERIVATIVE, 1)(found.detach().requires_grad_())
    if isinstance(found, tuple | list):
        return type(found)(_marked(one) for one in found)
    return found


def refuse_tangents(operator: str, *inputs: Tensor | None) -> None:
    """Raise RuntimeError if an input carries a tangent, which an operator without a jvp would drop.

    What torch.compile traces shows no tangent. Inside of a dual level this raises while tracing: torch then calls the
    function uncompiled, where tangents are seen, or raises with fullgraph=True.

    Args:
        operator: its name, for the message.
        inputs: what it is differentiable in.

    Cost: outside of forward-mode differentiation one comparison.
    """
    if forward_ad._current_level < 0:
        return
    for x in inputs:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{operator} has no forward-mode derivative: got an input {tuple(x.shape)} with a tangent: use "
                "backward mode, or its reference"
            )
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{operator} has no forward-mode derivative, and compiled it cannot see whether an input has a tangent: "
            "got a call inside of a dual level: leave the level, or call it without torch.compile"
        )
