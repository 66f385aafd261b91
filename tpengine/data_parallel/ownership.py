"""Who owns what of an optimizer's state: whole tensors, balanced by their size.

The largest tensor goes first, to the replica that owns least so far. A tensor that is larger than a share is cut along
its rows first, if its optimizer works element by element: such a class cannot tell a part of a tensor from a tensor.
Frozen tensors are divided in the same way by themselves: they have no state until they thaw.

The decision a reader will question: which classes those are is a list of torch's own, compared by identity. A class of
somebody else, and a subclass of one of these, may look at a tensor as a whole. It then gets whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

# Each is compared with whole tensors in tests/tpengine/data_parallel/test_sharded_optimizer.py.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor, along its first dim, that one replica owns.

    Attributes:
        owner: its rank.
        start, stop: half-open range of rows.
    """

    owner: int
    start: int
    stop: int


def divide(num_bytes: Sequence[int], num_rows: Sequence[int], loads: list[int], *, cuts: bool) -> list[list[Piece]]:
    """Give every tensor an owner, or several where it is cut.

    Args:
        num_bytes, num_rows: of the tensors.
        loads: bytes that each replica owns already, by rank; what it is given here is added.
        cuts: a tensor that is larger than a share may be cut.

    Returns:
        The pieces of each tensor, in the order of its rows; at most one for each replica.
    """
    share = (sum(loads) + sum(num_bytes)) / len(loads)
    cut: list[tuple[int, int, int, int]] = []
    for index, (size, rows) in enumerate(zip(num_bytes, num_rows, strict=True)):
        num_parts = min(math.ceil(size / share), len(loads), rows) if cuts and size > share else 1
        edges = [rows * part // num_parts for part in range(num_parts + 1)]
        cut += [(size * (b - a) // rows if rows else size, index, a, b) for a, b in pairwise(edges)]
    pieces: list[list[Piece]] = [[] for _ in num_bytes]
    for size, index, start, stop in sorted(cut, key=lambda piece: -piece[0]):
        taken = {piece.owner for piece in pieces[index]}
        owner = min((rank for rank in range(len(loads)) if rank not in taken), key=lambda rank: loads[rank])
        loads[owner] += size
        pieces[index].append(Piece(owner, start, stop))
    return [sorted(of_one, key=lambda piece: piece.start) for of_one in pieces]
