"""The options of `python -m benchmarks.run data_parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Steps after which weights are compared with those of one process.
CHECKED_STEPS = 2


@dataclass(frozen=True)
class Options:
    """DataParallel, alone and with ShardedOptimizer, against torch's own, float32."""

    against: Literal["torch"] = "torch"
    """torch: DDP, and DDP with ZeroRedundancyOptimizer."""
    ranks: int = 2
    """Replicas, one core for each."""
    hidden: int = 512
    """Features; an MLP has four times as many."""
    layers: int = 4
    """Layers."""
    tokens: int = 128
    """Per sequence."""
    sequences: int = 4
    """Per replica and micro-batch."""
    micro_batches: int = 1
    """Per replica and step."""
    rounds: int = 9
    """Timed steps of each contestant."""
    memory_steps: int = 3
    """Steps of each contestant whose memory is measured."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


def check(options: Options) -> None:
    """Refuse what cannot run; that sizes are at least 1 is checked for all benchmarks.

    Raises:
        ValueError: the rule, the values, the remedy.
    """
    if options.ranks < 2 or options.hidden % 8 or options.hidden < 8:
        raise ValueError(
            f"replicas divide states among themselves, and 8 heads features: got --ranks {options.ranks}, --hidden "
            f"{options.hidden}: use 2 ranks or more, and a multiple of 8"
        )
