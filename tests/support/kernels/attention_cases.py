"""What attention is tested with: cases, their operands, the operator and its specification for each.

Used by tests/kernels/ops/attention/test_attention.py and test_operators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tpkernels.ops.attention import attention
from tpkernels.ops.attention.host import AttentionDropout
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.attention.operator import attention_op
from tpkernels.ops.attention.reference import attention_reference
from tpkernels.ops.dropout import DropoutStream

from support.kernels.precision import unwritten_is_nan

STREAM = DropoutStream(rate=0.3, seed=1, site="layer 0/attention", step=4, microbatch=1)
FIRST_HEAD, NUM_HEADS = 2, 8


@dataclass(frozen=True)
class Case:
    """What attention is asked for; names as the operator's, `columns` of a head.

    Attributes:
        rotated: None, or whether the columns of a pair are neighbours.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    columns: int
    batch: int = 1
    causal: bool = True
    window: int | None = None
    query_starts: tuple[int, ...] | None = None
    key_starts: tuple[int, ...] | None = None
    rotated: bool | None = None
    dropped: bool = False

    @property
    def dropout(self) -> AttentionDropout | None:
        return AttentionDropout(STREAM, FIRST_HEAD, NUM_HEADS) if self.dropped else None

    @property
    def options(self) -> Options:
        numbers = (*STREAM.numbers[1:], FIRST_HEAD, NUM_HEADS) if self.dropped else ()
        rate = STREAM.rate if self.dropped else 0.0
        return Options(self.causal, self.window or 0, self.columns**-0.5, bool(self.rotated), rate, numbers)

    @property
    def is_plain(self) -> bool:
        return self.causal and self.window is None and self.query_starts is None and self.queries == self.keys

    def sides(self, device: str) -> Sides:
        """Starts of queries in int32 and of keys in int64."""
        if self.query_starts is None:
            return Sides(None, None)
        queries = torch.tensor(self.query_starts, dtype=torch.int32, device=device)
        return Sides(queries, torch.tensor(self.key_starts or self.query_starts, device=device))

    def documents(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each document."""
        queries = self.query_starts or (0, self.queries)
        keys = self.key_starts or self.query_starts or (0, self.keys)
        for i in range(len(queries) - 1):
            yield slice(*queries[i : i + 2]), slice(*keys[i : i + 2])


def growing(case: Case) -> Tensor:
    """Factors [S', 1, 1] that make a document's first values small, for its first queries not to be the most wrong.

    Where only one key is seen, gradients of the scores are 0, and torch's exactly: it takes equal numbers from each
    other. From dy and y, as attention in blocks has to have it, comes another rounding.
    """
    alone = [torch.arange(1, 1 + keys.stop - keys.start).div(8).clamp(max=1) for _, keys in case.documents()]
    return torch.cat(alone)[:, None, None]


def operands(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
    """q as a part of a fused projection's output, k with heads before tokens, v with tokens before sequences."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.batch, case.queries, case.heads + 1, case.columns, generator=generator).div(2)
    k, v = torch.randn(2, case.batch, case.keys, case.kv_heads, case.columns, generator=generator)
    k, v = k.transpose(1, 2).contiguous(), (v * growing(case)).transpose(0, 1).contiguous()
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    views = {"q": q[:, :, 1:], "k": k.transpose(1, 2), "v": v.transpose(0, 1)}
    return {name: tensor.requires_grad_() for name, tensor in views.items()}


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator."""
    sides = case.sides(str(q.device))
    if case.is_plain and q.device.type == "cpu" and q.element_size() == 2:
        # The public function leaves this to torch on the host, whose error torch's is.
        return attention_op(q, k, v, None, None, *sides, *case.options.packed)[0]
    return attention(
        q,
        k,
        v,
        causal=case.causal,
        window=case.window,
        dropout=case.dropout,
        query_starts=sides.query_starts,
        key_starts=sides.key_starts if case.key_starts else None,
    )


def specification(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reference: where a document's mask is not a matter of its place, of each document alone."""
    options, unpacked = case.options, Sides(None, None)
    if case.dropped:
        return attention_reference(q, k, v, Tables(None, None), case.sides(str(q.device)), options)
    alone = [
        attention_reference(q[:, some], k[:, seen], v[:, seen], Tables(None, None), unpacked, options)
        for some, seen in case.documents()
    ]
    return torch.cat(alone, dim=1)


def visible_by_definition(case: Case) -> Tensor:
    """Which keys each query sees, one by one: bool [queries, keys]."""
    see = torch.zeros(case.queries, case.keys, dtype=torch.bool)
    window = case.window or case.queries + case.keys
    for queries, keys in case.documents():
        for i in range(queries.start, queries.stop):
            last = keys.stop - (queries.stop - i)
            for j in range(keys.start, keys.stop):
                see[i, j] = last - window < j <= last if case.causal else abs(last - j) < window
    return see


def scores_by_definition(case: Case, q: Tensor, k: Tensor) -> Tensor:
    """[B, H, S, S'], -inf where a key is not seen."""
    q, k = q.transpose(1, 2), k.repeat_interleave(case.heads // case.kv_heads, dim=2).transpose(1, 2)
    s = q @ k.transpose(2, 3) * case.columns**-0.5
    return s.masked_fill(~visible_by_definition(case).to(s.device), -torch.inf)


def outcome(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """y and the gradient of every input, whatever is not written being NaN."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with unwritten_is_nan():
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]
