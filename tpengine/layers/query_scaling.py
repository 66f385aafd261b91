"""Queries that grow with their position, so that scores of long sequences stay sharp.

    q[p] *= 1 + beta ln(1 + floor(p / length))

In sequences of at most `length` tokens it is one everywhere, and nothing is computed. The rotation is linear, so that
it does not matter which of both comes first.

Source: Meta's Llama 4 ("attention temperature tuning"), which Ministral 3 has too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tpkernels.derivatives import differentiable_once, is_recorded
from tpkernels.launch import accumulation_dtype


@dataclass(frozen=True)
class QueryScaling:
    """What queries are multiplied by: see above.

    Attributes:
        beta: how much.
        length: tokens after which they begin to grow.
    """

    beta: float
    length: int

    def factors(self, seq: int, like: Tensor) -> Tensor | None:
        """Return the factor of each position, [S] in promote_types(like, float32); None where all are 1."""
        return None if seq <= self.length else _factors(self, seq, accumulation_dtype(like.dtype), like.device)


@functools.lru_cache(maxsize=16)
def _factors(scaling: QueryScaling, seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # As the rotary tables they serve all modes. In float32 for every dtype, as transformers has it.
    with torch.inference_mode(False):
        turns = (torch.arange(seq, device="cpu") // scaling.length).float()
        return (1 + scaling.beta * torch.log(1 + turns)).to(dtype).to(device)


def _grown(qkv: Tensor, num_columns: int, factors: Tensor) -> Tensor:
    y = qkv.clone(memory_format=torch.contiguous_format)
    y[:, :num_columns].unflatten(0, (-1, len(factors))).mul_(factors[:, None])
    return y


class _Grown(torch.autograd.Function):
    """Local shapes: qkv, y[T, (H + 2G) E / tp].  y = the query columns of qkv times factors[S], the others copied.

    dgrad:  the same of dy
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_columns: int, factors: Tensor) -> Tensor:
        ctx.num_columns = num_columns
        ctx.save_for_backward(factors)
        return _grown(qkv, num_columns, factors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _grown(dy, ctx.num_columns, *ctx.saved_tensors), None, None


def with_scaled_queries(qkv: Tensor, num_columns: int, factors: Tensor) -> Tensor:
    """Return qkv[T, (H + 2G) E / tp] with its first columns multiplied.

    Args:
        qkv: rows of whole sequences, batch first.
        num_columns: of queries.
        factors: [S], of a sequence's rows; or [T].
    """
    if not is_recorded():
        return _grown(qkv, num_columns, factors)
    y: Tensor = _Grown.apply(qkv, num_columns, factors)
    return y
