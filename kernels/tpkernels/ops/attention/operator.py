"""Attention: causal or full, grouped query heads, packed documents, a sliding window, rotary embedding.

    s[b, h, i, j] = scale * rope(q[b, i, h]) . rope(k[b, j, g])      g = h // (H/G): no repeated k, v anywhere
    p = softmax over the keys j that i sees;   y[b, i, h] = sum over j of drop(p)[b, h, i, j] * v[b, j, g]

    dv = drop(p).T dy;   ds = p * (drop(dy v.T) - sum(dy * y))
    dq = rope^-1(ds k) * scale;   dk = rope^-1(ds.T q) * scale

Tensors are token-major, [B, S, H, E], as a projection writes them: a tp rank holds H/tp and G/tp of the heads, and
nothing is transposed. `attention_qkv` takes the whole output of the fused projection, rotates q and k, and writes dq,
dk, dv into one tensor, as the projection's backward needs it.

Which keys a query sees: the last query of a document is aligned with its last key. A causal query sees no later key;
with a window of w it sees w keys back, its own included (without causal also as many forward). Documents packed into
one sequence do not see each other. A query that sees no key has y = 0, and gradients of 0.

Kernels are in forward.py and gradients.py, the specification in reference.py. On a CPU there are two host paths: whole
causal sequences use host_attention.py's blocks; all else is written out, 128 queries at a time. float64, and float32
with heads of more than 128 columns, is written out on a GPU too, because there are no kernels for it.

Sources: Dao, "FlashAttention-2", arXiv 2307.08691; Shah et al., "FlashAttention-3", arXiv 2407.08608; Ainslie et al.,
"GQA", arXiv 2305.13245; Beltagy et al., "Longformer", arXiv 2004.05150, section 3.1 (window).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import INTERPRETED, accumulation_dtype, by_triton
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.forward import launch_attention
from tpkernels.ops.attention.host import AttentionDropout, causal_attention
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.attention.reference import attention_backward_on_host, attention_on_host
from tpkernels.ops.rope import rope

_MOST_COLUMNS = 256
# Largest size of the second and third axis of a grid.
_MOST_PROGRAMS = 65535


def _forward(q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options) -> tuple[Tensor, Tensor]:
    """Return (y, lse), from the kernels if there are some for this device and dtype."""
    forward = launch_attention if has_kernel(q, q.shape[3]) else attention_on_host
    tables, sides = Tables(*_dense(tables)), Sides(*_dense(sides))
    with _without_autocast(q.device.type):
        return forward(_without_gaps(q), _without_gaps(k), _without_gaps(v), tables, sides, options)


def _backward(
    dy: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    tables: Tables,
    sides: Sides,
    options: Options,
) -> None:
    """Write dq, dk, dv."""
    q, k, v = (_without_gaps(t) for t in inputs)
    backward = launch_attention_backward if has_kernel(q, q.shape[3]) else attention_backward_on_host
    tables, sides = Tables(*_dense(tables)), Sides(*_dense(sides))
    with _without_autocast(dy.device.type):
        backward(_without_gaps(dy), q, k, v, *outputs, gradients, tables, sides, options)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast; it costs a tenth of a call, so only where there is one."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def has_kernel(x: Tensor, head_size: int) -> bool:
    """Return whether heads of x's device and dtype use the Triton kernels: wide heads of wide numbers spill."""
    return by_triton(x) and head_size * x.element_size() <= 2 * _MOST_COLUMNS and x.dtype != torch.float64


def _without_gaps(t: Tensor) -> Tensor:
    """Return t, or a copy of it, without gaps between columns; tokens and heads may have any strides."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _dense(tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    return (None if t is None else t.contiguous() for t in tensors)


@torch.library.custom_op("tpkernels::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H, E], lse [B, H, S]) for q[B, S, H, E], k and v[B, S', G, E]."""
    options = Options.unpacked(integers, reals)
    return _forward(q, k, v, Tables(cos, sin), Sides(query_starts, key_starts), options)


