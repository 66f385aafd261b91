"""Rung: gloo ranks. Second derivatives and those of forward mode, which no layer has: they raise."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.autograd import forward_ad
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tpengine.layers.collectives import all_reduce, copy, gather, reduce_scatter
from tpengine.layers.mlp import activated
from tpengine.layers.scores import rope
from tpengine.model.exact import Shards, collect, spread, stacked

D, T = 4, 6
LABELS = torch.arange(T) % 4


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def errors_of_derivatives() -> dict[str, tuple[str, str, str]]:
    """What a second derivative of each raises, of a sum and of squares, and what a tangent does."""
    comm = Communicator(dist.group.WORLD)
    shards = Shards(comm, 2)
    norm = RMSNorm(D, comm)
    table, tokens = VocabParallelEmbedding(8, D, comm), torch.arange(T) % 8
    angles = torch.rand(T, 2)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gather": lambda x: gather(x, comm),
        "reduce_scatter": lambda x: reduce_scatter(x, comm),
        "all_reduce": lambda x: all_reduce(x, comm),
        "copy": lambda x: copy(x, comm),
        "spread": lambda x: spread(x, shards)[0],
        "collect": lambda x: collect([x], shards),
        "stacked": lambda x: stacked([x], shards),
        "column-parallel": ColumnParallelLinear(D, 2 * comm.size, comm),
        "row-parallel": RowParallelLinear(D * comm.size, 2, comm),
        "norm": norm,
        "norm with a residual": lambda x: norm.add(x, x)[0],
        "embedding": lambda x: table(tokens) + x[: T // comm.size],
        "gated_silu": lambda y: activated(y, "silu", True),
        "rope": lambda x: rope(x.view(1, 1, T, D), angles, angles),
        "cross-entropy": lambda x: vocab_parallel_cross_entropy(x, LABELS, 8, comm),
    }
    found = {}
    for name, function in functions.items():

        def second(reduce: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor] = function) -> None:
            x = torch.randn(T, D, requires_grad=True)
            reduce(function(x)).backward(create_graph=True)
            assert x.grad is not None
            (x.grad.sum() + x.sum()).backward()

        def forward_mode(function: Callable[[Tensor], Tensor] = function) -> None:
            with forward_ad.dual_level():
                function(forward_ad.make_dual(torch.randn(T, D), torch.ones(T, D)))

        of_sum = raised_by(lambda second=second: second(torch.sum))  # type: ignore[misc]
        of_squares = raised_by(lambda second=second: second(lambda y: y.square().sum()))  # type: ignore[misc]
        found[name] = of_sum, of_squares, raised_by(forward_mode)
    return found


def test_no_derivative_is_left_out(ranks: RankPool) -> None:
    for found in ranks.run(errors_of_derivatives, 2):
        assert len(found) == 15
        for name, (of_sum, of_squares, of_tangent) in found.items():
            assert of_sum == of_squares and "differentiable once" in of_sum, (name, of_sum, of_squares)
            with_weights = ("column-parallel", "row-parallel", "norm", "norm with a residual", "embedding")
            assert ("and so are its weights: got create_graph=True" in of_sum) == (name in with_weights), name
            assert "jvp function" in of_tangent or name == "embedding", (name, of_tangent)
