"""Exchanges over a device arena, one function per call: what to launch, in which pieces, in which generation.

    gather          full[T, D]  = all_gather(x[T/tp, D])
    gather_matmul   y_i[T, F_i] = full @ m_i[D, F_i] + b_i
    matmul_scatter  y[T/tp, D]  = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D] + addend) + bias

Each call has three phases: launch what makes this rank's data visible to the peers; compute, in kernels that wait for
the peers' flags tile by tile; wait, on the stream, for whatever must be complete before the next launch. On a GPU the
host waits in none of them.

strategy.py decides before whether a call comes here, and in which pieces: data larger than a generation of the arena is
exchanged in several, each a call of its own. README.md beside this file shows what the kernels write and wait for, and
explains one more exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.exchange.arena import CallMismatch, piece_of, shard_rows
from tpkernels.exchange.copies import Copy, Fetch
from tpkernels.exchange.device_arena import DeviceArena, shard_pieces
from tpkernels.fused.kernels.gather_kernel import launch_fetch, launch_gather_matmul, launch_publish
from tpkernels.fused.kernels.scatter_kernel import MOST_TERMS, launch_matmul_scatter
from tpkernels.fused.strategy import Decision, is_for_engines, rows_that_fit
from tpkernels.launch import cdiv
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.symmetric.signals import PeerError
from tpkernels.symmetric.signals_kernel import FETCHED, MAX_SPLITS


@contextlib.contextmanager
def _poison_if_left(arena: DeviceArena) -> Iterator[None]:
    """Tell the others if this rank leaves a call before its end (out of memory, say): they would wait in vain."""
    try:
        yield
    except (PeerError, CallMismatch):
        raise
    except BaseException:
        arena.leave()
        raise


def gather_matmul(
    x: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: DeviceArena,
    num_tokens: int,
    operation: str,
    decision: Decision,
    *,
    keep: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Multiply the gathered rows by each matrix; one gather serves all, hidden behind the widest matrix.

    Args:
        x: this rank's rows, as shard_rows(num_tokens) says.
        decision: how, by stores of the kernel or the copy engine.
        keep: also return the gathered x.

    Extra memory: T*D elements; with push none unless kept.
    """
    x = x.contiguous()
    depth, push, split_rows = x.shape[1], decision.pushes, decision.split_rows
    outputs = [x.new_empty(num_tokens, m.shape[1]) for m in matrices]
    gathered = x.new_empty(num_tokens, depth) if keep or not push else None
    most = cdiv(num_tokens, arena.world)
    order = sorted(range(len(matrices)), key=lambda i: -matrices[i].shape[1])
    with _poison_if_left(arena):
        for first, piece in decision.pieces:
            # Launch: this rank's rows become visible to the peers, and theirs are fetched. Pushing needs no launch of
            # its own: the first items of the matmul do it. The call's number covers `kind`, because ranks that wait
            # for a flag must agree on how many rows it stands for.
            kind = f"pushes, a flag for {split_rows} rows" if push else "pulls"
            generation, call = _begin(arena, operation, kind, num_tokens, depth, x.dtype, first)
            own = x[first : first + piece]
            if push:
                shard_stride = arena.slot_bytes // x.element_size()
                others = arena.block(arena.rank, generation, (arena.world * shard_stride,), x.dtype)
            else:
                assert gathered is not None
                launch_publish(own, arena, generation, call)
                fetch = _fetch if decision.by_engine else _fetch_by_kernel
                fetch(arena, generation, call, gathered, own, num_tokens, first, piece, split_rows, keep_own=keep)
                others, shard_stride = gathered[first:], most * depth
            # Compute: own rows first, then each peer's as its flag goes up. The widest matrix hides the exchange; when
            # the next one starts, all rows are there.
            for nth, i in enumerate(order):
                how = "there" if nth else ("push" if push else "pull")
                launch_gather_matmul(
                    outputs[i],
                    own,
                    others,
                    shard_stride,
                    matrices[i],
                    biases[i],
                    arena,
                    num_tokens,
                    first,
                    piece,
                    split_rows,
                    generation,
                    call,
                    how,
                )
            # Keep: pushed rows are in the arena's slots, which the next call but one overwrites.
            if push and keep:
                assert gathered is not None
                for source in range(arena.world):
                    rows = piece_of(shard_rows(num_tokens, arena.world, source), first, piece)
                    shape = (rows.stop - rows.start, depth)
                    offset_bytes = source * arena.slot_bytes
                    slot = arena.block(arena.rank, generation, shape, x.dtype, offset_bytes)
                    gathered[rows].copy_(own if source == arena.rank else slot)
            # Wait: the stream waits for the copy engine, so that the next piece finds its copies done.
            arena.copies.join()
    _raise_where_it_is_known(arena)
    return outputs, gathered if keep else None


def gather(x: Tensor, arena: DeviceArena, num_tokens: int, operation: str) -> Tensor:
    """Return the rows of all ranks, concatenated."""
    full = _gather_in_pieces(x, arena, num_tokens, operation)
    arena.copies.join()
    _raise_where_it_is_known(arena)
    return full


def start_gather(x: Tensor, arena: DeviceArena, num_tokens: int, operation: str) -> Tensor:
    """Begin to concatenate the ranks' rows; the result is complete after `finish_gather`.

    One `matmul_scatter` of one piece may run in between; any other call finishes the gather first. If the rows do not
    fit into a generation they are exchanged in pieces, and only the last piece is not waited for here.
    """
    full = _gather_in_pieces(x, arena, num_tokens, operation)
    arena.calls_since_gather, arena.gather_call = 0, arena.newest_call
    return full


