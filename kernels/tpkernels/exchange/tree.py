"""Sums in a balanced tree, whose shape follows only from the number of terms.

    4 terms: (t0 + t1) + (t2 + t3)

A rank that holds an aligned run of 2^k terms computes a whole subtree. So the same terms on 1, 2, 4, ... ranks give the
same bits. All sums between ranks are taken in this order (arena.py, communicator.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_sum(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Add the terms in pairs, then the sums in pairs, and so on; an odd one out takes part in the next round.

    Args:
        terms: at least one tensor, all of one shape and dtype; they are not changed.
        out: where the sum goes; default a new tensor. It may be one of the terms.

    Returns:
        The sum, in `out`'s dtype; without `out` in promote_types(dtype, float32), for integers in their own dtype.

    Numerics: every addition in promote_types(dtype, float32). Extra memory: half as many tensors as terms.
    """
    dtype = terms[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if len(terms) == 1:
        return terms[0].to(wide, copy=True) if out is None else out.copy_(terms[0])
    # The first terms are sums made here, to which others are added in place.
    num_own = 0
    while len(terms) > 2:
        pairs = [_sum(terms[i], terms[i + 1], wide, in_place=i < num_own) for i in range(0, len(terms) - 1, 2)]
        terms, num_own = [*pairs, *terms[2 * len(pairs) :]], len(pairs)
    left, right = terms
    if out is None:
        return _sum(left, right, wide, in_place=num_own > 0)
    if out.dtype == wide == right.dtype == left.dtype:
        return torch.add(left, right, out=out)
    return out.copy_(_sum(left, right, wide, in_place=num_own > 0))


def _sum(left: Tensor, right: Tensor, wide: torch.dtype, *, in_place: bool) -> Tensor:
    if in_place:
        return left.add_(right)
    return left + right if left.dtype == right.dtype == wide else left.to(wide) + right
