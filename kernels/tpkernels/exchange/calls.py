"""What the ranks of an arena agree on in a call: its operation, what it does, its sizes and dtype, as int32 words.

Every rank announces the words of its call, and compares those of the peers with its own (Arena.wait).
"""

from __future__ import annotations

import functools
import zlib

import torch

from tpkernels.symmetric.signals import wrapped

OPERATIONS = (
    "a refused call",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "dispatch",
    "combine",
)
# Announced by a rank that takes part in a call only to say that it cannot make it.
REFUSED = (0, 0, 0, 0, 0, 0)
# An operator's forward and its dual have the same name: this field says which of the two gathers and which scatters.
GATHERS, SCATTERS, SUMS, PUBLISHES, TAKES, RETURNS = range(1, 7)
_KINDS = {
    GATHERS: "gathers rows",
    SCATTERS: "scatters sums",
    SUMS: "sums rows",
    PUBLISHES: "publishes parts",
    TAKES: "takes rows to experts",
    RETURNS: "returns rows to tokens",
}


def words_of(operation: str, kind: int, num_rows: int, columns: int, dtype: torch.dtype, first: int) -> tuple[int, ...]:
    """Return what all ranks must agree on in a call, as int32 words."""
    sizes = (num_rows, columns, first)
    return (OPERATIONS.index(operation), kind, *(wrapped(size) for size in sizes), _dtype_number(dtype))


@functools.cache
def _dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a dtype, the same in every process."""
    return zlib.crc32(str(dtype).encode()) & 0x7FFFFFFF


def described(call: tuple[int, ...]) -> str:
    """Return a call's words as text."""
    operation, kind, num_rows, columns, first, dtype = call
    if operation == 0:
        return "something it refused"
    names = {
        _dtype_number(t): str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)
    }
    name = names.get(dtype, "of an unknown dtype")
    # What goes to experts and back is cut by columns.
    place = "column" if kind in (TAKES, RETURNS) else "row"
    return f"{OPERATIONS[operation]} of {num_rows} x {columns} {name} from {place} {first}, which {_KINDS[kind]}"
