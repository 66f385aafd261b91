"""The arena of a group: symmetric memory, its signals, and the two exchanges that move data through it.

    gather           each rank publishes its shard; the others read it in place. A rank begins with its own shard
    publish          the same of parts of any size, which each rank writes where the others read them
    meet             what publish is made of: each rank writes into its memory what it likes, then reads the peers'
    reduce_scatter   each rank writes partial results for the other owners, then its own, and adds what the others wrote

Both let the caller work on each piece as soon as it is there, so that a matmul computes while other ranks are still
busy. Both end only when the signals of all peers have come (signals.py, pattern 2), so that calls need no barrier
between them. Nothing here is a collective of a process group.

A tensor larger than a generation of the arena moves in pieces. Each piece is a call of its own, with its own epoch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.exchange.calls import (
    GATHERS,
    OPERATIONS,
    PUBLISHES,
    REFUSED,
    SCATTERS,
    SUMS,
    described,
    words_of,
)
from tpkernels.exchange.tree import tree_sum
from tpkernels.symmetric.memory import ALIGNMENT_BYTES, HostMemory, barrier, check_num_bytes
from tpkernels.symmetric.processes import close_to_children
from tpkernels.symmetric.signals import SPIN_SECONDS, PeerError, Signals, control_bytes, words_over, wrapped

NUM_GENERATIONS = 2
# How long to wait for all shards to come at once. Splitting a matmul costs about as much, to copy its parts into place.
_SOON_SECONDS = 1e-4


class CallMismatch(ValueError):
    """The ranks of a group made different calls. All of them raise this."""


def shard_rows(num_rows: int, world: int, rank: int) -> slice:
    """Return the rows that `rank` holds of `num_rows`: ceil(num_rows / world), on the last ranks fewer or none."""
    most = -(-num_rows // world)
    return slice(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


def exchange_bytes(num_rows: int, row_bytes: int, world: int) -> int:
    """Return the size of an arena in which a gather or reduce-scatter of `num_rows` rows moves in one piece."""
    slot_bytes = -(-num_rows // world) * row_bytes
    return NUM_GENERATIONS * world * (-(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


class Arena:
    """One rank's part in the exchanges of its group.

    Args:
        memory: the group's symmetric memory.
        generation_bytes: size of each of its two generations.
        name: the group's name, for messages.
        members: global ranks of the group's members, for messages.
        timeout_seconds: how long to wait for a peer.
        first_epoch: the epoch before that of the first call.

    Attributes:
        rank, world: this rank's place in the group and the number of ranks.
        generation_bytes, memory: as given.
        signals: flags and poison; `signals.timeout_seconds` may be changed.

    Make one with `Arena.open`. All ranks must make the same calls in the same order, with the same sizes. If a rank
    makes another call, every rank raises CallMismatch.
    """

    def __init__(
        self,
        memory: HostMemory,
        generation_bytes: int,
        name: str,
        members: Sequence[int],
        timeout_seconds: float,
        first_epoch: int = 0,
    ) -> None:
        self.memory, self.generation_bytes, self.name = memory, generation_bytes, name
        self.rank, self.world = memory.rank, memory.world
        self._members = members
        self._peers = [(self.rank + i) % self.world for i in range(1, self.world)]
        size = control_bytes(self.world)
        self._data_offset = round_to_pages(size)
        areas = [words_over(memory.bytes_of(rank, 0, size)) for rank in range(self.world)]
        self.signals = Signals(areas, self.rank, memory.pids, members, name, OPERATIONS, timeout_seconds)
        close_to_children(self, f"the arena of group {name}", "signals", "memory")
        self._epoch = first_epoch
        self._ended_by: BaseException | None = None
        for peer in self._peers:
            # No rank reads these before the barrier at the end of `open`.
            self.signals.notify(peer, wrapped(first_epoch))

    @classmethod
    def open(
        cls, group: ProcessGroup, num_bytes: int, *, timeout_seconds: float = 300.0, first_epoch: int = 0
    ) -> Arena:
        """Make the arena of a group whose ranks share a host; collective, once, before anything is exchanged.

        Args:
            group: the ranks, over gloo.
            num_bytes: memory for data per rank; each of two generations gets half.
            timeout_seconds: how long a call waits for a peer that is alive.
            first_epoch: for tests near the largest epoch.

        Raises:
            MemoryRefused: on all ranks alike; see HostMemory.allocate.
            ValueError: num_bytes is not a legal number of bytes, or not the same on all ranks.
        """
        check_num_bytes("an arena's size", num_bytes)
        generation_bytes = round_to_pages(-(-num_bytes // NUM_GENERATIONS))
        world = dist.get_world_size(group)
        total = round_to_pages(control_bytes(world)) + NUM_GENERATIONS * generation_bytes
        memory = HostMemory.allocate(group, total)
        members = dist.get_process_group_ranks(group)
        arena = cls(memory, generation_bytes, group.group_name, members, timeout_seconds, first_epoch)
        barrier(group)
        return arena

    @property
    def epoch(self) -> int:
        """Epoch of the newest call, as int32."""
        return wrapped(self._epoch)

    def reset(self) -> None:
        """Make a poisoned group usable again; collective. No rank may be in the middle of a call.

        Raises:
            PeerTimeout, PeerGone: a rank did not take part.
        """
        self._epoch = self.signals.reset(self.epoch)

    def abandon(self) -> None:
        """Poison the group, because this rank leaves it: calls of all ranks end, those of its own threads too."""
        self.signals.fail(OPERATIONS.index("all_reduce"), self.epoch)

    def refuse(self, message: str) -> NoReturn:
        """Tell the other ranks that this rank cannot make their call, and raise ValueError.

        It takes part in the call with an announcement of its own. So the others raise CallMismatch, instead of waiting
        for this rank.
        """
        self.begin(REFUSED)
        for peer in self._peers:
            self.signals.notify(peer, self.epoch)
        self._hear_all(REFUSED)
        raise ValueError(message)

    def gather(
        self, x: Tensor, num_rows: int, operation: str, *, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Publish this rank's shard and yield every shard as it arrives.

        Args:
            x: [rows, columns], this rank's shard: `shard_rows(num_rows, world, rank)`.
            num_rows: of all shards.
            operation: name of the operation, for messages and to compare calls.
            into: [num_rows, columns]; if all shards come soon, they are copied into it and yielded as one.

        Yields:
            (rows of the whole, shard [rows, columns]): first this rank's own shard, which is `x` itself, then those of
            rank + 1, rank + 2, ... A peer's shard is that rank's memory: read it before asking for the next, and do not
            keep it. If all shards come soon: once (all rows, `into`).

        Raises:
            CallMismatch: on all ranks, if they call different things.
            ValueError: `x` is not this rank's shard, or a row does not fit; other ranks raise CallMismatch.
            PeerError: a peer is missing.
        """
        columns, item = x.shape[1], x.element_size()
        own = shard_rows(num_rows, self.world, self.rank)
        if len(x) != own.stop - own.start:
            self.refuse(
                f"rank {self.rank} of {self.world} holds {own.stop - own.start} of {num_rows} rows: {operation} got "
                f"{len(x)}: pass rows {own.start} to {own.stop}, or another num_tokens"
            )
        rows_per_piece = self._rows_that_fit(self.generation_bytes, columns * item, operation)
        most = -(-num_rows // self.world)
        for first in range(0, max(most, 1), rows_per_piece):
            call = words_of(operation, GATHERS, num_rows, columns, x.dtype, first)
            generation = self.begin(call)
            with self._poison_if_left(operation):
                # Publish: copy this rank's shard into its arena, and raise its flag for every peer.
                piece = x[first : first + rows_per_piece]
                self.block(self.rank, generation, 0, piece.shape, x.dtype).copy_(piece)
                for peer in self._peers:
                    self.signals.notify(peer, self.epoch)
                # Read: the peers' shards as they come, or all of them copied into `into`.
                shards = self._peers_shards(num_rows, columns, x.dtype, first, rows_per_piece, generation, call)
                if into is not None and most <= rows_per_piece and self._all_come_soon():
                    into[own].copy_(x)
                    for rows, shard in shards:
                        into[rows].copy_(shard)
                    yield slice(0, num_rows), into
                else:
                    yield piece_of(own, first, rows_per_piece), piece
                    yield from shards

    def publish(
        self, numels: Sequence[int], dtype: torch.dtype, write: Callable[[Tensor], object]
    ) -> Iterator[tuple[int, Tensor]]:
        """Let this rank write its part where the others read it, and yield the peers' parts as they come.

        Args:
            numels: elements of every rank's part, by rank; the same on all ranks.
            dtype: of the parts.
            write: fills the flat tensor that it is given: this rank's part.

        Yields:
            (peer, its part): that rank's memory. Read it before asking for the next, and do not keep it.

        Raises:
            As `gather`.
        """
        self._rows_that_fit(self.generation_bytes, max(numels) * dtype.itemsize, "all_gather")

        def write_own(generation: int) -> None:
            write(self.block(self.rank, generation, 0, (numels[self.rank],), dtype))

        for peer, generation in self.meet("all_gather", PUBLISHES, (sum(numels), 1, 0), dtype, write_own):
            if peer != self.rank:
                yield peer, self.block(peer, generation, 0, (numels[peer],), dtype)

    def meet(
        self,
        operation: str,
        kind: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        write: Callable[[int], object],
    ) -> Iterator[tuple[int, int]]:
        """Let every rank write into its own memory, and yield the ranks as what they wrote may be read.

        Args:
            operation: name of the operation, for messages.
            kind: what the call does (calls.py).
            sizes: rows, columns and first row or column of the piece; with the rest what all ranks must agree on.
            dtype: of what is exchanged.
            write: fills this rank's part (`block`) of the generation that it is given.

        Yields:
            (rank, generation): first this rank, then rank + 1, ... Read a peer's blocks before asking for the next.

        Raises:
            CallMismatch, PeerError: as `gather`.
        """
        num_rows, columns, first = sizes
        call = words_of(operation, kind, num_rows, columns, dtype, first)
        generation = self.begin(call)
        with self._poison_if_left(operation):
            write(generation)
            for peer in self._peers:
                self.signals.notify(peer, self.epoch)
            yield self.rank, generation
            for peer in self._peers:
                self.wait(peer, generation, call)
                yield peer, generation

    def _peers_shards(
        self,
        num_rows: int,
        columns: int,
        dtype: torch.dtype,
        first: int,
        rows_per_piece: int,
        generation: int,
        call: tuple[int, ...],
    ) -> Iterator[tuple[slice, Tensor]]:
        for peer in self._peers:
            self.wait(peer, generation, call)
            rows = piece_of(shard_rows(num_rows, self.world, peer), first, rows_per_piece)
            yield rows, self.block(peer, generation, 0, (rows.stop - rows.start, columns), dtype)

    def reduce_scatter(
        self,
        num_rows: int,
        columns: int,
        dtype: torch.dtype,
        partial: Callable[[slice, Tensor | None], Tensor],
        operation: str,
        *,
        into: Tensor | None = None,
    ) -> Tensor:
        """Sum every rank's partial rows at their owners.

            y[shard_rows(T), D] = sum over ranks of partial(rows)

        Args:
            num_rows, columns, dtype: T, D and dtype of the partial results.
            partial: (rows, out) -> this rank's partial result for these rows, in `out` if it is given; otherwise in a
                new tensor, to which the other ranks' results are added in place. Its own rows it may return from
                elsewhere, unchanged.
            operation: name of the operation, for messages and to compare calls.
            into: [rows, columns] of this rank, where the sum goes; `partial` is given its parts as `out`.

        Returns:
            This rank's rows: `into`, or a new tensor.

        Raises:
            As `gather`.

        Numerics: added in a balanced tree of ranks (tree.py), in promote_types(dtype, float32): the same bits on every
        run.
        """
        item = dtype.itemsize
        own = shard_rows(num_rows, self.world, self.rank)
        slot_bytes = self.generation_bytes // self.world // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        rows_per_piece = self._rows_that_fit(slot_bytes, columns * item, operation)
        most = -(-num_rows // self.world)
        is_new = into is None and most <= rows_per_piece
        total = torch.empty(own.stop - own.start, columns, dtype=dtype) if into is None else into
        for first in range(0, max(most, 1), rows_per_piece):
            call = words_of(operation, SCATTERS, num_rows, columns, dtype, first)
            generation = self.begin(call)
            with self._poison_if_left(operation):
                # Write: a partial result for each peer, and raise the flag for it.
                for peer in self._peers:
                    rows = piece_of(shard_rows(num_rows, self.world, peer), first, rows_per_piece)
                    shape = (rows.stop - rows.start, columns)
                    if shape[0]:
                        partial(rows, self.block(self.rank, generation, peer * slot_bytes, shape, dtype))
                    self.signals.notify(peer, self.epoch)
                # Compute this rank's own part while the peers write theirs.
                rows = piece_of(own, first, rows_per_piece)
                term = piece = total[first : first + rows_per_piece]
                if len(piece):
                    # Matmuls fill a new tensor faster than a given one (ops/matmul/host.py, product).
                    term = partial(rows, None if is_new else piece)
                # Wait for all peers, then add in the tree's order.
                for peer in self._peers:
                    self.wait(peer, generation, call)
                slots = [
                    self.block(peer, generation, self.rank * slot_bytes, piece.shape, dtype)
                    for peer in range(self.world)
                ]
                if is_new:
                    total = piece = term
                add_to_own(slots, self.rank, term, piece)
        return total

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """Sum every rank's x[rows, columns] on every rank: y = sum over ranks of x. For few rows: one call, not two.

        Args:
            x: of one shape and dtype on all ranks; it must fit into a generation.

        Returns:
            A new tensor, the same bits on all ranks.

        Raises:
            As `gather`.

        Numerics: as reduce_scatter. Cost: each rank reads (R - 1) times its bytes, and adds R tensors.
        """
        self._rows_that_fit(self.generation_bytes, x.numel() * x.element_size(), "all_reduce")
        call = words_of("all_reduce", SUMS, len(x), x.shape[1], x.dtype, 0)
        generation = self.begin(call)
        with self._poison_if_left("all_reduce"):
            self.block(self.rank, generation, 0, x.shape, x.dtype).copy_(x)
            for peer in self._peers:
                self.signals.notify(peer, self.epoch)
            for peer in self._peers:
                self.wait(peer, generation, call)
            # No peer writes here again before this rank has begun another call.
            terms = [self.block(peer, generation, 0, x.shape, x.dtype) for peer in range(self.world)]
            return tree_sum(terms, out=torch.empty_like(x))

    def _rows_that_fit(self, room_bytes: int, row_bytes: int, operation: str) -> int:
        rows = room_bytes // max(row_bytes, 1)
        if not rows:
            self.refuse(
                f"a row must fit into the arena: {operation} has rows of {row_bytes} bytes, the arena room for "
                f"{room_bytes}: open it with {exchange_bytes(self.world, row_bytes, self.world)} bytes"
            )
        return rows

    def begin(self, call: tuple[int, ...]) -> int:
        """Begin a call and return its generation, which no rank reads any more."""
        self.signals.raise_if_poisoned()
        self._ended_by = None
        self._epoch += 1
        generation = self._epoch % NUM_GENERATIONS
        self.signals.announce(generation, call)
        return generation

    def wait(self, peer: int, generation: int, call: tuple[int, ...]) -> None:
        """Wait until a peer has published its part of this call; raise CallMismatch if its call is another one."""
        self.signals.wait(peer, self.epoch, call[0])
        theirs = self.signals.announced(peer, generation, len(call))
        if theirs != call:
            self._hear_all(call)
            self._ended_by = CallMismatch(
                f"every rank of group {self.name} must make the same call: rank {self._members[self.rank]} calls "
                f"{described(call)}, rank {self._members[peer]} {described(theirs)}: make both the same"
            )
            raise self._ended_by

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Let waits inside sleep at once: a background thread that polls takes the core from what goes on beside it."""
        self.signals.spin_seconds = 0.0
        try:
            yield
        finally:
            self.signals.spin_seconds = SPIN_SECONDS

    def _all_come_soon(self) -> bool:
        """Return whether all peers publish within the time that splitting a matmul would cost."""
        end = time.perf_counter() + _SOON_SECONDS
        while not all(self.signals.has_notified(peer, self.epoch) for peer in self._peers):
            if time.perf_counter() > end:
                return False
            os.sched_yield()
        return True

    def _hear_all(self, call: tuple[int, ...]) -> None:
        """Wait for every peer: otherwise the next call could overwrite what a peer still reads."""
        for peer in self._peers:
            self.signals.wait(peer, self.epoch, call[0])

    @contextlib.contextmanager
    def _poison_if_left(self, operation: str) -> Iterator[None]:
        """Poison the group if this rank leaves a call before its end: the others would wait for it in vain."""
        try:
            yield
        except BaseException as error:
            # After a CallMismatch every rank raises by itself; after a PeerError the group is poisoned already.
            if error is not self._ended_by and not isinstance(error, PeerError):
                self.signals.fail(OPERATIONS.index(operation), self.epoch)
            raise

    def block(self, owner: int, generation: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of a part of a rank's data in one generation."""
        offset = self._data_offset + generation * self.generation_bytes + offset_bytes
        return self.memory.block(owner, offset, shape, dtype)


def piece_of(rows: slice, first: int, num_rows: int) -> slice:
    """Return the piece of `rows` that begins `first` rows after its start and has at most `num_rows` rows."""
    return slice(min(rows.start + first, rows.stop), min(rows.start + first + num_rows, rows.stop))


def add_to_own(slots: Sequence[Tensor], rank: int, own: Tensor, out: Tensor) -> None:
    """Write into `out` the tree's sum of the slots, with `own`, which may be `out`, in the place of slots[rank]."""
    tree_sum([own if peer == rank else slot for peer, slot in enumerate(slots)], out=out)


def round_to_pages(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages, at least one."""
    page = os.sysconf("SC_PAGE_SIZE")
    return max(page, -(-num_bytes // page) * page)
