"""Attention's cases of `benchmarks.run kernels`: causal, with a window, with packed documents, and as in a layer.

The reference is computed for some queries at a time, because a sequence of 32768 would need 137 GB of scores in
float64. Between blocks gradients of keys and values are added in float32 at least, as one matmul would do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.kernels.cases.cases import (
    COMPILED,
    FLEX,
    OURS,
    TORCH,
    Case,
    Contestant,
    Direction,
    Draw,
    Shape,
    compiled,
)

# The window is the sequence's length divided by this; so is the length of the documents.
_WINDOW_PART = 4
_DOCUMENT_PARTS = (2, 4, 8, 8)
_QUERY_BLOCK = 512
_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}

# Returns which of these keys these queries see, both as positions in the sequence: bool, broadcast over the two.
Sees = Callable[[Tensor, Tensor], Tensor]


def attention(shape: Shape) -> Sequence[Case]:
    """Some sequences of a rank's query heads and key heads; packed documents are of one alone."""
    from tpkernels.ops.attention import attention as attend

    window = max(1, shape.seq // _WINDOW_PART)
    lengths = [shape.seq // part for part in _DOCUMENT_PARTS]
    lengths[0] += shape.seq - sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(shape.device, torch.int32)
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(shape.device)

    def causal(i_query: Tensor, i_key: Tensor) -> Tensor:
        return i_key <= i_query

    def in_window(i_query: Tensor, i_key: Tensor) -> Tensor:
        return (i_key <= i_query) & (i_query - i_key < window)

    def in_document(i_query: Tensor, i_key: Tensor) -> Tensor:
        return (i_key <= i_query) & (document[i_query] == document[i_key])

    packed = functools.partial(attend, query_starts=starts)
    return (
        _case("attention", shape, attend, causal, [shape.seq], None),
        _case("attention_window", shape, functools.partial(attend, window=window), in_window, [shape.seq], window),
        _case("attention_documents", replace(shape, batch=1), packed, in_document, lengths, None),
        _qkv_case(shape, causal),
    )


def _case(
    name: str,
    shape: Shape,
    ours: Callable[..., Tensor],
    sees: Sees,
    lengths: Sequence[int],
    window: int | None,
) -> Case:
    model, seq = shape.model, shape.seq

    def inputs(draw: Draw) -> dict[str, Tensor]:
        heads = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        return {n: draw.normal(shape.batch, seq, num, model.head_size) for n, num in heads.items()}

    def work(direction: Direction) -> Any:
        from tpkernels.work import attention_backward_work, attention_work, visible_pairs

        function = attention_work if direction == "forward" else attention_backward_work
        sizes = (shape.batch, seq, model.heads, model.kv_heads, model.head_size, shape.item_bytes)
        return function(*sizes, causal_half=True, pairs=shape.batch * visible_pairs(lengths, window))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attended(q, k, v, sees, 0)

    if name == "attention":
        also = functools.partial(_sdpa, is_causal=True)
        rivals = {"sdpa": Contestant(also)} if shape.device == "cpu" else _by_backend()
    else:
        also = functools.partial(_masked_sdpa, mask=_mask(shape, sees))
        rivals = {"sdpa": Contestant(also), **_by_blocks_of_mask(shape, sees)}
    contestants = {OURS: Contestant(ours), TORCH: Contestant(plain), COMPILED: Contestant(compiled(plain)), **rivals}
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "head_size": model.head_size}
    sizes |= {"documents": len(lengths)} | ({"window": window} if window else {})
    right = functools.partial(_by_blocks, sees=sees)
    return Case(name, inputs, contestants, work, "matmul", sizes, right, also_torch=also)


def _qkv_case(shape: Shape, causal: Sees) -> Case:
    """Return the case of what a layer does between its projections, including rotary embedding."""
    from tpkernels.ops.attention import attention_qkv
    from tpkernels.ops.rope_tables import rope_tables

    model, seq = shape.model, shape.seq
    heads = [model.heads, model.kv_heads, model.kv_heads]
    cos, sin = rope_tables(seq, model.head_size, device=shape.device)

    @functools.cache
    def full_width(dtype: torch.dtype) -> list[Tensor]:
        """Return the rivals' tables, made once as a model makes them for all layers, outside the timed calls."""
        return [torch.cat((t, t), -1)[:, None].to(dtype) for t in (cos, sin)]

    def turned(t: Tensor) -> Tensor:
        full_cos, full_sin = full_width(t.dtype)
        first, second = t.chunk(2, -1)
        return t * full_cos + torch.cat((-second, first), -1) * full_sin

    def unfused(attend: Callable[..., Tensor], qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(shape.batch, seq, sum(heads), model.head_size).split(heads, 2)
        return attend(turned(q), turned(k), v).reshape(shape.batch * seq, -1)

    def ours(qkv: Tensor) -> Tensor:
        return attention_qkv(qkv, model.heads, model.kv_heads, seq=seq, cos=cos, sin=sin)

    def work(direction: Direction) -> Any:
        from tpkernels.work import attention_backward_work, attention_work

        function = attention_work if direction == "forward" else attention_backward_work
        sizes = (shape.batch, seq, model.heads, model.kv_heads, model.head_size, shape.item_bytes)
        return function(*sizes, causal_half=True)

    by_sdpa = functools.partial(_sdpa, is_causal=True)
    rivals = {"sdpa": Contestant(by_sdpa)} if shape.device == "cpu" else _by_backend()
    rivals = {n: replace(rival, function=functools.partial(unfused, rival.function)) for n, rival in rivals.items()}
    plain = functools.partial(unfused, functools.partial(_attended, sees=causal, first=0))
    contestants = {OURS: Contestant(ours), TORCH: Contestant(plain), COMPILED: Contestant(compiled(plain)), **rivals}
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "head_size": model.head_size}
    right = functools.partial(unfused, functools.partial(_by_blocks, sees=causal))

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"qkv": draw.normal(shape.batch * seq, sum(heads) * model.head_size)}

    also = functools.partial(unfused, by_sdpa)
    return Case("attention_qkv", inputs, contestants, work, "matmul", sizes, right, also_torch=also)


