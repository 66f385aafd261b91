"""The two forms of every fused operator and its dual: gather, then multiply; multiply, then reduce-scatter.

    gather_matmul    y_i[T, F_i]  = all_gather(x[T/tp, D]) @ m_i[D, F_i]
    matmul_scatter   y[T/tp, D]   = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D])

Over an arena, the products of a shard start when it has arrived, and those for a peer are sent when they are computed;
in between no rank waits for another. Over a device arena kernels do the same (on_device.py), where strategy.py predicts
that they are faster. Otherwise (one rank, several hosts) the collective runs before or after one product. The operators
choose the matrices: w.T in forward, w in the duals.

Splitting a product by rows may change its last bits. So the arena's results differ from the collectives' by rounding.
They are the same from run to run, in whatever order the ranks arrive: where splitting changes bits, products are always
split, but for those of few rows, which never are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.background import copied
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused import on_device
from tpkernels.fused.strategy import AllReduce, Decision, Operation, decide, decide_all_reduce
from tpkernels.ops.matmul.host import Matrix, accumulate_product, product, rows_are_independent
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES

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
    kernels = _by_kernels(x, comm, "gather", num_tokens, [matrix.shape[1] for matrix in matrices], x.shape[1])
    if kernels is not None and matrices:
        arena, decision = kernels
        plain = [_plain(matrix) for matrix in matrices]
        no_biases = [None] * len(plain)
        return on_device.gather_matmul(x, plain, biases or no_biases, arena, num_tokens, operation, decision, keep=keep)
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
    kernels = _by_kernels(first, comm, "scatter", num_tokens, [columns], inner)
    if kernels is not None:
        plain = [(x, _plain(m)) for x, m in terms]
        return on_device.matmul_scatter(plain, addend, bias, kernels[0], operation, kernels[1])
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
    kernels = _by_kernels(x, comm, "gather", num_tokens, [columns], x.shape[1])
    if kernels is None:
        return matmul_scatter(terms, comm, operation), comm.all_gather_rows(x, num_tokens, operation=operation)
    arena, _ = kernels
    full = on_device.start_gather(x, arena, num_tokens, operation)
    y = matmul_scatter(terms, comm, operation)
    on_device.finish_gather(arena)
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
        mine = on_device.matmul_scatter([(x, _plain(matrix))], None, bias, device_arena, operation, decision)
        return on_device.gather(mine, device_arena, len(x), operation)
    mine = _scatter_on_host([(x, matrix)], comm, operation, None, bias)
    return comm.all_gather_rows(mine, len(x), operation=operation)


def kernels_gather(x: Tensor, weight: Tensor, comm: Communicator, num_tokens: int) -> bool:
    """Return whether kernels do `gather_matmul` of x[T/tp, D] and m[D, F]."""
    return _by_kernels(x, comm, "gather", num_tokens, [weight.shape[1]], x.shape[1]) is not None


def _by_kernels(
    x: Tensor, comm: Communicator, operation: Operation, num_tokens: int, widths: Sequence[int], inner: int
) -> tuple[DeviceArena, Decision] | None:
    """Return the arena if kernels exchange, and how they do; see `decide`."""
    arena = comm.device_arena_for(x)
    decision = None if arena is None else decide(arena, comm.strategy, operation, x, num_tokens, widths, inner)
    return None if arena is None or decision is None else (arena, decision)


def _plain(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.plain
