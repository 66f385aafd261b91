"""The layout of a picture in pixels: one time axis for all pictures, one row format for all ranks; its colours.

A row holds the rank's boxes, then thin lanes (sends, receives, gathers, reductions), then memory. A lane exists only if
a rank of one of the pictures has a span on it. Spans that overlap on a lane are put on separate tracks.

The legend below has an entry for everything that occurs in the pictures, and for nothing else.

Colours and patterns are after Okabe and Ito (2008). Colour-blind readers can tell them apart; patterns help in grey. A
kind is a hue with a pattern; the chunks of a rank are its shades, from full (first) to light (last).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

from tpengine.plan.actions import COMPUTE, Kind
from tpengine.plan.clock import RankTimeline, Span
from tpengine.planner.draw.picture import Picture, compute_spans, drawn, shown_kinds

INK = "#1a1a1a"
FAINT_INK = "#666666"
PAPER = "#ffffff"
IDLE = "#f3f3f3"
TICK = "#d5d5d5"
MEMORY = "#c9c9c9"
MEMORY_EDGE = "#757575"
LIMIT = "#b3261e"
_ENDING = "#595959"
BASE: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.F: "#0072b2",
        Kind.B: "#56c2a0",
        Kind.I: "#e69f00",
        Kind.W: "#f0e442",
        Kind.TIE_REDUCE: _ENDING,
        Kind.CLIP: _ENDING,
        Kind.STEP: _ENDING,
        Kind.SEND_F: "#0072b2",
        Kind.RECV_F: "#0072b2",
        Kind.SEND_B: "#e69f00",
        Kind.RECV_B: "#e69f00",
        Kind.REDUCE: "#a6488a",
        Kind.GATHER: "#d55e00",
    }
)
NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.F: "F forward",
        Kind.B: "B backward",
        Kind.I: "I backward, input half",
        Kind.W: "W backward, weight half",
        Kind.TIE_REDUCE: "t ties",
        Kind.CLIP: "clip",
        Kind.STEP: "step",
    }
)
# A tile of 6 by 6 pixels, drawn in ink over the fill; F is plain.
PATTERNS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.B: "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
        Kind.I: "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
        Kind.W: "M0.9,1.5 h1.2 M3.9,4.5 h1.2",
    }
)
# The share of white in the lightest shade.
_LIGHTEST = 0.6
# Width of a digit relative to the font size: the widest of the fonts that svg.py names.
_DIGIT_WIDTH = 0.64
_LEFT, _RIGHT = 78.0, 86.0
_TITLE, _AXIS, EDGE, _BETWEEN = 44.0, 34.0, 12.0, 18.0
_BOX, _TALL_BOX = 20.0, 27.0
_TRACK, _LANE_GAP, _MAX_TRACKS = 4.0, 3.0, 6
_MEMORY, _MEMORY_GAP = 20.0, 5.0
_MIN_WIDTH, _GOOD_WIDTH, _MAX_WIDTH = 680.0, 1400.0, 2800.0
_FONT_SIZES = (11.0, 10.0, 9.0, 8.0, 7.0, 6.5)
CHUNK_FONT_SIZE = 7.0
_PADDING = 2.5
_LINE, _GAP = 18.0, 18.0
_SWATCH = 16.0
# Upper limit of the mean width of a letter of the legend's text, over the fonts that svg.py names.
_LETTER = 5.8


def shade(kind: Kind, place: int, num_places: int) -> str:
    """Return the fill of the `place`-th of `num_places` chunks of a rank; the first is the fullest."""
    white = _LIGHTEST * place / max(num_places - 1, 2)
    mixed = (round(value + (255 - value) * white) for value in _channels(BASE[kind]))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def text_on(fill: str) -> str:
    """Return white or ink, whichever has the greater contrast on a fill."""
    return PAPER if _luminance(fill) < 0.28 else INK


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2, from 0 to 1."""
    linear = ((c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour))
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@dataclass(frozen=True)
class Lane:
    """A thin lane below the boxes: a field of `RankTimeline`, its label, its position and its number of tracks."""

    name: str
    label: str
    offset: float
    num_tracks: int

    @property
    def height(self) -> float:
        """Return the height of all tracks."""
        return self.num_tracks * _TRACK