@torch.library.custom_op("tpkernels::attention_backward", mutates_args=())
def attention_backward_op(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous."""
    gradients = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    options = Options.unpacked(integers, reals)
    _backward(dy, (q, k, v), (y, lse), gradients, Tables(cos, sin), Sides(query_starts, key_starts), options)
    return gradients


@torch.library.custom_op("tpkernels::attention_qkv", mutates_args=())
def attention_qkv_op(
    qkv: Tensor,
    sizes: Sequence[int],
    cos: Tensor | None,
    sin: Tensor | None,
    starts: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return (y [T, H*E], lse [B, H, S]) for qkv[T, (H+2G)*E]; sizes are B, H and G."""
    q, k, v = _views(qkv, *sizes)
    options = Options.unpacked(integers, reals)
    y, lse = _forward(q, k, v, Tables(cos, sin), Sides(starts, starts), options)
    return y.flatten(2).flatten(0, 1), lse


@torch.library.custom_op("tpkernels::attention_qkv_backward", mutates_args=())
def attention_qkv_backward_op(
    dy: Tensor,
    qkv: Tensor,
    y: Tensor,
    lse: Tensor,
    sizes: Sequence[int],
    cos: Tensor | None,
    sin: Tensor | None,
    starts: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> Tensor:
    """Return dqkv [T, (H+2G)*E], contiguous; sizes are B, H and G."""
    dqkv = qkv.new_empty(qkv.shape)
    inputs, gradients = (_views(t, *sizes) for t in (qkv, dqkv))
    shape = inputs[0].shape
    options = Options.unpacked(integers, reals)
    outputs = (y.view(shape), lse)
    _backward(dy.reshape(shape), inputs, outputs, gradients, Tables(cos, sin), Sides(starts, starts), options)
    return dqkv


def _views(qkv: Tensor, batch: int, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q[B, S, H, E], k and v[B, S, G, E] as views of [T, (H+2G)*E], where they are side by side."""
    heads = qkv.unflatten(0, (batch, -1) if batch else (0, 0)).unflatten(2, (num_heads + 2 * num_kv_heads, -1))
    return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulation_dtype(q.dtype))


@attention_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _lse_like(q)


@attention_backward_op.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@attention_qkv_op.register_fake
def _(qkv: Tensor, sizes: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    q = _views(qkv, *sizes)[0]
    return qkv.new_empty(qkv.shape[0], q.shape[2] * q.shape[3]), _lse_like(q)


@attention_qkv_backward_op.register_fake
def _(dy: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.places, ctx.others = tensors, [None if i in tensors else value for i, value in enumerate(inputs)]
    ctx.save_for_backward(*output, *(inputs[i] for i in tensors))


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    y, lse, *tensors = ctx.saved_tensors
    inputs = list(ctx.others)
    for i, tensor in zip(ctx.places, tensors, strict=True):
        inputs[i] = tensor
    return y, lse, inputs


@differentiable_once
def _attention_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, lse, (q, k, v, *rest) = _saved(ctx)
    return *attention_backward_op(dy, q, k, v, y, lse, *rest), *(None for _ in rest)


@differentiable_once
def _attention_qkv_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, lse, (qkv, *rest) = _saved(ctx)
    return attention_qkv_backward_op(dy, qkv, y, lse, *rest), *(None for _ in rest)


attention_op.register_autograd(_attention_backward, setup_context=_setup_context)
attention_qkv_op.register_autograd(_attention_qkv_backward, setup_context=_setup_context)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Compute attention, with query heads grouped to their group's keys and values.

        y[B, S, H, E] = drop(softmax(scale * q k.T over the keys that a query sees)) v

    Args:
        q: [B, S, H, E], any strides; E even, at most 256. Pass a tensor [B, H, S, E] as q.transpose(1, 2).
        k, v: [B, S', G, E] in q's dtype, G a divisor of H; any strides.
        causal: queries see no later key; the last query is aligned with the last key.
        window: how many keys back a query sees, its own included; None for all.
        scale: of the scores, above 0; default E^(-1/2).
        query_starts: for documents packed into one sequence (B = 1): int32 or int64 [documents + 1], on q's device,
            0 first, S last; documents do not see each other.
        key_starts: the same for the keys, S' last; default query_starts.
        dropout: of the probabilities; its mask does not depend on how heads are cut. With packed documents a row is a
            query of the sequence, a column the key's position in its document.

    Returns:
        y of q's shape and dtype, new and contiguous: its view [T, H*E] goes to the output projection.

    Raises:
        ValueError: shapes, dtypes or documents that do not fit. On a GPU, starts that are not cumulative lengths fail
            an assertion on the device, since checking them would wait for it; under torch.compile they are not checked.

    Cost: 4*B*H*S*S'*E flops forward, half of it if causal, 2.5 or 3.5 times that backward (launch.py); keeps
    q, k, v, y and the log-sum-exp, B*H*S float32. Backward with 2.5 takes dq in float32 besides. If there are few keys,
    a group's query heads are divided into parts, each with a float32 copy of dk and dv (backward.py); on sm_90
    16-bit heads of 65 to 128 columns always are, into single ones: 8*B*H*S'*E bytes.
    Numerics: scores, softmax and sums in float32, probabilities rounded to v's dtype for their product with v; float32
    products are not reduced to tf32. All is added up in one order: equal bits from run to run. On a CPU all in float32,
    except plain causal 16-bit attention, which is torch's.
    Source: Dao, arXiv 2307.08691.
    """
    q, k, v = lowered(q, k, v)
    if q.dim() == 4 and k.dim() == 4 and key_starts is None and k.shape[1] == q.shape[1]:
        key_starts = query_starts
    _check_shapes(q, k, v)
    _check_window(window)
    for what, starts, length in (("query_starts", query_starts, q.shape[1]), ("key_starts", key_starts, k.shape[1])):
        _check_starts(what, starts, length, q)
    if (query_starts is None) != (key_starts is None) or (
        query_starts is not None and key_starts is not None and query_starts.shape != key_starts.shape
    ):
        raise ValueError(
            "queries and keys must be packed alike: query_starts and key_starts have "
            f"{_num_starts(query_starts)} and {_num_starts(key_starts)} entries: pass both, of as many documents"
        )
    refuse_tangents("attention", q, k, v)
    scale = _scale(scale, q.shape[3])
    is_plain = causal and window is None and query_starts is None and q.shape[1] == k.shape[1]
    if q.device.type == "cpu" and not INTERPRETED and is_plain and scale == q.shape[3] ** -0.5:
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout).transpose(1, 2)
        return y.contiguous()  # torch's attention may return q's layout
    rate, numbers = _dropout_numbers(dropout, q.shape[2])
    # A wider window sees no more keys, and might exceed the range of the kernels' numbers.
    width = min(window or 0, q.shape[1] + k.shape[1])
    options = Options(causal, width, scale, False, rate, tuple(numbers))
    y = attention_op(q, k, v, None, None, query_starts, key_starts, *options.packed)[0]
    return y


def attention_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    seq: int | None = None,
    starts: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Compute attention on the output of a fused q, k, v projection, rotating queries and keys.

        q[T, H, E], k[T, G, E], v[T, G, E] = the columns of qkv[T, (H + 2G) * E], side by side
        y[T, H*E] = drop(softmax(scale * rope(q) rope(k).T)) v

    Nothing is split or transposed. Forward and backward rotate q and k into copies, which their loops read many times;
    backward writes dq, dk and dv, rotated back, into one dqkv. With heads cut over tp, H and G are this rank's: qkv is
    what all_gather_matmul returns, y what matmul_reduce_scatter takes.

    Args:
        qkv: [T, (H + 2G) * E], rows of whole sequences, batch first.
        num_heads, num_kv_heads: H and G on this rank.
        seq: tokens per sequence; default T, one sequence.
        starts: for packed documents, int32 or int64 [documents + 1], 0 first, T last; then seq must be T.
        cos, sin: [positions, E/2] float32, from rope.rope_tables; positions count from a document's first token.
            Without them nothing is rotated.
        interleaved: which columns are a pair: (2i, 2i+1), or by default (i, i + E/2).
        causal, window, scale, dropout: as attention.

    Returns:
        y [T, H*E], new and contiguous.

    Raises:
        ValueError: shapes, dtypes or documents that do not fit; on a CPU, a document longer than the tables (on a GPU
            that is an assertion of the device).

    Cost, Numerics: as attention; in addition q and k are rotated, forward and again in backward, which needs memory for
    q, k, dq and dk once more.
    """
    (qkv,) = lowered(qkv)
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 2 or num_heads < 1 or num_kv_heads < 1 or qkv.shape[1] % heads:
        raise ValueError(
            f"qkv must be [T, (H + 2G) * E]: got {tuple(qkv.shape)}, H {num_heads}, G {num_kv_heads}: "
            "pass this rank's numbers of heads"
        )
    num_tokens = qkv.shape[0]
    seq = num_tokens if seq is None else seq
    if num_tokens and (seq < 1 or num_tokens % seq or (starts is not None and seq != num_tokens)):
        raise ValueError(
            f"tokens must be whole sequences, and one where documents are packed: {num_tokens} tokens, seq {seq}: "
            f"use seq {num_tokens}"
        )
    batch = num_tokens // seq if num_tokens else 1
    q, k, v = _views(qkv, batch, num_heads, num_kv_heads)
    _check_shapes(q, k, v)
    _check_window(window)
    _check_starts("starts", starts, num_tokens, qkv)
    _check_tables(cos, sin, q, seq, starts)
    refuse_tangents("attention_qkv", qkv)
    rate, numbers = _dropout_numbers(dropout, num_heads)
    scale = _scale(scale, q.shape[3])
    is_plain = causal and window is None and starts is None and scale == q.shape[3] ** -0.5
    if qkv.device.type == "cpu" and not INTERPRETED and is_plain and num_tokens:
        if cos is not None and sin is not None:
            q, k = (_rotated_on_host(t, cos[:seq], sin[:seq], interleaved) for t in (q, k))
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout)
        return y.transpose(1, 2).reshape(num_tokens, -1)
    width = min(window or 0, 2 * seq)
    options = Options(causal, width, scale, interleaved, rate, tuple(numbers))
    y = attention_qkv_op(qkv, [batch, num_heads, num_kv_heads], cos, sin, starts, *options.packed)[0]
    return y


def _rotated_on_host(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return t[B, S, heads, E] rotated by its positions in the sequences."""
    return rope(t.flatten(0, 1), cos, sin, interleaved=interleaved).view(t.shape)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.is_floating_point()
    if not fits or q.shape[::3] != k.shape[::3] or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            "attention takes q[B, S, H, E], k and v[B, S', G, E] of one floating-point dtype, H a multiple of G: got "
            f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}: "
            "reshape or convert them"
        )
    if max(q.shape[0], q.shape[2]) > _MOST_PROGRAMS:
        raise ValueError(
            f"attention takes at most {_MOST_PROGRAMS} sequences and heads: got q {tuple(q.shape)}: pack short "
            "sequences into one, with query_starts"
        )
    if q.shape[3] % 2 or not 0 < q.shape[3] <= _MOST_COLUMNS:
        raise ValueError(
            f"a head's size must be even and at most {_MOST_COLUMNS}: got {q.shape[3]}: pad q, k and v with zeros to "
            f"{q.shape[3] + q.shape[3] % 2}, or use more heads"
        )


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"a window must hold a query's own key: got {window}: use 1 or more, or None for all keys")


