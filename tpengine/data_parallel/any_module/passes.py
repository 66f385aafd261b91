"""Ranks that run different numbers of forward and backward passes (ZeRO 2 and 3): who does what next.

Each pass begins with a maximum over the replicas: forward over backward over finish, and of two parts of the model the
later one. A rank that has come to less takes part in the pass of the others without computing anything, contributes
zeros, and asks again. So a replica without data waits in `finish` for the others, and serves them meanwhile.

The price: one all-reduce of one element per pass, which the host waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch

from tpengine.layers.collectives import Communicator


class Pass(IntEnum):
    """What a rank has come to; the greatest goes first."""

    FINISH = 0
    BACKWARD = 1
    FORWARD = 2


class Passes:
    """The meetings of all replicas.

    Args:
        comm: the replicas.
        device: of the flag.
        num_parts: of the model: a pass goes over one.
        serve: take part in a pass of others, over a part.
    """

    def __init__(
        self, comm: Communicator, device: torch.device, num_parts: int, serve: Callable[[Pass, int], None]
    ) -> None:
        self._comm, self._device, self._num_parts, self._serve = comm, device, num_parts, serve

    def begin(self, own: Pass, part: int = 0) -> None:
        """Return when it is this rank's turn to begin a pass over a part; serve the others until then."""
        wanted = int(own) * self._num_parts + part
        while True:
            first = int(self._comm.all_reduce_max_(torch.tensor([wanted], device=self._device)))
            if first == wanted:
                return
            kind, of_others = divmod(first, self._num_parts)
            self._serve(Pass(kind), of_others)
