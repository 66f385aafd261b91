"""The seam between layers and communication: differentiable pairs over a `Communicator`.

Layers and buckets call a Communicator and nothing else, so that how bytes travel is decided in one place
(tpkernels.exchange.communicator). The pairs here (gather and reduce_scatter, all_reduce and copy) are for layers of
your own; ours fuse their communication with the matmul (tpkernels.fused.exchange_matmul). `ShardCommunicator` takes the
place of a Communicator in a layer that computes one shard of exact mode (model/exact.py).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

__all__ = ["Communicator", "ShardCommunicator", "Work", "all_reduce", "copy", "gather", "reduce_scatter"]


class ShardCommunicator(Communicator):
    """The ranks of a layer that computes one shard: it has been given all tokens, and others sum what it returns.

        all_gather(x) = x;   reduce_scatter(y) = y

    Args:
        rank, size: the number of the shard, and how many there are.
        holders: the real ranks that hold those shards, over which the gradient of a parameter is summed that shards
            have in common, where no sink of the engine's does that later.
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
        """Sum over the real ranks in place: each of a rank's shards brings its own term. Returns x."""
        return self.holders.all_reduce_(x)

    def broadcast_(self, x: Tensor) -> Tensor:
        """Overwrite with the tensor of the first real rank. Returns x."""
        return self.holders.broadcast_(x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What stands for running processes is `holders`, which says so itself.
        return object.__reduce_ex__(self, protocol)

    def _start(self, x: Tensor, op: Any) -> NoReturn:
        raise AssertionError("a layer of one shard exchanges nothing by itself")


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
    """x, equal on all ranks -> y = x;  dx = all_reduce(dy): the dual of all_reduce."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce_(dy.clone()), None


def gather(x: Tensor, comm: Communicator) -> Tensor:
    """Gather token shards, differentiably: y[T, ...] = all_gather(x[T/tp, ...]);  dx = reduce_scatter(dy)."""
    return x if comm.size == 1 else _Gather.apply(x, comm)


def reduce_scatter(x: Tensor, comm: Communicator) -> Tensor:
    """Sum partial tensors, keep this rank's tokens: y[T/tp, ...] = reduce_scatter(x[T, ...]);  dx = all_gather(dy)."""
    return x if comm.size == 1 else _ReduceScatter.apply(x, comm)


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """Sum partial tensors: y = all_reduce(x);  dx = dy. For a y that every rank goes on to use alike."""
    return x if comm.size == 1 else _AllReduce.apply(x, comm)


def copy(x: Tensor, comm: Communicator) -> Tensor:
    """Hand a replicated tensor to sharded work: y = x;  dx = all_reduce(dy)."""
    return x if comm.size == 1 else _Copy.apply(x, comm)
