"""Exact mode's experts on N ranks that share them: each rank has all V chunks of its own whole networks.

Local shapes: n = V/tp held shards; R = T k rows of this replica, R' those that this rank's experts get of all replicas.

    Xs[R, D] = rows of X[T, D], sorted by expert        every tp rank has them all, as every one routes all tokens
    Xs'[R', D] = send(Xs)                               by replica, expert and token
    Ys'_v[R', D] = chunk v of F of each expert          one product for each (expert, micro-batch, chunk)
    Ys_v[R, D] = give_back(Ys'_v)                       to the tp rank of the same replica that holds shard v
    backward: dYs' = send(dYs), the same for all shards;  dXs_v = give_back(dXs'_v);  wgrad at the experts' owner

So what a shard gets is, bit for bit, what ExpertNetworks over a ShardCommunicator would have made on its own rank: the
same rows in the same order, by the same part of F. All before and behind it (routing, the sum of a token's k rows, the
router's gradient, the tree over shards) is the layer's that cuts each expert over tp, and does not know.

The ranks of d replicas may share experts: N = d tp. Rows of two replicas are of two micro-batches, so each replica is a
**lane**: with products of its own, and with sinks of its own, whose blocks of micro-batches are added up apart
(data_parallel/bucket.py joins them).

The decision a reader will question: V partial rows come back for each row that is sent, 1 + V rows on the way instead
of 2. To add them at the expert's owner would be another order of sums: the V parts of each row first, then a token's k
rows; at ep 1 a shard adds its k rows first. What is sent is cut over the tp ranks of a replica without regard to
tokens: all have all rows, so each sends an equal part of what an owner is to get.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tpkernels.again import once
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.rows import take_backward

from tpengine.layers.experts import ExpertNetworks, Multiplied
from tpengine.layers.gradient_sink import GradientSink, check_reaches, total_of
from tpengine.layers.routing import Routed
from tpengine.layers.whereabouts import says_where


@dataclass(frozen=True)
class ReplicaRows:
    """The rows that this rank's experts get of one replica.

    Attributes:
        rows: which of the R' they are.
        offsets: int32 [E/N + 1], on the device: within them, those of each expert.
    """

    rows: slice
    offsets: Tensor


class RowRoutes:
    """Where rows go, and where they come back to: the numbers of one layer and one micro-batch of each replica.

    Args:
        counts: rows of each expert, [d][E], of each replica; all ranks have the same.
        num_shards: V.
        tp: this replica's ranks.
        comm: the N = d tp ranks that share experts; those of a replica are neighbours.
        device: of the offsets.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        num_shards: int,
        tp: Communicator,
        comm: Communicator,
        device: torch.device,
    ) -> None:
        self.comm, self._tp, self.num_held = comm, tp, num_shards // tp.size
        self.num_shards, self._replica = num_shards, comm.rank // tp.size
        each = len(counts[0]) // comm.size
        own = slice(comm.rank * each, (comm.rank + 1) * each)
        # Of this replica: the sorted rows of each owner.
        starts = list(itertools.accumulate(counts[self._replica], initial=0))
        self._of_owners = [slice(starts[o * each], starts[(o + 1) * each]) for o in range(comm.size)]
        # Of each replica: the rows of this rank's experts.
        numbers = [list(itertools.accumulate(of_replica[own], initial=0)) for of_replica in counts]
        begins = list(itertools.accumulate((of[-1] for of in numbers), initial=0))
        self.lanes = tuple(
            ReplicaRows(slice(begin, begin + of[-1]), torch.tensor(of, dtype=torch.int32, device=device))
            for begin, of in zip(begins, numbers, strict=False)
        )

    def _part(self, num_rows: int, tp_rank: int) -> slice:
        """Return which of the rows for one owner a tp rank sends."""
        return shard_rows(num_rows, self._tp.size, tp_rank)

    def sent(self) -> list[slice]:
        """Return the sorted rows that this rank sends each owner."""
        found = []
        for of_owner in self._of_owners:
            part = self._part(of_owner.stop - of_owner.start, self._tp.rank)
            found.append(slice(of_owner.start + part.start, of_owner.start + part.stop))
        return found

    def send(self, rows: Tensor) -> Tensor:
        """Exchange what `sent` names, one part behind the other; return rows[R', D] by replica, expert and token."""
        lengths = [lane.rows.stop - lane.rows.start for lane in self.lanes]
        parts = [self._part(length, rank) for length in lengths for rank in range(self._tp.size)]
        num_sent = [of.stop - of.start for of in self.sent()]
        return self.comm.all_to_all_rows(rows, num_sent, [part.stop - part.start for part in parts])

    def give_back(self, of_lanes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Exchange each lane's V parts of rows; return this replica's sorted rows[R, D] of each held shard.

        Args:
            of_lanes: for each lane and shard, [rows of the lane, D].
        """
        to_send = torch.cat([part for of_shards in of_lanes for part in of_shards])
        num_sent = [self.num_held * len(of_shards[0]) for of_shards in of_lanes for _ in range(self._tp.size)]
        num_rows = [of.stop - of.start for of in self._of_owners]
        came = self.comm.all_to_all_rows(to_send, num_sent, [self.num_held * number for number in num_rows])
        if self.num_held == 1:
            return [came]
        # From each owner come the rows of the first held shard, then those of the second, ...
        by_owner = [
            part.split(number)
            for part, number in zip(came.split([self.num_held * n for n in num_rows]), num_rows, strict=True)
            if number
        ]
        return [torch.cat([of_owner[i] for of_owner in by_owner]) for i in range(self.num_held)]


class ChunkedExperts(nn.ModuleDict):
    """All V chunks of the networks of E/N whole experts, by the number of the shard: see the module's head.

    Args:
        chunks: the networks of each shard, made for E/N experts over its ShardCommunicator.
        tp: the ranks of this replica.
        comm: the N ranks that share the experts.
        sinks: for each lane and shard, where weight gradients go; None for autograd.

    Cost: 6*R'*D*F flops; sends R/tp rows and as many of dYs, and gets back V R/tp and as many of dX. Keeps R'*D and
        3*R'*F elements for backward. The host waits for the counts, once a layer.
    """

    def __init__(
        self,
        chunks: Mapping[str, ExpertNetworks],
        tp: Communicator,
        comm: Communicator,
        sinks: Sequence[Sequence[GradientSink]] | None = None,
    ) -> None:
        super().__init__(chunks)
        self.tp, self.comm = tp, comm
        lanes = range(comm.size // tp.size)
        self.sinks = sinks or [[GradientSink() for _ in chunks] for _ in lanes]

    def forward(self, xs: Sequence[Tensor], routed: Sequence[Routed]) -> list[Tensor]:
        """X_v[T, D] of each held shard, and where their rows go -> Ys_v[R, D], sorted by expert.

        Args:
            xs: the same values, of which each has a gradient of its own.
            routed: the same choices.
        """
        where = routed[0]
        routes = once(lambda: self._routes(where.counts))
        if not is_recorded():
            rows = routes.send(_taken(xs[0], where, routes))
            return routes.give_back(
                [[chunk(rows[lane.rows], lane.offsets) for chunk in self._chunks()] for lane in routes.lanes]
            )
        for chunk, sink in zip(self._chunks(), self.sinks[0], strict=True):
            for weight in chunk.weights:
                check_reaches(sink, weight, "an expert's weight")
        weights = [weight for chunk in self._chunks() for weight in chunk.weights]
        return list(_Chunked.apply(routes, self, where, len(xs), *xs, *weights))

    def _chunks(self) -> Iterator[ExpertNetworks]:
        for chunk in self.values():
            assert isinstance(chunk, ExpertNetworks)
            yield chunk

    def _each(self, routes: RowRoutes) -> Iterator[tuple[ReplicaRows, ExpertNetworks, GradientSink, int]]:
        """Yield each lane's chunks with their sinks, and the number of the chunk."""
        for lane, sinks in zip(routes.lanes, self.sinks, strict=True):
            for number, (chunk, sink) in enumerate(zip(self._chunks(), sinks, strict=True)):
                yield lane, chunk, sink, number

    def _routes(self, counts: Tensor) -> RowRoutes:
        """Tell the ranks of other replicas how many rows each expert gets from this one."""
        if self.comm.size > self.tp.size:
            everyone = self.comm.all_gather_rows(counts.view(1, -1), self.comm.size, operation="dispatch")
            counts_of: list[list[int]] = everyone[:: self.tp.size].tolist()
        else:
            counts_of = [counts.tolist()]
        return RowRoutes(counts_of, len(self), self.tp, self.comm, counts.device)

    def _multiplied(self, rows: Tensor, routes: RowRoutes) -> list[list[tuple[Tensor, Multiplied]]]:
        """Return Ys' of each lane and chunk, and what its backward needs."""
        return [[chunk.multiplied(rows[lane.rows], lane.offsets) for chunk in self._chunks()] for lane in routes.lanes]


def _taken(x: Tensor, routed: Routed, routes: RowRoutes) -> Tensor:
    """Return the rows of tokens that this rank sends."""
    sent = torch.cat([routed.order[rows] for rows in routes.sent()])
    return x.index_select(0, sent // routed.weights.shape[1])


@says_where
class _Chunked(torch.autograd.Function):
    """Local shapes: X_v[T, D], Ys_v[R, D]; at the owner Xs'[R', D], GU_v[R', 2F/V], H_v[R', F/V].

    forward:  Xs' = send(rows of X);  each lane and chunk as ExpertNetworks;  Ys_v = give_back(Ys'_v)
    backward: dYs' = send(dYs);  dXs'_v, wgrad of each lane and chunk;  dX_v[t] = the sum of dXs_v's k rows of t
    """

    @staticmethod
    def forward(
        ctx: Any, routes: RowRoutes, experts: ChunkedExperts, routed: Routed, num_held: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        rows = routes.send(_taken(tensors[0], routed, routes))
        found = experts._multiplied(rows, routes)
        kept = [tensor for of_lane in found for _, multiplied in of_lane for tensor in multiplied]
        # Weights among them, so that autograd notices a write between forward and backward.
        ctx.save_for_backward(rows, routed.places, *kept, *tensors[num_held:])
        ctx.routes, ctx.experts, ctx.num_held, ctx.k = routes, experts, num_held, routed.weights.shape[1]
        return tuple(routes.give_back([[y for y, _ in of_lane] for of_lane in found]))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a mixture of experts")
        rows, places, *kept = ctx.saved_tensors
        routes, experts, num_held = ctx.routes, ctx.experts, ctx.num_held
        needs_dx, trained = ctx.needs_input_grad[4], ctx.needs_input_grad[4 + num_held :]
        # The gradient of what a shard makes is that of the sum over shards: all have the same.
        drows = routes.send(torch.cat([dys[0][rows] for rows in routes.sent()]))
        each = len(Multiplied._fields)
        dxs: list[list[Tensor]] = [[] for _ in routes.lanes]
        dws: list[list[Tensor | None]] = [[] for _ in trained]
        for place, (lane, chunk, sink, number) in enumerate(experts._each(routes)):
            lane_number, three = place // len(experts), slice(3 * number, 3 * number + 3)
            multiplied = Multiplied(*kept[each * place : each * place + each])
            dx, gradients = chunk.gradients(
                drows[lane.rows], rows[lane.rows], multiplied, lane.offsets, sink, trained[three], needs_dx=needs_dx
            )
            if dx is not None:
                dxs[lane_number].append(dx)
            for found, gradient in zip(dws[three], gradients, strict=True):
                found.append(gradient)
        of_tokens: list[Tensor | None] = [None] * num_held
        if needs_dx:
            of_tokens = [take_backward(back, places, ctx.k) for back in routes.give_back(dxs)]
        return None, None, None, None, *of_tokens, *(total_of(found) for found in dws)
