"""Grouped-query self-attention, its heads cut over tp, with rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.attention import attention, attention_qkv, has_kernel
from tpkernels.ops.attention.choice import WHOSE, Problem, Whose, choose, chosen_backend
from tpkernels.ops.attention.host import AttentionDropout, causal_attention

from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.column import ColumnParallelLinear, PackedWeights
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.norm import Norm
from tpengine.layers.query_scaling import with_scaled_queries
from tpengine.layers.row import RowParallelLinear
from tpengine.layers.rows import Documents, KeyValueCache, Rows, length_of
from tpengine.layers.scaled import scaled
from tpengine.layers.scores import Rotation, Scores, rope, tables_of
from tpengine.layers.torch_attention import attend_by_torch, prepared_heads
from tpengine.layers.width_norm import WidthNorm, norm_over_ranks

# Tokens of sequences that torch's attention is faster for, by rule.
_LONG = 4096


def attend(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rows: int | Documents,
    scores: Scores,
    dropout: AttentionDropout | None,
    head_norms: tuple[Norm, Norm] | None = None,
    *,
    whose: Whose = "ours",
) -> Tensor:
    """Rotate q and k by their positions, then attend causally within each sequence, or document.

        q[T, H*E], k[T, G*E], v[T, G*E] = the columns of qkv, side by side
        y[T, H*E] = softmax(scale * rope(norm(q)) rope(norm(k)).T, over the keys that a query sees) v

    Args:
        qkv: [T, (H + 2G) * E], rows of whole sequences, batch first.
        num_heads, num_kv_heads: H and G of this rank.
        rows: S, the number of tokens per sequence, or the documents that the T tokens are.
        scores: rotation, window, scale.
        dropout: drops attention probabilities; None drops none.
        head_norms: norms of each head's queries and keys [E]; None for none.
        whose: our kernels, torch's attention, or what is faster: see tpkernels.ops.attention.choice.

    Raises:
        ValueError: torch's was asked for, and does not compute this.
    """
    heads = num_heads, num_kv_heads, num_kv_heads
    head_size = qkv.shape[1] // sum(heads)
    seq, documents = length_of(rows), rows if isinstance(rows, Documents) else None
    if documents is not None and len(documents.places) != len(qkv):
        raise ValueError(
            f"documents must be those of all ranks' tokens: {len(documents.places)} in documents, {len(qkv)} over all "
            "ranks: pass the documents of the whole micro-batch"
        )
    window = None if scores.window is None or scores.window >= seq else scores.window
    cos, sin = None, None
    if scores.rotation is not None:
        cos, sin = tables_of(seq, head_size, scores.rotation, accumulation_dtype(qkv.dtype), qkv.device)
    if scores.queries is not None and (factors := scores.queries.factors(seq, qkv)) is not None:
        qkv, head_norms = _with_normed_heads(qkv, heads, head_norms), None
        factors = factors if documents is None else factors[documents.places]
        qkv = with_scaled_queries(qkv, num_heads * head_size, factors)
    backend = None
    if whose != "ours":
        sizes = num_heads, num_kv_heads, head_size
        what = window is not None, documents is not None, dropout is not None
        backend = chosen_backend(Problem(qkv.device, qkv.dtype, seq, *sizes, *what), whose)
    if backend is None or (head_norms is not None and head_norms[0].centered):
        qkv, head_norms = _with_normed_heads(qkv, heads, head_norms), None
    if backend is not None:
        tables = (None, None) if cos is None or sin is None else (cos, sin)
        options: dict[str, Any] = dict(window=window, scale=scores.scale, head_norms=head_norms)
        return attend_by_torch(qkv, num_heads, num_kv_heads, rows, tables, backend, **options)
    if has_kernel(qkv, head_size) and cos is not None and 2 * cos.shape[1] < head_size:
        # Attention's own kernels rotate whole heads.
        q, k, v = prepared_heads(qkv, num_heads, num_kv_heads, rows, (cos, sin), None)
        starts = None if documents is None else documents.starts
        y = attention(q, k, v, window=window, scale=scores.scale, query_starts=starts, dropout=dropout)
        return y.reshape(len(qkv), -1)
    if has_kernel(qkv, head_size):
        options = dict(window=window, scale=scores.scale, dropout=dropout, cos=cos, sin=sin)
        if documents is not None:
            return attention_qkv(qkv, num_heads, num_kv_heads, starts=documents.starts, **options)
        return attention_qkv(qkv, num_heads, num_kv_heads, seq=seq, **options)
    # On a CPU matmuls are faster when each head is contiguous. The rotation writes q and k that way at no extra cost.
    # v is copied too: otherwise it would be a view that keeps all of qkv until backward.
    parts = qkv.split([n * head_size for n in heads], dim=1)
    together = seq if documents is None else len(qkv)
    q, k, v = (rearrange(part, "(b s) (h e) -> b h s e", s=together, e=head_size) for part in parts)
    if documents is not None and cos is not None and sin is not None:
        cos, sin = cos[documents.places], sin[documents.places]
    if cos is not None and sin is not None:
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    else:
        q, k = (of.clone(memory_format=torch.contiguous_format) for of in (q, k))
    v = v.clone(memory_format=torch.contiguous_format)
    if window is not None or documents is not None:
        q, k, v = (of.transpose(1, 2) for of in (q, k, v))
        starts = None if documents is None else documents.starts
        y = attention(q, k, v, window=window, scale=scores.scale, query_starts=starts, dropout=dropout)
        return y.flatten(2).flatten(0, 1)
    if scores.scale is not None:
        q = scaled(q, scores.scale * head_size**0.5)
    return rearrange(causal_attention(q, k, v, dropout), "b h s e -> (b s) (h e)")


def _with_normed_heads(qkv: Tensor, heads: tuple[int, int, int], head_norms: tuple[Norm, Norm] | None) -> Tensor:
    if head_norms is None:
        return qkv
    # A norm's rows are heads; the packed columns are put together again behind it.
    head_size = qkv.shape[1] // sum(heads)
    q, k, v = qkv.split([n * head_size for n in heads], dim=1)
    normed = (norm(of.reshape(-1, head_size)).view(of.shape) for norm, of in zip(head_norms, (q, k), strict=True))
    return torch.cat((*normed, v), dim=1)


def attend_on_cache(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: KeyValueCache,
    layer: nn.Module,
    scores: Scores,
    head_norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Do as `attend` for tokens that follow on a cache: write their keys and values, then attend to all that are in it.

    Args:
        qkv: [T, (H + 2G) * E], what follows on each sequence, batch first.
        heads: H, G, G of this rank.
        cache: of the whole model.
        layer: whose keys and values these are.
        scores, head_norms: as attend.

    Returns:
        y[T, H*E].
    """
    qkv = _with_normed_heads(qkv, heads, head_norms)
    if scores.queries is not None and (factors := scores.queries.factors(cache.seq, qkv)) is not None:
        held = slice(cache.num_held, cache.num_held + cache.num_new)
        factors = factors[cache.places if cache.is_padded else held]
        qkv = with_scaled_queries(qkv, heads[0] * (qkv.shape[1] // sum(heads)), factors)
    # [B, S, heads, E] -> [B, heads, S, E]
    shape = cache.num_sequences, cache.num_new, sum(heads), -1
    packed = qkv.view(shape).transpose(1, 2)
    if scores.rotation is None:
        q, k, v = packed.split(heads, dim=1)
    else:
        q_and_k, v = packed.split((heads[0] + heads[1], heads[2]), dim=1)
        angles = _angles_on(cache, scores.rotation, q_and_k.shape[3], qkv)
        q, k = rope(q_and_k, *angles).split(heads[:2], dim=1)
    seen = cache.extend(layer, k, v)
    if len(seen) == 1:
        return _attend_to(q, *seen[0], scores).transpose(1, 2).flatten(2).flatten(0, 1)
    parts = [
        _attend_to(queries, keys, values, scores)
        for queries, (keys, values) in zip(q.chunk(len(seen)), seen, strict=True)
    ]
    return rearrange(torch.cat(parts), "b h s e -> (b s) (h e)")


def _angles_on(cache: KeyValueCache, rotation: Rotation, head_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of what follows: [B, 1, S, R/2], or [S, R/2] without padding. A pass's layers share them."""
    dtype = accumulation_dtype(like.dtype)

    def make() -> tuple[Tensor, Tensor]:
        tables = tables_of(cache.seq, head_size, rotation, dtype, like.device)
        if not cache.is_padded:
            cos, sin = (table[cache.num_held : cache.num_held + cache.num_new] for table in tables)
            return cos, sin
        places = cache.places.view(cache.num_sequences, 1, cache.num_new)
        cos, sin = (table[places] for table in tables)
        return cos, sin

    angles: tuple[Tensor, Tensor] = cache.once((rotation, head_size, dtype), make)
    return angles


def _attend_to(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Return y[B, H, S, E] of rotated q; the last query is at the last key of k, v[B, G, S', E]."""
    num_queries, num_keys, window = q.shape[2], k.shape[2], scores.window
    if num_queries > num_keys:
        # Padding before a sequence begins sees nothing.
        y = _attend_to(q[:, :, num_queries - num_keys :], k, v, scores)
        return F.pad(y, (0, 0, num_queries - num_keys, 0))
    if has_kernel(q, q.shape[3]):
        q, k, v = (of.transpose(1, 2) for of in (q, k, v))
        return attention(q, k, v, window=window, scale=scores.scale).transpose(1, 2)
    mask = None
    if num_queries == 1:
        k, v = (of[:, :, -window:] if window else of for of in (k, v))
    else:
        back = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
        back = back - torch.arange(num_keys, device=q.device)
        mask = (back >= 0) & (back < (window or num_keys))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention over H query heads and G key/value heads.

        q, k, v = all_gather_tp(x[T/tp, D]) @ (wq, wk, wv).T + b   one gather, one GEMM
        y[T/tp, D] = reduce_scatter_tp(softmax(scale * q k.T, causal) v @ wo.T) + bo

    Args:
        hidden_size, num_heads, num_kv_heads: D, H, G, global; H divisible by G and by tp.
        comm: the tp ranks.
        head_size: E; default D/H.
        qkv_bias, output_bias: whether there are b[(H + 2G) E / tp] and bo[D].
        width_norm: makes the norm of all heads' queries together, and that of their keys, from the number of columns
            and the ranks that share a KV head; default none.
        head_norm: makes the norm of each head's queries, and that of its keys, before they are rotated, from E and
            comm; default none.
        scores: rotation, window and scale of the scores.
        replicas: with G < tp, the communicator of the tp/G consecutive ranks that share a KV head.
        rope_theta: base of the rotary frequencies, instead of `scores`.
        dropout: drops attention probabilities.
        whose: our kernels ("ours"), torch's attention ("torch"), or what is faster here ("auto"), which is said in
            tpkernels/ops/attention/choice.py. Torch's gradients may differ from run to run; where torch is to be
            deterministic, "auto" takes ours.
        sink, gathers_again, dtype, device: as ColumnParallelLinear.

    Raises:
        ValueError: heads that do not divide; or torch's attention was asked for, and does not compute this. What
            depends on the length of sequences is known when forward is called.

    Shape: x [T/tp, D] with T = batch * seq, batch first. Positions start at 0 in every sequence, or document.
    Cost: keeps gathered x, rotated q and k, v and the attention output for backward.
    """

    # Of each head (Norm), or of all together (WidthNorm).
    q_norm: Any
    k_norm: Any

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        comm: Communicator,
        *,
        head_size: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm: Callable[[int, Communicator], Norm] | None = None,
        width_norm: Callable[[int, Communicator | None], WidthNorm] | None = None,
        scores: Scores | None = None,
        replicas: Communicator | None = None,
        rope_theta: float = 10000.0,
        dropout: Dropout | None = None,
        whose: Whose = "auto",
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if (head_size is None and hidden_size % num_heads) or num_heads % num_kv_heads or num_heads % comm.size:
            raise ValueError(
                "hidden_size must be divisible by num_heads, num_heads by num_kv_heads and by tp: "
                f"hidden_size {hidden_size}, num_heads {num_heads}, num_kv_heads {num_kv_heads}, tp {comm.size}: "
                "use num_heads a multiple of num_kv_heads and tp that divides hidden_size"
            )
        share = comm.size // num_kv_heads
        if (replicas.size if replicas else 1) != max(1, share) or (
            comm.size % num_kv_heads and num_kv_heads % comm.size
        ):
            raise ValueError(
                "num_kv_heads must be divisible by tp, or tp by num_kv_heads, where replicas are the ranks of one "
                f"head: num_kv_heads {num_kv_heads}, tp {comm.size}, replicas {replicas.size if replicas else None}: "
                f"use num_kv_heads {comm.size}, or replicas of {max(1, share)} consecutive ranks"
            )
        self.head_size = head_size or hidden_size // num_heads
        self.scores, self.dropout = scores or Scores(Rotation(rope_theta)), dropout
        q_size, kv_size = num_heads * self.head_size, num_kv_heads * self.head_size
        options: dict[str, Any] = dict(sink=sink, gathers_again=gathers_again, dtype=dtype, device=device)
        self.q_proj = ColumnParallelLinear(hidden_size, q_size, comm, bias=qkv_bias, **options)
        self.k_proj = ColumnParallelLinear(hidden_size, kv_size, comm, bias=qkv_bias, replicas=replicas, **options)
        self.v_proj = ColumnParallelLinear(hidden_size, kv_size, comm, bias=qkv_bias, replicas=replicas, **options)
        # Of this rank.
        self._num_heads = self.q_proj.rows // self.head_size, self.k_proj.rows // self.head_size
        if head_norm is not None:
            self.q_norm, self.k_norm = (head_norm(self.head_size, comm) for _ in range(2))
        self._norms_heads = head_norm is not None
        self._norms_width = width_norm is not None
        if width_norm is not None:
            self.q_norm, self.k_norm = width_norm(q_size, None), width_norm(kv_size, replicas)
        self.o_proj = RowParallelLinear(q_size, hidden_size, comm, bias=output_bias, **options)
        self._qkv = PackedWeights(self.q_proj, self.k_proj, self.v_proj)
        self._whose = self._checked(whose)

    def _checked(self, whose: Whose) -> Whose:
        """Return whose attention a layer takes, after asking torch; what depends on the length is asked in forward."""
        if whose not in WHOSE:
            raise ValueError(f"attention must be one of {', '.join(WHOSE)}: got {whose!r}: use auto")
        if isinstance(self.o_proj.comm, ShardCommunicator):
            # A shard of exact mode has the same bits wherever it is computed.
            if whose == "torch":
                raise ValueError("attention torch is not for a shard of exact mode: got torch: use attention ours")
            return "ours"
        weight, what = self.o_proj.weight, (False, False, self.dropout is not None)
        if whose != "ours" and not weight.is_meta and self.scores.window is None:
            choose(Problem(weight.device, weight.dtype, _LONG, *self._num_heads, self.head_size, *what), whose)
        return whose

    def forward(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D], attention within each of the T/seq sequences, each document, or on a cache."""
        qkv = self.projected(x, seq)
        if self._norms_width:
            (qkv,) = norm_over_ranks([qkv], [(self.q_norm, self.k_norm)], self.o_proj.comm)
        return self.attended(qkv, seq)

    def projected(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> qkv[T, (H + 2G) E / tp]."""
        num_tokens = x.shape[0] * self.o_proj.comm.size
        if not isinstance(seq, Documents) and isinstance(seq, int) and num_tokens % seq:
            raise ValueError(
                f"tokens must be whole sequences: {num_tokens} tokens over all ranks, seq {seq}: use "
                f"{-(-num_tokens // seq) * seq} tokens"
            )
        return self._qkv.forward_packed(x, (self.q_proj, self.k_proj, self.v_proj))

    def attended(self, qkv: Tensor, seq: Rows) -> Tensor:
        """qkv[T, (H + 2G) E / tp], normed over all heads where they are, -> y[T/tp, D]."""
        comm = self.o_proj.comm
        heads, kv_heads = self._num_heads
        drop = self.dropout.of_heads(comm.rank * heads, comm.size * heads) if self.dropout else None
        norms = (self.q_norm, self.k_norm) if self._norms_heads else None
        if isinstance(seq, KeyValueCache):
            attended: Tensor = self.o_proj(
                attend_on_cache(qkv, (heads, kv_heads, kv_heads), seq, self, self.scores, norms)
            )
            return attended
        mixed = attend(qkv, heads, kv_heads, seq, self.scores, drop, norms, whose=self._whose)
        y: Tensor = self.o_proj(mixed)
        return y

    def prepare(self, num_tokens: int) -> None:
        """Prepare all weights: see ColumnParallelLinear.prepare."""
        self._qkv.prepare(num_tokens)
        self.o_proj.prepare(num_tokens)

    def release(self) -> None:
        """Release all prepared weights: see ColumnParallelLinear.release."""
        self._qkv.release()
        self.o_proj.release()