@dataclass(frozen=True)
class Panel:
    """The position of one picture: tops of its title, rows and axis; and the memory at the top of a curve."""

    picture: Picture
    top: float
    rows: float
    axis: float
    most_memory: float


@dataclass(frozen=True)
class Scene:
    """The positions of everything.

    Attributes:
        end: the time at the right end of the axis.
        left, plot_width: position of time 0, and width of the axis.
        font_size: of the numbers in boxes. A box too narrow for `last_microbatch` (or `last_chunk`, the longest small
            number) gets no number, so that of boxes of one width all have one or none has.
        num_places: the largest number of chunks on a rank; if above 1, boxes have a second line.
        box_height, lanes, memory, pitch: of a row: offsets from its top, and the distance between rows.
        legend: top of the legend, below the last picture.
    """

    pictures: tuple[Picture, ...]
    panels: tuple[Panel, ...]
    end: float
    plot_width: float
    font_size: float
    last_microbatch: int
    last_chunk: int
    num_places: int
    box_height: float
    lanes: tuple[Lane, ...]
    memory: float
    pitch: float
    legend: float
    left: float = _LEFT
    memory_height: float = _MEMORY
    track: float = _TRACK

    @property
    def width(self) -> float:
        """Return the total width."""
        return self.left + self.plot_width + _RIGHT

    def x(self, time: float) -> float:
        """Return the horizontal position of a time."""
        return self.left + time / self.end * self.plot_width

    def fits(self, number: int, font_size: float, span: Span) -> bool:
        """Return whether a number fits in a box."""
        return _text_width(number, font_size) <= self.x(span.end) - self.x(span.start)

    def ticks(self, picture: Picture) -> list[float]:
        """Return the times of the picture's ticks: multiples of a round step in the unit shown."""
        factor, _ = picture.time_scale
        step = _round_step(self.end * factor * 70.0 / self.plot_width) / factor
        return [step * count for count in range(math.floor(self.end / step + 1e-9) + 1)]


def make_scene(pictures: Sequence[Picture]) -> Scene:
    """Lay out pictures below each other on one time axis.

    Args: pictures: with at least one box (`check_size`).
    Returns: the scene.
    """
    end = max(picture.timeline.makespan for picture in pictures)
    num_places = max(len(places(rank)) for picture in pictures for rank in picture.timeline.ranks)
    box_height = _BOX if num_places < 2 else _TALL_BOX
    lanes, below = _lanes(pictures, box_height)
    pitch = below + _MEMORY_GAP + _MEMORY + 11.0
    panels, top = [], EDGE
    for picture in pictures:
        rows = top + _TITLE
        axis = rows + pitch * len(picture.timeline.ranks) - 7.0
        panels.append(Panel(picture, top, rows, axis, _most_memory(picture, pictures)))
        top = axis + _AXIS + _BETWEEN
    pieces = {
        span.action.piece for spans in compute_spans(pictures) for span in spans if span.action.kind in COMPUTE
    } or {(0, 0)}
    last_chunk, last_microbatch = (max(piece[place] for piece in pieces) for place in (0, 1))
    plot_width, font_size = _resolution(pictures, end, last_microbatch, last_chunk if num_places > 1 else None)
    return Scene(
        pictures=tuple(pictures),
        panels=tuple(panels),
        end=end,
        plot_width=plot_width,
        font_size=font_size,
        last_microbatch=last_microbatch,
        last_chunk=last_chunk,
        num_places=num_places,
        box_height=box_height,
        lanes=lanes,
        memory=below + _MEMORY_GAP,
        pitch=pitch,
        legend=top,
    )


def _text_width(number: int, font_size: float) -> float:
    """Return an upper limit of the width of a number, with some room on both sides."""
    return len(str(number)) * _DIGIT_WIDTH * font_size + _PADDING


