"""`tpengine watch RUN [RUN...]`: draw what runs report, live until none goes on, or once. No torch.

Read in this order: the command; a run's metrics.jsonl as series of numbers by step, and events; the panels of a
terminal, each number of each run as a line of bars; the same panels as one SVG, a line for each run, a tick where
something happened.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from rich.live import Live
from rich.table import Table

from tpengine import journal
from tpengine.checkpoint.run_directory import is_running
from tpengine.files import write_beside
from tpengine.observe.safe_console import SafeConsole
from tpengine.planner.draw import scene

_SECONDS = 1.0
# A run that is restarted is gone for a while; one that has been gone so many looks in a row has died or was stopped.
_LOOKS_GONE = 60
# (field of a row, title, factor); wall time where a row has it.
PANELS = (
    ("loss", "loss", 1.0),
    ("held_out_loss", "held-out loss", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("lr", "learning rate", 1.0),
    ("wall_tokens_per_second", "tokens/s, wall time", 1.0),
    ("bubble", "bubble, share of the step", 1.0),
    ("peak_memory_bytes", "peak memory, GB", 1e-9),
    ("balance_loss", "auxiliary loss of experts", 1.0),
    ("expert_load", "tokens of the hottest expert over the mean, largest of the layers", 1.0),
    ("expert_tokens", "tokens of the hottest expert, largest of the layers", 1.0),
    ("expert_rank_load", "rows of the hottest rank over the mean, largest of the layers", 1.0),
    ("expert_crossing", "share of rows whose expert is another rank's, largest of the layers", 1.0),
)
# Of each layer with experts a field; their panels have the largest as a line, each layer as a thin one.
_LOADS = ("expert_load", "expert_tokens", "expert_rank_load", "expert_crossing")
# Where no rows cross, as ranks share no experts, these two say nothing.
_CROSSING, _SPREAD = "expert_crossing", ("expert_rank_load", "expert_crossing")
# Fields of a run's own metrics; of a mixture's sources, with another /, none is drawn.
_OWN = ("metric/", "held_out_metric/")
# A float knows them apart: rows of others are none of a run's.
_MOST_STEPS = 2**53
_SIGNS = ("skipped", "overflowed", "left_out")
_BARS = " ▁▂▃▄▅▆▇█"
_NARROWEST = 10
# Columns that name, value and borders take.
_BESIDE = 52
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 760, 130, 80, 20, 44, 34
_MOST_POINTS = 1000
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a6488a", "#e69f00", "#595959")
_EVENT = "#d55e00"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine watch` understands."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--once", action="store_true", help="draw one picture and leave")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write one picture of all numbers, and leave")


def watch(args: argparse.Namespace) -> None:
    """Draw the runs.

    Raises:
        ValueError: a directory is not a run.
    """
    console = SafeConsole()
    histories = [read_history(run) for run in args.runs]
    if args.svg is not None:
        write_beside(args.svg, draw_histories(histories).encode())
        console.print(f"wrote {args.svg}", soft_wrap=True)
        return
    if args.once or not console.is_terminal:
        console.print(table_of(histories, console.width))
        return
    with Live(table_of(histories, console.width), console=console, auto_refresh=False) as live:
        gone = Counter[int]()
        while not all(history.has_ended or gone[at] >= _LOOKS_GONE for at, history in enumerate(histories)):
            time.sleep(_SECONDS)
            histories = [read_history(run) for run in args.runs]
            for at, history in enumerate(histories):
                gone[at] = gone[at] + 1 if history.is_running is False else 0
            live.update(table_of(histories, console.width), refresh=True)


@dataclass
class History:
    """One run.

    Attributes:
        name: of its directory.
        series: by field of a row, (step, value).
        events: (step, what).
        num_steps: that are done.
        length: steps of the run, if config.toml says so; else 0.
        is_running: whether a process holds the run's directory; None if this host cannot tell.
    """

    name: str
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    num_steps: int = 0
    length: int = 0
    is_running: bool | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the last step is done."""
        return 0 < self.length <= self.num_steps

    @property
    def state(self) -> str:
        """What the run does, in words."""
        if self.has_ended:
            return "ended"
        return {True: "running", False: "not running", None: ""}[self.is_running]


def read_history(run_dir: Path) -> History:
    """Read what a run has written; lines that are cut, or are no rows, are passed over.

    Raises:
        ValueError: there is no such run.
    """
    path = run_dir / "metrics.jsonl"
    try:
        rows = journal.read_steps(path)
    except OSError as error:
        raise ValueError(
            f"a run to watch must have a metrics.jsonl: {path}: {error.strerror}: give the --run-dir of a run that "
            "has begun"
        ) from None
    history = History(run_dir.name or str(run_dir), length=_length_of(run_dir))
    history.is_running = is_running(run_dir)
    for row in rows:
        if 0 < row["step"] < _MOST_STEPS:
            _add(history, row, row["step"])
    return history


def _add(history: History, row: dict[str, Any], number: int) -> None:
    if "event" in row:
        history.events.append((number, str(row["event"])))
    elif sign := next((sign for sign in reversed(_SIGNS) if row.get(sign) is True), None):
        history.events.append((number, sign.replace("_", " ")))
    if "event" not in row:
        history.num_steps = max(history.num_steps, number)
    row = row | _largest_of_layers(row)
    drawn = (*_OWN, *(f"{load}/" for load in _LOADS))
    own = ((name, "", 1.0) for name in row if name.startswith(drawn) and name.count("/") == 1)
    for name, _, factor in (*PANELS, *own):
        value = row.get(name)
        if _is_number(value):
            history.series.setdefault(name, []).append((number, value * factor))


