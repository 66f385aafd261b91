"""Attention in plain torch: the specification, with every score in memory; the host path, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.attention.problem import Options, Sides, Tables
from tpkernels.dropout import StreamNumbers, keep_by_numbers
from tpkernels.launch import accumulation_dtype

_QUERIES_AT_A_TIME = 128


class _Places(NamedTuple):
    """For each token of one side: its document, its place there, and that place counted from the document's end."""

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
    """Which keys each query sees: bool [queries, keys]."""
    # How far the key lies before the query when the documents' ends are aligned.
    back = keys.to_end - queries.to_end[:, None]
    see = queries.document[:, None] == keys.document
    if causal:
        see &= back >= 0
    if window:
        see &= (back if causal else back.abs()) < window
    return see


def _rotated(t: Tensor, tables: Tables, position: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    """t[B, S, heads, E] at the positions [S], in t's dtype; t itself without tables."""
    if tables.cos is None or tables.sin is None:
        return t
    cos, sin = (table[position][:, None].to(t.dtype) for table in (tables.cos, tables.sin))
    sin = -sin if back else sin
    low, high = (t[..., ::2], t[..., 1::2]) if interleaved else t.chunk(2, dim=-1)
    halves = low * cos - high * sin, high * cos + low * sin
    return torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options) -> Tensor:
    """The specification, in q's dtype with every score in memory: y [B, S, H, E]."""
    queries, keys = (_Places.of(starts, t.shape[1], q.device) for starts, t in zip(sides, (q, k), strict=True))
    see = _visible(queries, keys, options.causal, options.window)
    q = _rotated(q, tables, _query_positions(queries, keys, sides), options.interleaved)
    k = _rotated(k, tables, keys.place, options.interleaved)
    q, k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2).transpose(1, 2) for t in (q, k, v))
    sees_any = see.any(1, keepdim=True)
    s = (q @ k.transpose(2, 3) * options.scale).masked_fill(~see, -torch.inf).masked_fill(~sees_any, 0)
    p = s.softmax(-1) * sees_any
    if options.rate:
        p = torch.where(_kept(q.shape[0], slice(0, q.shape[2]), q.shape[1:3], keys, options), p / (1 - options.rate), 0)
    return (p @ v).transpose(1, 2)


def _query_positions(queries: _Places, keys: _Places, sides: Sides) -> Tensor:
    """The position that each query has among its document's keys."""
    if sides.key_starts is None:
        return len(keys.place) - queries.to_end
    return sides.key_starts.diff()[queries.document] - queries.to_end


def _kept(batch: int, rows: slice, heads_and_queries: Sequence[int], keys: _Places, options: Options) -> Tensor:
    """Dropout's mask of some queries: bool [batch, H, rows, keys], the columns being the keys' places."""
    num_heads, num_queries = heads_and_queries
    key0, key1, counter2, counter3, first_head, num_row_heads = options.dropout
    numbers = StreamNumbers(options.rate, key0, key1, counter2, counter3)
    device = keys.place.device
    first = torch.arange(batch, device=device)[:, None] * num_row_heads + first_head
    head_rows = (first + torch.arange(num_heads, device=device)) * num_queries
    row = head_rows[:, :, None] + torch.arange(rows.start, rows.stop, device=device)
    num_keys = len(keys.place)
    return keep_by_numbers(numbers, row, 0, num_keys, num_keys)[..., keys.place]