def finish_gather(arena: DeviceArena) -> None:
    """Complete what `start_gather` began: the stream waits for this rank's copies.

    The peers may still copy from here. After a call that ran beside the gather, which they may have begun before they
    had copied all, the next call begins with a barrier of the group.
    """
    if arena.calls_since_gather is None:
        return
    arena.calls_since_gather, arena.gather_call = None, 0
    arena.follow()
    arena.copies.join()
    _raise_where_it_is_known(arena)


def _gather_in_pieces(x: Tensor, arena: DeviceArena, num_tokens: int, operation: str) -> Tensor:
    """Return all rows; the copies of the last piece are still under way."""
    x = x.contiguous()
    full = x.new_empty(num_tokens, x.shape[1])
    row_bytes = x.shape[1] * x.element_size()
    most = rows_that_fit(arena.generation_bytes, row_bytes)
    by_engine = is_for_engines(cdiv(num_tokens, arena.world) * row_bytes, arena.engine_bytes)
    with _poison_if_left(arena):
        for first, piece in shard_pieces(num_tokens, arena.world, most):
            # Wait for the previous piece's copies before its generation comes up again.
            arena.copies.join()
            generation, call = _begin(arena, operation, "pulls", num_tokens, x.shape[1], x.dtype, first)
            own = x[first : first + piece]
            launch_publish(own, arena, generation, call)
            # Programs share a shard; no flag is waited for.
            split_rows = max(piece if by_engine else cdiv(piece, MAX_SPLITS), 1)
            fetch = _fetch if by_engine else _fetch_by_kernel
            fetch(arena, generation, call, full, own, num_tokens, first, piece, split_rows, keep_own=True)
    return full


def matmul_scatter(
    terms: Sequence[tuple[Tensor, Tensor]],
    addend: Tensor | None,
    bias: Tensor | None,
    arena: DeviceArena,
    operation: str,
    decision: Decision,
) -> Tensor:
    """Multiply, sum over the ranks, keep this rank's rows.

    Extra memory: T*D elements for more than two terms: the others are multiplied first, into the addend.
    """
    for x, matrix in terms[MOST_TERMS:]:
        addend = launch_matmul(x, matrix, residual=addend)
    terms = terms[:MOST_TERMS]
    x, matrix = terms[0]
    num_tokens, columns = x.shape[0], matrix.shape[1]
    own = shard_rows(num_tokens, arena.world, arena.rank)
    y = x.new_empty(own.stop - own.start, columns)
    addend = None if addend is None else addend.contiguous()
    slot_elements = arena.slot_bytes // x.element_size()
    with _poison_if_left(arena):
        for first, piece in decision.pieces:
            generation, call = _begin(
                arena, operation, "scatters", num_tokens, columns, x.dtype, first, may_be_beside=True
            )
            # Compute and send: each tile for a peer is stored into this rank's slot there, a flag follows the last of a
            # split. Wait: own tiles, computed last, wait for their split of every peer, and are added to the slots.
            mine = y[first : first + piece]
            launch_matmul_scatter(
                mine, terms, addend, bias, arena, num_tokens, first, piece, slot_elements, generation, call
            )
    _raise_where_it_is_known(arena)
    return y


def _begin(
    arena: DeviceArena,
    operation: str,
    kind: str,
    num_rows: int,
    columns: int,
    dtype: torch.dtype,
    first: int,
    *,
    may_be_beside: bool = False,
) -> tuple[int, int]:
    """Return generation and number of the next call; finish a gather under way if this call may not run beside it."""
    if arena.calls_since_gather or not may_be_beside:
        finish_gather(arena)
    if arena.calls_since_gather is not None:
        arena.calls_since_gather += 1
    return arena.begin(operation, kind, num_rows, columns, dtype, first)


def _fetch(
    arena: DeviceArena,
    generation: int,
    call: int,
    full: Tensor,
    own: Tensor,
    num_tokens: int,
    first: int,
    piece: int,
    split_rows: int,
    *,
    keep_own: bool,
) -> None:
    """Start the copy engine: every peer's rows of a piece go to their place in `full`, those of rank+1 first."""
    fetches = []
    for i in range(1, arena.world):
        peer = (arena.rank + i) % arena.world
        rows = piece_of(shard_rows(num_tokens, arena.world, peer), first, piece)
        shape = (rows.stop - rows.start, full.shape[1])
        block = arena.block(peer, generation, shape, full.dtype)
        copies = [
            Copy(
                block[at : at + split_rows],
                full[rows.start + at : min(rows.start + at + split_rows, rows.stop)],
                FETCHED + peer * MAX_SPLITS + split,
            )
            for split, at in enumerate(range(0, shape[0], split_rows))
        ]
        fetches.append(Fetch(peer, tuple(copies)))
    if keep_own:
        rows = piece_of(shard_rows(num_tokens, arena.world, arena.rank), first, piece)
        fetches.append(Fetch(arena.rank, (Copy(own, full[rows], None),)))
    arena.copies.start(arena, fetches, generation, call)


def _fetch_by_kernel(
    arena: DeviceArena,
    generation: int,
    call: int,
    full: Tensor,
    own: Tensor,
    num_tokens: int,
    first: int,
    piece: int,
    split_rows: int,
    *,
    keep_own: bool,
) -> None:
    """Do as `_fetch`, by a kernel on the copy engine's stream; it takes this rank's own rows from its block."""

    def launch() -> None:
        launch_fetch(full, arena, num_tokens, first, piece, split_rows, generation, call, keep_own=keep_own)

    arena.copies.launch(launch, full)


def _raise_where_it_is_known(arena: DeviceArena) -> None:
    """Raise errors of the peers if they are known already: an interpreted call has ended when it returns."""
    if not arena.control.is_cuda:
        arena.check()
