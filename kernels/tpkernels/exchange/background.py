"""Exchanges of flat tensors through an arena that go on while their caller does something else.

An arena's calls are made in one order on all ranks. So a communicator has one thread for them, which makes one exchange
after the other, and whoever uses the arena itself waits until the thread is done (`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tpkernels.exchange.arena import Arena, shard_rows
from tpkernels.exchange.pending import Submitted


class Background:
    """The thread of one communicator.

    Args:
        name: of the communicator.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        self._newest: Submitted | None = None

    def submit(self, exchange: Callable[..., None], arena: Arena, *args: Any) -> Submitted:
        """Begin an exchange, after those before it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tpkernels-{self._name}")
        self._newest = Submitted(self._thread.submit(_timed, exchange, arena, *args))
        return self._newest

    def settle(self) -> None:
        """Wait until everything that was begun has ended, whatever came of it.

        If an exchange fails, its own `wait` says so, and until a reset the poisoned arena.
        """
        if self._newest is not None:
            self._newest.settle()


@torch.no_grad()
def all_reduce_through(arena: Arena, x: Tensor) -> None:
    """Sum in place: a reduce-scatter, in which each rank adds its share of the elements, then a gather."""
    flat = x.reshape(-1, 1)
    own = flat[shard_rows(len(flat), arena.world, arena.rank)]
    arena.reduce_scatter(len(flat), 1, x.dtype, lambda rows, out: copied(flat[rows], out), "all_reduce", into=own)
    for rows, shard in arena.gather(own, len(flat), "all_reduce"):
        copied(shard, flat[rows])
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))


@torch.no_grad()
def gather_through(arena: Arena, own: Tensor, full: Tensor) -> None:
    """Write full[R*n] = all_gather(own[n])."""
    flat = full.view(-1, 1)
    for rows, shard in arena.gather(own.view(-1, 1), len(full), "all_gather"):
        copied(shard, flat[rows])


@torch.no_grad()
def reduce_scatter_through(arena: Arena, x: Tensor, out: Tensor) -> None:
    """Write out[n] = this rank's part of the sum over ranks of x[R*n]."""
    flat = x.view(-1, 1)
    own = shard_rows(len(flat), arena.world, arena.rank)

    def partial(rows: slice, part: Tensor | None) -> Tensor:
        # This rank's own part is added where it is.
        is_own = own.start <= rows.start < own.stop
        return flat[rows] if is_own else copied(flat[rows], part)

    arena.reduce_scatter(len(flat), 1, x.dtype, partial, "reduce_scatter", into=out.view(-1, 1))


def copied(x: Tensor, out: Tensor | None) -> Tensor:
    """Return a copy of x, in `out` where one is given, which may be x itself."""
    if out is None:
        return x.clone()
    return out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def _timed(exchange: Callable[..., None], arena: Arena, *args: Any) -> int:
    """Make an exchange; return the time at which it ended, in ns."""
    with arena.patiently():
        exchange(arena, *args)
    return time.perf_counter_ns()
