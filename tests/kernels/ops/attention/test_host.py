"""Rung: one process. Attention on the CPU is the equation, with its gradients, for any lengths and strides.

With dropout it is the equation with every probability and its mask written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.kernels.precision import check_errors
from torch import Tensor
from tpkernels.ops.attention.host import AttentionDropout, attention_with_dropout, causal_attention
from tpkernels.ops.dropout import DropoutStream, keep_at

STREAM = DropoutStream(rate=0.3, seed=1, site="layer 0/attention", step=4, microbatch=1)
Attend = Callable[[Tensor, Tensor, Tensor, AttentionDropout | None], Tensor]


def attention_by_definition(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None = None) -> Tensor:
    """drop(softmax(q k.T / sqrt(E), causal)) v with every score written out."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    p = scores.masked_fill(future, -torch.inf).softmax(-1)
    if dropout is not None:
        p = p * torch.stack([mask_of_sequence(b, q, dropout) for b in range(len(q))]).to(p.dtype) / 0.7
    return p @ v


def mask_of_sequence(sequence: int, q: Tensor, dropout: AttentionDropout) -> Tensor:
    """The mask [H, S, S] of one sequence, row by row of the matrix of all sequences, heads and queries of the layer."""
    heads, seq = q.shape[1:3]
    first = (sequence * dropout.num_heads + dropout.first_head) * seq
    rows = torch.arange(first, first + heads * seq)
    return keep_at(dropout.stream, rows, 0, seq, seq).view(heads, seq, seq)


def outcome(
    attend: Attend, inputs: list[Tensor], dy: Tensor, dtype: torch.dtype, dropout: AttentionDropout | None
) -> list[Tensor]:
    """y, dq, dk and dv, computed in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    y = attend(*leaves, dropout)
    return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]


def operands(
    shape: tuple[int, int, int, int], num_kv_heads: int | None, dtype: torch.dtype, token_major: bool, seed: int = 0
) -> list[Tensor]:
    """q, k, v and dy [B, H, S, E]; token-major ones are views of one packed tensor, as a layer has them."""
    batch, heads, seq, size = shape
    generator = torch.Generator().manual_seed(math.prod(shape) + seed)
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


def written_out(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout) -> Tensor:
    """What other devices and torch.compile get."""
    return attention_with_dropout(q, k, v, dropout, is_blocked=False)


@pytest.mark.parametrize("attend", [causal_attention, written_out])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_kv_heads", "first_head", "num_heads"),
    [
        ((1, 1, 1, 4), None, 0, 1),
        ((2, 3, 63, 8), None, 1, 5),
        ((1, 2, 64, 16), None, 0, 2),
        ((3, 1, 65, 8), None, 2, 3),
        ((2, 2, 100, 5), None, 0, 4),
        ((2, 4, 70, 8), 2, 4, 8),
    ],
)
def test_dropout_equation_and_gradients(
    shape: tuple[int, int, int, int],
    num_kv_heads: int | None,
    first_head: int,
    num_heads: int,
    token_major: bool,
    attend: Attend,
) -> None:
    *inputs, dy = operands(shape, num_kv_heads, torch.float64, token_major)
    dropout = AttentionDropout(STREAM, first_head, num_heads)
    want = outcome(attention_by_definition, inputs, dy, torch.float64, dropout)
    for a, b in zip(outcome(attend, inputs, dy, torch.float64, dropout), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.by_default("dtype1-4")
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_rounding_is_no_worse_than_plain_torchs(dtype: torch.dtype, num_kv_heads: int) -> None:
    dropout = AttentionDropout(STREAM, 0, 4)

    def draw(seed: int) -> dict[str, Tensor]:
        *inputs, _ = operands((1, 4, 128, 64), num_kv_heads, torch.float32, True, seed)
        return {name: t.to(dtype).requires_grad_() for name, t in zip("qkv", inputs, strict=True)}

    check_errors(
        f"causal_attention of {dtype}",
        lambda q, k, v: causal_attention(q, k, v, dropout),
        lambda q, k, v: attention_by_definition(q, k, v, dropout),
        draw,
        draws=8,
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("seq", [65, 256])
def test_dropout_of_some_heads_is_cut_from_that_of_all(seq: int, size: int) -> None:
    """In float32, to the bit: each rank's heads have the probabilities, masks and gradients that one process has."""
    *inputs, dy = operands((2, 4, seq, 16), None, torch.float32, True)
    whole = outcome(causal_attention, inputs, dy, torch.float32, AttentionDropout(STREAM, 0, 4))
    for first in range(0, 4, size):
        heads = slice(first, first + size)
        dropout = AttentionDropout(STREAM, first, 4)
        part = outcome(causal_attention, [t[:, heads] for t in inputs], dy[:, heads], torch.float32, dropout)
        assert all(torch.equal(a, b[:, heads]) for a, b in zip(part, whole, strict=True))


@pytest.mark.parametrize(("dtype", "num_kv_heads"), [(torch.float32, None), (torch.float32, 1), (torch.bfloat16, None)])
def test_dropout_at_rate_0_is_none(dtype: torch.dtype, num_kv_heads: int | None) -> None:
    *inputs, dy = operands((2, 3, 65, 8), num_kv_heads, torch.float32, True)
    none = AttentionDropout(replace(STREAM, rate=0.0), 0, 3)
    for a, b in zip(*(outcome(causal_attention, inputs, dy, dtype, d) for d in (None, none)), strict=True):
        assert torch.equal(a, b)


def test_dropout_under_autocast_stays_in_its_dtype() -> None:
    *inputs, dy = operands((1, 2, 40, 8), None, torch.float32, False)
    dropout = AttentionDropout(STREAM, 0, 2)
    want = outcome(causal_attention, inputs, dy, torch.float32, dropout)
    with torch.autocast("cpu", torch.bfloat16):
        got = outcome(causal_attention, inputs, dy, torch.float32, dropout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_dropout_of_no_sequences() -> None:
    *inputs, dy = operands((0, 2, 8, 4), None, torch.float32, False)
    got = outcome(causal_attention, inputs, dy, torch.float32, AttentionDropout(STREAM, 0, 2))
    assert all(t.shape == (0, 2, 8, 4) for t in got)


@pytest.mark.parametrize(("first_head", "num_heads"), [(-1, 4), (3, 4), (0, 1)])
def test_dropout_of_heads_outside_the_layer_is_refused(first_head: int, num_heads: int) -> None:
    *inputs, _ = operands((1, 2, 8, 4), None, torch.float32, False)
    with pytest.raises(ValueError, match=f"layer's {num_heads}: layer 0/attention has 2 from {first_head} on"):
        causal_attention(*inputs, AttentionDropout(STREAM, first_head, num_heads))
