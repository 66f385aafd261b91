"""A timeline as a grid of characters, and a plan as wrapped lists: what a terminal shows."""

from __future__ import annotations

from collections.abc import Iterable

from tpengine.plan.actions import COMPUTE
from tpengine.plan.plan import Plan
from tpengine.plan.timeline import Span, Timeline


def grid(timeline: Timeline, unit: float = 1.0) -> str:
    """Draw one row per rank and one column per unit of time.

        rank 0  F0 F1 .  .  B0--- B1---
        rank 1  .  F0 B0--- F1 B1--- .

    Args:
        timeline: from `simulate`, or measured.
        unit: time per column, in the timeline's unit. Times are rounded to columns; an action shorter than
            half a unit may vanish.
    Returns: the lines, without a newline at the end. Longer actions are filled with dashes, idle time is a
        dot. Labels carry the chunk (`1F0`) where a rank has several.
    Raises: ValueError: unit is not above 0.
    """
    if not unit > 0.0:
        raise ValueError(f"a column needs a time above 0: got unit {unit}")
    lists = [[span for span in rank.compute if span.action.kind in COMPUTE] for rank in timeline.ranks]
    several = any(len({span.action.chunk for span in spans}) > 1 for spans in lists)
    labels = [[_label(span, several) for span in spans] for spans in lists]
    width = 1 + max((len(label) for row in labels for label in row), default=1)
    num_columns = round(timeline.makespan / unit)
    margin = len(f"rank {len(timeline.ranks) - 1}")
    rows = []
    for rank, (spans, row) in enumerate(zip(lists, labels, strict=True)):
        cells = _cells(spans, row, unit, width, num_columns)
        rows.append(f"{f'rank {rank}':<{margin}}  {cells}".rstrip())
    return "\n".join(rows)


def describe(plan: Plan, width: int = 100) -> str:
    """Print each rank's actions, wrapped between actions.

    Args: plan: any plan. width: characters of a line; a longer action stands alone on its line.
    Returns: the lines, without a newline at the end.
    """
    margin = len(f"rank {plan.num_ranks - 1}") + 2
    lines = []
    for rank, actions in enumerate(plan.actions):
        for number, line in enumerate(_wrap(map(str, actions), width - margin)):
            lines.append(f"{f'rank {rank}' if number == 0 else '':<{margin}}{line}")
    return "\n".join(lines)


def _label(span: Span, with_chunk: bool) -> str:
    chunk, microbatch = span.action.piece
    return f"{chunk if with_chunk else ''}{span.action.kind}{microbatch}"


def _cells(spans: Iterable[Span], labels: Iterable[str], unit: float, width: int, num_columns: int) -> str:
    idle = ".".ljust(width)
    text, column = "", 0
    for span, label in zip(spans, labels, strict=True):
        start, end = round(span.start / unit), round(span.end / unit)
        if end > start:
            filling = "-" if end - start > 1 else " "
            text += idle * (start - column) + label.ljust((end - start) * width - 1, filling) + " "
            column = end
    return text + idle * (num_columns - column)


def _wrap(words: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]