class _Written:
    """Attention written out, in the accumulation dtype, some queries at a time; heads of a group side by side."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options) -> None:
        self.shape, self.tables, self.options = q.shape, tables, options
        wide = accumulation_dtype(q.dtype)
        self.queries = _Places.of(sides.query_starts, q.shape[1], q.device)
        self.keys = _Places.of(sides.key_starts, k.shape[1], q.device)
        self.position = _query_positions(self.queries, self.keys, sides)
        self.num_groups = k.shape[2]
        # [B, G, S', E]
        self.k = _rotated(k.to(wide), tables, self.keys.place, options.interleaved).transpose(1, 2)
        self.v = v.to(wide).transpose(1, 2)
        self.q = _rotated(q.to(wide), tables, self.position, options.interleaved)

    def blocks(self) -> Iterator[slice]:
        """Some queries after others."""
        for first in range(0, self.shape[1], _QUERIES_AT_A_TIME):
            yield slice(first, min(first + _QUERIES_AT_A_TIME, self.shape[1]))

    def grouped(self, t: Tensor, rows: slice) -> Tensor:
        """t[B, S, H, E] -> [B, G, H/G * rows, E]."""
        return t[:, rows].unflatten(2, (self.num_groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def ungrouped(self, t: Tensor, rows: slice) -> Tensor:
        """The inverse: [B, rows, H, E]."""
        return t.unflatten(2, (-1, rows.stop - rows.start)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def scores(self, rows: slice) -> Tensor:
        """[B, G, H/G, rows, S'], -inf where a key is not seen."""
        queries = _Places(*(of[rows] for of in self.queries))
        see = _visible(queries, self.keys, self.options.causal, self.options.window)
        s = self.grouped(self.q, rows) @ self.k.transpose(2, 3) * self.options.scale
        return s.unflatten(2, (-1, rows.stop - rows.start)).masked_fill_(~see, -torch.inf)

    def factors(self, rows: slice) -> Tensor | None:
        """What probabilities [B, G, H/G, rows, S'] are multiplied by: dropout's mask, scaled; None without."""
        if not self.options.rate:
            return None
        keep = _kept(self.shape[0], rows, (self.shape[2], self.shape[1]), self.keys, self.options)
        return (keep.to(self.k.dtype) / (1 - self.options.rate)).unflatten(1, (self.num_groups, -1))


def attention_on_host(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options
) -> tuple[Tensor, Tensor]:
    """(y, lse) as forward.launch_attention, on any device; lse in the accumulation dtype."""
    written = _Written(q, k, v, tables, sides, options)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=written.k.dtype, device=q.device)
    for rows in written.blocks():
        s = written.scores(rows)
        block_lse = s.logsumexp(-1)
        p = s.sub_(block_lse.masked_fill(block_lse == -torch.inf, 0)[..., None]).exp_()
        factors = written.factors(rows)
        p = p if factors is None else p.mul_(factors)
        y[:, rows] = written.ungrouped(p.flatten(2, 3) @ written.v, rows)
        lse[:, :, rows] = block_lse.flatten(1, 2)
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
    """As backward.launch_attention_backward, on any device."""
    written = _Written(q, k, v, tables, sides, options)
    dy = dy.to(written.k.dtype)
    delta = (dy * y).sum(-1).transpose(1, 2)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    dq = torch.empty_like(written.q)
    dk, dv = torch.zeros_like(written.k), torch.zeros_like(written.v)
    for rows in written.blocks():
        of_rows = lambda t, rows=rows: t[:, :, rows].unflatten(1, (written.num_groups, -1))[..., None]  # noqa: E731
        p = written.scores(rows).sub_(of_rows(lse)).exp_()
        factors, block_dy = written.factors(rows), written.grouped(dy, rows)
        dp = (block_dy @ written.v.transpose(2, 3)).view(p.shape)
        dropped = p
        if factors is not None:
            dp, dropped = dp.mul_(factors), p * factors
        dv += dropped.flatten(2, 3).transpose(2, 3) @ block_dy
        ds = dp.sub_(of_rows(delta)).mul_(p).mul_(options.scale).flatten(2, 3)
        dq[:, rows] = written.ungrouped(ds @ written.k, rows)
        dk += ds.transpose(2, 3) @ written.grouped(written.q, rows)
    position = (written.position, written.keys.place)
    rotated = zip((dq, dk.transpose(1, 2)), position, strict=True)
    results = [_rotated(d, tables, at, options.interleaved, back=True) for d, at in rotated]
    for out, result in zip(gradients, (*results, dv.transpose(1, 2)), strict=True):
        out.copy_(result)
