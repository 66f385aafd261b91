"""Token embedding whose rows are cut over tp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.embedding import check_rows_and_table, embedding_forward

from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.placement import Placement, check_tokens, cut
from tpengine.layers.vocabulary.loss import check_range


class _VocabParallelEmbedding(torch.autograd.Function):
    """Local shapes: tokens[T] (all of them on every rank), w[V/tp, D], y[T/tp, D].

    forward:  y = reduce_scatter(w's row for each token of this rank's range, zeros for other tokens)
    wgrad:    dw[token] += all_gather(dy)[t] for the tokens of this rank's range, into the sink
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, comm: Communicator, sink: GradientSink) -> Tensor:
        rows = tokens - comm.rank * weight.shape[0]
        ctx.save_for_backward(rows)
        ctx.comm, ctx.sink, ctx.parameter = comm, sink, weight
        partial = embedding_forward(rows, weight)
        return partial if comm.size == 1 else comm.reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a vocabulary-parallel embedding")
        (rows,) = ctx.saved_tensors
        full = ctx.comm.all_gather(dy)
        dw = ctx.sink.add_rows(ctx.parameter, rows, full) if ctx.needs_input_grad[1] else None
        return None, dw, None, None


class VocabParallelEmbedding(nn.Module):
    """Look tokens up in a table whose rows are cut over tp.

        y[T/tp, D] = reduce_scatter_tp(w[V/tp, D][tokens[T]])

    Args:
        num_embeddings, embedding_dim: V (a multiple of tp) and D, global.
        comm: the tp ranks.
        sink: where the weight gradient goes; default `weight.grad`.
        dtype, device: of the weight, as torch.

    Shape: tokens [T] int64, equal on every tp rank, 0 <= token < V; y [T/tp, D].

    Raises:
        ValueError: V or T is not divisible by tp; on a CPU, a token outside the table. On a GPU that check would wait
            for the device: there such a token gives a row of zeros.

    Cost: (tp-1)/tp*T*D elements sent.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings % comm.size:
            up = -(-num_embeddings // comm.size) * comm.size
            raise ValueError(
                f"the vocabulary must be divisible by tp: {num_embeddings} rows, tp {comm.size}: pad to {up}"
            )
        self.comm = comm
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(num_embeddings // comm.size, embedding_dim, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=0.02)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: rows are cut."""
        return {"weight": cut(self.comm, 0)}

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[T] -> y[T/tp, D]."""
        weight = self.weight
        check_rows_and_table(tokens, weight, "weight")
        check_tokens(len(tokens), self.comm.num_row_parts)
        check_range("tokens", tokens, weight.shape[0] * self.comm.size)
        check_reaches(self.sink, weight, "an embedding's table")
        y: Tensor = _VocabParallelEmbedding.apply(tokens, weight, self.comm, self.sink)
        return y
