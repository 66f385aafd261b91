"""Rows of tokens on their way to the owners of experts, and back: routes, and the two ways that rows travel.

N ranks share E experts: rank j owns experts jE/N to (j+1)E/N - 1. Every rank has t tokens of its own (not all ranks
need have as many), each of which chose k experts: R = t*k rows. Sorted by expert, they are `order`.

    exchange_counts  the counts of all ranks, once a layer: everything else about who gets what follows from them
    rows_to_experts  x[t, D] -> rows[R', D] at the experts' owner:  by expert, then by source rank, token and choice
    rows_to_tokens   h[R', D] -> ys[R, D] at the tokens' owner:     as `order` sorts them

So the rows of an expert lie in the order of the global tokens, and no result depends on which rows come first. The two
are each other's inverse, one way behind both names:

- **Through the arena**, where ranks share memory: a rank publishes its t rows once, whatever k is, and which token each
  of its sorted rows is; every owner copies what its experts need from there to its place. On the way back a rank
  publishes what its experts made, sorted by who gets it. No buffer is sized by a guess: what is larger than a
  generation moves in pieces of some columns each, also with all tokens at one expert.
- **By all-to-all of exact sizes** over the process group, gloo's or NCCL's.

The host must know the counts for either, to make the tensors. It waits for them once a layer, in `exchange_counts`:
backward, and what is computed again, keep the routes. The decision a reader will question: rows move at their exact
number, not in buffers for a capacity. A library whose buffers the host sizes beforehand (DeepEP, NCCL EP) needs no
wait, but room for N times t tokens at each expert's owner; NCCL EP also adds the k terms as they arrive.

A third way, by kernels over symmetric memory, asks the host for nothing: fused/bounded_rows.py. The registered
operators, with gradients, are in fused/experts.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.exchange.arena import NUM_GENERATIONS, Arena
from tpkernels.exchange.calls import RETURNS, TAKES
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.ops.experts.rows import combine_backward, take_forward
from tpkernels.symmetric.memory import ALIGNMENT_BYTES

# Rows at a time on the host.
_HOST_ROWS = 256
# Columns of a piece: whole cache lines, whatever the dtype.
_LINE = 64


@dataclass(frozen=True)
class Routes:
    """Where the rows of one micro-batch go in one layer; kept for backward, and for computing the layer again.

    Attributes:
        order: int32 [R]: sorted row r is the pair order[r] = token * k + choice of this rank.
        places: int32 [R], order's inverse.
        weights: [t, k] in promote_types(dtype, float32), what a token's k terms are multiplied by; differentiable.
        offsets: int32 [E/N + 1], on the device: rows offsets[i] to offsets[i + 1] are those of this rank's expert i.
        counts: int32 [N, E], on the host: rows that each rank sends each expert.
        num_rows: R', the rows that this rank's experts get.
    """

    order: Tensor
    places: Tensor
    weights: Tensor
    offsets: Tensor
    counts: Tensor
    num_rows: int

    @property
    def num_choices(self) -> int:
        """Return k."""
        return self.weights.shape[1]


@torch.no_grad()
def exchange_counts(order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, comm: Communicator) -> Routes:
    """Tell all ranks how many rows each expert gets from this one, and return where every row goes.

    Collective, once for each layer and micro-batch.

    Args:
        order, places: int32 [R], of this rank's choices (ops/experts/order.py).
        weights: [t, k], as Routes keeps them.
        counts: int32 [E]: this rank's rows for each expert.
        comm: the N ranks that share the experts.

    Raises:
        ValueError: on all ranks: N does not divide E; ranks choose different numbers of experts; a rank's counts do not
            add up to its rows.
        CallMismatch, PeerError: as all_gather.

    Cost: E + 2 numbers to each rank. Order: the host waits for them. With one rank it exchanges nothing and waits for
        nothing.
    """
    (tokens, choices), num_experts = weights.shape, len(counts)
    if num_experts % comm.size:
        comm.refuse(
            counts,
            f"every rank owns as many experts: {num_experts} experts do not divide by {comm.size} ranks: use "
            f"{nearest_divisor(num_experts, comm.size)} ranks",
        )
    if order.shape != (tokens * choices,) or places.shape != order.shape:
        comm.refuse(
            counts,
            f"order and places have an entry for each choice: got {tuple(order.shape)} and {tuple(places.shape)} for "
            f"weights {tuple(weights.shape)}: pass those of these tokens",
        )
    if comm.size == 1:
        offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return Routes(order, places, weights, offsets, torch.empty(1, num_experts, dtype=torch.int32), len(order))
    # Filled by kernels: of a list the host would copy, and wait for the device.
    numbers = counts.new_full((num_experts + 2,), tokens, dtype=torch.int32)
    numbers[:num_experts] = counts
    numbers[-1].fill_(choices)
    everyone = comm.all_gather_rows(numbers.view(1, -1), comm.size, operation="dispatch")
    host = everyone.cpu()
    _check(host, num_experts)
    own = slice(comm.rank * num_experts // comm.size, (comm.rank + 1) * num_experts // comm.size)
    offsets = torch.nn.functional.pad(everyone[:, own].sum(0).cumsum(0, dtype=torch.int32), (1, 0))
    return Routes(order, places, weights, offsets, host[:, :num_experts].contiguous(), int(host[:, own].sum()))


def nearest_divisor(num_experts: int, size: int) -> int:
    """Return the largest number of ranks, at most `size`, by which experts divide."""
    return max(divisor for divisor in range(1, size + 1) if num_experts % divisor == 0)


def _check(everyone: Tensor, num_experts: int) -> None:
    """Raise if the ranks' numbers do not fit together; all ranks have the same."""
    tokens, choices = everyone[:, num_experts].tolist(), everyone[:, num_experts + 1].tolist()
    if len(set(choices)) > 1:
        raise ValueError(f"every token chooses as many experts: got {choices} by rank: use one k on all ranks")
    for rank, counts in enumerate(everyone[:, :num_experts].tolist()):
        if sum(counts) != tokens[rank] * choices[rank] or min(counts) < 0:
            raise ValueError(
                f"the counts of a rank add up to its tokens times their choices: rank {rank} has {tokens[rank]} x "
                f"{choices[rank]}, and counts of {sum(counts)}: pass what `route` returned"
            )


