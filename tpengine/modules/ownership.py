"""Who owns what of an optimizer's state, and how updated tensors reach the other replicas: whole tensors, by size.

The largest tensor goes first, to the replica that owns least so far. A tensor that is larger than a share is cut along
its rows first, if its optimizer works element by element: such a class cannot tell a part of a tensor from a tensor.
Frozen tensors are divided in the same way by themselves: they have no state until they thaw.

The decision a reader will question: which classes those are is a list of torch's own, compared by identity. A class of
somebody else, and a subclass of one of these, may look at a tensor as a whole. It then gets whole tensors.

Updated tensors travel in flat buckets of one dtype:

    own tensors of rank r:  a a a b b c    bucket 0: a a a b    bucket 1: b c
    own tensors of rank s:  d d d d d      bucket 0: d d d d    bucket 1: d

What a rank owns is one stream of elements, whatever the tensors' sizes. A bucket holds the next elements of each rank's
stream. Over collectives it is gathered, while the next one is filled. Through an arena each rank writes its part once,
where the others read it.

Another decision: elements travel in the order of their memory where a tensor is dense, so that one
in channels_last or transposed needs no copy. Strides are among what the replicas have agreed on. Tensors with gaps go
through a contiguous copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
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
from tpkernels.exchange.arena import Arena
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work
from tpkernels.ops.tensor_table import is_dense

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
# While one bucket travels, the next one is filled.
_NUM_BUFFERS = 2


@dataclass(frozen=True)
class OwnedRows:
    """Rows of a tensor, along its first dim, that one replica owns.

    Attributes:
        owner: its rank.
        start, stop: half-open range of rows.
    """

    owner: int
    start: int
    stop: int


def divide(num_bytes: Sequence[int], num_rows: Sequence[int], loads: list[int], *, cuts: bool) -> list[list[OwnedRows]]:
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
    pieces: list[list[OwnedRows]] = [[] for _ in num_bytes]
    for size, index, start, stop in sorted(cut, key=lambda piece: -piece[0]):
        taken = {piece.owner for piece in pieces[index]}
        owner = min((rank for rank in range(len(loads)) if rank not in taken), key=lambda rank: loads[rank])
        loads[owner] += size
        pieces[index].append(OwnedRows(owner, start, stop))
    return [sorted(of_one, key=lambda piece: piece.start) for of_one in pieces]


def send_updates(owned: Sequence[Sequence[Tensor]], replicas: Communicator, bucket_bytes: int) -> None:
    """Overwrite every tensor with that of the replica which owns it; collective.

    Args:
        owned: by rank, the tensors that it owns: the same shapes, strides and dtypes on all replicas.
        replicas: the ranks.
        bucket_bytes: of what travels at once, over all replicas.

    Cost: each rank receives all that it does not own. Over collectives memory of `bucket_bytes`, through an arena none.
    """
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensors in owned for tensor in tensors)
    for dtype, device in kinds:
        views = [[x for x in tensors if x.dtype == dtype and x.device == device and x.numel()] for tensors in owned]
        # A tensor with gaps travels as a contiguous one.
        with_gaps = [x for tensors in views for x in tensors if not is_dense(x)]
        gaps = {id(x): torch.empty_like(x, memory_format=torch.contiguous_format) for x in with_gaps}
        for x in views[replicas.rank]:
            if id(x) in gaps:
                gaps[id(x)].copy_(x)
        streams = [[flat_of(gaps.get(id(x), x)) for x in tensors] for tensors in views]
        if any(streams):
            _send_streams(streams, replicas, bucket_bytes)
        for rank, tensors in enumerate(views):
            for x in tensors:
                if rank != replicas.rank and id(x) in gaps:
                    x.copy_(gaps[id(x)])


def _send_streams(streams: Sequence[Sequence[Tensor]], replicas: Communicator, bucket_bytes: int) -> None:
    """Send streams of flat tensors of one dtype and device."""
    first = next(tensors[0] for tensors in streams if tensors)
    arena = replicas.arena_for(first)
    longest = max(sum(map(len, tensors)) for tensors in streams)
    if arena is not None:
        _send_through(arena, [_windows(tensors, arena.generation_bytes // first.itemsize) for tensors in streams])
        return
    numel = max(1, min(bucket_bytes // (_NUM_BUFFERS * replicas.size * first.itemsize), longest))
    windows = [_windows(tensors, numel) for tensors in streams]
    buffers = [first.new_empty(replicas.size * numel) for _ in range(_NUM_BUFFERS)]
    travelling: list[tuple[Work, Tensor, list[list[Tensor]]]] = []
    while any(parts := [next(of_rank, []) for of_rank in windows]):
        # Empty the buffer that has travelled longest.
        if len(travelling) == _NUM_BUFFERS:
            _arrive(*travelling[0], replicas.rank)
            buffers.append(buffers.pop(0))
            del travelling[0]
        # Fill one with the next elements that this rank owns, and let it travel.
        width = max(sum(map(len, part)) for part in parts)
        full = buffers[len(travelling)][: replicas.size * width].view(replicas.size, width)
        _fill(full[replicas.rank], parts[replicas.rank])
        travelling.append((replicas.start_all_gather(full[replicas.rank], full.view(-1)), full, parts))
    for work, full, parts in travelling:
        _arrive(work, full, parts, replicas.rank)


def _send_through(arena: Arena, windows: Sequence[Iterator[list[Tensor]]]) -> None:
    """Send the streams' windows through shared memory, where each rank's part is written once."""
    while any(parts := [next(of_rank, []) for of_rank in windows]):
        numels = [sum(map(len, part)) for part in parts]
        dtype = next(part[0].dtype for part in parts if part)
        for peer, block in arena.publish(numels, dtype, partial(_fill, parts=parts[arena.rank])):
            _empty(block, parts[peer])


def _arrive(work: Work, full: Tensor, parts: Sequence[Sequence[Tensor]], rank: int) -> None:
    work.wait()
    for peer, part in enumerate(parts):
        if peer != rank:
            _empty(full[peer], part)


def _fill(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy tensors one behind the other into a flat one."""
    if parts:
        torch.cat(list(parts), out=flat[: sum(map(len, parts))])


def _empty(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy a flat tensor into others, one behind the other."""
    sizes = [len(part) for part in parts]
    for part, piece in zip(parts, flat[: sum(sizes)].split(sizes), strict=True):
        part.copy_(piece)


def _windows(tensors: Sequence[Tensor], numel: int) -> Iterator[list[Tensor]]:
    """Cut a stream of flat tensors into windows of `numel` elements; the last may be shorter."""
    window: list[Tensor] = []
    room = numel
    for tensor in tensors:
        start = 0
        while start < len(tensor):
            part = tensor[start : start + room]
            window.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield window
                window, room = [], numel
    if window:
        yield window


def flat_of(x: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of memory: a view of one dim."""
    return x.as_strided((x.numel(),), (1,))
