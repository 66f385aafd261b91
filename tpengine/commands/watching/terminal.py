"""Panels of a terminal: each number of each run as a line of bars over the steps, its last value beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tpengine.commands.watching.history import PANELS, History

_BARS = " ▁▂▃▄▅▆▇█"
_NARROWEST = 10
# Columns that name, value and borders take.
_BESIDE = 52


def table_of(histories: Sequence[History], width: int) -> Table:
    """Return one row per number and run."""
    title = "; ".join(_state(history) for history in histories)
    table = Table(title=title, expand=False)
    table.add_column("")
    table.add_column("run", overflow="ellipsis", max_width=14)
    table.add_column("last", justify="right")
    table.add_column("over the steps", no_wrap=True)
    for name, heading, _ in PANELS:
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
