"""Which of how many processes this is, as torchrun says it in the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """This process's place.

    Attributes:
        rank, world_size: over all nodes.
        local_rank, local_world_size: on this node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them there is one process.

        Raises:
            ValueError: not integers, not 0 <= rank < size, or several processes and no address to meet at.
        """
        rank, world_size = _pair(environ, "RANK", "WORLD_SIZE", "1")
        local_rank, local_world_size = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", str(world_size))
        port = environ.get("MASTER_PORT", "")
        if world_size > 1 and not ("MASTER_ADDR" in environ and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"{world_size} processes must know where to meet: MASTER_ADDR {environ.get('MASTER_ADDR')}, "
                f"MASTER_PORT {port or None}: start with torchrun"
            )
        return cls(rank, world_size, local_rank, local_world_size)


def _pair(environ: Mapping[str, str], index: str, size: str, default_size: str) -> tuple[int, int]:
    a, b = environ.get(index, "0"), environ.get(size, default_size)
    if not (a.isdecimal() and b.isdecimal() and int(a) < int(b)):
        raise ValueError(
            f"the environment must have integers 0 <= {index} < {size}: {index} {a!r}, {size} {b!r}: "
            "start with torchrun, or unset both"
        )
    return int(a), int(b)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
