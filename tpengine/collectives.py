"""The seam between layers and communication: one process group seen as gather, reduce-scatter and all-reduce.

Layers and buckets call a `Communicator` and nothing else, so that how bytes travel is decided here. A communicator
of one rank does nothing and copies nothing. The differentiable pairs at the end (gather and reduce_scatter, all_reduce
and copy) are for layers of your own; ours fuse their collectives with the matmul's Function.

The decision a reader will question: over gloo, gather and reduce-scatter are direct exchanges between the ranks and
not gloo's own collectives. A tensor of 0.5 MB between 2 ranks takes 0.58 ms instead of 0.68 (gather) and 0.68 ms
instead of 1.07 (reduce-scatter; row gloo_exchange of benchmarks/results), and the sum is taken in rank order, so that
it is the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until the result is there (on CUDA: until the current stream will see it)."""


class _Done:
    """A collective of one rank."""

    def wait(self) -> None:
        return None


class _Staged:
    """A collective on a host copy of a CUDA tensor: waiting copies the result back."""

    def __init__(self, pending: Pending, host: Tensor, target: Tensor) -> None:
        self.pending, self.host, self.target = pending, host, target

    def wait(self) -> None:
        self.pending.wait()
        self.target.copy_(self.host)


class Communicator:
    """One process group as layers and buckets see it.

    Args:
        group: the ranks; None stands for this rank alone.

    Attributes:
        rank, size: this rank's place in the group and the number of ranks.

    Order: blocking calls return when the result may be read (on CUDA: by the current stream). All members must call
        in the same order. Numerics: reduce-scatter over gloo adds in rank order.
        Where the group is gloo's and tensors live on a GPU (several ranks on one card), data is staged through
        the host.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._gloo = group is not None and dist.get_backend(group) == "gloo"

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along dim 0.

            y[R*n, ...] = all_gather(x[n, ...])

        Args:
            x: the same shape and dtype on every rank.

        Returns:
            A new tensor; with one rank `x` itself.

        Cost: each rank sends (R - 1) times its bytes.
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        if not self._gloo:
            full = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            _all_gather_single(full, x, self.group)
            return full
        return self._on_host(self._exchange_shards, x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors and keep this rank's slice of dim 0.

            y[n, ...] = sum over ranks of x[R*n, ...], rows rank*n .. (rank+1)*n

        Args:
            x: the same shape on every rank, dim 0 a multiple of R.

        Returns:
            A new tensor; with one rank `x` itself.

        Cost: each rank sends (R - 1)/R of its bytes. Over gloo extra memory of one tensor.
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        if not self._gloo:
            part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
            _reduce_scatter_single(part, x, self.group)
            return part
        return self._on_host(self._exchange_and_add, x)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place: x = sum over ranks of x. Returns x."""
        self.start_all_reduce(x).wait()
        return x

    def all_reduce_max_(self, x: Tensor) -> Tensor:
        """Take the elementwise maximum over the ranks in place. Returns x."""
        self._start(x, dist.ReduceOp.MAX).wait()
        return x

    def broadcast_(self, x: Tensor) -> Tensor:
        """Overwrite the ranks' tensors with that of the group's rank 0. Returns x."""
        if self.size > 1:
            host = x.cpu() if self._gloo and x.is_cuda else x
            dist.broadcast(host, group=self.group, group_src=0)
            if host is not x:
                x.copy_(host)
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Begin summing the ranks' tensors in place; `x` must not be touched before `wait()` of the result."""
        return self._start(x, dist.ReduceOp.SUM)

    def _start(self, x: Tensor, op: Any) -> Pending:
        if self.size == 1:
            return _Done()
        if self._gloo and x.is_cuda:
            host = x.cpu()
            return _Staged(dist.all_reduce(host, op, group=self.group, async_op=True), host, x)
        pending: Pending = dist.all_reduce(x, op, group=self.group, async_op=True)
        return pending

    def _on_host(self, exchange: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return exchange(x.cpu()).to(x.device) if x.is_cuda else exchange(x)

    def _exchange_shards(self, x: Tensor) -> Tensor:
        full = x.new_empty(self.size, *x.shape)
        full[self.rank].copy_(x)
        others = [peer for peer in range(self.size) if peer != self.rank]
        pending = [dist.isend(x, group=self.group, group_dst=peer) for peer in others]
        pending += [dist.irecv(full[peer], group=self.group, group_src=peer) for peer in others]
        for work in pending:
            assert work is not None
            work.wait()
        return full.flatten(0, 1)

    def _exchange_and_add(self, x: Tensor) -> Tensor:
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=self.group)
        terms = parts.view(self.size, x.shape[0] // self.size, *x.shape[1:])
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        return total


# torch 2.13 renamed these two and warns about the old names, which are all that 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """x[T/tp, ...] -> y[T, ...];  dx = reduce_scatter(dy)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(dy), None


class _ReduceScatter(torch.autograd.Function):
    """x[T, ...] partial -> y[T/tp, ...];  dx = all_gather(dy)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return comm.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(dy), None


class _AllReduce(torch.autograd.Function):
    """x partial -> y, equal on all ranks;  dx = dy (each rank already holds the whole gradient of y)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce_(x.clone())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Copy(torch.autograd.Function):
    """x, equal on all ranks -> y = x;  dx = all_reduce(dy): the dual of all_reduce."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
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
