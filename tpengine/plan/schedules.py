"""Schedules: in which order each pipeline rank computes. One chunk per rank, compute actions only.

Communication is added afterwards and for all schedules alike (lower.py), so a schedule is a few lines. In
each of them a chunk's backwards run in the order of the micro-batches: gradients accumulate in the same
order, hence to the same bits, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tpengine.plan.actions import Action, Kind

ComputeLists = tuple[tuple[Action, ...], ...]
Generator = Callable[[int, int], ComputeLists]


def gpipe(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """List all forwards, then all backwards. Holds all micro-batches' activations; idle (p-1)/(m+p-1).

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: one list per rank.
    Raises: ValueError: an argument below 1.
    Source: GPipe (Huang et al. 2019), section 2.3, with backward in forward's order instead of reversed.
    """
    _check(num_ranks, num_microbatches)
    return tuple(
        _run(Kind.F, rank, 0, num_microbatches) + _run(Kind.B, rank, 0, num_microbatches) for rank in range(num_ranks)
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """List p-r-1 warm-up forwards on rank r, then forward and backward in turn, then the backwards left.

    Rank r holds at most p-r micro-batches' activations; idle (p-1)/(m+p-1) as GPipe.

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: one list per rank.
    Raises: ValueError: an argument below 1.
    Source: PipeDream-Flush (Narayanan et al. 2021), section 2.2.
    """
    _check(num_ranks, num_microbatches)
    return tuple(_one_f_one_b_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def forward_only(num_ranks: int, num_microbatches: int) -> ComputeLists:
    """List all forwards and nothing else, for evaluation and sampling.

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1.
    Returns: one list per rank.
    Raises: ValueError: an argument below 1.
    """
    _check(num_ranks, num_microbatches)
    return tuple(_run(Kind.F, rank, 0, num_microbatches) for rank in range(num_ranks))


# The schedules that train, by the name a user gives.
SCHEDULES: Mapping[str, Generator] = MappingProxyType({"gpipe": gpipe, "1f1b": one_f_one_b})


def _one_f_one_b_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(num_ranks - rank - 1, num_microbatches)
    num_steady = num_microbatches - num_warmup
    steady = tuple(
        action
        for step in range(num_steady)
        for action in (Action(Kind.F, rank, num_warmup + step), Action(Kind.B, rank, step))
    )
    cool_down = _run(Kind.B, rank, num_steady, num_microbatches)
    return _run(Kind.F, rank, 0, num_warmup) + steady + cool_down


def _run(kind: Kind, chunk: int, first: int, end: int) -> tuple[Action, ...]:
    return tuple(Action(kind, chunk, microbatch) for microbatch in range(first, end))


def _check(num_ranks: int, num_microbatches: int) -> None:
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"a schedule needs {name} of at least 1: got {value}, use 1")
