"""Operators that exchange, as torch.compile must take them: every call is an exchange, in the program's order.

To torch.compile an operator without mutated arguments is a function of its inputs: two equal calls may become one, and
an unused call none. Another rank, whose program differs, would then wait for an exchange that nobody makes. So these
operators are registered with torch.library's ordered effect: their calls form a chain in the traced graph.

The decision a reader will question: inductor gets a lowering of ours. In torch 2.11 to 2.13 its own files the edges of
the chain under the names of buffers, while its scheduler looks for names of operations (pytorch/pytorch 189209). So it
finds none, and reorders the calls to save memory, by sizes that differ from rank to rank. Inductor's cache on disk does
not look at effects either: graphs that it keeps from versions without them must be deleted.

torch 2.11 to 2.13 cannot repeat an ordered effect of forward in a compiled backward. torch.utils.checkpoint inside of
what is compiled needs `context_fn=keep_exchanges`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._higher_order_ops.effects import _get_effect
from torch._library.custom_ops import CustomOpDef
from torch._library.effects import EffectType
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

Fake = TypeVar("Fake", bound=Callable[..., Any])


def exchanges(operator: CustomOpDef) -> Callable[[Fake], Fake]:
    """Register the fake kernel of an operator that exchanges, and keep all its calls, in their order.

    Args:
        operator: from torch.library.custom_op, without mutated arguments.

    Cost: none where nothing is traced.
    """
    operator.register_effect(EffectType.ORDERED)

    def register(fake: Fake) -> Fake:
        @functools.wraps(fake)
        def traced(*args: Any, **kwargs: Any) -> Any:
            # Inductor has the graph traced once more when it is loaded, and lowers it afterwards.
            if "torch._inductor.lowering" in sys.modules:
                _lower_in_order(operator)
            return fake(*args, **kwargs)

        operator.register_fake(traced)
        return fake

    return register


def keep_exchanges() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts in which a checkpointed region keeps what its exchanges return, and computes the rest again.

        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_exchanges)

    Cost: backward has no exchanges of the region's forward, and what they returned is kept until then.
    """
    forward, again = create_selective_checkpoint_contexts(_keeps)
    return forward, again


def _keeps(_: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_exchange = isinstance(operator, torch._ops.OpOverload) and _get_effect(operator) is EffectType.ORDERED
    return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _lower_in_order(operator: CustomOpDef) -> None:
    """Give inductor the lowering of an operator."""
    from torch._inductor.lowering import register_lowering

    overload = operator._opoverload
    register_lowering(overload, type_promotion_kind=None)(_lowered(overload))


def _lowered(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return inductor's lowering of one operator: its own fallback, and edges from the exchange before."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    call = fallback_handler(overload, add_to_fallback_set=False)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        before = graph.effectful_ops.get(EffectType.ORDERED)
        num_before = len(graph.operations)
        outputs = call(*args, **kwargs)
        if before is not None:
            for operation in graph.operations[num_before:]:
                # An edge that orders, and does not keep the buffer's memory.
                graph.additional_buffer_deps[operation.get_operation_name()].add(before.get_name())
        return outputs

    return lowered
