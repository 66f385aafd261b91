"""One of the processes that share the machine while it is measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpengine.distributed.local_ranks import THREADS_PER_RANK
from tpengine.doctor.measure.clock import CallClock, clock_of, host_clock_of
from tpengine.doctor.measure.exchanges import fused_rates, message_seconds, sum_rates
from tpengine.doctor.measure.heap import keep_what_is_freed
from tpengine.doctor.measure.host import seconds_per_action, seconds_per_operator
from tpengine.doctor.measure.operators import operator_rates, update_rates
from tpengine.doctor.measure.products import cold_shares, prepare_rates, product_rates
from tpengine.doctor.measure.sizes import MeasuredSizes


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks.

    Args:
        device: cpu or cuda.
        sizes: what is measured.
    """

    def __init__(self, device: str, sizes: MeasuredSizes) -> None:
        if device == "cpu":
            keep_what_is_freed()
            torch.set_num_threads(THREADS_PER_RANK)
        self._sizes, self._clock = sizes, clock_of(torch.device(device), sizes.seconds, sizes.evicting_bytes)
        # Nothing is pushed out of the caches. Such calls differ by less from each other.
        self._warm = clock_of(torch.device(device), sizes.seconds / 2, 0)
        self._host = host_clock_of(torch.device(device), sizes.seconds)

    def rates(self, dtype: str) -> dict[str, Any]:
        """Return products and operators of a dtype, whose operands come from memory."""
        clock, sizes, of = self._clock, self._sizes, getattr(torch, dtype)
        found = self._of_micro_batches(clock, of)
        if clock.device.type == "cpu":
            found["operators"]["prepare"] = prepare_rates(clock, of, sizes.prepared)
        found["operators"] |= update_rates(clock, of, sizes.updated)
        return found

    def cached_rates(self, dtype: str) -> dict[str, Any]:
        """Return those that every micro-batch has, where their operands come from caches."""
        return self._of_micro_batches(self._warm, getattr(torch, dtype))

    def cold_shares(self, dtype: str) -> list[tuple[float, float]]:
        """Return what is left of memory's cost by the bytes that are touched between two uses."""
        sizes = self._sizes
        return cold_shares(self._clock, self._warm, getattr(torch, dtype), sizes.cycled, sizes.cycled_bytes)

    def _of_micro_batches(self, clock: CallClock, dtype: torch.dtype) -> dict[str, Any]:
        sizes = self._sizes
        # A GPU's clock does not count the host.
        host_s = seconds_per_operator(clock) if clock.device.type == "cpu" else 0.0
        return {
            "products": product_rates(clock, dtype, sizes.rows, sizes.matrices),
            "operators": operator_rates(clock, dtype, sizes, host_s),
        }

    def copies(self) -> list[tuple[float, float]]:
        """Return bytes read and written per second, by bytes of a copy."""
        found = []
        for num_bytes in self._sizes.copied_bytes:
            x, y = (torch.zeros(num_bytes // 4, device=self._clock.device) for _ in range(2))
            seconds = self._clock.of_call([lambda x=x, y=y: y.copy_(x)])  # type: ignore[misc]
            found.append((2.0 * num_bytes, 2.0 * num_bytes / seconds))
        return found

    def host(self) -> tuple[float, float, float]:
        """Return the host's seconds per operator and per action, and those of a kernel that does nothing."""
        x = torch.zeros(1, device=self._clock.device)
        launch = self._clock.of_call([lambda: x.add_(1.0)], is_cold=False)
        return seconds_per_operator(self._host), seconds_per_action(self._host), launch

    def exchanges(self, group: ProcessGroup | None = None) -> dict[str, list[tuple[float, float]]]:
        """Return messages, sums and fused matmuls by size, of this host's ranks on a CPU; nothing with one rank.

        Args:
            group: the ranks of this host; None for all.
        """
        if dist.get_world_size(group) == 1:
            return {}
        clock, sizes = self._clock, self._sizes
        return {
            "messages": message_seconds(clock, sizes.message_bytes, group),
            "sums": sum_rates(clock, sizes.sum_bytes, group),
            "fused": fused_rates(clock, sizes.fused, group),
        }
