"""What a picture shows: a timeline with its title, its unit, and memory as a curve. scene.py computes positions.

For terminals: a timeline as a grid of characters, and a plan as wrapped lists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tpengine.plan.actions import BACKWARD, COMPUTE, Kind
from tpengine.plan.clock import RankTimeline, Span, Timeline
from tpengine.plan.plan import Plan
from tpengine.planner.figures import StepFigures

# 35 MB of text; a browser can still just move such a picture.
MAX_BOXES = 200_000
_SECONDS = "s"
_SMALLER_SECONDS = ((1e-3, "\N{MICRO SIGN}s", 1e6), (1.0, "ms", 1e3))
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


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


@dataclass(frozen=True)
class Picture:
    """One timeline to draw.

    Args:
        title: such as "zbv, 4 ranks, 8 micro-batches".
        timeline: predicted or measured.
        unit: of its times; "s" is shown as ms or µs if the makespan is short.
        plan: the complete plan that the timeline plays; needed for the figures of waits and for peers in hover texts.
        longest: the makespan of the longest picture on the same axis, if longer than its own: all use the same unit.
        limit: the bytes that a rank may hold, drawn as a line across each curve of memory in bytes; 0 for none.
    """

    title: str
    timeline: Timeline
    unit: str = "forwards"
    plan: Plan | None = None
    longest: float = 0.0
    limit: float = 0.0

    @property
    def num_boxes(self) -> int:
        """Return the number of spans that are drawn."""
        return sum(
            len(drawn(spans))
            for rank in self.timeline.ranks
            for spans in (rank.compute, rank.sends, rank.receives, rank.gathers, rank.reductions, rank.waits)
        )

    @cached_property
    def figures(self) -> StepFigures | None:
        """Return where the time went, if the plan is known."""
        return None if self.plan is None else StepFigures.of(self.plan, self.timeline)

    @cached_property
    def knows_bytes(self) -> bool:
        """Return whether memory is drawn in bytes; else it is live activations, in micro-batches."""
        return any(rank.memory for rank in self.timeline.ranks)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Return by rank (time, held from then on): bytes, or micro-batches whose activations are live."""
        ranks = self.timeline.ranks
        return tuple(rank.memory for rank in ranks) if self.knows_bytes else tuple(map(live_activations, ranks))

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Return the peak memory of each rank."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)

    def time_text(self, time: float, with_unit: bool = True) -> str:
        """Return a time in the picture's unit; a rounding error, relative to the makespan, is shown as 0."""
        factor, unit = self.time_scale
        number = f"{0.0 if abs(time) < 1e-9 * self.makespan else time * factor:.5g}"
        return f"{number} {unit}" if with_unit else number

    @cached_property
    def makespan(self) -> float:
        """Return the timeline's makespan, which each text of a time needs."""
        return self.timeline.makespan

    @cached_property
    def time_scale(self) -> tuple[float, str]:
        """Return the factor from a time to the shown number, and the unit shown."""
        if self.unit == _SECONDS:
            for below, unit, factor in _SMALLER_SECONDS:
                if max(self.makespan, self.longest) < below:
                    return factor, unit
        return 1.0, self.unit

    def memory_text(self, held: float) -> str:
        """Return an amount of memory as text, with its unit."""
        return bytes_text(held) if self.knows_bytes else live_text(held)


def on_one_axis(pictures: Sequence[Picture]) -> list[Picture]:
    """Return the pictures so that those with the same unit of time show their times in the unit of the longest."""
    longest = {
        unit: max(other.timeline.makespan for other in pictures if other.unit == unit)
        for unit in {picture.unit for picture in pictures}
    }
    # An unchanged picture is returned itself, because it caches its figures.
    return [
        picture
        if picture.timeline.makespan == longest[picture.unit]
        else replace(picture, longest=longest[picture.unit])
        for picture in pictures
    ]


def check_size(pictures: Sequence[Picture]) -> None:
    """Raise ValueError if there is nothing or too much to draw."""
    if not any(compute_spans(pictures)):
        raise ValueError("a picture needs an action that takes time: got none: draw a step that has run")
    check_num_boxes(sum(picture.num_boxes for picture in pictures))


def check_num_boxes(num_boxes: int) -> None:
    """Raise ValueError if there is too much to draw."""
    if num_boxes > MAX_BOXES:
        raise ValueError(
            f"a picture must have at most {MAX_BOXES} boxes: got {num_boxes}: draw fewer ranks or fewer micro-batches"
        )


def live_activations(rank: RankTimeline) -> tuple[tuple[float, float], ...]:
    """Return (time, micro-batches held from then on), by the rule of `Timeline.peak_live_activations`."""
    spans = [span for span in rank.compute if span.action.chunk is not None]
    share = 1.0 / max(len({span.action.chunk for span in spans}), 1)
    backwards_left = Counter(span.action.piece for span in spans if span.action.kind in BACKWARD)
    changes: list[tuple[float, int]] = []
    for span in spans:
        if span.action.kind is Kind.F:
            changes.append((span.start, 1))
        else:
            backwards_left[span.action.piece] -= 1
        if not backwards_left[span.action.piece]:
            changes.append((span.end, -1))
    live, curve = 0, dict[float, float]()
    for time, change in changes:
        live += change
        curve[time] = live * share
    return tuple(curve.items())


def live_text(held: float) -> str:
    """Return a number of live micro-batches as text; a chunk may count a third of one."""
    return f"{round(held, 2):g}"


def bytes_text(held: float) -> str:
    """Return bytes in the largest decimal unit that keeps the number at 1 or more, three digits."""
    for size, unit in _BYTE_UNITS:
        if held >= size:
            return f"{held / size:.3g} {unit}"
    return f"{held:.3g} B"


def shown_kinds(pictures: Sequence[Picture]) -> list[Kind]:
    """Return the kinds whose boxes are drawn, in the order of `Kind`."""
    kinds = {span.action.kind for spans in compute_spans(pictures) for span in spans}
    return [kind for kind in Kind if kind in kinds]


def compute_spans(pictures: Sequence[Picture]) -> list[list[Span]]:
    """Return each rank's boxes, of all pictures."""
    return [drawn(rank.compute) for picture in pictures for rank in picture.timeline.ranks]


def drawn(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that have a box: those that take time."""
    return [span for span in spans if span.duration > 0.0]
