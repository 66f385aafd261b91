"""How the parts of a block are put together.

    pre_norm         x = x + attention(norm(x));         y = x + mlp(norm(x))
    sandwich_norm    x = x + norm(attention(norm(x)));   y = x + norm(mlp(norm(x)))

A block computes these two in methods of its own (model/block.py). Any other order is a function of a block, of
x[T/tp, D], this rank's tokens, and of `seq`, the length of their sequences, or the documents that they are, which is
only handed on. It gets a tensor and returns one, calls the block's parts by their names, and may be written with `+`
alone. Plain Python over tensors: it works in fast and in exact mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class OrderedBlock(Protocol):
    """What an order may call of its block, besides its parts; `Any` stands for tensors, since no file here needs torch.

    attend, feed    its attention and its feed-forward network, with what belongs behind them (bias of the output,
                    dropout)
    normed          (norm(x), x)
    normed_sum      (norm(x + branch), x + branch), in one pass
    left            x + branch
    again           runs a function so that backward can compute it once more (`--parallel.recompute attention`)
    """

    def in_order(self, x: Any, seq: Any, order: Order | None = None) -> Any: ...
    def attend(self, x: Any, seq: Any) -> Any: ...
    def feed(self, x: Any) -> Any: ...
    def normed(self, norm: Any, x: Any) -> tuple[Any, Any]: ...
    def normed_sum(self, norm: Any, x: Any, branch: Any) -> tuple[Any, Any]: ...
    def left(self, x: Any, branch: Any) -> Any: ...
    def again(self, forward: Callable[..., Any], *inputs: Any) -> Any: ...


Order = Callable[[OrderedBlock, Any, Any], Any]


def pre_norm(block: OrderedBlock, x: Any, seq: Any) -> Any:
    """x = x + attention(norm(x));  y = x + mlp(norm(x))."""
    return block.in_order(x, seq, pre_norm)


def sandwich_norm(block: OrderedBlock, x: Any, seq: Any) -> Any:
    """x = x + norm(attention(norm(x)));  y = x + norm(mlp(norm(x)))."""
    return block.in_order(x, seq, sandwich_norm)
