"""The interface between layers and communication: differentiable pairs over a `Communicator`.

Layers and buckets communicate through a Communicator only, so that how bytes travel is decided in one place
(tpkernels.exchange.communicator). The pairs here (gather and reduce_scatter, all_reduce and copy) are for layers of
your own; ours fuse their communication with the matmul (tpkernels.fused). A layer that computes one
shard of exact mode (model/exact.py) is given a `ShardCommunicator` instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Done, Work
from tpkernels.exchange.tree import tree_sum
from tpkernels.fused.gather import FEW_ROWS

__all__ = [
    "Communicator",
    "Done",
    "ShardCommunicator",
    "WholeRows",
    "Work",
    "all_reduce",
    "copy",
    "gather",
    "reduce_scatter",
]


class ShardCommunicator(Communicator):
    """The communicator of a layer that computes one shard of exact mode.

        all_gather(x) = x;   reduce_scatter(y) = y

    It exchanges nothing: the layer is given all tokens, and ExactLayer sums what the shards return.

    Args:
        rank, size: the number of the shard, and how many there are.
        holders: the real ranks that hold the shards. Where no sink of the engine sums it later, the gradient of a
            parameter that shards have in common is summed over them.
    """

    def __init__(self, rank: int, size: int, holders: Communicator) -> None:
        super().__init__(None)
        self.rank, self.size, self.holders = rank, size, holders

    def all_gather_rows(self, x: Tensor, num_rows: int, *, operation: str = "all_gather") -> Tensor:
        """Return x: it holds all rows."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return x: `collect` adds it to the other shards' terms."""
        return x

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over the real ranks in place; each shard of a rank calls this with its own term. Return x."""
        return self.holders.all_reduce_(x)

    def broadcast_(self, x: Tensor) -> Tensor:
        """Overwrite x with the tensor of the first real rank. Return x."""
        return self.holders.broadcast_(x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only `holders` stands for running processes; it refuses to be pickled by itself.
        return object.__reduce_ex__(self, protocol)

    def _start(self, x: Tensor, op: Any) -> NoReturn:
        raise AssertionError("a layer of one shard exchanges nothing by itself")


class WholeRows(Communicator):
    """The communicator of layers whose activations are not cut over tp: every rank has all rows, bit for bit.

        all_gather(x) = x;   reduce_scatter(y) = the sum of all ranks' y, whole

    For passes over few rows without a backward: a row cannot be cut, and one exchange of a block's half takes the place
    of two. Rows are those of one rank; the layers' matrices are cut as ever.

    Args:
        over: the tp ranks.
    """

    def __init__(self, over: Communicator) -> None:
        super().__init__(None)
        self.rank, self.size, self.over = over.rank, over.size, over

    @property
    def row_part(self) -> int:
        """The whole."""
        return 0

    @property
    def num_row_parts(self) -> int:
        """One: the whole."""
        return 1

    def all_gather_rows(self, x: Tensor, num_rows: int, *, operation: str = "all_gather") -> Tensor:
        """Return x: it is all rows."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x[T, D], whole, the same bits on every rank.

        Few rows in one exchange: each rank adds what all have, in a balanced tree.
        """
        if self.size == 1:
            return x
        if len(x) > FEW_ROWS:
            return self.over.all_gather_rows(self.over.reduce_scatter(x), len(x))
        arena = self.over.arena_for(x)
        if arena is not None:
            return arena.sum_of_rows(x)
        return tree_sum(self.over.all_gather(x).view(self.size, *x.shape).unbind()).to(x.dtype)

    def broadcast_(self, x: Tensor) -> Tensor:
        """Overwrite x with the tensor of the first rank. Return x."""
        return self.over.broadcast_(x)

    def _start(self, x: Tensor, op: Any) -> NoReturn:
        raise AssertionError("whole rows are for passes without a backward")


def of_all_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """Return x[n, ...] of all ranks, one behind the other: [R n, ...], also where every rank has all rows."""
    return (comm.over if isinstance(comm, WholeRows) else comm).all_gather(x)


class _Gather(torch.autograd.Function):
    """x[T/tp, ...] -> y[T, ...];  dx = reduce_scatter(dy)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return comm.all_gather(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(dy), None


class _ReduceScatter(torch.autograd.Function):
    """x[T, ...] partial -> y[T/tp, ...];  dx = all_gather(dy)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return comm.reduce_scatter(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(dy), None


class _AllReduce(torch.autograd.Function):
    """x partial -> y, equal on all ranks;  dx = dy (each rank already holds the whole gradient of y)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce_(x.clone())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Copy(torch.autograd.Function):
    """x, equal on all ranks -> y = x;  dx = all_reduce(dy). It is the dual of all_reduce."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce_(dy.clone()), None


def gather(x: Tensor, comm: Communicator) -> Tensor:
    """Gather token shards; differentiable: y[T, ...] = all_gather(x[T/tp, ...]);  dx = reduce_scatter(dy)."""
    return x if comm.size == 1 else _Gather.apply(x, comm)


def reduce_scatter(x: Tensor, comm: Communicator) -> Tensor:
    """Sum partial tensors, keep this rank's tokens: y[T/tp, ...] = reduce_scatter(x[T, ...]);  dx = all_gather(dy)."""
    return x if comm.size == 1 else _ReduceScatter.apply(x, comm)


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """Sum partial tensors: y = all_reduce(x);  dx = dy. Every rank must use y in the same way afterwards."""
    return x if comm.size == 1 else _AllReduce.apply(x, comm)


def copy(x: Tensor, comm: Communicator) -> Tensor:
    """Pass a replicated tensor to sharded computation: y = x;  dx = all_reduce(dy)."""
    return x if comm.size == 1 else _Copy.apply(x, comm)
