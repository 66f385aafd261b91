"""What co-located ranks compute, in every way: a feed-forward network's matmuls on one of 8 ranks.

    gate_up[T, 2F] = all_gather(x[T/R, D]) @ w[2F, D].T         all_gather_matmul
    y[T/R, D]      = reduce_scatter(h[T, F] @ v[D, F].T)        matmul_reduce_scatter

F is the share of one of 8 ranks, as models are trained; rows are exchanged between R co-located ranks, each with its
own weights. What the activation between the two would compute exists already, so that it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness.shapes import Model
from benchmarks.overlap.ranks import VirtualRanks
from benchmarks.overlap.ways import MOST_PUSHED_TOKENS, Rows, Way

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
_LARGEST = 2


class Operands:
    """Every rank's tensors, not filled yet, and buffers that are allocated once.

    Attributes:
        model, tokens, ranks: as given; tokens are those of all ranks.
        x, dy: what is gathered, [T, D].
        w, v: a rank's weights, [2F, D] and [D, F]; w_t, v_t as forward multiplies by them.
        h, dh: what is scattered when multiplied, [T, F] and [T, 2F].
        dw, dv: float32.
    """

    def __init__(self, model: Model, tokens: int, ranks: VirtualRanks, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.tokens, self.ranks = model, tokens, ranks
        depth, ffn = model.hidden, model.ffn

        def empty(*shape: int, of: torch.dtype = dtype) -> list[Tensor]:
            return [torch.empty(shape, dtype=of, device=ranks.device) for _ in range(ranks.world)]

        self.x, self.dy = (Rows(empty(tokens, depth)) for _ in range(2))
        self.w, self.v = empty(2 * ffn, depth), empty(depth, ffn)
        self.w_t, self.v_t = ([m.T for m in each] for each in (self.w, self.v))
        self.h, self.dh = empty(tokens, ffn), empty(tokens, 2 * ffn)
        self.dw, self.dv = empty(2 * ffn, depth, of=torch.float32), empty(depth, ffn, of=torch.float32)

    def fill(self, *, integers: bool) -> None:
        """Fill with small integers, for which every order of sums gives the same bits, or with normal numbers.

        With normal numbers a GPU draws as much power as in training, and so runs at the same clock.
        """
        generator = torch.Generator(self.ranks.device).manual_seed(0)
        for each in (self.x.full[:1], self.dy.full[:1], self.w, self.v, self.h, self.dh):
            for tensor in each:
                if integers:
                    tensor.random_(-_LARGEST, _LARGEST + 1, generator=generator)
                else:
                    tensor.normal_(0, tensor.shape[1] ** -0.5, generator=generator)
        self.x.refresh()
        self.dy.refresh()

    def clear(self) -> None:
        """Zero the gradients."""
        for buffer in (*self.dw, *self.dv):
            buffer.zero_()


@dataclass(frozen=True)
class Case:
    """One thing to compute.

    Attributes:
        name: what is computed.
        compute: computes it in a given way; returns the results of all ranks.
        is_pushed: whether it gathers rows that a kernel may push.
    """

    name: str
    compute: Callable[[Way], list[Tensor]]
    is_pushed: bool


def cases_of(o: Operands) -> list[Case]:
    """Return forward, data gradient, and both with weight gradients, for both operators."""

    def first_forward(way: Way) -> list[Tensor]:
        return way.gather(o.x, o.w_t, GATHER, False)[0]

    def second_forward(way: Way) -> list[Tensor]:
        return way.scatter(o.h, o.v_t, SCATTER)

    def first_dgrad(way: Way) -> list[Tensor]:
        return way.scatter(o.dh, o.w, GATHER)

    def second_dgrad(way: Way) -> list[Tensor]:
        return way.gather(o.dy, o.v, SCATTER, False)[0]

    def first_backward(way: Way) -> list[Tensor]:
        """x was not kept: it is gathered again, hidden by the data gradient's matmul if the way can do that."""
        dx, full = way.scatter_and_gather(o.dh, o.w, o.x, GATHER)
        way.wgrad(o.dw, o.dh, full)
        return [*dx, *o.dw]

    def pair_forward(way: Way) -> list[Tensor]:
        return [*first_forward(way), *second_forward(way)]

    def pair_backward(way: Way) -> list[Tensor]:
        dh, full = way.gather(o.dy, o.v, SCATTER, True)
        assert full is not None, "the gathered rows were asked for"
        way.wgrad(o.dv, full, o.h)
        dx = first_dgrad(way)
        way.wgrad(o.dw, o.dh, o.x.full)
        return [*dh, *dx, *o.dv, *o.dw]

    few = o.tokens <= MOST_PUSHED_TOKENS
    return [
        Case(f"{GATHER}/forward", first_forward, few),
        Case(f"{SCATTER}/forward", second_forward, False),
        Case(f"{GATHER}/dgrad", first_dgrad, False),
        Case(f"{SCATTER}/dgrad", second_dgrad, few),
        Case(f"{GATHER}/backward_regathering", first_backward, False),
        Case("pair/forward", pair_forward, few),
        Case("pair/backward", pair_backward, few),
    ]
