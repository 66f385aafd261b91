"""Where many tensors lie in a device's memory, so that a kernel goes over all of them in one launch.

    places[tensor]  = elements, number of its first chunk, address of the tensor, addresses of those that go with it
    chunks[program] = tensor, which chunk of it

A program has a chunk of CHUNK elements. A tensor of any size is some chunks, of which the last may be shorter. Where an
address is no multiple of 16, as in a slice that ZeRO cuts, a kernel must load element by element: these tensors have a
launch of their own.

The decision a reader will question: the addresses are in memory, not among the kernel's arguments. Apex and torch pass
them with the launch, which holds 320 chunks of 65,536 elements, or 2,240 where torch is built for CUDA 13: 53 or 8
launches for 1.1 billion elements. The table costs 8 bytes a chunk, and a program two small loads, one after the other.
It depends on addresses and sizes alone. So it is kept, and found again by them: a tensor that has moved has another
table, and nobody needs to declare it.

Source: apex and torch, multi_tensor_apply.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import jit, refuse_while_captured, run, tl

# Elements of a chunk. 67,000 programs for 1.1 billion elements, each with enough to do to pay for its two small loads.
# No GPU has timed it yet.
CHUNK = 16384
# Tables that are kept: an engine has one for its update, one for the norm and one for clearing gradients.
_MOST_TABLES = 32
# Those that captured graphs read, by identity: a replay finds them where they were.
_captured: dict[int, TensorTable] = {}
# What a row of `places` has before the addresses.
FIRST_ADDRESS = 2


class TensorTable(NamedTuple):
    """The tables, on the device.

    Attributes:
        places: int64 [tensors, FIRST_ADDRESS + addresses].
        launches: (chunks int32 [programs, 2], whether all their addresses are multiples of 16) of each launch.
        num_chunks: of all tensors.
        stream: on which their memory was taken; None where there are none.
    """

    places: Tensor
    launches: tuple[tuple[Tensor, bool], ...]
    num_chunks: int
    stream: torch.cuda.Stream | None


def table_of(*columns: Sequence[Tensor]) -> TensorTable:
    """Return where tensors lie, and those that go with them.

    Args:
        columns: each with as many tensors, the i-th of all of the same number of elements; at least one tensor, all on
            one device and dense.

    Raises:
        RuntimeError: a tensor's memory has been taken away; or a CUDA graph is captured, and no call before has seen
            the tensors where they are.

    Cost: for 5 columns of 146 tensors some 100 us of the host. Where a tensor has moved, copies to the device more, for
        which the host waits. A table that a captured graph reads is kept for good.
    """
    addresses = tuple(tuple([x.data_ptr() for x in column]) for column in columns)
    table = _table(columns[0][0].device, tuple([x.numel() for x in columns[0]]), addresses)
    if table.stream is not None:
        _keep(table)
    return table


def _keep(table: TensorTable) -> None:
    """Have a table's memory not used again before what is launched next has read it, however often that runs."""
    if torch.cuda.is_current_stream_capturing():
        _captured[id(table)] = table
        return
    stream = torch.cuda.current_stream(table.places.device)
    if stream != table.stream:
        for x in (table.places, *(chunks for chunks, _ in table.launches)):
            x.record_stream(stream)


def launch_over(table: TensorTable, kernel: Any, *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Launch a kernel over all chunks of a table: once, or twice where some addresses are no multiples of 16.

    Args:
        kernel: called with (places, chunks, *arguments), and ALIGNED, COLUMNS and CHUNK among its constants.
    """
    columns = table.places.shape[1]
    for chunks, is_aligned in table.launches:
        sizes = {"ALIGNED": is_aligned, "COLUMNS": columns, "CHUNK": CHUNK}
        run(kernel, (len(chunks),), table.places, chunks, *arguments, num_warps=num_warps, **sizes, **constants)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return triton's name of a dtype, for a kernel that knows its operands by address alone."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor's elements lie side by side in memory, in whatever order of its dims."""
    return x.layout == torch.strided and _is_dense(x.shape, x.stride())


@functools.lru_cache
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.lru_cache(_MOST_TABLES)
def _table(device: torch.device, numels: tuple[int, ...], addresses: tuple[tuple[int, ...], ...]) -> TensorTable:
    missing = [i for i, numel in enumerate(numels) if numel and not all(column[i] for column in addresses)]
    if missing and device.type != "meta":
        raise RuntimeError(
            f"tensors have memory when a kernel goes over them: numbers {missing} of {len(numels)} have none: give it "
            "back before"
        )
    refuse_while_captured(device, "tensors lie where no call has seen them")
    sizes, places = torch.tensor(numels), torch.tensor(addresses)
    counts = (sizes + (CHUNK - 1)) // CHUNK
    firsts = counts.cumsum(0) - counts
    # One row per chunk: its tensor, and its number within the tensor.
    tensors = torch.arange(len(numels)).repeat_interleave(counts)
    chunks = torch.stack([tensors, torch.arange(len(tensors)) - firsts[tensors]], dim=1).to(torch.int32)
    is_aligned = (places % 16 == 0).all(0)[tensors]
    launches = [(chunks[is_aligned == aligned], aligned) for aligned in (True, False)]
    return TensorTable(
        torch.cat([sizes[None], firsts[None], places]).T.contiguous().to(device),
        tuple((some.to(device), aligned) for some, aligned in launches if len(some)),
        len(chunks),
        torch.cuda.current_stream(device) if device.type == "cuda" else None,
    )


@jit
def chunk_of(p_places: tl.tensor, p_chunks: tl.tensor, COLUMNS: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return this program's tensor, the row of `places` that is its, and its first element and number of elements."""
    p_chunk = p_chunks + 2 * tl.program_id(0).to(tl.int64)
    i_tensor = tl.load(p_chunk).to(tl.int64)
    first = tl.load(p_chunk + 1).to(tl.int64) * CHUNK
    p_place = p_places + i_tensor * COLUMNS
    return i_tensor, p_place, first, tl.minimum(tl.load(p_place) - first, CHUNK)


@jit
def tensor_at(p_place: tl.tensor, NUMBER: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return the pointer to the tensor of column NUMBER in a row of `places`."""
    p_tensor = tl.load(p_place + 2 + NUMBER).to(tl.pointer_type(DTYPE))  # 2 is FIRST_ADDRESS
    if ALIGNED:
        p_tensor = tl.multiple_of(p_tensor, 16)
    return p_tensor


@jit
def load_inside(p_block: tl.tensor, m_inside: tl.tensor) -> tl.tensor:
    """Return a block; zeros outside a mask. A mask of None is none, so that loads have full width."""
    return tl.load(p_block) if m_inside is None else tl.load(p_block, mask=m_inside, other=0.0)
