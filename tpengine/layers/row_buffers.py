"""Buffers for the rows of a rank's experts: how many rows have room, and what did not fit.

    R' <= bound = load * t k       rows that kernels bring to this rank's experts, of t tokens with k choices each

Between GPUs of one host kernels bring rows to their experts, and the host waits for nothing (tpkernels.fused:
bounded_rows.py). So the host does not know how many rows come, and makes tensors by a bound. At load N, the number of
ranks, nothing can be lost. With less, rows beyond the bound are dropped and counted: what was computed must not be used
then, but computed again while `are_used` is false, when rows travel at their exact number. Where all rows fit both ways
have the same bits.

Whose step it is decides when buffers are used, and looks at what did not fit: training/expert_loads.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes, exchange_counts
from tpkernels.fused.bounded_rows import can_bound, exchange_bounded_counts


class RowBuffers:
    """The buffers of one rank's experts in all layers.

    Args:
        comm: the N ranks that share the experts, with an arena for kernels on `device`.
        load: rows that have room, over the mean of t k; above N it is N.
        device, dtype: of the rows.

    Raises:
        ValueError: the ranks have no such arena, or kernels do not move the dtype; a load below 1.

    Attributes:
        load: as given, at most N.
        are_used: whether rows go into buffers now; else they travel at their exact number, with a wait for the host.
        spilled: int64 [], on the device: the rows of this rank's experts that had no room, of all layers and
            micro-batches since `clear`; also of rows that travelled at their exact number, which are all there.
    """

    def __init__(self, comm: Communicator, load: float, device: torch.device, dtype: torch.dtype) -> None:
        if not can_bound(comm, device, dtype):
            raise ValueError(
                f"kernels bring rows into buffers: group {comm.name} has no arena for kernels on {device} that moves "
                f"{dtype}: pass no buffers, and rows travel at their exact number"
            )
        if load < 1:
            raise ValueError(f"buffers hold at least the mean number of rows: got load {load:g}: use 1 or more")
        self._comm, self.load = comm, min(load, float(comm.size))
        self.are_used = False
        self.spilled = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Forget what did not fit."""
        self.spilled.zero_()

    def exchange_counts(
        self, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, most_tokens: int
    ) -> Routes:
        """Tell all ranks how many rows each expert gets from this one; collective.

        Args:
            order, places, weights, counts: as tpkernels.exchange.experts.exchange_counts.
            most_tokens: no rank has more; the same on all ranks.

        Order: the host waits for the numbers only where buffers are not used.
        """
        mine = order, places, weights, counts
        bound = math.ceil(self.load * most_tokens * weights.shape[1])
        if self.are_used:
            routes = exchange_bounded_counts(*mine, self._comm, most_tokens, bound)
            self.spilled += routes.spilled[self._comm.rank]
            return routes
        exact = exchange_counts(*mine, self._comm)
        self.spilled += max(exact.num_rows - bound, 0)
        return exact
