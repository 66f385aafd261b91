"""The numbers of runs as one SVG: a panel for each, a line for each run, a tick where something happened."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tpengine.commands.watching.history import PANELS, History
from tpengine.planner.draw import palette

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 760, 130, 80, 20, 44, 34
_MOST_POINTS = 1000
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a6488a", "#e69f00", "#595959")
_EVENT = "#d55e00"


def draw_histories(histories: Sequence[History]) -> str:
    """Return a complete SVG document."""
    panels = [panel for panel in PANELS if any(panel[0] in history.series for history in histories)]
    height = _TOP + len(panels) * (_PANEL + _GAP)
    last = max([2, *(history.num_steps for history in histories)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<style>text {{ font: 10px Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: {palette.INK}; }}</style>",
        f'<rect width="100%" height="100%" fill="{palette.PAPER}"/>',
    ]
    for number, history in enumerate(histories):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<text x="{_LEFT + 160 * number}" y="16" style="fill:{colour}">{escape(history.name)}</text>')
    for number, (name, heading, _) in enumerate(panels):
        parts += _panel(histories, name, heading, _TOP + number * (_PANEL + _GAP), last)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(histories: Sequence[History], name: str, heading: str, top: int, last: int) -> list[str]:
    values = [value for history in histories for _, value in history.series.get(name, [])]
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
        parts.append(f'<path d="M{_LEFT},{y(value):.1f}H{right}" stroke="{palette.TICK}" stroke-width="0.6"/>')
        parts.append(f'<text text-anchor="end" x="{_LEFT - 6}" y="{y(value) + 3:.1f}">{value:,.4g}</text>')
        parts.append(f'<text text-anchor="middle" x="{x(step):.1f}" y="{bottom + 12}">{step:,}</text>')
    for number, history in enumerate(histories):
        for step, what in history.events:
            mark = f"M{x(step):.1f},{bottom}v-8"
            title = f"<title>{escape(f'{history.name}, step {step}: {what}')}</title>"
            parts.append(f'<path d="{mark}" stroke="{_EVENT}" stroke-width="1.5">{title}</path>')
        points = history.series.get(name, [])
        thinned = points[:: max(1, len(points) // _MOST_POINTS)] + points[-1:]
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return parts
