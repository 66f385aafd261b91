"""What an update of the weights takes, by optim.name: bytes of what is kept, operations, traffic. No torch.

AdamW with moments in float32 is one pass over its tensors, by a kernel (tpkernels/ops/adamw.py). Any other optimizer is
a pass for each of its operations (training/elementwise.py).
"""

from __future__ import annotations

from typing import NamedTuple

from tpkernels.work import Work, adamw_work

from tpengine.config import OptimConfig, optimizer_kind
from tpengine.dtypes import dtype_bytes
from tpengine.layout.step_plan import gradient_bytes

# Of a word of Philox and its use: 10 rounds of 11 operations, in words of 8 bytes, inside a CPU's cache.
_ROUNDING_OPERATIONS = 120


class UpdateWork(NamedTuple):
    """The work of an update.

    Attributes:
        work: operations and bytes.
        operator: under which machines have measured it; empty for no other than any pass over memory.
    """

    work: Work
    operator: str


def state_item_bytes(optim: OptimConfig, dtype: str) -> int:
    """Return the bytes of an element of what the optimizer keeps."""
    return dtype_bytes("bfloat16") if optim.moments == "bfloat16" else gradient_bytes(dtype)


def states_bytes(optim: OptimConfig, dtype: str) -> int:
    """Return the bytes that the optimizer keeps of one weight, besides a master."""
    return len(optimizer_kind(optim).states) * state_item_bytes(optim, dtype)


def update_work(optim: OptimConfig, dtype: str, elements: int) -> UpdateWork:
    """Return the work of an update of so many weights of a dtype."""
    wide, narrow = gradient_bytes(dtype), dtype_bytes(dtype)
    if optim.name == "adamw" and optim.moments == "float32":
        return UpdateWork(adamw_work(elements, wide, narrow if narrow < wide else 0), "adamw")
    operations = optimizer_kind(optim).operations
    # Each reads two numbers and writes one; then weight and what is kept are chosen, read and written.
    item_bytes = 3 * wide * (operations + 1) + 2 * states_bytes(optim, dtype) + (wide + narrow if narrow < wide else 0)
    if optim.moments == "bfloat16":
        operations += _ROUNDING_OPERATIONS
    return UpdateWork(Work(flops=operations * elements, memory_bytes=item_bytes * elements), "")
