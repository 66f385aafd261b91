"""Rung: host. Operators under torch.autocast: products in its dtype, as torch's; sums of two dtypes in the wider one.

Autocast leaves float64 as it is. So plain torch says in float64 what is right, and in float32 how wrong torch is under
autocast: the operator is at most twice as wrong, and its results have the same dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from support.kernels.precision import Operator, check_errors
from torch import Tensor
from tpkernels import (
    Communicator,
    add_layer_norm,
    add_rms_norm,
    all_gather_matmul,
    attention,
    attention_qkv,
    cross_entropy,
    geglu,
    grouped_matmul,
    grouped_swiglu,
    layer_norm,
    linear_cross_entropy,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_swiglu,
    rms_norm,
    rope,
    rope_tables,
    swiglu,
)
from tpkernels.autocast import lowered, promoted

ONE = Communicator(None)
T, D, HEADS, SEQ = 48, 32, 4, 16
SIZE = D // HEADS
HALVES = torch.tensor([0, 16, T], dtype=torch.int32)
LABELS = torch.arange(T) * 7 % D
TABLES = rope_tables(SEQ, SIZE)


def tables(like: Tensor) -> list[Tensor]:
    return [table.to(torch.promote_types(like.dtype, torch.float32)) for table in TABLES]


def by_sequence(x: Tensor) -> Tensor:
    return x.view(T // SEQ, SEQ, -1, SIZE)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """y[B, S, H, E]."""
    back = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    mask = (back >= 0) & (back < (window or SEQ))
    q, k, v = (by_sequence(t).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def rotated_attention(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    q, k, values = F.linear(x, torch.cat((w, v, w))).chunk(3, dim=1)
    q, k = (rope(t.reshape(T, HEADS, SIZE), *tables(t)) for t in (q, k))
    return plain_attention(q, k, values.contiguous()).reshape(T, D)


def losses(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), LABELS, reduction="none")


def rows(x: Tensor) -> Tensor:
    """x as one of torch's products gives it here."""
    return F.linear(x, torch.eye(D, dtype=x.dtype))


