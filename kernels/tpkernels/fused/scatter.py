"""Multiply, then sum and scatter, in both forms, and what it makes together with a gather; see gather.py, its dual.

    matmul_scatter        y[T/tp, D]   = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D] + addend) + bias
    scatter_and_gather    the same, beside a gather of other rows
    matmul_then_gather    the same, and all rows to all ranks

Rows for a peer are sent when they are computed; in between no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.background import copied
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.gather import (
    FEW_ROWS,
    begin_call,
    choose_kernels,
    finish_gather,
    gather,
    plain,
    poison_if_left,
    raise_where_it_is_known,
    start_gather,
)
from tpkernels.fused.kernels.scatter_kernel import MOST_TERMS, launch_matmul_scatter
from tpkernels.fused.strategy import AllReduce, Decision, decide, decide_all_reduce
from tpkernels.ops.matmul.host import Matrix, accumulate_product, product
from tpkernels.ops.matmul.kernel import launch_matmul


def matmul_scatter(
    terms: Sequence[tuple[Tensor, Matrix]],
    comm: Communicator,
    operation: str,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply, sum over the ranks, keep this rank's rows.

        y[T/tp, D] = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D] + addend[T, D]) + b[D]

    Args:
        terms: pairs (x_i, m_i), any strides, m_i may be prepared.
        operation: the operation's name, for messages.
        addend: added before the sum.
        bias: added after the sum.

    Returns:
        A new tensor.

    Order: the rows of rank+1 first, own rows last. Numerics: as Arena.reduce_scatter, or the collective's.
    """
    first, matrix = terms[0]
    num_tokens, columns = first.shape[0], matrix.shape[1]
    inner = sum(m.shape[0] for _, m in terms)
    kernels = choose_kernels(first, comm, "scatter", num_tokens, [columns], inner)
    if kernels is not None:
        by_kernels = [(x, plain(m)) for x, m in terms]
        return scatter_by_kernels(by_kernels, addend, bias, kernels[0], operation, kernels[1])
    return _scatter_on_host(terms, comm, operation, addend, bias)


def _scatter_on_host(
    terms: Sequence[tuple[Tensor, Matrix]],
    comm: Communicator,
    operation: str,
    addend: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run `matmul_scatter` over an arena or collectives."""
    first, matrix = terms[0]
    num_tokens, columns = first.shape[0], matrix.shape[1]

    def partial(rows: slice, out: Tensor | None = None) -> Tensor:
        y = product(first[rows], matrix, out)
        for x, m in terms[1:]:
            accumulate_product(y, x[rows], m)
        return y if addend is None else y.add_(addend[rows])

    arena = comm.arena_for(first)
    if arena is None or comm.size == 1:
        y = comm.reduce_scatter(partial(slice(0, num_tokens)))
    elif num_tokens <= FEW_ROWS:
        whole = partial(slice(0, num_tokens))
        y = arena.reduce_scatter(
            num_tokens, columns, first.dtype, lambda rows, out: copied(whole[rows], out), operation
        )
    else:
        y = arena.reduce_scatter(num_tokens, columns, first.dtype, partial, operation)
    return y if bias is None else y.add_(bias)


def scatter_by_kernels(
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
    with poison_if_left(arena):
        for first, piece in decision.pieces:
            generation, call = begin_call(
                arena, operation, "scatters", num_tokens, columns, x.dtype, first, may_be_beside=True
            )
            # Compute and send: each tile for a peer is stored into this rank's slot there, a flag follows the last of a
            # split. Wait: own tiles, computed last, wait for their split of every peer, and are added to the slots.
            mine = y[first : first + piece]
            launch_matmul_scatter(
                mine, terms, addend, bias, arena, num_tokens, first, piece, slot_elements, generation, call
            )
    raise_where_it_is_known(arena)
    return y


def scatter_and_gather(
    terms: Sequence[tuple[Tensor, Matrix]],
    x: Tensor,
    comm: Communicator,
    num_tokens: int,
    operation: str,
) -> tuple[Tensor, Tensor]:
    """Do `matmul_scatter`, and gather other rows; with kernels each hides the other.

    Returns:
        The rows of the products, and all ranks' x[T, D].
    """
    columns = sum(m.shape[0] for _, m in terms)
    # The same choice as forward made when it gathered these rows.
    kernels = choose_kernels(x, comm, "gather", num_tokens, [columns], x.shape[1])
    if kernels is None:
        return matmul_scatter(terms, comm, operation), comm.all_gather_rows(x, num_tokens, operation=operation)
    arena, _ = kernels
    full = start_gather(x, arena, num_tokens, operation)
    y = matmul_scatter(terms, comm, operation)
    finish_gather(arena)
    return y, full


def matmul_then_gather(
    x: Tensor, matrix: Matrix, comm: Communicator, operation: str, bias: Tensor | None = None
) -> Tensor:
    """Multiply, sum over the ranks, give all rows to all ranks: y[T, D] = all_reduce(x[T, K] @ m[K, D]) + b[D].

    Every element is the same sum on all ranks: it is added on one rank and gathered or, for few tokens, added on each
    rank by the same kernel. Extra memory: for few tokens T*D elements of every rank.
    """
    device_arena, (inner, columns) = comm.device_arena_for(x), matrix.shape
    way: AllReduce = "two_collectives"
    if device_arena is not None:
        way = decide_all_reduce(device_arena, comm.strategy, x, columns, inner)
    if way == "one_shot":
        partials = comm.all_gather(product(x, matrix)).view(comm.size, len(x), columns)
        # One order on all ranks: they add equal tensors by the same kernel.
        y = partials.sum(0)
        return y if bias is None else y.add_(bias)
    if way == "kernels":
        assert device_arena is not None
        decision = decide(device_arena, "fused", "scatter", x, len(x), [columns], inner)
        assert decision is not None, "a named strategy has a decision"
        mine = scatter_by_kernels([(x, plain(matrix))], None, bias, device_arena, operation, decision)
        return gather(mine, device_arena, len(x), operation)
    mine = _scatter_on_host([(x, matrix)], comm, operation, None, bias)
    return comm.all_gather_rows(mine, len(x), operation=operation)
