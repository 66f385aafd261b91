"""The collectives of a process group, for tensors that go through no arena: of torch.distributed, or direct exchanges.

The decision a reader will question: over gloo, gather and reduce-scatter are direct exchanges between the ranks and
not gloo's own collectives. A tensor of 0.5 MB between 2 ranks takes 0.58 ms instead of 0.68 (gather) and 0.68 ms
instead of 1.07 (reduce-scatter; row gloo_exchange of benchmarks/results). Also, the sum is taken in a balanced tree of
ranks, so that it is the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.pending import Collective, Messages, Parts, Work
from tpkernels.exchange.tree import tree_sum

# torch 2.13 has renamed these two and warns about the old names; 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """What a communicator of several ranks does over its process group.

    Args:
        group: the ranks.

    Attributes:
        rank, size: this rank's place in the group and the number of ranks.
        is_gloo: whether the group's backend is gloo, which works on host memory.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_gloo = dist.get_backend(group) == "gloo"

    def broadcast_(self, x: Tensor) -> None:
        """Overwrite the ranks' tensors with that of the group's rank 0."""
        host = x.cpu().contiguous() if self.is_gloo else x.contiguous()
        dist.broadcast(host, group=self._group, group_src=0)
        if host is not x:
            x.copy_(host)

    def start_all_reduce(self, x: Tensor, op: Any) -> Work:
        """Begin to reduce the ranks' tensors in place."""
        if (self.is_gloo and x.is_cuda) or not x.is_contiguous():
            # A contiguous copy: the collective would also sum what lies between the elements of a strided tensor.
            host = x.cpu().contiguous() if self.is_gloo else x.contiguous()
            return Collective(dist.all_reduce(host, op, group=self._group, async_op=True), (host, x))
        return Collective(dist.all_reduce(x, op, group=self._group, async_op=True))

    def start_all_gather(self, own: Tensor, full: Tensor) -> Work:
        """Begin as `Communicator.start_all_gather`."""
        if self.is_gloo and full.is_cuda:
            host = torch.empty(full.shape, dtype=full.dtype)
            return Collective(_all_gather_single(host, own.cpu(), group=self._group, async_op=True), (host, full))
        if self.is_gloo:
            return self._start_exchange(own, full.view(self.size, -1))
        return Collective(_all_gather_single(full, own, group=self._group, async_op=True))

    def start_reduce_scatter(self, x: Tensor, out: Tensor, *, in_tree: bool) -> Work:
        """Begin as `Communicator.start_reduce_scatter`."""
        if not self.is_gloo and not in_tree:
            return Collective(_reduce_scatter_single(out, x, group=self._group, async_op=True))
        x = x.cpu() if self.is_gloo else x
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=self._group, async_op=True)
        return Parts(work, parts.view(self.size, -1).unbind(), out)

    def gather(self, x: Tensor, num_rows: int) -> Tensor:
        """Return the ranks' shards of `num_rows` rows, one behind the other."""
        most = -(-num_rows // self.size)
        x = _padded(x, most)
        if self.is_gloo:
            full = self._on_host(self._exchange_shards, x)
        else:
            full = x.new_empty(self.size * most, *x.shape[1:])
            _all_gather_single(full, x, group=self._group)
        return full[:num_rows]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum."""
        if self.is_gloo:
            return self.reduce_scatter_in_tree(x)
        own = shard_rows(len(x), self.size, self.rank)
        most = -(-len(x) // self.size)
        part = x.new_empty(most, *x.shape[1:])
        # `group` by keyword: the third argument is the reduce operation.
        _reduce_scatter_single(part, _padded(x, self.size * most), group=self._group)
        return part[: own.stop - own.start]

    def reduce_scatter_in_tree(self, x: Tensor) -> Tensor:
        """Return the same: send each other rank its rows, and add the received ones in a balanced tree."""
        own = shard_rows(len(x), self.size, self.rank)
        x = _padded(x, self.size * -(-len(x) // self.size))
        part = self._on_host(self._exchange_and_add, x) if self.is_gloo else self._exchange_and_add(x)
        return part[: own.stop - own.start]

    def exchange_rows(self, x: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send rank j its num_sent[j] rows of x, which lie in the order of ranks; return what came, in that order."""

        def exchanged(rows: Tensor) -> Tensor:
            out = rows.new_empty(sum(num_received), *rows.shape[1:])
            dist.all_to_all_single(out, rows, list(num_received), list(num_sent), group=self._group)
            return out

        return self._on_host(exchanged, x.contiguous()) if self.is_gloo else exchanged(x.contiguous())

    def _on_host(self, exchange: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return exchange(x.cpu()).to(x.device) if x.is_cuda else exchange(x)

    def _exchange_shards(self, x: Tensor) -> Tensor:
        full = x.new_empty(self.size, *x.shape)
        self._start_exchange(x, full).wait()
        return full.flatten(0, 1)

    def _start_exchange(self, own: Tensor, full: Tensor) -> Work:
        """Begin sending `own` to each other rank, and receiving theirs in the rows of `full`; copy it into its row."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        pending = [dist.irecv(full[peer], group=self._group, group_src=peer) for peer in others]
        pending += [dist.isend(own, group=self._group, group_dst=peer) for peer in others]
        if full[self.rank].data_ptr() != own.data_ptr():
            full[self.rank].copy_(own)
        return Messages(pending, own)

    def _exchange_and_add(self, x: Tensor) -> Tensor:
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=self._group)
        terms = parts.view(self.size, x.shape[0] // self.size, *x.shape[1:])
        return tree_sum(terms.unbind()).to(x.dtype)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    if len(x) == num_rows:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(num_rows - len(x), *x.shape[1:])))
