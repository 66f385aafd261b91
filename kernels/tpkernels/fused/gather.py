"""Gather, then multiply, in both forms: over the host's memory or collectives, and by kernels over a device arena.

    gather_matmul    y_i[T, F_i]  = all_gather(x[T/tp, D]) @ m_i[D, F_i] + b_i        its dual is in scatter.py

Over an arena, the products of a shard start when it has arrived; in between no rank waits for another. Over a device
arena kernels do the same, where strategy.py predicts that they are faster. Otherwise (one rank, several hosts) the
collective runs before one product. The operators choose the matrices: w.T in forward, w in the duals.

Splitting a product by rows may change its last bits. So the arena's results differ from the collectives' by rounding.
They are the same from run to run, in whatever order the ranks arrive: where splitting changes bits, products are always
split, but for those of few rows, which never are.

A call of kernels has three phases: launch what makes this rank's data visible to the peers; compute, in kernels that
wait for the peers' flags tile by tile; wait, on the stream, for whatever must be complete before the next launch. On a
GPU the host waits in none of them. Data larger than a generation of the arena is exchanged in pieces, each a call of
its own. README.md beside this file shows what the kernels write and wait for, and explains one more exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.exchange.arena import CallMismatch, piece_of, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import Copy, Fetch
from tpkernels.exchange.device_arena import DeviceArena, shard_pieces
from tpkernels.fused.kernels.gather_kernel import launch_fetch, launch_gather_matmul, launch_publish
from tpkernels.fused.strategy import Decision, Operation, decide, is_for_engines, rows_that_fit
from tpkernels.launch import cdiv
from tpkernels.ops.matmul.host import Matrix, product, rows_are_independent
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES
from tpkernels.symmetric.signals import PeerError
from tpkernels.symmetric.signals_kernel import FETCHED, MAX_SPLITS
from tpkernels.symmetric.wait_kernels import launch_wait

# So many rows are multiplied at once: the product takes as long as reading the matrix, and parts would read it again.
FEW_ROWS = 16
# Dtypes that can be multiplied and summed in every kind of exchange. Kernels take all but float64.
DTYPES = (*KERNEL_DTYPES, torch.float64)


def dtype_problem(operation: str, x: Tensor) -> str:
    """Return why an operation of all ranks cannot multiply x; empty if it can.

    Ask before the call begins: refusing a dtype in the middle of the call would leave the group poisoned.
    """
    if x.dtype in DTYPES:
        return ""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    return f"{operation} multiplies {names}: got {x.dtype} {tuple(x.shape)}: convert x and what it is multiplied by"


def gather_matmul(
    x: Tensor,
    matrices: Sequence[Matrix],
    comm: Communicator,
    num_tokens: int,
    operation: str,
    *,
    keep: bool,
    biases: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor | None]:
    """Multiply the gathered rows by each matrix; one gather serves all.

        y_i[T, F_i] = all_gather(x[T/tp, D]) @ m_i[D, F_i] + b_i

    Args:
        x: this rank's rows, as shard_rows(num_tokens) says.
        matrices: m_i, any strides, or prepared.
        num_tokens: T.
        operation: the operation's name, for messages.
        keep: also return the gathered x.
        biases: b_i [F_i], one per matrix, or none at all.

    Returns:
        The products, and the gathered x (with one rank x itself) or None.

    Order: own rows first, then those of rank+1, rank+2, ... as each arrives. With `keep`, all rows at once if all
    arrive within 0.1 ms and the bits are the same (ops/matmul/host.py, rows_are_independent): that costs least on the
    last rank to arrive, for which the others wait. Extra memory: T*D elements with `keep`.
    """
    kernels = choose_kernels(x, comm, "gather", num_tokens, [matrix.shape[1] for matrix in matrices], x.shape[1])
    if kernels is not None and matrices:
        arena, decision = kernels
        no_biases = [None] * len(matrices)
        in_memory = [plain(matrix) for matrix in matrices]
        return gather_by_kernels(x, in_memory, biases or no_biases, arena, num_tokens, operation, decision, keep=keep)
    outputs, full = _gather_on_host(x, matrices, comm, num_tokens, operation, keep)
    for y, bias in zip(outputs, biases, strict=False):
        y.add_(bias)
    return outputs, full


def _gather_on_host(
    x: Tensor, matrices: Sequence[Matrix], comm: Communicator, num_tokens: int, operation: str, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Run `gather_matmul` over an arena or collectives, without biases."""
    arena = comm.arena_for(x)
    if arena is None or comm.size == 1 or num_tokens <= FEW_ROWS:
        full = comm.all_gather_rows(x, num_tokens, operation=operation)
        return [product(full, matrix) for matrix in matrices], full if keep else None
    gathered = x.new_empty(num_tokens, x.shape[1]) if keep else None
    products = [x.new_empty(num_tokens, matrix.shape[1]) for matrix in matrices]
    shards = [shard_rows(num_tokens, comm.size, rank) for rank in range(comm.size)]
    lengths = [rows.stop - rows.start for rows in shards]
    may_be_whole = all(rows_are_independent(matrix, num_tokens, lengths) for matrix in matrices)
    for rows, shard in arena.gather(x, num_tokens, operation, into=gathered if may_be_whole else None):
        if shard is gathered:
            products = [product(shard, matrix) for matrix in matrices]
            continue
        if rows.start == rows.stop:
            continue
        for matrix, y in zip(matrices, products, strict=True):
            product(shard, matrix, out=y[rows])
        if gathered is not None:
            gathered[rows].copy_(shard)
    return products, gathered


