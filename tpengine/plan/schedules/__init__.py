"""Schedules: in which order each pipeline rank computes. Compute actions only, one generator per file.

In all of them each chunk runs its actions of one kind in the order of the micro-batches, so gradients are added in the
same order and have the same bits with every schedule. A user's own file (file.py) may use another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tpengine.plan.schedules.file import read_schedule
from tpengine.plan.schedules.interleaved import interleaved
from tpengine.plan.schedules.schedule import ComputeLists, Schedule, chunks_of_rank
from tpengine.plan.schedules.simple import forward_only, gpipe, one_f_one_b
from tpengine.plan.schedules.zb_h1 import zb_h1
from tpengine.plan.schedules.zbv import zbv
from tpengine.spelling import use

__all__ = ["SCHEDULES", "ComputeLists", "Form", "Schedule", "chunks_of_rank", "forward_only", "make_schedule"]


@dataclass(frozen=True)
class Form:
    """A kind of schedule that a user can name.

    Args:
        generate: (ranks p, micro-batches m, chunks per rank v) -> schedule.
        num_chunks: v if the form fixes it; None if the user chooses it.
    """

    generate: Callable[[int, int, int], Schedule]
    num_chunks: int | None = 1


# The schedules that train, by the name a user gives.
SCHEDULES: Mapping[str, Form] = MappingProxyType(
    {
        "gpipe": Form(lambda p, m, _: gpipe(p, m)),
        "1f1b": Form(lambda p, m, _: one_f_one_b(p, m)),
        "interleaved": Form(interleaved, num_chunks=None),
        "zb-h1": Form(lambda p, m, _: zb_h1(p, m)),
        "zbv": Form(lambda p, m, _: zbv(p, m), num_chunks=2),
    }
)


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate the schedule of that name, or read it from a file.

    Args:
        name: one of `SCHEDULES`, or the path of a file (file.py): a name with a "/" in it or ending in ".txt".
        num_ranks, num_microbatches: p and m.
        num_chunks: chunks per rank v, where the form leaves it open; other forms and files ignore it.
    Returns: the schedule; it is not verified here.
    Raises: ValueError: an unknown name, a size below 1, a file that cannot be read or is wrong.
    """
    form = SCHEDULES.get(name)
    if form is not None:
        return form.generate(num_ranks, num_microbatches, form.num_chunks or num_chunks)
    if "/" in name or name.endswith(".txt"):
        return read_schedule(name, num_ranks, num_microbatches)
    raise ValueError(
        f"schedule must be one of {', '.join(SCHEDULES)}, or the path of a file: got {name!r}: {use(name, SCHEDULES)}, "
        f"or ./{name} for a file"
    )
