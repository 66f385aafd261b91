"""Biases of tensor-parallel layers, and learned positions: rows that are added to activations.

    cut:     y[T, F/tp] + b[F/tp]              an output-parallel product; db = the sum of dy over all tokens
    whole:   x[T/tp, D] + b[D]                 behind an input-parallel product; db partial(tp), over this rank's tokens
    places:  x[T/tp, D] + w[position of each token]

Like weights, they give their gradients to a sink, which may leave them to autograd. What is whole on every rank takes
several sinks, each for an equal block of the tokens: so exact mode's sums do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.embedding import add_rows_

from tpengine.layers.gradient_sink import GradientSink, check_reaches, total_of
from tpengine.layers.placement import Placement, whole
from tpengine.layers.rows import Rows, length_of

Biases = Sequence[tuple[Tensor, Communicator | None]]


def _summed_rows(dy: Tensor) -> Tensor:
    """Return db[F] of dy[T, F], in promote_types(dtype, float32)."""
    return dy.sum(0, dtype=accumulation_dtype(dy.dtype))


class _AddCut(torch.autograd.Function):
    """y[T, F] + (b_0, b_1, ...)[F];  db_i = the sum of its columns of dy, into the sink."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, row: Tensor, biases: Biases, sink: GradientSink, *_: Tensor) -> Tensor:
        ctx.biases, ctx.sink = biases, sink
        ctx.mark_dirty(y)
        return y.add_(row)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a bias of a tensor-parallel layer")
        pieces = dy.split([len(bias) for bias, _ in ctx.biases], dim=1)
        dbs = [
            ctx.sink.add(bias, _summed_rows(piece), partial) if is_trained else None
            for (bias, partial), piece, is_trained in zip(ctx.biases, pieces, ctx.needs_input_grad[4:], strict=True)
        ]
        return (dy, None, None, None, *dbs)


def add_cut_bias(y: Tensor, biases: Biases, sink: GradientSink) -> Tensor:
    """Add biases[F] to y[T, F], side by side, in place; F is this rank's.

    Args:
        y: what a matmul has returned; nobody else may need it.
        biases: each with the ranks that hold it too, with a part of its gradient.
        sink: where the gradients go.
    """
    tensors = [bias for bias, _ in biases]
    for bias in tensors:
        check_reaches(sink, bias, "a bias")
    row = torch.cat(tensors)
    # Autograd, which the compiler leaves the gradients to, sums none over ranks.
    is_alone = all(ranks is None for _, ranks in biases)
    if torch.compiler.is_compiling() and sink.is_autograds and is_alone:
        return y + row.to(y.dtype)
    if not is_recorded():
        return y.add_(row)
    added: Tensor = _AddCut.apply(y, row.detach(), biases, sink, *tensors)
    return added


class _AddWhole(torch.autograd.Function):
    """x[T, D] + b[D];  db = the sum of each block of dy, into the block's sink, partial(comm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, comm: Communicator, sinks: Sequence[GradientSink]) -> Tensor:
        ctx.bias, ctx.comm, ctx.sinks = bias, comm, sinks
        # Autocast: the product is in 16 bits, and stays so.
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a bias of a tensor-parallel layer")
        db = None
        if ctx.needs_input_grad[1]:
            blocks = zip(ctx.sinks, dy.contiguous().chunk(len(ctx.sinks)), strict=True)
            db = total_of([sink.add(ctx.bias, _summed_rows(block), ctx.comm) for sink, block in blocks])
        return dy, db, None, None


def add_whole_bias(x: Tensor, bias: Tensor, comm: Communicator, sinks: Sequence[GradientSink]) -> Tensor:
    """Return x[T, D] + b[D]; each of the n sinks gets db summed over its block of T/n tokens, partial(comm)."""
    check_reaches(sinks[0], bias, "a bias")
    if not is_recorded():
        return x + bias.to(x.dtype)
    y: Tensor = _AddWhole.apply(x, bias, comm, sinks)
    return y


class _AddPositions(torch.autograd.Function):
    """x[T, D] + w[places[T]];  dw[places[t]] += dy[t], of each block into the block's sink, partial(comm)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, places: Tensor, comm: Communicator, sinks: Sequence[GradientSink]
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.weight, ctx.comm, ctx.sinks = weight, comm, sinks
        return x + weight[places]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("learned positions")
        (places,), num = ctx.saved_tensors, len(ctx.sinks)
        found = []
        if ctx.needs_input_grad[1]:
            blocks = zip(dy.contiguous().chunk(num), places.chunk(num), strict=True)
            for sink, (block, rows) in zip(ctx.sinks, blocks, strict=True):
                dw = torch.zeros(ctx.weight.shape, dtype=accumulation_dtype(dy.dtype), device=dy.device)
                add_rows_(dw, rows, block)
                found.append(sink.add(ctx.weight, dw, ctx.comm))
        return dy, total_of(found), None, None, None


class LearnedPositions(nn.Module):
    """Add a row of a learned table to each token, by its place in the sequence.

        y[T/tp, D] = x[T/tp, D] + w[P, D][place of each token]

    Args:
        num_positions, hidden_size: P and D.
        comm: the tp ranks, which hold other tokens of the same batch. Construction is collective: all take the first
            one's table.
        sink: where the gradient goes; default `weight.grad`, summed over tp at once.
        dtype, device: of the weight, as torch.

    Cost: T/tp*D additions; backward adds dy's rows into P*D elements.
    """

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(num_positions, hidden_size, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=0.02)
        if not self.weight.is_meta:
            # Every rank holds the whole table, whatever each generator drew.
            comm.broadcast_(self.weight.detach())

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: whole, and each rank's gradient is of its own tokens."""
        return {"weight": whole(self.comm)}

    def forward(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]; `seq` says what the T rows are."""
        return self.in_blocks(x, seq, self.comm.row_part * len(x), (self.sink,))

    def in_blocks(self, x: Tensor, seq: Rows, first: int, sinks: Sequence[GradientSink]) -> Tensor:
        """Return y[T, D] for the tokens from number `first` on; each sink gets the gradient of its block of tokens."""
        length, weight = length_of(seq), self.weight
        if length > len(weight):
            raise ValueError(f"learned positions end at {len(weight)}: sequences of {length} tokens: use fewer")
        if isinstance(seq, int):
            places = torch.arange(first, first + len(x), device=x.device) % seq
        else:
            places = seq.places[first : first + len(x)].long()
        check_reaches(sinks[0], weight, "a table of positions")
        y: Tensor = _AddPositions.apply(x, weight, places, self.comm, sinks)
        return y