def places(rank: RankTimeline) -> dict[int, int]:
    """Return for each chunk of a rank its number among the rank's chunks, in model order."""
    chunks = {span.action.chunk for span in rank.compute if span.action.chunk is not None}
    return {chunk: place for place, chunk in enumerate(sorted(chunks))}


def tracks(spans: Sequence[Span], tolerance: float) -> list[int]:
    """Return a track for each span, so that spans that overlap are on different tracks: the first track that is free.

    Args: spans: ordered by start. tolerance: a shorter overlap is ignored.
    """
    free_at: list[float] = []
    chosen = []
    for span in spans:
        track = next((track for track, time in enumerate(free_at) if time <= span.start + tolerance), len(free_at))
        if track == _MAX_TRACKS:
            track = min(range(track), key=free_at.__getitem__)
        free_at[track : track + 1] = [span.end]
        chosen.append(track)
    return chosen


def _lanes(pictures: Sequence[Picture], offset: float) -> tuple[tuple[Lane, ...], float]:
    """Return the lanes in use, below `offset`, and where they end."""
    lanes: list[Lane] = []
    ranks = [(rank, picture.timeline.makespan) for picture in pictures for rank in picture.timeline.ranks]
    for name, label in (("sends", "send"), ("receives", "receive"), ("gathers", "gather"), ("reductions", "reduce")):
        used = [tracks(drawn(getattr(rank, name)), 1e-9 * makespan) for rank, makespan in ranks]
        num_tracks = 1 + max((track for of_rank in used for track in of_rank), default=-1)
        if num_tracks:
            # The label is higher than one track.
            num_tracks = max(num_tracks, 2)
            lanes.append(Lane(name, label, offset + _LANE_GAP, num_tracks))
            offset = lanes[-1].offset + lanes[-1].height
    return tuple(lanes), offset


def _resolution(
    pictures: Sequence[Picture], end: float, last_microbatch: int, last_chunk: int | None
) -> tuple[float, float]:
    """Return a width at which the numbers of the shortest kind of box are readable, within limits; and their size."""
    by_kind: dict[Kind, list[float]] = {}
    for spans in compute_spans(pictures):
        for span in spans:
            if span.action.kind in COMPUTE:
                by_kind.setdefault(span.action.kind, []).append(span.duration)
    if not by_kind:
        return _MIN_WIDTH, _FONT_SIZES[0]
    most_boxes = end / min(map(statistics.median, by_kind.values()))
    chunk_width = 0.0 if last_chunk is None else _text_width(last_chunk, CHUNK_FONT_SIZE)
    widths = {size: max(_text_width(last_microbatch, size), chunk_width) * most_boxes for size in _FONT_SIZES}
    size = next((size for size, width in widths.items() if width <= _GOOD_WIDTH), _FONT_SIZES[-1])
    # One per cent more: an exact fit may fail after rounding.
    return min(max(1.01 * widths[size], _MIN_WIDTH), _MAX_WIDTH), size


def _most_memory(picture: Picture, pictures: Sequence[Picture]) -> float:
    """Return the memory at the top of a curve, or of its limit: the same for all pictures with the same unit."""
    alike = [other for other in pictures if other.knows_bytes == picture.knows_bytes]
    limit = max(other.limit for other in alike) if picture.knows_bytes else 0.0
    return max(limit, *(peak for other in alike for peak in other.peaks)) or 1.0


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= least * (1.0 - 1e-9))


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
            if kind in PATTERNS:
                parts.append(f'<rect fill="url(#over{kind})" {place} {size}/>')
        text_x = x + len(entry.swatches) * _SWATCH + 3.0
        parts.append(f'<text class="legend" x="{text_x:.1f}" y="{y + 9.6:.1f}">{escape(entry.text)}</text>')
        x += entry.width
    return [*parts, "</g>"], y + _LINE + EDGE


def _entries(scene: Scene) -> Iterator[_Entry]:
    kinds = shown_kinds(scene.pictures)
    for kind in kinds:
        yield _Entry(NAMES[kind], ((f"{kind} s0", 12.0),))
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
