"""Heads for attention out of a packed product: operator.py says what is computed."""

from tpkernels.ops.attention.prepare.operator import prepare_backward, prepare_forward, prepare_heads
from tpkernels.ops.attention.prepare.tiles import Heads, Rotary, Weights

__all__ = ["Heads", "Rotary", "Weights", "prepare_backward", "prepare_forward", "prepare_heads"]
