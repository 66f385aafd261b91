"""Attention in plain torch: the specification, with every score in memory; the host path, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, accumulation_dtype
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.dropout import StreamNumbers, keep_by_numbers

_QUERIES_AT_A_TIME = 128


class _Places(NamedTuple):
    """For each token of one side: its document, its position there, and its position from the document's end."""

    document: Tensor
    place: Tensor
    to_end: Tensor

    @classmethod
    def of(cls, starts: Tensor | None, length: int, device: torch.device) -> _Places:
        token = torch.arange(length, device=device)
        if starts is None:
            return cls(torch.zeros_like(token), token, length - token)
        document = torch.searchsorted(starts, token, right=True) - 1
        return cls(document, token - starts[document], starts[document + 1] - token)


def _visible(queries: _Places, keys: _Places, causal: bool, window: int) -> Tensor:
    """Return which keys each query sees: bool [queries, keys]."""
    # Distance from the query back to the key, with the documents' ends aligned.
    back = keys.to_end - queries.to_end[:, None]
    see = queries.document[:, None] == keys.document
    if causal:
        see &= back >= 0
    if window:
        see &= (back if causal else back.abs()) < window
    return see


def _rotated(t: Tensor, tables: Tables, position: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    """Return t[B, S, heads, E] rotated by positions [S], in t's dtype; t itself without tables."""
    if tables.cos is None or tables.sin is None:
        return t
    cos, sin = (table[position][:, None].to(t.dtype) for table in (tables.cos, tables.sin))
    sin = -sin if back else sin
    low, high = (t[..., ::2], t[..., 1::2]) if interleaved else t.chunk(2, dim=-1)
    halves = low * cos - high * sin, high * cos + low * sin
    return torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options) -> Tensor:
    """Return y [B, S, H, E], computed in q's dtype with every score in memory: the specification."""
    queries, keys = (_Places.of(starts, t.shape[1], q.device) for starts, t in zip(sides, (q, k), strict=True))
    see = _visible(queries, keys, options.causal, options.window)
    q = _rotated(q, tables, _query_positions(queries, keys, sides), options.interleaved)
    k = _rotated(k, tables, keys.place, options.interleaved)
    q, k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2).transpose(1, 2) for t in (q, k, v))
    sees_any = see.any(1, keepdim=True)
    s = (q @ k.transpose(2, 3) * options.scale).masked_fill(~see, -torch.inf).masked_fill(~sees_any, 0)
    p = s.softmax(-1) * sees_any
    if options.rate:
        rows, num_keys = torch.arange(q.shape[2], device=q.device), k.shape[2]
        kept = _kept(q.shape[:3], rows, slice(0, num_keys), num_keys, options)[..., keys.place]
        p = torch.where(kept, p / (1 - options.rate), 0)
    return (p @ v).transpose(1, 2)


def _query_positions(queries: _Places, keys: _Places, sides: Sides) -> Tensor:
    """Return the position of each query among its document's keys."""
    if sides.key_starts is None:
        return len(keys.place) - queries.to_end
    return sides.key_starts.diff()[queries.document] - queries.to_end


def _kept(sizes: Sequence[int], rows: Tensor, columns: slice, num_keys: int, options: Options) -> Tensor:
    """Return dropout's mask for some queries [rows] of batch, H, S: bool [batch, H, rows, columns] in a document."""
    batch, num_heads, num_queries = sizes
    key0, key1, counter2, counter3, first_head, num_row_heads = options.dropout
    numbers = StreamNumbers(options.rate, key0, key1, counter2, counter3)
    first = torch.arange(batch, device=rows.device)[:, None] * num_row_heads + first_head
    head_rows = (first + torch.arange(num_heads, device=rows.device)) * num_queries
    return keep_by_numbers(numbers, head_rows[:, :, None] + rows, columns.start, columns.stop - columns.start, num_keys)


class _Piece(NamedTuple):
    """Some queries of a document, and the keys that any of them sees.

    Attributes:
        rows, keys: both as positions in the sequence.
        first_key: the first key's position in its document.
        hidden: columns, and which of them some of the queries do not see: bool [rows, columns].
    """

    rows: slice
    keys: slice
    first_key: int
    hidden: list[tuple[slice, Tensor]]


def _pieces(q: Tensor, k: Tensor, sides: Sides, options: Options) -> Iterator[_Piece]:
    """Yield pieces with all queries that see a key."""
    everything = q.shape[1] + k.shape[1]
    back = options.window - 1 if options.window else everything
    forth = 0 if options.causal else back
    ends = (pairwise([0, t.shape[1]] if of is None else of.tolist()) for of, t in zip(sides, (q, k), strict=True))
    for (first_query, last_query), (first_key, last_key) in zip(*ends, strict=True):
        # Difference between a query's position among the keys and its position in the sequence.
        shift = last_key - last_query
        for start in range(first_query, last_query, _QUERIES_AT_A_TIME):
            rows = slice(start, min(start + _QUERIES_AT_A_TIME, last_query))
            low, high = rows.start + shift, rows.stop - 1 + shift
            keys = slice(max(first_key, low - back), min(last_key, high + forth + 1))
            if keys.start >= keys.stop:
                continue
            own = torch.arange(low, high + 1, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)
            before = slice(0, max(0, high - back - keys.start))
            after = slice(max(0, low + forth + 1 - keys.start), None)
            hidden = [(before, key[before] < own - back), (after, key[after] > own + forth)]
            yield _Piece(rows, keys, keys.start - first_key, hidden)


