"""What a schedule generator returns: which rank holds each chunk, and in which order each rank computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tpengine.plan.actions import Action, Kind

ComputeLists = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Compute actions of every pipeline rank. lower.py adds communication, in the same way for all schedules.

    Args:
        name: for messages and drawings.
        ranks: the rank of each chunk, in model order.
        compute: one list of compute actions per rank.
    """

    name: str
    ranks: tuple[int, ...]
    compute: ComputeLists

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.compute)

    @property
    def num_microbatches(self) -> int:
        """Return how many micro-batches the lists name."""
        return 1 + max(action.piece[1] for actions in self.compute for action in actions)

    @property
    def splits_backward(self) -> bool:
        """Return whether weight halves (W) run apart from input halves: only layers with a gradient sink can."""
        return any(action.kind is Kind.W for actions in self.compute for action in actions)

    def with_backward_from(self, first: int) -> Schedule:
        """Return the schedule without the backwards of the chunks before `first`, in the same order otherwise.

        Nothing that is left waits for what is left out: a backward needs those of the chunks behind it.
        """
        lists = (
            tuple(action for action in actions if action.kind is Kind.F or action.piece[0] >= first)
            for actions in self.compute
        )
        return Schedule(self.name, self.ranks, tuple(lists)) if first else self

    @property
    def keeps_order(self) -> bool:
        """Return whether each chunk's weight gradients are added in the order of the micro-batches.

        Only then are all sums those of one process, which `train.reduction exact` requires.
        """
        latest: Counter[int] = Counter()
        for actions in self.compute:
            for action in actions:
                if action.kind in (Kind.B, Kind.W):
                    chunk, microbatch = action.piece
                    if microbatch < latest[chunk]:
                        return False
                    latest[chunk] = microbatch
        return True


def chunks_of_rank(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the chunks that a rank holds, in model order."""
    return tuple(chunk for chunk, holder in enumerate(ranks) if holder == rank)


def looping(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the ranks of chunks placed round-robin: chunk c on rank c mod p."""
    return tuple(range(num_ranks)) * num_chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of two chunks per rank, down and up again: rank 0 holds the first and the last."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def run(kind: Kind, chunk: int, first: int, end: int) -> tuple[Action, ...]:
    """Return one kind of action of one chunk for micro-batches [first, end)."""
    return tuple(Action(kind, chunk, microbatch) for microbatch in range(first, end))


def check_sizes(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ValueError for a size below 1."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"a schedule needs {name} of at least 1: got {value}, use 1")