CASES: Mapping[str, tuple[Operator, Operator]] = {
    "matmul": (
        lambda x, w, b, residual: matmul(x, w.T, bias=b, residual=residual),
        lambda x, w, b, residual: F.linear(x, w, b) + rows(residual),
    ),
    "matmul_swiglu": (
        lambda x, w, v: matmul_swiglu(x, torch.cat((w, v))),
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v),
    ),
    "grouped_matmul": (
        lambda x, w, v: grouped_matmul(x, torch.stack((w, v)), HALVES),
        lambda x, w, v: torch.cat((F.linear(x[:16], w), F.linear(x[16:], v))),
    ),
    "grouped_swiglu": (
        lambda x, w, v: grouped_swiglu(x, torch.stack((w, v)), torch.stack((v, w)), HALVES),
        lambda x, w, v: torch.cat(
            (F.silu(F.linear(x[:16], w)) * F.linear(x[:16], v), F.silu(F.linear(x[16:], v)) * F.linear(x[16:], w))
        ),
    ),
    "all_gather_matmul": (
        lambda x, w, v, b: all_gather_matmul(rows(x), (w, v), ONE, biases=(b, b)),
        lambda x, w, v, b: (F.linear(rows(x), w, b), F.linear(rows(x), v, b)),
    ),
    "matmul_reduce_scatter": (
        lambda x, w, b: matmul_reduce_scatter(x, w, ONE, bias=b),
        lambda x, w, b: F.linear(x, w, b),
    ),
    "matmul_all_reduce": (
        lambda x, w, b: matmul_all_reduce(rows(x), w, ONE, bias=b),
        lambda x, w, b: F.linear(rows(x), w, b),
    ),
    "attention": (
        lambda x, residual: attention(*(by_sequence(t) for t in (x, rows(x), residual))),
        lambda x, residual: plain_attention(x, rows(x), residual),
    ),
    "attention with a window": (
        lambda x, residual: attention(*(by_sequence(t) for t in (x, rows(x), residual)), window=5),
        lambda x, residual: plain_attention(x, rows(x), residual, 5),
    ),
    "attention_qkv": (
        lambda x, w, v: attention_qkv(
            F.linear(x, torch.cat((w, v, w))), HEADS, HEADS, seq=SEQ, cos=TABLES[0], sin=TABLES[1]
        ),
        rotated_attention,
    ),
    "rope": (
        lambda x: rope(rows(x).view(T, HEADS, SIZE), *TABLES),
        lambda x: rope(rows(x).view(T, HEADS, SIZE), *tables(rows(x))),
    ),
    "rms_norm": (lambda x, b: rms_norm(rows(x), b), lambda x, b: F.rms_norm(rows(x), (D,), b, 1e-5)),
    "layer_norm": (lambda x, b: layer_norm(rows(x), b, b), lambda x, b: F.layer_norm(rows(x), (D,), b, b)),
    "add_rms_norm": (
        lambda x, residual, b: add_rms_norm(rows(x), residual, b),
        lambda x, residual, b: (F.rms_norm(rows(x) + residual, (D,), b, 1e-5), rows(x) + residual),
    ),
    "add_layer_norm": (
        lambda x, residual, b: add_layer_norm(residual, rows(x), b, b),
        lambda x, residual, b: (F.layer_norm(rows(x) + residual, (D,), b, b), rows(x) + residual),
    ),
    "swiglu": (
        lambda x: swiglu(rows(x)),
        lambda x: F.silu(rows(x)[:, : D // 2]) * rows(x)[:, D // 2 :],
    ),
    "geglu": (
        lambda x: geglu(rows(x)),
        lambda x: F.gelu(rows(x)[:, : D // 2]) * rows(x)[:, D // 2 :],
    ),
    "cross_entropy": (lambda x, w: cross_entropy(F.linear(x, w), LABELS), lambda x, w: losses(F.linear(x, w))),
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(rows(x), w, LABELS),
        lambda x, w: losses(F.linear(rows(x), w)).sum(),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_as_torchs_are(name: str, dtype: torch.dtype) -> None:
    operator, plain = CASES[name]
    names = operator.__code__.co_varnames[: operator.__code__.co_argcount]
    shapes = {"x": (T, D), "residual": (T, D), "w": (D, D), "v": (D, D), "b": (D,)}

    def draw(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn(shapes[name], generator=generator) for name in names}
        return {n: (t / D**0.5 if n in "wv" else t).requires_grad_() for n, t in drawn.items()}

    with torch.autocast("cpu", dtype):
        # A loss is one number, which torch may hit by chance, and scales what was rounded before.
        check_errors(f"{name}, {dtype}", operator, plain, draw, draws=64 if name == "linear_cross_entropy" else 8)


def test_only_what_autocast_converts_is_converted() -> None:
    """As torch: neither float64 nor integers, nothing outside of the region or where it is off, nothing on meta."""
    x, wide, places = torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    on_meta = torch.zeros(2, device="meta")
    assert lowered(x, None)[0] is x
    with torch.autocast("cpu", torch.float16):
        low, none, *others = lowered(x, None, wide, places)
        assert low.dtype == torch.float16 and none is None
        assert others[0] is wide and others[1] is places
        assert lowered(on_meta)[0] is on_meta
        assert [t.dtype for t in promoted(low, x)] == [torch.float32] * 2
        with torch.autocast("cpu", enabled=False):
            assert lowered(x)[0] is x and promoted(low, x)[0] is low


def test_outside_of_autocast_two_dtypes_are_refused_in_a_line_that_names_it() -> None:
    x, w = torch.zeros(4, D, dtype=torch.bfloat16), torch.zeros(D, D)
    for call in (
        lambda: all_gather_matmul(x, (w,), ONE),
        lambda: matmul_reduce_scatter(x, w, ONE),
        lambda: matmul_all_reduce(x, w, ONE),
    ):
        with pytest.raises(ValueError, match=r"x \(4, 32\) torch.bfloat16 on cpu.*torch.float32 on cpu.*autocast"):
            call()