def _is_number(value: object) -> TypeGuard[int | float]:
    # An integer of JSON may be larger than any float; NaN is not below.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _largest_of_layers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return each load of experts, its largest over the layers that a row has it of."""
    found: dict[str, float] = {}
    for name, value in row.items():
        load, slash, _ = name.partition("/")
        if slash and load in _LOADS and _is_number(value):
            found[load] = max(value, found.get(load, value))
    return found


def _length_of(run_dir: Path) -> int:
    import tomllib

    try:
        steps = tomllib.loads((run_dir / "config.toml").read_text())["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return steps if isinstance(steps, int) else 0


def panels_of(histories: Sequence[History]) -> list[tuple[str, str, float]]:
    """Return the panels of which a run has numbers: those of every run, then each metric of theirs."""
    found = {name for history in histories for name in history.series}
    if not any(value for history in histories for _, value in history.series.get(_CROSSING, ())):
        found -= set(_SPREAD)
    of_all = [panel for panel in PANELS if panel[0] in found]
    own = sorted((name.partition("/")[2], name) for name in found if name.startswith(_OWN))
    return of_all + [(name, f"held-out {of}" if name.startswith(_OWN[1]) else of, 1.0) for of, name in own]


def table_of(histories: Sequence[History], width: int) -> Table:
    """Return one row per number and run."""
    title = "; ".join(_state(history) for history in histories)
    table = Table(title=title, expand=False)
    table.add_column("")
    table.add_column("run", overflow="ellipsis", max_width=14)
    table.add_column("last", justify="right")
    table.add_column("over the steps", no_wrap=True)
    for name, heading, _ in panels_of(histories):
        of_panel = [(history, history.series[name]) for history in histories if name in history.series]
        for place, (history, points) in enumerate(of_panel):
            bars = bars_of([value for _, value in points], max(_NARROWEST, width - _BESIDE))
            table.add_row("" if place else heading, history.name, f"{points[-1][1]:,.5g}", bars)
    for history in histories:
        if history.events:
            step, what = history.events[-1]
            table.add_row("events", history.name, str(len(history.events)), f"last: {what}, step {step}")
    return table


def bars_of(values: Sequence[float], width: int) -> str:
    """Return means of equal parts of the values as bars between their smallest and largest."""
    num = min(width, len(values))
    parts = [values[len(values) * at // num : len(values) * (at + 1) // num] for at in range(num)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    top = len(_BARS) - 1
    if low == high:
        return _BARS[top // 2] * num
    return "".join(_BARS[1 + round((mean - low) / (high - low) * (top - 1))] for mean in means)


def _state(history: History) -> str:
    of = f" of {history.length}" if history.length else ""
    return f"{history.name}: step {history.num_steps}{of}{history.state and f', {history.state}'}"


def draw_histories(histories: Sequence[History]) -> str:
    """Return a complete SVG document."""
    panels = panels_of(histories)
    height = _TOP + len(panels) * (_PANEL + _GAP)
    last = max([2, *(history.num_steps for history in histories)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<style>text {{ font: 10px Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: {scene.INK}; }}</style>",
        f'<rect width="100%" height="100%" fill="{scene.PAPER}"/>',
    ]
    for number, history in enumerate(histories):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<text x="{_LEFT + 160 * number}" y="16" style="fill:{colour}">{escape(history.name)}</text>')
    for number, (name, heading, _) in enumerate(panels):
        parts += _panel(histories, name, heading, _TOP + number * (_PANEL + _GAP), last)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(histories: Sequence[History], name: str, heading: str, top: int, last: int) -> list[str]:
    every = [(history, line) for history in histories for line in history.series if line.startswith(f"{name}/")]
    values = [value for history in histories for _, value in history.series.get(name, [])]
    values += [value for history, line in every for _, value in history.series[line]]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / (last - 1)

    def y(value: float) -> float:
        return top + _PANEL * (high - value) / (high - low)

    bottom, right = top + _PANEL, _WIDTH - _RIGHT
    parts = [f'<text x="{_LEFT}" y="{top - 6}" style="font-weight:bold">{escape(heading)}</text>']
    for share in (0.0, 0.5, 1.0):
        value, step = low + share * (high - low), 1 + round(share * (last - 1))
        parts.append(f'<path d="M{_LEFT},{y(value):.1f}H{right}" stroke="{scene.TICK}" stroke-width="0.6"/>')
        parts.append(f'<text text-anchor="end" x="{_LEFT - 6}" y="{y(value) + 3:.1f}">{value:,.4g}</text>')
        parts.append(f'<text text-anchor="middle" x="{x(step):.1f}" y="{bottom + 12}">{step:,}</text>')
    for number, history in enumerate(histories):
        for step, what in history.events:
            mark = f"M{x(step):.1f},{bottom}v-8"
            title = f"<title>{escape(f'{history.name}, step {step}: {what}')}</title>"
            parts.append(f'<path d="{mark}" stroke="{_EVENT}" stroke-width="1.5">{title}</path>')
        lines = [name, *(line for of, line in every if of is history)]
        for line in lines:
            points = history.series.get(line, [])
            thinned = points[:: max(1, len(points) // _MOST_POINTS)] + points[-1:]
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned)
            colour, width = _COLOURS[number % len(_COLOURS)], 1.4 if line == name else 0.4
            shape = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"'
            layer = escape(line.partition("/")[2])
            parts.append(f"{shape}/>" if line == name else f"{shape}><title>layer {layer}</title></polyline>")
    return parts