class _Written:
    """Attention written out, in the accumulation dtype, piece by piece, with the heads of a group side by side."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options) -> None:
        self.options = options
        self.batch, self.num_queries, self.num_heads, self.num_groups = *q.shape[:3], k.shape[2]
        wide = accumulation_dtype(q.dtype)
        queries, keys = (_Places.of(of, t.shape[1], q.device) for of, t in zip(sides, (q, k), strict=True))
        self.positions = _query_positions(queries, keys, sides), keys.place
        # [B*G, H/G, S, E] and [B*G, S', E]
        self.q = self.grouped(_rotated(q.to(wide), tables, self.positions[0], options.interleaved))
        self.k = _rotated(k.to(wide), tables, self.positions[1], options.interleaved).transpose(1, 2).flatten(0, 1)
        self.v = v.to(wide).transpose(1, 2).flatten(0, 1)

    def grouped(self, t: Tensor) -> Tensor:
        """Return t[B, S, H, E] as [B*G, H/G, S, E]."""
        return t.unflatten(2, (self.num_groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def ungrouped(self, t: Tensor) -> Tensor:
        """Return the inverse of `grouped`, for any part of the queries."""
        return t.unflatten(0, (self.batch, self.num_groups)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def powers(self, piece: _Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(s - top) [B*G, H/G, rows, keys], their sums over the keys, and top, the rows' largest score.

        exp(s - top) is 0 for keys that are not seen. It is computed as a power of 2, with the factor log2(e) in the
        product: if s - top were multiplied by it, values far from the top would be wrong by several units. On AMD's
        processors exp2 also takes a third of exp's time (in MKL).
        """
        q, k = self.q[:, :, piece.rows].flatten(1, 2), self.k[:, piece.keys].transpose(1, 2)
        s = q.new_empty(q.shape[0], q.shape[1], k.shape[2])
        torch.baddbmm(s, q, k, beta=0, alpha=self.options.scale * LOG2_E, out=s)
        s = s.unflatten(1, (-1, piece.rows.stop - piece.rows.start))
        for columns, hidden in piece.hidden:
            s[..., columns].masked_fill_(hidden, -torch.inf)
        top = s.amax(-1, keepdim=True)
        p = s.sub_(top.masked_fill(top == -torch.inf, 0)).exp2_()
        return p, p.sum(-1, keepdim=True), top.div_(LOG2_E)

    def factors(self, piece: _Piece) -> Tensor | None:
        """Return the factors of probabilities [B*G, H/G, rows, keys]: dropout's mask, scaled; None without dropout."""
        if not self.options.rate:
            return None
        columns = slice(piece.first_key, piece.first_key + piece.keys.stop - piece.keys.start)
        rows = torch.arange(piece.rows.start, piece.rows.stop, device=self.q.device)
        keep = _kept((self.batch, self.num_heads, self.num_queries), rows, columns, self.k.shape[1], self.options)
        return (keep.to(self.k.dtype) / (1 - self.options.rate)).unflatten(1, (self.num_groups, -1)).flatten(0, 1)


def attention_on_host(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options
) -> tuple[Tensor, Tensor]:
    """Return (y, lse) as forward.launch_attention does, on any device; lse in the accumulation dtype."""
    written = _Written(q, k, v, tables, sides, options)
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=written.k.dtype, device=q.device)
    grouped_lse = lse.view(written.q.shape[:3])
    for piece in _pieces(q, k, sides, options):
        p, total, top = written.powers(piece)
        grouped_lse[:, :, piece.rows] = (top + total.log())[..., 0]
        factors = written.factors(piece)
        p = p if factors is None else p.mul_(factors)
        of_rows = (p.flatten(1, 2) @ written.v[:, piece.keys]).view(*p.shape[:3], v.shape[3])
        y[:, piece.rows] = written.ungrouped(of_rows.div_(total.masked_fill_(total == 0, 1)))
    return y, lse


def attention_backward_on_host(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    tables: Tables,
    sides: Sides,
    options: Options,
) -> None:
    """Compute backward.launch_attention_backward on any device; lse is not used.

    A piece has all keys of its rows. So their sum is known without the rounding of lse, which a whole row would share.
    """
    written = _Written(q, k, v, tables, sides, options)
    dy = dy.to(written.k.dtype)
    delta = written.grouped((dy * y).sum(-1, keepdim=True))
    dy = written.grouped(dy)
    dq, dk, dv = (torch.zeros_like(t) for t in (written.q, written.k, written.v))
    for piece in _pieces(q, k, sides, options):
        rows, keys = piece.rows, piece.keys
        p, total, _ = written.powers(piece)
        p.div_(total.masked_fill_(total == 0, 1))
        factors, block_q, block_dy = written.factors(piece), written.q[:, :, rows], dy[:, :, rows]
        dp = (block_dy.flatten(1, 2) @ written.v[:, keys].transpose(1, 2)).view(p.shape)
        dropped = p
        if factors is not None:
            dp, dropped = dp.mul_(factors), p * factors
        ds = dp.sub_(delta[:, :, rows]).mul_(p)
        dq[:, :, rows] = (ds.flatten(1, 2) @ written.k[:, keys]).view(*p.shape[:3], k.shape[3])
        # Head by head: one sum over all queries of a group would round more often, and lose a quarter of a unit.
        for head in range(p.shape[1]):
            dv[:, keys].baddbmm_(dropped[:, head].transpose(1, 2), block_dy[:, head])
            dk[:, keys].baddbmm_(ds[:, head].transpose(1, 2), block_q[:, head], alpha=options.scale)
    dk, dv = (t.unflatten(0, (written.batch, written.num_groups)).transpose(1, 2) for t in (dk, dv))
    rotated = zip((written.ungrouped(dq.mul_(options.scale)), dk), written.positions, strict=True)
    results = [_rotated(d, tables, at, options.interleaved, back=True) for d, at in rotated]
    for out, result in zip(gradients, (*results, dv), strict=True):
        out.copy_(result)