def _attended(q: Tensor, k: Tensor, v: Tensor, sees: Sees, first: int) -> Tensor:
    """Return attention of queries [B, n, H, E] from `first` on; softmax in float32 at least, as Hugging Face's."""
    groups = q.shape[2] // k.shape[2]
    i_query = torch.arange(first, first + q.shape[1], device=q.device)
    i_key = torch.arange(k.shape[1], device=q.device)
    keys, values = (t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~sees(i_query[:, None], i_key[None, :]), -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ values).transpose(1, 2)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, sees: Sees) -> Tensor:
    """Do the same as _attended for any length; nothing of a block is kept for backward."""

    def block(b_q: Tensor, wide_k: Tensor, wide_v: Tensor, first: int) -> Tensor:
        return _attended(b_q, wide_k.to(b_q.dtype), wide_v.to(b_q.dtype), sees, first)

    wide = torch.promote_types(q.dtype, torch.float32)
    wide_k, wide_v = k.to(wide), v.to(wide)
    blocks = enumerate(q.split(_QUERY_BLOCK, 1))
    ys = [checkpoint(block, b, wide_k, wide_v, i * _QUERY_BLOCK, use_reentrant=False) for i, b in blocks]
    return torch.cat(ys, 1)


def _by_backend() -> dict[str, Contestant]:
    """Return torch's own causal attention with each of its backends on a GPU."""

    def by_backend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
        knows_groups = backend != SDPBackend.EFFICIENT_ATTENTION
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, knows_groups=knows_groups, is_causal=True)

    found = {name: Contestant(functools.partial(by_backend, backend=one)) for name, one in _BACKENDS.items()}
    flash = found["sdpa_flash"].function
    found["sdpa_flash_deterministic"] = Contestant(flash, context=deterministic, directions=("backward", "both"))
    return found


def _mask(shape: Shape, sees: Sees) -> Callable[[], Tensor]:
    """Return a function that makes the mask of every pair when it is first called."""

    @functools.cache
    def mask() -> Tensor:
        places = torch.arange(shape.seq, device=shape.device)
        return sees(places[:, None], places[None, :])

    return mask


def _by_blocks_of_mask(shape: Shape, sees: Sees) -> dict[str, Contestant]:
    """Return torch's attention compiled for the blocks that a mask leaves; it has no backward on a CPU."""
    if shape.device == "cpu":
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @functools.cache
    def blocks() -> Any:
        def mask_mod(_batch: Tensor, _head: Tensor, i_query: Tensor, i_key: Tensor) -> Tensor:
            return sees(i_query, i_key)

        return create_block_mask(mask_mod, None, None, shape.seq, shape.seq, device=shape.device)

    flex = compiled(flex_attention)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y: Tensor = flex(query=q, key=k, value=v, block_mask=blocks(), enable_gqa=True)
        return y.transpose(1, 2)

    return {FLEX: Contestant(by_flex)}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, knows_groups: bool = True, **how: Any) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and not knows_groups:
        k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1 and knows_groups, **how).transpose(1, 2)


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Callable[[], Tensor]) -> Tensor:
    """Attend with copies for each group, because the backend that takes a mask has no groups."""
    return _sdpa(q, k, v, knows_groups=False, attn_mask=mask())


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, without filling new tensors, which would be timed too."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