@torch.no_grad()
def rows_to_experts(x: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Return the rows of this rank's experts, from the tokens of all ranks: rows[R', D] = x[t, D] of the pairs.

    Returns:
        [R', D] of x's dtype, a new tensor: by expert, then source rank, token, choice.
    """
    arena = comm.arena_for(x)
    if arena is not None:
        return _take_through(arena, x, routes, scaled=False)
    return _sorted_to_experts(take_forward(x, routes.order, routes.num_choices), routes, comm)


@torch.no_grad()
def rows_to_tokens(h: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Return the experts' rows for this rank's tokens: the inverse of rows_to_experts, for sorted rows.

    Args:
        h: [R', D], what this rank's experts made, in the order of rows_to_experts.

    Returns:
        [R, D], sorted as `order` is, a new tensor; with one rank `h` itself.
    """
    if comm.size == 1:
        return h
    traffic = _Traffic(routes.counts, comm.rank)
    arena = comm.arena_for(h)
    if arena is not None:
        return _return_through(arena, h, traffic)
    by_rank = h.index_select(0, traffic.moved(h.device, len(h), to_experts=False))
    return comm.all_to_all_rows(by_rank, traffic.received(), traffic.sent())


@torch.no_grad()
def combine_gradients(
    dy: Tensor, ys: Tensor, routes: Routes, comm: Communicator, *, of_weights: bool = True, of_rows: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of what `combine` adds: of the experts' rows, at their owner, and of the weights.

        dh[R', D] = weights * dy of the pairs;  dweights[t, k] = <dy of the token, ys of the pair>

    Args:
        dy: [t, D].
        ys: [R, D], of rows_to_tokens.
        of_weights, of_rows: whether dweights and dh are asked for; of_rows alike on all ranks, as no row travels
            without.
    """
    arena = comm.arena_for(dy)
    if arena is not None:
        dh = _take_through(arena, dy, routes, scaled=True) if of_rows else None
        return dh, _slopes(dy, ys, routes) if of_weights else None
    dys, dweights = combine_backward(dy, ys, routes.order, routes.places, routes.weights)
    return _sorted_to_experts(dys, routes, comm) if of_rows else None, dweights


def _slopes(dy: Tensor, ys: Tensor, routes: Routes) -> Tensor:
    """Return dweights on the host, some rows at a time, which stay in a core's cache."""
    products = ys.new_empty(len(ys), dtype=routes.weights.dtype)
    tokens = routes.order // routes.num_choices
    for first in range(0, len(ys), _HOST_ROWS):
        some = slice(first, first + _HOST_ROWS)
        rows = dy.index_select(0, tokens[some]).to(products.dtype)
        torch.sum(rows.mul_(ys[some]), 1, out=products[some])
    return products.index_select(0, routes.places).view(routes.weights.shape)


def _sorted_to_experts(rows: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Send rows[R, D], sorted by expert, by all-to-all; return those of this rank's experts."""
    if comm.size == 1:
        return rows
    traffic = _Traffic(routes.counts, comm.rank)
    came = comm.all_to_all_rows(rows, traffic.sent(), traffic.received())
    return came.index_select(0, traffic.moved(rows.device, routes.num_rows, to_experts=True))


class _Traffic:
    """Who gets how many rows, and where they lie, from the counts of all ranks.

    A segment is the rows of one expert from one rank. `firsts` is where each begins in its source's sorted rows;
    `places` where it lies among the rows of this rank's experts.
    """

    def __init__(self, counts: Tensor, rank: int) -> None:
        self.counts: list[list[int]] = counts.tolist()
        self.rank, self.world = rank, len(self.counts)
        self.per_rank = counts.shape[1] // self.world
        self.num_rows = [sum(of_rank) for of_rank in self.counts]
        self.firsts = [list(itertools.accumulate(of_rank, initial=0)) for of_rank in self.counts]
        self.experts = self.owned(rank)
        self.places: dict[tuple[int, int], int] = {}
        place = 0
        for expert in self.experts:
            for source in range(self.world):
                self.places[expert, source] = place
                place += self.counts[source][expert]

    def owned(self, owner: int) -> range:
        return range(owner * self.per_rank, (owner + 1) * self.per_rank)

    def num_between(self, source: int, owner: int) -> int:
        """Return how many rows `source` sends to `owner`."""
        experts = self.owned(owner)
        return self.firsts[source][experts.stop] - self.firsts[source][experts.start]

    def sent(self) -> list[int]:
        return [self.num_between(self.rank, owner) for owner in range(self.world)]

    def received(self) -> list[int]:
        return [self.num_between(source, self.rank) for source in range(self.world)]

    def begins_of(self, owner: int) -> list[int]:
        """Return where, of the rows that `owner` returns to the other ranks, those for each rank begin, and the end."""
        lengths = [0 if source == owner else self.num_between(source, owner) for source in range(self.world)]
        return list(itertools.accumulate(lengths, initial=0))

    def segments(self, source: int) -> list[tuple[slice, slice]]:
        """Return for each of this rank's experts the rows of `source`: where they are there, and here."""
        found = []
        for expert in self.experts:
            length = self.counts[source][expert]
            if length:
                first, place = self.firsts[source][expert], self.places[expert, source]
                found.append((slice(first, first + length), slice(place, place + length)))
        return found

    def moved(self, device: torch.device, num_rows: int, *, to_experts: bool) -> Tensor:
        """Return the index that sorts rows by expert which came by rank, or back.

        The indices are made on the device, from E numbers: they are as many as rows.
        """
        by_rank: dict[tuple[int, int], int] = {}
        place = 0
        for source in range(self.world):
            for expert in self.experts:
                by_rank[expert, source] = place
                place += self.counts[source][expert]
        here, there = (self.places, by_rank) if to_experts else (by_rank, self.places)
        lengths = [self.counts[source][expert] for expert, source in here]
        shifts = [there[segment] - begin for segment, begin in here.items()]
        numbers = torch.tensor((shifts, lengths))
        if device.type == "cuda":
            # Of pinned memory the copy goes in the stream's order; else the host would wait for the stream.
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        shift = numbers[0].repeat_interleave(numbers[1], output_size=num_rows)
        return shift.add_(torch.arange(num_rows, device=device))


def _take_through(arena: Arena, x: Tensor, routes: Routes, *, scaled: bool) -> Tensor:
    """Publish this rank's tokens, and copy the rows of its experts from where the ranks published theirs.

    Args:
        scaled: multiply by the pairs' weights, in their dtype.
    """
    traffic = _Traffic(routes.counts, arena.rank)
    rows = x.new_empty(routes.num_rows, x.shape[1])
    num_tokens = [num_rows // routes.num_choices for num_rows in traffic.num_rows]
    tokens = routes.order // routes.num_choices
    weights = routes.weights.reshape(-1).index_select(0, routes.order) if scaled else None
    # A rank's part of the generation: the tokens of its sorted rows, their weights, and columns of its tokens' rows.
    most = max(traffic.num_rows)
    weights_at = _aligned(most * tokens.element_size())
    rows_at = weights_at + (0 if weights is None else _aligned(most * weights.element_size()))
    width = columns_of_piece(arena, rows_at, max(num_tokens) * x.element_size(), x.shape[1], "dispatch")

    for first in range(0, x.shape[1], width):
        columns = slice(first, min(first + width, x.shape[1]))
        piece = x[:, columns]

        def write(generation: int, piece: Tensor = piece) -> None:
            arena.block(arena.rank, generation, 0, tokens.shape, tokens.dtype).copy_(tokens)
            if weights is not None:
                arena.block(arena.rank, generation, weights_at, tokens.shape, weights.dtype).copy_(weights)
            arena.block(arena.rank, generation, rows_at, piece.shape, x.dtype).copy_(piece)

        sizes = (sum(traffic.num_rows), x.shape[1], first)
        for source, generation in arena.meet("dispatch", TAKES, sizes, x.dtype, write):
            length = (traffic.num_rows[source],)
            theirs = arena.block(source, generation, rows_at, (num_tokens[source], piece.shape[1]), x.dtype)
            index = arena.block(source, generation, 0, length, tokens.dtype)
            scale = None if weights is None else arena.block(source, generation, weights_at, length, weights.dtype)
            for there, here in traffic.segments(source):
                if scale is None:
                    torch.index_select(theirs, 0, index[there], out=rows[here, columns])
                else:
                    picked = theirs.index_select(0, index[there]).to(scale.dtype)
                    rows[here, columns] = picked.mul_(scale[there].unsqueeze(1))
    return rows


def _return_through(arena: Arena, h: Tensor, traffic: _Traffic) -> Tensor:
    """Publish what this rank's experts made for the others' tokens, and copy what the others made for its own."""
    own, world = traffic.rank, traffic.world
    ys = h.new_empty(traffic.num_rows[own], h.shape[1])
    # An owner publishes the rows for rank 0, then those for rank 1, ..., each by expert; none for itself.
    begins = [traffic.begins_of(owner) for owner in range(world)]
    width = columns_of_piece(arena, 0, max(begin[world] for begin in begins) * h.element_size(), h.shape[1], "combine")

    for first in range(0, h.shape[1], width):
        columns = slice(first, min(first + width, h.shape[1]))
        piece = h[:, columns]

        def block_of(owner: int, generation: int, piece: Tensor = piece) -> Tensor:
            return arena.block(owner, generation, 0, (begins[owner][world], piece.shape[1]), h.dtype)

        def write(generation: int, piece: Tensor = piece) -> None:
            block = block_of(own, generation)
            for source in range(world):
                at = begins[own][source]
                for _, here in traffic.segments(source) if source != own else ():
                    end = at + here.stop - here.start
                    block[at:end] = piece[here]
                    at = end

        sizes = (sum(traffic.num_rows), h.shape[1], first)
        for owner, generation in arena.meet("combine", RETURNS, sizes, h.dtype, write):
            if owner == own:
                for there, here in traffic.segments(own):
                    ys[there, columns] = piece[here]
            else:
                at = traffic.firsts[own][traffic.owned(owner).start]
                part = block_of(owner, generation)[begins[owner][own] : begins[owner][own + 1]]
                ys[at : at + len(part), columns] = part
    return ys


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def columns_of_piece(
    arena: Arena | DeviceArena, before_bytes: int, column_bytes: int, columns: int, operation: str
) -> int:
    """Return how many columns move in one call, of column_bytes each, behind before_bytes; all ranks find the same."""
    room = arena.generation_bytes - before_bytes
    width = min(columns, room // max(column_bytes, 1))
    if width < 1:
        needed = NUM_GENERATIONS * (before_bytes + column_bytes)
        arena.refuse(
            f"a column of all rows must fit into the arena: {operation} has {before_bytes} + {column_bytes} bytes, a "
            f"generation of the arena {arena.generation_bytes}: open it with {needed} bytes, or more for fewer pieces"
        )
    # Whole cache lines, where that many fit.
    return width if width == columns or width < _LINE else width // _LINE * _LINE
