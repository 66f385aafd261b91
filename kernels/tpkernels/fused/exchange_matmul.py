"""The two forms every fused operator and its dual consist of: gather, then multiply; multiply, then reduce-scatter.

    gather_matmul    y_i[T, F_i]  = all_gather(x[T/tp, D]) @ m_i[D, F_i]
    matmul_scatter   y[T/tp, D]   = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D])

Over an arena the products of a shard start when it has arrived, and those for a peer leave when they are computed; in
between nobody waits for anybody. Otherwise (one rank, CUDA tensors, several hosts) the collective comes before or after
one product. The operators choose the matrices: w.T forwards, w in the duals.

Splitting a product by rows may change its last bits, hence the arena's results differ from the collectives' by
rounding, and are the same from run to run, whoever comes first: where it does, products are always split.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpkernels.arena import shard_rows
from tpkernels.communicator import Communicator
from tpkernels.host_gemm import Matrix, accumulate_product, product, rows_are_independent


def gather_matmul(
    x: Tensor, matrices: Sequence[Matrix], comm: Communicator, num_tokens: int, operation: str, *, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Multiply the gathered rows by each matrix; one gather for all.

        y_i[T, F_i] = all_gather(x[T/tp, D]) @ m_i[D, F_i]

    Args:
        x: this rank's rows, as shard_rows(num_tokens) says.
        matrices: m_i, any strides, or prepared.
        num_tokens: T.
        operation: what for, in messages.
        keep: also return the gathered x.

    Returns:
        The products, and the gathered x (with one rank x itself) or None.

    Order: own rows first, then those of rank+1, rank+2, ... as each arrives. With `keep` all at once, if all come
    within 0.1 ms and the bits are the same (host_gemm.rows_are_independent): the last rank to come, for whom the others
    wait, then loses least. Extra memory: T*D elements with `keep`.
    """
    arena = comm.arena_for(x)
    if arena is None or comm.size == 1:
        full = comm.all_gather_rows(x, num_tokens)
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
    terms: Sequence[tuple[Tensor, Matrix]], comm: Communicator, operation: str, addend: Tensor | None = None
) -> Tensor:
    """Multiply, sum over the ranks, keep this rank's rows.

        y[T/tp, D] = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D] + addend[T, D])

    Args:
        terms: pairs (x_i, m_i), any strides, m_i may be prepared.
        operation: what for, in messages.
        addend: added before the sum.

    Returns:
        A new tensor.

    Order: the rows of rank+1 first, own rows last. Numerics: as Arena.reduce_scatter, or the collective's.
    """
    first, matrix = terms[0]
    num_tokens, columns = first.shape[0], matrix.shape[1]

    def partial(rows: slice, out: Tensor | None = None) -> Tensor:
        y = product(first[rows], matrix, out)
        for x, m in terms[1:]:
            accumulate_product(y, x[rows], m)
        return y if addend is None else y.add_(addend[rows])

    arena = comm.arena_for(first)
    if arena is None or comm.size == 1:
        return comm.reduce_scatter(partial(slice(0, num_tokens)))
    return arena.reduce_scatter(num_tokens, columns, first.dtype, partial, operation)
