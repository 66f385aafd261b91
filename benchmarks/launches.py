"""What each operator launches: its launchers, called with tensors without memory, for every shape that is measured.

Used where launches are looked at (tpkernels.launch.observed), not made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from tpkernels.activation import launch_activation, launch_activation_backward
from tpkernels.adamw import launch_adamw_
from tpkernels.attention.backward import launch_attention_backward
from tpkernels.attention.forward import launch_attention
from tpkernels.attention.problem import Options, Sides, Tables
from tpkernels.cross_entropy_kernel import launch_cross_entropy_gradient_, launch_cross_entropy_partials
from tpkernels.dropout_kernel import launch_dropout
from tpkernels.embedding import launch_embedding, launch_embedding_backward_
from tpkernels.norm_kernel import launch_norm, launch_norm_backward
from tpkernels.rope import launch_rope

from benchmarks.shapes import MODELS, SEQUENCES, TP

DTYPES = (torch.bfloat16, torch.float32)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm() -> None:
    for dtype in DTYPES:
        for model in MODELS:
            x = _empty(SEQUENCES[0] // TP, model.hidden, dtype=dtype)
            weight = x[0]
            for centered, residual in ((False, None), (False, x), (True, x)):
                bias = weight if centered else None
                _, total, mean, rstd = launch_norm(x, weight, bias, residual, 1e-5, centered)
                dtotal = None if residual is None else total
                launch_norm_backward(x, dtotal, x, weight, mean, rstd, 1, centered, centered)


def _cross_entropy() -> None:
    for dtype in DTYPES:
        for model in MODELS:
            logits = _empty(1024, model.vocabulary, dtype=dtype)
            labels = _empty(1024, dtype=torch.int64)
            partials = launch_cross_entropy_partials(logits, labels, 0, model.vocabulary)
            for label_smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
                launch_cross_entropy_gradient_(
                    logits,
                    labels,
                    partials[0],
                    partials[1],
                    partials[2],
                    TP * model.vocabulary,
                    0,
                    model.vocabulary,
                    label_smoothing,
                    z_loss,
                )


def _activation() -> None:
    for dtype in DTYPES:
        for model in MODELS:
            h = _empty(SEQUENCES[0], model.ffn, dtype=dtype)
            for kind in ("silu", "gelu", "gelu_tanh"):
                for gated in (False, True):
                    y = _empty(SEQUENCES[0], model.ffn * (1 + gated), dtype=dtype)
                    launch_activation(y, kind, gated)
                    launch_activation_backward(h, y, kind, gated)


def _rope() -> None:
    for dtype in DTYPES:
        for model in MODELS:
            table = _empty(SEQUENCES[0], model.head_size // 2, dtype=torch.float32)
            packed = _empty(SEQUENCES[0], dtype=torch.int32)
            qkv = _empty(SEQUENCES[0], model.heads + 2 * model.kv_heads, model.head_size, dtype=dtype)
            for x in qkv.split((model.heads, model.kv_heads, model.kv_heads), dim=1)[:2]:
                for interleaved in (False, True):
                    for positions in (None, packed):
                        launch_rope(x, table, table, positions, interleaved, False)


def _embedding() -> None:
    rows = _empty(SEQUENCES[0], dtype=torch.int64)
    for dtype in DTYPES:
        for model in MODELS:
            weight = _empty(model.vocabulary, model.hidden, dtype=dtype)
            dy = launch_embedding(rows, weight)
            for buffer in (weight, weight.float()) if dtype != torch.float32 else (weight,):
                launch_embedding_backward_(buffer, rows, dy)


def _dropout() -> None:
    """Whole rows, a rank's columns, and columns that begin within a Philox call."""
    for dtype in DTYPES:
        for model in MODELS:
            x = _empty(SEQUENCES[0], model.hidden, dtype=dtype)
            for columns, first_column in ((model.hidden, 0), (model.hidden // TP, model.hidden // TP), (1023, 1)):
                launch_dropout(x[:, :columns], 0.1, (0, 0), (0, 0), 0, first_column, model.hidden)


def _adamw() -> None:
    master = _empty(1 << 26, dtype=torch.float32)
    for grad in (master, master.bfloat16()):
        for parameter in (None, master.bfloat16()):
            launch_adamw_(master, master, master, grad, 1, 1e-3, 0.9, 0.95, 1e-8, 0.1, parameter)


def _attention() -> None:
    """Head sizes that models have, with and without documents, rotation, a window and dropout."""
    for dtype in DTYPES:
        for head in (64, 80, 96, 128, 256) if dtype == torch.bfloat16 else (64, 128):
            _attend(dtype, head, heads=8, kv_heads=1)
    for model in MODELS:
        _attend(torch.bfloat16, model.head_size, model.heads, model.kv_heads)
    for causal in (True, False):
        _attend(torch.bfloat16, 128, 8, 1, causal=causal, window=1024, rotated=True)
    _attend(torch.bfloat16, 128, 8, 1, causal=False)
    _attend(torch.bfloat16, 128, 8, 1, rotated=True, packed=True)
    _attend(torch.bfloat16, 80, 8, 1, rotated=True, interleaved=True, rate=0.1)


def _attend(
    dtype: torch.dtype,
    head: int,
    heads: int,
    kv_heads: int,
    causal: bool = True,
    window: int = 0,
    rotated: bool = False,
    interleaved: bool = False,
    packed: bool = False,
    rate: float = 0.0,
) -> None:
    seq = SEQUENCES[0]
    qkv = _empty(1, seq, heads + 2 * kv_heads, head, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    table = _empty(seq, head // 2, dtype=torch.float32) if rotated else None
    starts = _empty(9, dtype=torch.int32) if packed else None
    options = Options(causal, window, head**-0.5, interleaved, rate, (0, 0, 0, 0, 0, heads) if rate else ())
    problem = (Tables(table, table), Sides(starts, starts), options)
    y, lse = launch_attention(q, k, v, *problem)
    launch_attention_backward(y, q, k, v, y, lse, (q, k, v), *problem)


LAUNCHES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "activation": _activation,
        "attention": _attention,
        "cross_entropy": _cross_entropy,
        "dropout": _dropout,
        "norm": _norm,
        "embedding": _embedding,
        "adamw": _adamw,
        "rope": _rope,
    }
)
