"""Links between ranks: how long messages and collectives take, by size and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpengine.simulate.machine.curve import Curve


@dataclass(frozen=True)
class Link:
    """What connects ranks: those of one node, or those of several.

    Attributes:
        bytes_per_s: from one rank to one other, each direction, of long messages.
        latency_s: until a message's first byte has arrived, or of one step of a ring.
        ring_bytes_per_s: bus bandwidth of a ring of many bytes: what each rank sends per second.
        measured: bus bandwidth by bytes of the whole tensor, by number of ranks; of a number between two measured ones
            the next larger. It includes latencies. Without an entry a ring takes its steps' latencies and its bytes
            over `ring_bytes_per_s`.
        fused: bytes per second by bytes of the whole tensor, by number of ranks: what a fused matmul takes longer than
            the same matmul without its exchange. Without an entry an exchange takes `exchange_seconds`, and hides.
    """

    bytes_per_s: float
    latency_s: float
    ring_bytes_per_s: float
    measured: Mapping[int, Curve] = field(default_factory=dict)
    fused: Mapping[int, Curve] = field(default_factory=dict)

    def message_seconds(self, num_bytes: float) -> float:
        """Return how long one message takes."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def exchange_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long ranks take that copy their shares straight to each other, as fused matmuls do.

        Args:
            num_bytes: of the whole tensor.
            num_ranks: n.
        """
        if num_ranks == 1 or not num_bytes:
            return 0.0
        return (num_ranks - 1) * (num_bytes / num_ranks / self.bytes_per_s + self.latency_s)

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long an all-gather or a reduce-scatter takes; zero for one rank.

            (n-1)/n * bytes / bandwidth + (n-1) * latency          n-1 steps, each with 1/n of the bytes

        Args:
            num_bytes: of the whole tensor.
            num_ranks: n.
        """
        if num_ranks == 1 or not num_bytes:
            return 0.0
        sent = (num_ranks - 1) / num_ranks * num_bytes
        curve = _of_ranks(self.measured, num_ranks)
        if curve is not None:
            return sent / curve.at(num_bytes)
        return sent / self.ring_bytes_per_s + (num_ranks - 1) * self.latency_s

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long an all-reduce takes: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(num_bytes, num_ranks)

    def fused_seconds(self, num_bytes: float, num_ranks: int) -> float | None:
        """Return what a fused matmul takes longer than without its exchange; None if it was not measured."""
        curve = _of_ranks(self.fused, num_ranks)
        return None if curve is None or num_ranks == 1 else num_bytes / curve.at(num_bytes)


def _of_ranks(curves: Mapping[int, Curve], num_ranks: int) -> Curve | None:
    known = [measured for measured in sorted(curves) if measured >= num_ranks]
    return curves[known[0]] if known else None
