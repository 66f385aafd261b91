"""What operators do where a derivative is asked for that they do not have: they raise, instead of leaving it out.

differentiable_once     a backward whose gradients have no derivative, for create_graph=True
refuse_tangents         an operator without a forward-mode derivative, for torch.func.jvp and forward_ad
is_recorded             whether anybody may ask for a derivative at all: where not, a layer leaves its Function out
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


def is_recorded() -> bool:
    """Return whether somebody may ask for a derivative of what is computed now, or torch.compile traces it.

    Where nobody may, as in generation, a layer computes without its Function, whose `apply` costs the host some 10 us
    even then: a tenth of a pass over one token.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


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
