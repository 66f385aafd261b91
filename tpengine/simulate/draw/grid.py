"""A timeline as a grid of characters, and a plan as wrapped lists, for terminals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tpengine.plan.actions import COMPUTE
from tpengine.plan.plan import Plan
from tpengine.plan.timeline import Span, Timeline


def grid(timeline: Timeline, unit: float = 1.0, line_width: int | None = None) -> str:
    """Draw one row per rank and one column per unit of time.

        rank 0  F0 F1 .  .  B0--- B1---
        rank 1  .  F0 B0--- F1 B1--- .

    Args:
        timeline: from `simulate`, or measured.
        unit: time per column, in the timeline's unit. Times are rounded to columns, halves up. Every action has at
            least one column; if that is more than its time, later actions move right until idle time makes up for it.
        line_width: characters per line; wider grids are broken between columns and continued in rows below. None for
            rows of any width.
    Returns: the lines, without a newline at the end. Longer actions are filled with dashes, idle time is a
        dot. Labels carry the chunk (`1F0`) where a rank has several.
    Raises: ValueError: unit is not above 0.
    """
    if not unit > 0.0:
        raise ValueError(f"a column needs a time above 0: got unit {unit}")
    lists = [[span for span in rank.compute if span.action.kind in COMPUTE] for rank in timeline.ranks]
    several = any(len({span.action.chunk for span in spans}) > 1 for spans in lists)
    labels = [[_label(span, several) for span in spans] for spans in lists]
    places = [_places(spans, unit) for spans in lists]
    width = 1 + max((len(label) for row in labels for label in row), default=1)
    num_columns = max([_column(timeline.makespan, unit), *(end for row in places for _, end in row)])
    margin = len(f"rank {len(timeline.ranks) - 1}")
    rows = [_cells(row, of_rank, width, num_columns) for row, of_rank in zip(labels, places, strict=True)]
    columns_per_line = num_columns
    if line_width is not None and margin + 2 + num_columns * width - 1 > line_width:
        # Break at columns only: an action that continues below has no space at the end of the line.
        columns_per_line = max(1, (line_width - margin - 2) // width)
    lines: list[str] = []
    for first in range(0, max(1, num_columns), max(1, columns_per_line)):
        part = slice(first * width, (first + columns_per_line) * width)
        lines += [""] if lines else []
        lines += [f"{f'rank {rank}':<{margin}}  {cells[part]}".rstrip() for rank, cells in enumerate(rows)]
    return "\n".join(lines)


def describe(plan: Plan, width: int = 100) -> str:
    """Return each rank's actions as text, wrapped between actions.

    Args: plan: any plan. width: characters per line; a longer action gets a line of its own.
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


def _column(time: float, unit: float) -> int:
    # Round halves to one side, or a span from 1.5 to 2.5 has no width. The small number does so for sums of fractions.
    return math.floor(time / unit + 0.5 + 1e-6)


def _places(spans: Sequence[Span], unit: float) -> list[tuple[int, int]]:
    """Return the first column of each action and the column after its last."""
    places: list[tuple[int, int]] = []
    for span in spans:
        start = max(_column(span.start, unit), places[-1][1] if places else 0)
        places.append((start, max(_column(span.end, unit), start + 1)))
    return places


def _cells(labels: Iterable[str], places: Iterable[tuple[int, int]], width: int, num_columns: int) -> str:
    idle = ".".ljust(width)
    text, column = "", 0
    for label, (start, end) in zip(labels, places, strict=True):
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
