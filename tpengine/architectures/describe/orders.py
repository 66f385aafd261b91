"""How the parts of a block are put together. Plain Python over tensors: it works in fast and in exact mode.

`x[T/tp, D]` are this rank's tokens; `seq` is the length of their sequences, or the documents that they are, and is only
handed on. What a block offers (model/block.py): its parts by name; `attend` and `feed`, which are its attention and its
feed-forward network with what belongs behind them (bias of the output, dropout); and `again`, which runs a function so
that backward can compute it once more (`--parallel.recompute attention`).
"""

from __future__ import annotations

from typing import Any


def pre_norm(block: Any, x: Any, seq: Any) -> Any:
    """x = x + attention(norm(x));  y = x + mlp(norm(x))."""
    attended = block.again(lambda x: block.attend(block.input_layernorm(x), seq), x)
    normed, x = block.post_attention_layernorm.add(attended, x)
    return x + block.feed(normed)


def sandwich_norm(block: Any, x: Any, seq: Any) -> Any:
    """x = x + norm(attention(norm(x)));  y = x + norm(mlp(norm(x)))."""
    attended = block.again(lambda x: block.post_attention_layernorm(block.attend(block.input_layernorm(x), seq)), x)
    normed, x = block.pre_feedforward_layernorm.add(attended, x)
    return x + block.post_feedforward_layernorm(block.feed(normed))
