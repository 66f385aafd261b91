"""Rung: one process. Attention on the CPU is the equation, with its gradients, for any lengths and strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from tpkernels.host_attention import causal_attention


def attention_by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k.T / sqrt(E), causal) v with every score written out."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def operands(
    shape: tuple[int, int, int, int], num_kv_heads: int | None, dtype: torch.dtype, token_major: bool
) -> list[Tensor]:
    """q, k, v and dy [B, H, S, E]; token-major ones are views of one packed tensor, as a layer has them."""
    batch, heads, seq, size = shape
    generator = torch.Generator().manual_seed(math.prod(shape))
    kv = num_kv_heads or heads
    if not token_major:
        return [torch.randn(batch, h, seq, size, generator=generator, dtype=dtype) for h in (heads, kv, kv, heads)]
    packed = torch.randn(batch, seq, heads + 2 * kv, size, generator=generator, dtype=dtype).transpose(1, 2)
    dy = torch.randn(batch, seq, heads, size, generator=generator, dtype=dtype).transpose(1, 2)
    return [*packed.split([heads, kv, kv], dim=1), dy]


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_kv_heads"),
    [
        ((1, 1, 1, 4), None),
        ((2, 3, 63, 8), None),
        ((1, 2, 64, 16), None),
        ((3, 1, 65, 8), None),
        ((2, 2, 200, 5), None),
        ((2, 4, 70, 8), 2),
        ((0, 2, 8, 4), None),
    ],
)
def test_equation_and_gradients(shape: tuple[int, int, int, int], num_kv_heads: int | None, token_major: bool) -> None:
    *inputs, dy = operands(shape, num_kv_heads, torch.float64, token_major)
    outcomes = []
    for function in (causal_attention, attention_by_definition):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = function(*leaves)
        outcomes.append([y, *torch.autograd.grad(y, leaves, dy)])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_rounding_is_no_worse_than_torchs_own() -> None:
    """In float32, each gradient's distance to float64 is at most twice that of torch's backward."""
    *inputs, dy = operands((2, 4, 256, 64), None, torch.float32, True)

    def gradients(function: object, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        return list(torch.autograd.grad(function(*leaves), leaves, dy.to(dtype)))  # type: ignore[operator]

    def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = gradients(attention_by_definition, torch.float64)
    ours, theirs = gradients(causal_attention, torch.float32), gradients(of_torch, torch.float32)
    for got, rival, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).abs().max() <= 2 * (rival - want).abs().max()


def test_large_scores_neither_overflow_nor_lose_the_mask() -> None:
    *inputs, dy = operands((1, 1, 80, 8), None, torch.float32, False)
    leaves = [(30 * t).requires_grad_() for t in inputs]
    y = causal_attention(*leaves)
    grads = torch.autograd.grad(y, leaves, dy)
    assert all(torch.isfinite(t).all() for t in (y, *grads))
    # Only the last token sees the last key and value.
    only_last = torch.zeros_like(dy)
    only_last[:, :, :-1] = 1
    _, dk, dv = torch.autograd.grad(causal_attention(*leaves), leaves, only_last)
    assert not dk[:, :, -1].any() and not dv[:, :, -1].any()


def test_other_dtypes_are_left_to_torch() -> None:
    *inputs, _ = operands((1, 2, 16, 8), None, torch.bfloat16, False)
    want = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(causal_attention(*inputs), want)
