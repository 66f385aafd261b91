"""The learning rate of a run as a small SVG: a line over the steps, a dashed one where a phase begins. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from tpengine.planner.draw import scene

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 34
_MOST_POINTS = 600
_NUM_TICKS = 4


def draw_learning_rate(rate: Callable[[int], float], num_steps: int, borders: Sequence[int] = ()) -> str:
    """Draw the rates of all steps.

    Args:
        rate: of a step, 0-based.
        num_steps: of the run.
        borders: first steps of the phases after the first.

    Returns:
        A complete SVG document.
    """
    # Both sides of a border are drawn, so that a jump is seen as one.
    every = max(1, num_steps // _MOST_POINTS)
    chosen = {*range(0, num_steps, every), num_steps - 1, *borders, *(step - 1 for step in borders)}
    steps = sorted(step for step in chosen if 0 <= step < num_steps)
    rates = [rate(step) for step in steps]
    top = max(rates) or 1.0

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, num_steps - 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    title = f"learning rate: {num_steps:,} steps, at most {top:.3g}, at the end {rates[-1]:.3g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>text {{ font: 10px Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: {scene.FAINT_INK}; }} "
        f".title {{ font-size: 13px; font-weight: bold; fill: {scene.INK}; }} "
        f".grid {{ stroke: {scene.TICK}; stroke-width: 0.6; }} "
        f".border {{ stroke: {scene.INK}; stroke-width: 0.8; stroke-dasharray: 3 2; }} "
        f".rate {{ stroke: {scene.INK}; stroke-width: 1.6; fill: none; }}</style>",
        f'<rect width="100%" height="100%" fill="{scene.PAPER}"/>',
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
    ]
    for tick in range(_NUM_TICKS + 1):
        value, step = top * tick / _NUM_TICKS, round((num_steps - 1) * tick / _NUM_TICKS)
        parts.append(f'<path class="grid" d="M{_LEFT},{y(value):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text text-anchor="end" x="{_LEFT - 6}" y="{y(value) + 3:.1f}">{value:.3g}</text>')
        parts.append(f'<text text-anchor="middle" x="{x(step):.1f}" y="{_HEIGHT - 14}">{step + 1:,}</text>')
    for number, step in enumerate(borders, 2):
        parts.append(f'<path class="border" d="M{x(step):.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x(step) + 3:.1f}" y="{_HEIGHT - _BOTTOM - 4}">phase {number}</text>')
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, rates, strict=True))
    return "\n".join([*parts, f'<polyline class="rate" points="{points}"/>', "</svg>"]) + "\n"