def gather_by_kernels(
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
    with poison_if_left(arena):
        for first, piece in decision.pieces:
            # Launch: this rank's rows become visible to the peers, and theirs are fetched. Pushing needs no launch of
            # its own: the first items of the matmul do it. The call's number covers `kind`, because ranks that wait
            # for a flag must agree on how many rows it stands for.
            kind = f"pushes, a flag for {split_rows} rows" if push else "pulls"
            generation, call = begin_call(arena, operation, kind, num_tokens, depth, x.dtype, first)
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
    raise_where_it_is_known(arena)
    return outputs, gathered if keep else None


def gather(x: Tensor, arena: DeviceArena, num_tokens: int, operation: str) -> Tensor:
    """Return the rows of all ranks, concatenated."""
    full = _gather_in_pieces(x, arena, num_tokens, operation)
    arena.copies.join()
    raise_where_it_is_known(arena)
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
    raise_where_it_is_known(arena)


def _gather_in_pieces(x: Tensor, arena: DeviceArena, num_tokens: int, operation: str) -> Tensor:
    """Return all rows; the copies of the last piece are still under way."""
    x = x.contiguous()
    full = x.new_empty(num_tokens, x.shape[1])
    row_bytes = x.shape[1] * x.element_size()
    most = rows_that_fit(arena.generation_bytes, row_bytes)
    by_engine = is_for_engines(cdiv(num_tokens, arena.world) * row_bytes, arena.engine_bytes)
    with poison_if_left(arena):
        for first, piece in shard_pieces(num_tokens, arena.world, most):
            # Wait for the previous piece's copies before its generation comes up again.
            arena.copies.join()
            generation, call = begin_call(arena, operation, "pulls", num_tokens, x.shape[1], x.dtype, first)
            own = x[first : first + piece]
            launch_publish(own, arena, generation, call)
            # Programs share a shard; no flag is waited for.
            split_rows = max(piece if by_engine else cdiv(piece, MAX_SPLITS), 1)
            fetch = _fetch if by_engine else _fetch_by_kernel
            fetch(arena, generation, call, full, own, num_tokens, first, piece, split_rows, keep_own=True)
    return full


def begin_call(
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
        if arena.reserved_processors:
            # One program waits, then many copy: their processors are others' too (processors.py).
            launch_wait(arena, (arena.rank + 1) % arena.world, arena.world - 1, generation, call)
        launch_fetch(full, arena, num_tokens, first, piece, split_rows, generation, call, keep_own=keep_own)

    arena.copies.launch(launch, full)


@contextlib.contextmanager
def poison_if_left(arena: DeviceArena) -> Iterator[None]:
    """Tell the others if this rank leaves a call before its end (out of memory, say): they would wait in vain."""
    try:
        yield
    except (PeerError, CallMismatch):
        raise
    except BaseException:
        arena.leave()
        raise


def raise_where_it_is_known(arena: DeviceArena) -> None:
    """Raise errors of the peers if they are known already: an interpreted call has ended when it returns."""
    if not arena.control.is_cuda:
        arena.check()


def kernels_gather(x: Tensor, weight: Tensor, comm: Communicator, num_tokens: int) -> bool:
    """Return whether kernels do `gather_matmul` of x[T/tp, D] and m[D, F]."""
    return choose_kernels(x, comm, "gather", num_tokens, [weight.shape[1]], x.shape[1]) is not None


def choose_kernels(
    x: Tensor, comm: Communicator, operation: Operation, num_tokens: int, widths: Sequence[int], inner: int
) -> tuple[DeviceArena, Decision] | None:
    """Return the arena if kernels exchange, and how they do.

    Whether a group has such an arena follows from its construction; the rest is decided once for each size (`decide`).
    """
    arena = comm.device_arena_for(x)
    decision = None if arena is None else decide(arena, comm.strategy, operation, x, num_tokens, widths, inner)
    return None if arena is None or decision is None else (arena, decision)


def plain(matrix: Matrix) -> Tensor:
    """Return a matrix as kernels read it, prepared for the host's products or not."""
    return matrix if isinstance(matrix, Tensor) else matrix.plain
