"""The legend: an entry for everything that occurs in the pictures, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from tpengine.plan.actions import COMPUTE, Kind
from tpengine.simulate.draw import palette
from tpengine.simulate.draw.picture import compute_spans, drawn, shown_kinds
from tpengine.simulate.draw.scene import Scene

_LINE, _EDGE, _GAP = 18.0, 12.0, 18.0
_SWATCH = 16.0
# Upper limit of the mean width of a letter of the legend's text, over the fonts that svg.py names.
_LETTER = 5.8


@dataclass(frozen=True)
class _Entry:
    """A text, with the style and the height of each swatch before it."""

    text: str
    swatches: tuple[tuple[str, float], ...]

    @property
    def width(self) -> float:
        return len(self.swatches) * _SWATCH + 6.0 + len(self.text) * _LETTER + _GAP


def draw_legend(scene: Scene) -> tuple[list[str], float]:
    """Return the legend's elements, in lines as wide as the plot, and the position of the page's end below them."""
    parts = ['<g class="legend">']
    x, y = scene.left, scene.legend
    for entry in _entries(scene):
        if x > scene.left and x + entry.width - _GAP > scene.width:
            x, y = scene.left, y + _LINE
        for number, (style, height) in enumerate(entry.swatches):
            place = f'x="{x + number * _SWATCH:.1f}" y="{y + (12.0 - height) / 2:.1f}"'
            size = f'width="{_SWATCH - 2.0}" height="{height}"'
            parts.append(f'<rect class="{style}" {place} {size}/>')
            kind = style.partition(" ")[0]
            if kind in palette.PATTERNS:
                parts.append(f'<rect fill="url(#over{kind})" {place} {size}/>')
        text_x = x + len(entry.swatches) * _SWATCH + 3.0
        parts.append(f'<text class="legend" x="{text_x:.1f}" y="{y + 9.6:.1f}">{escape(entry.text)}</text>')
        x += entry.width
    return [*parts, "</g>"], y + _LINE + _EDGE


def _entries(scene: Scene) -> Iterator[_Entry]:
    kinds = shown_kinds(scene.pictures)
    for kind in kinds:
        yield _Entry(palette.NAMES[kind], ((f"{kind} s0", 12.0),))
    halves = [kind for kind in kinds if kind in COMPUTE]
    if scene.num_places > 1:
        yield _Entry(
            "shade and small number: chunk", tuple((f"{halves[0]} s{n}", 12.0) for n in range(scene.num_places))
        )
    under_way = {
        span.action.kind
        for picture in scene.pictures
        for rank in picture.timeline.ranks
        for lane in scene.lanes
        for span in drawn(getattr(rank, lane.name))
    }
    if under_way & {Kind.SEND_F, Kind.RECV_F}:
        yield _Entry("activation under way", ((Kind.SEND_F, 3.0),))
    if under_way & {Kind.SEND_B, Kind.RECV_B}:
        yield _Entry("gradient under way", ((Kind.SEND_B, 3.0),))
    if Kind.GATHER in under_way:
        are_freed = any(span.action.frees for spans in compute_spans(scene.pictures) for span in spans)
        yield _Entry(f"weights gathered{', tick: freed' if are_freed else ''}", ((Kind.GATHER, 3.0),))
    if Kind.REDUCE in under_way:
        yield _Entry("bucket reduced", ((Kind.REDUCE, 3.0),))
    for knows_bytes, text in ((True, "memory held, bytes"), (False, "micro-batches whose activations are held")):
        if any(picture.knows_bytes is knows_bytes for picture in scene.pictures):
            yield _Entry(text, (("held", 8.0),))
    if any(picture.timeline.critical_path for picture in scene.pictures):
        yield _Entry("critical path", (("top", 1.8),))
