"""A plot of `benchmarks.run kernels`: each contestant's share of the ceiling, case by case."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.timing import PASSED

_ENDINGS = (".png", ".svg")
_MOST_ACROSS = 3
# Sizes of a bar, a panel and the margin, in inches.
_BAR, _PANEL_HEIGHT, _MARGIN = 0.22, 3.2, 1.4


def check_plot(path: Path) -> None:
    """Refuse, before the measurements, what would fail after them.

    Raises:
        ValueError: another kind of file, a directory that does not exist, or no matplotlib.
    """
    if path.suffix not in _ENDINGS:
        raise ValueError(f"--plot must end in {' or '.join(_ENDINGS)}: got {path}: use {path.with_suffix('.png')}")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"--plot must lie in a directory that exists: got {path}: make {path.parent} first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'tpengine[plot]'")


def write_plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a panel for each operator's case and direction: one group of bars per shape, one bar per contestant.

    A bar's height is the share of the ceiling, with a line from the 20th to the 80th percentile of the samples. The
    broken line is the ceiling. Rows with a red check have no bars.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = _panels(rows)
    names = list(dict.fromkeys(name for row in rows for name in row["contestants"]))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    num_across = max(1, min(_MOST_ACROSS, len(panels)))
    num_down = max(1, -(-len(panels) // num_across))
    num_shapes = max(map(len, panels.values()), default=1)
    width = max(3.4, _MARGIN + _BAR * num_shapes * (len(names) + 1))
    figure = Figure(figsize=(width * num_across, _PANEL_HEIGHT * num_down + 0.6), layout="constrained")
    axes = figure.subplots(num_down, num_across, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, of_panel) in zip(axes, panels.items(), strict=False):
        _draw(axis, title, of_panel, colors)
    handles = [Patch(color=colors[name], label=name) for name in names]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(names)), frameon=False)
    figure.savefig(path, dpi=140)


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        _, case, *_ = row["case"].split("/")
        panels.setdefault(f"{case}, {row['direction']}", []).append(row)
    return panels


def _draw(axis: Any, title: str, rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    """Draw one panel. The bars of a shape are side by side, 0.8 wide together."""
    names = [name for name in colors if any(name in row["contestants"] for row in rows)]
    bar = 0.8 / max(1, len(names))
    for place, row in enumerate(rows):
        if row["check"] != PASSED:
            axis.annotate("wrong", (place, 0), ha="center", va="bottom", color="red")
        for i, name in enumerate(names):
            if name not in row["contestants"]:
                continue
            height = row[f"{name}_of_ceiling_percent"]
            median, p20, p80 = (row[f"{name}_{which}_seconds"] for which in ("median", "p20", "p80"))
            reach = [[height * (1 - median / p80)], [height * (median / p20 - 1)]]
            axis.bar(
                place + (i - (len(names) - 1) / 2) * bar, height, bar, color=colors[name], yerr=reach, ecolor="black"
            )
    axis.axhline(100, linestyle="--", linewidth=0.8, color="gray")
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(rows)), [f"{row['model'].removeprefix('llama3_')}\n{row['seq']}" for row in rows])
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.set_ylabel(f"% of a large {rows[0]['ceiling']}")
