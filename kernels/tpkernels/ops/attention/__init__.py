"""Attention: operator.py says what it computes."""

from tpkernels.ops.attention.operator import attention, attention_qkv, has_kernel

__all__ = ["attention", "attention_qkv", "has_kernel"]
