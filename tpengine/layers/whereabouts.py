"""What an error says of where in a model it was raised: the layer, the micro-batch, and who has which experts.

Layers of experts wait for other ranks, and hold as many rows as the router sends them: when a rank is lost there, or
its memory is used up, the action of the plan alone does not say which layer it was. A model tells such layers where
they are; what is raised inside of them, in forward or in backward, says it behind its own words.

The decision a reader will question: the words are added to the error that was raised, which keeps its type: callers
tell a lost rank from a mistake by it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from tpkernels.exchange.communicator import Communicator
from tpkernels.symmetric.signals import PeerError

from tpengine.layers.dropout import Position

_MOST_OWNERS = 8
_thread = threading.local()


@dataclass(frozen=True)
class Whereabouts:
    """Where a layer of experts is; a context in which errors say so.

    Attributes:
        layer: its number in the model.
        position: what is computed.
        num_experts: of the layer.
        comm: the ranks that share them; None where each expert is cut over tp.
    """

    layer: int
    position: Position
    num_experts: int
    comm: Communicator | None = None

    def __enter__(self) -> None:
        _entered().append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered().pop()
        # The innermost says it: a layer's exact form has layers inside.
        if isinstance(error, Exception) and not getattr(error, "says_where", False):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        words = f"; layer {self.layer}, micro-batch {self.position.microbatch}{self._owners(error)}"
        error.args = (f"{error.args[0] if error.args else ''}{words}", *error.args[1:])
        if isinstance(error, PeerError):
            error.what += words
        error.says_where = True  # type: ignore[attr-defined]

    def _owners(self, error: Exception) -> str:
        if self.comm is None or self.comm.group is None:
            return ""
        members = dist.get_process_group_ranks(self.comm.group)
        awaited = error.awaited if isinstance(error, PeerError) else None
        # Of the rank that was waited for if it is known, and else of all.
        told = [rank for rank in members if awaited in (rank, None)][:_MOST_OWNERS]
        each = self.num_experts // len(members)
        owned = [(rank, members.index(rank) * each) for rank in told]
        words = ", ".join(f"rank {rank} has experts {first} to {first + each - 1}" for rank, first in owned)
        return f", where {words} of {self.num_experts}" if words else ""


def _entered() -> list[Whereabouts]:
    found: list[Whereabouts] | None = getattr(_thread, "entered", None)
    if found is None:
        found = _thread.entered = []
    return found


class Placed:
    """A layer that is told where it is, in front of torch.nn.Module among its bases.

    Attributes:
        whereabouts: by whoever builds a model; None says nothing.
    """

    whereabouts: Whereabouts | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the layer; what is raised says where."""
        call: Any = super()
        if self.whereabouts is None:
            return call.__call__(*arguments, **named)
        with self.whereabouts:
            return call.__call__(*arguments, **named)


def says_where(function: Any) -> Any:
    """Decorate an autograd Function: what its backward raises says where its forward was."""
    forward, backward = function.forward, function.backward

    def noting(ctx: Any, *given: Any) -> Any:
        entered = _entered()
        ctx.whereabouts = entered[-1] if entered else None
        return forward(ctx, *given)

    def telling(ctx: Any, *given: Any) -> Any:
        if ctx.whereabouts is None:
            return backward(ctx, *given)
        # Backward may run when another micro-batch was the last one computed: its own begins before it.
        with ctx.whereabouts:
            return backward(ctx, *given)

    function.forward, function.backward = staticmethod(noting), staticmethod(telling)
    return function
