"""Operations that ranks issue in orders which do not fit together, across communicators.

NCCL promises nothing about operations of several communicators at once, unless all fit onto the device. So there should
be one order of all operations of a run, of which every rank issues those that it takes part in. Then any number of them
can be in flight, one suffices too, and no rank waits for another in a circle.

Each operation comes after the one that a rank has issued before it. If that leads back to itself there is no such
order, and two ranks have issued two operations the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.nccl.program import COMPUTE, Flag, Launch, Word


@dataclass
class _Operation:
    """One operation: who takes part, in which actions; and the operations that some rank issues next."""

    issued: dict[int, str] = field(default_factory=dict)
    later: list[_Operation] = field(default_factory=list)
    num_before: int = 0

    def __str__(self) -> str:
        return " = ".join(f"rank {rank}'s {text}" for rank, text in sorted(self.issued.items()))


def order_cycle(programs: Sequence[Sequence[Word]]) -> str:
    """Return operations that stand in a circle, each issued by a rank before the next; "" if there is one order.

    Launches that wait for nobody are in no circle.
    """
    operations: dict[Flag, _Operation] = {}
    for rank, words in enumerate(programs):
        before: _Operation | None = None
        for word in words:
            if not isinstance(word, Launch) or word.stream == COMPUTE or not word.begins:
                continue
            # A flag without the rank that raises it is what both sides of an operation have in common.
            operation = operations.setdefault(word.begins[0][:-1], _Operation())
            for flag in word.begins[1:]:
                # A batch is one operation with all its messages.
                operation = operations.setdefault(flag[:-1], operation)
            operation.issued[rank] = f"{word.action} ({word.what})"
            if before is not None:
                before.later.append(operation)
                operation.num_before += 1
            before = operation
    return _cycle(list({id(operation): operation for operation in operations.values()}.values()))


def _cycle(operations: list[_Operation]) -> str:
    """Take away whatever nothing comes before; what is left leads in circles."""
    ready = [operation for operation in operations if not operation.num_before]
    num_done = 0
    while ready:
        operation = ready.pop()
        num_done += 1
        for later in operation.later:
            later.num_before -= 1
            if not later.num_before:
                ready.append(later)
    if num_done == len(operations):
        return ""
    # Each of those that are left comes after another one of them: go back until one comes again.
    before: defaultdict[int, list[_Operation]] = defaultdict(list)
    for operation in operations:
        for later in operation.later if operation.num_before else ():
            before[id(later)].append(operation)
    path = [next(operation for operation in operations if operation.num_before)]
    while path[-1] not in path[:-1]:
        path.append(before[id(path[-1])][0])
    circle = path[path.index(path[-1]) :]
    return "\n  before ".join(map(str, reversed(circle)))
