"""How the parts of a block are put together. Plain Python over tensors: it works in fast and in exact mode.

`x[T/tp, D]` are this rank's tokens; `seq` is the length of their sequences, or the documents that they are, and is only
handed on. What a block offers (model/block.py):

    its parts       by name
    attend, feed    its attention and its feed-forward network, with what belongs behind them (bias of the output,
                    dropout)
    normed          (norm(x), x), where x may be a sum that the block before has left to this norm
    normed_sum      (norm(x + branch), x + branch), in one pass
    left            x + branch, or that sum left to the next norm, which makes it in its own pass
    again           runs a function so that backward can compute it once more (`--parallel.recompute attention`)

An order of your own may be written with `+` alone: it gets a tensor, and returns one.
"""

from __future__ import annotations

from typing import Any


def pre_norm(block: Any, x: Any, seq: Any) -> Any:
    """x = x + attention(norm(x));  y = x + mlp(norm(x))."""

    def attention(x: Any) -> tuple[Any, Any]:
        normed, x = block.normed(block.input_layernorm, x)
        return block.attend(normed, seq), x

    attended, x = block.again(attention, x)
    normed, x = block.normed_sum(block.post_attention_layernorm, x, attended)
    return block.left(x, block.feed(normed))


def sandwich_norm(block: Any, x: Any, seq: Any) -> Any:
    """x = x + norm(attention(norm(x)));  y = x + norm(mlp(norm(x)))."""

    def attention(x: Any) -> tuple[Any, Any]:
        normed, x = block.normed(block.input_layernorm, x)
        return block.post_attention_layernorm(block.attend(normed, seq)), x

    attended, x = block.again(attention, x)
    normed, x = block.normed_sum(block.pre_feedforward_layernorm, x, attended)
    return block.left(x, block.post_feedforward_layernorm(block.feed(normed)))


# Orders that take a sum left by the block before. Any other is given tensors: it may do with x what it likes.
TAKE_SUMS = (pre_norm, sandwich_norm)