def _scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return float(head_size**-0.5)
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"a scale of scores must be above 0 and finite: got {scale}: negate q for the opposite order")
    return scale


def _check_starts(what: str, starts: Tensor | None, length: int, q: Tensor) -> None:
    if starts is None:
        return
    fits = starts.dim() == 1 and len(starts) > 1 and starts.dtype in (torch.int32, torch.int64)
    if fits and _can_look(starts):
        fits = bool(starts[0] == 0 and starts[-1] == length and (starts.diff() >= 0).all())
    if fits and starts.device.type != "cpu" and not torch.compiler.is_compiling():
        ends_fit = (starts[0] == 0) & (starts[-1] == length)
        torch._assert_async(ends_fit & (starts.diff() >= 0).all(), f"{what} must be cumulative lengths, 0 to {length}")
    if not fits or starts.device != q.device or (q.dim() == 4 and q.shape[0] != 1):
        got = starts.tolist() if _can_look(starts) else tuple(starts.shape)
        raise ValueError(
            f"{what} must be cumulative lengths of one sequence's documents, from 0 to {length}, int32 or int64 on "
            f"{q.device}: got {got} {starts.dtype} on {starts.device}: pack the batch into one sequence, or pass none"
        )


def _can_look(starts: Tensor) -> bool:
    """Return whether values may be read: on a GPU that would wait for it, and a compiler has no values."""
    return starts.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_tables(cos: Tensor | None, sin: Tensor | None, q: Tensor, seq: int, starts: Tensor | None) -> None:
    if cos is None and sin is None:
        return
    wide = accumulation_dtype(q.dtype)
    for table in (cos, sin):
        fits = table is not None and table.dim() == 2 and table.shape[1] == q.shape[3] // 2 and table.dtype == wide
        if table is None or cos is None or not fits or table.shape != cos.shape or table.requires_grad:
            raise ValueError(
                f"cos and sin must both be constants [positions, {q.shape[3] // 2}] of {wide}: got "
                f"{[None if t is None else (tuple(t.shape), t.dtype) for t in (cos, sin)]}: use rope.rope_tables"
            )
    assert cos is not None
    if len(cos) >= seq:
        return
    if starts is None or (_can_look(starts) and int(starts.diff().max()) > len(cos)):
        raise ValueError(
            f"cos and sin must have a row for every position: {len(cos)} rows, a sequence or document of "
            f"{seq if starts is None else int(starts.diff().max())}: make longer tables"
        )
    if starts.device.type != "cpu":
        torch._assert_async((starts.diff() <= len(cos)).all(), "a document is longer than the rotary tables")


def _num_starts(starts: Tensor | None) -> int:
    return 0 if starts is None else len(starts)


def _dropout_numbers(dropout: AttentionDropout | None, num_heads: int) -> tuple[float, list[int]]:
    if dropout is None or dropout.stream.rate == 0:
        return 0.0, []
    dropout.check(num_heads)
    rate, *numbers = dropout.stream.numbers
    return rate, [*numbers, dropout.first_head, dropout.num_heads]
