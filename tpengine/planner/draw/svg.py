"""A picture as SVG: text without scripts, fonts or external resources.

Every rank is a <g class="rank">, every computed action a <rect class="F ..." data-action="0F3">, so that a program can
count them; an action that takes no time has no box. Hover texts give action, start and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

from tpengine.plan.actions import BUCKET, COMPUTE, TRANSFERS, Action, Kind, format_actions
from tpengine.plan.clock import RankTimeline, Span
from tpengine.planner.costs import transfer_bytes
from tpengine.planner.draw.picture import Picture, bytes_text, check_size, drawn, on_one_axis, shown_kinds
from tpengine.planner.draw.scene import (
    BASE,
    CHUNK_FONT_SIZE,
    FAINT_INK,
    IDLE,
    INK,
    LIMIT,
    MEMORY,
    MEMORY_EDGE,
    PAPER,
    PATTERNS,
    TICK,
    Lane,
    Panel,
    Scene,
    draw_legend,
    make_scene,
    places,
    shade,
    text_on,
    tracks,
)

_STYLE = f"""
text {{ font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: {INK}; }}
.title {{ font-size: 13px; font-weight: bold; }}
.figures {{ font-size: 11px; }}
.name {{ font-size: 11px; text-anchor: end; }}
.lane {{ font-size: 7.5px; text-anchor: end; fill: {FAINT_INK}; }}
.peak {{ font-size: 9px; fill: {FAINT_INK}; }}
.tick {{ font-size: 9px; text-anchor: middle; fill: {FAINT_INK}; }}
.legend {{ font-size: 10px; }}
.number, .chunk {{ text-anchor: middle; stroke-width: 2px; paint-order: stroke; stroke-linejoin: round; }}
.chunk {{ font-size: {CHUNK_FONT_SIZE}px; }}
.stroke {{ stroke: {INK}; stroke-opacity: 0.3; fill: none; }}
.over {{ pointer-events: none; }}
.grid {{ stroke: {TICK}; stroke-width: 0.6; }}
.end {{ stroke: {INK}; stroke-width: 0.8; stroke-dasharray: 3 2; }}
.critical {{ stroke: {INK}; fill: none; }}
.idle {{ fill: {IDLE}; }}
.wait {{ fill: none; pointer-events: all; }}
.held {{ fill: {MEMORY}; stroke: {MEMORY_EDGE}; stroke-width: 0.7; }}
.limit {{ stroke: {LIMIT}; stroke-width: 1; stroke-dasharray: 4 2; }}
.beyond {{ font-size: 9px; fill: {LIMIT}; }}
.top, .freed {{ fill: {INK}; }}
"""


def draw_svg(pictures: Sequence[Picture]) -> str:
    """Draw timelines below each other on one time axis, such as a measured step above the predicted one.

    Args: pictures: at least one; those with the same unit of memory share its scale.
    Returns: a complete SVG document.
    Raises: ValueError: nothing to draw, or more than `MAX_BOXES` boxes.
    Cost: linear in the number of spans; 10 s and 35 MB at the limit.
    """
    check_size(pictures)
    pictures = on_one_axis(pictures)
    scene = make_scene(pictures)
    num_places = {kind: scene.num_places if kind in COMPUTE else 1 for kind in shown_kinds(pictures)}
    legend, height = draw_legend(scene)
    width = scene.width
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{_label(pictures)}">',
        f"<style>{_STYLE}{''.join(_fill_rules(num_places))}</style>",
        f"<defs>{''.join(_patterns())}</defs>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    for panel in scene.panels:
        parts += _draw_panel(scene, panel)
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def _label(pictures: Sequence[Picture]) -> str:
    return escape("; ".join(picture.title for picture in pictures))


def _fill_rules(num_places: dict[Kind, int]) -> Iterator[str]:
    """Yield the fill of each kind's shades, and of the text on them, whose outline keeps the pattern off the text."""
    for kind, count in num_places.items():
        for place in range(count):
            colour = shade(kind, place, count)
            yield f".{kind}.s{place} {{ fill: {colour}; }}\n"
            yield f".on{kind}{place} {{ fill: {text_on(colour)}; stroke: {colour}; }}\n"
    for kind in (*sorted(TRANSFERS), Kind.REDUCE, Kind.GATHER):
        yield f".{kind} {{ fill: {BASE[kind]}; }}\n"


def _patterns() -> Iterator[str]:
    for kind, path in PATTERNS.items():
        yield (
            f'<pattern id="over{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path class="stroke" d="{path}"/></pattern>'
        )


def _draw_panel(scene: Scene, panel: Panel) -> Iterator[str]:
    picture = panel.picture
    yield '<g class="picture">'
    yield f'<text class="title" x="{scene.left:.1f}" y="{panel.top + 13:.1f}">{escape(picture.title)}</text>'
    yield f'<text class="figures" x="{scene.left:.1f}" y="{panel.top + 29:.1f}">{escape(_figures(picture))}</text>'
    for rank in range(len(picture.timeline.ranks)):
        yield from _draw_idle(scene, panel, rank)
    yield from _draw_axis(scene, panel)
    for rank in range(len(picture.timeline.ranks)):
        yield from _draw_rank(scene, panel, rank)
    yield from _draw_critical_path(scene, panel)
    yield "</g>"


def _figures(picture: Picture) -> str:
    timeline, figures = picture.timeline, picture.figures
    words = [f"makespan {picture.time_text(timeline.makespan)}", f"bubble {timeline.bubble:.1%}"]
    if figures is not None and figures.exposed > 0.0:
        words.append(f"exposed communication {figures.exposed:.1%}")
    unit = "" if picture.knows_bytes else " micro-batches live"
    return ", ".join([*words, f"peak {picture.memory_text(max(picture.peaks))}{unit}"])


def _draw_idle(scene: Scene, panel: Panel, rank: int) -> Iterator[str]:
    """Draw the background of a rank's boxes: where it is visible, the rank does not compute."""
    width = scene.x(panel.picture.timeline.makespan) - scene.left
    y = panel.rows + rank * scene.pitch
    yield f'<rect class="idle" x="{scene.left:.1f}" y="{y:.1f}" width="{width:.2f}" height="{scene.box_height}"/>'


def _draw_axis(scene: Scene, panel: Panel) -> Iterator[str]:
    picture, bottom = panel.picture, panel.axis
    yield '<g class="axis">'
    for time in scene.ticks(picture):
        x = scene.x(time)
        yield f'<line class="grid" x1="{x:.2f}" y1="{panel.rows - 3:.1f}" x2="{x:.2f}" y2="{bottom + 4:.1f}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{bottom + 14:.1f}">{picture.time_text(time, with_unit=False)}</text>'
    end = scene.x(picture.timeline.makespan)
    yield f'<line class="end" x1="{end:.2f}" y1="{panel.rows - 3:.1f}" x2="{end:.2f}" y2="{bottom:.1f}"/>'
    middle = scene.left + scene.plot_width / 2
    yield f'<text class="tick" x="{middle:.1f}" y="{bottom + 26:.1f}">time, {escape(picture.time_scale[1])}</text>'
    yield "</g>"


def _draw_rank(scene: Scene, panel: Panel, rank: int) -> Iterator[str]:
    picture, y = panel.picture, panel.rows + rank * scene.pitch
    timeline = picture.timeline.ranks[rank]
    yield f'<g class="rank" data-rank="{rank}">'
    yield f'<text class="name" x="{scene.left - 6:.1f}" y="{y + scene.box_height / 2 + 4:.1f}">rank {rank}</text>'
    for span in drawn(timeline.waits):
        # Before the list of a measured step: its first F waits for what it reads.
        reads = "samples of " if span.action.kind is Kind.F else ""
        yield _box(scene, "wait", span, y, scene.box_height, reads + _hover(picture, span))
    place_of = places(timeline)
    boxes = drawn(timeline.compute)
    for span in boxes:
        yield _box(scene, _style(span, place_of), span, y, scene.box_height, _hover(picture, span), _name(span.action))
    yield from _draw_patterns(scene, boxes, y)
    for span in boxes:
        yield from _draw_number(scene, span, _style(span, place_of), y)
    for lane in scene.lanes:
        yield from _draw_lane(scene, picture, timeline, lane, y)
    yield from _draw_frees(scene, picture, timeline, y)
    yield from _draw_memory(scene, panel, rank, y + scene.memory)
    yield "</g>"


def _draw_patterns(scene: Scene, boxes: Sequence[Span], y: float) -> Iterator[str]:
    """Draw the patterns over a rank's boxes: one element for all boxes of one kind."""
    for kind in PATTERNS:
        outlines = [
            f"M{scene.x(span.start):.2f} {y:.2f}H{scene.x(span.end):.2f}v{scene.box_height}H{scene.x(span.start):.2f}z"
            for span in boxes
            if span.action.kind is kind
        ]
        if outlines:
            yield f'<path class="over" fill="url(#over{kind})" d="{"".join(outlines)}"/>'


def _draw_number(scene: Scene, span: Span, style: str, y: float) -> Iterator[str]:
    """Write a micro-batch's number on its box if it fits; with several chunks per rank, the chunk's number below it."""
    if span.action.microbatch is None or not scene.fits(scene.last_microbatch, scene.font_size, span):
        return
    chunk, microbatch = span.action.piece
    x = (scene.x(span.start) + scene.x(span.end)) / 2
    style = "on" + style.replace(" s", "")
    below = 0.36 * scene.font_size + (scene.box_height / 2 if scene.num_places < 2 else 10.0)
    yield (
        f'<text class="number {style}" x="{x:.2f}" y="{y + below:.2f}" font-size="{scene.font_size:g}">'
        f"{microbatch}</text>"
    )
    if scene.num_places > 1 and scene.fits(scene.last_chunk, CHUNK_FONT_SIZE, span):
        yield f'<text class="chunk {style}" x="{x:.2f}" y="{y + 23.5:.2f}">{chunk}</text>'


def _draw_lane(scene: Scene, picture: Picture, timeline: RankTimeline, lane: Lane, y: float) -> Iterator[str]:
    top = y + lane.offset
    yield f'<text class="lane" x="{scene.left - 6:.1f}" y="{top + lane.height / 2 + 2.6:.1f}">{lane.label}</text>'
    spans = drawn(getattr(timeline, lane.name))
    for span, track in zip(spans, tracks(spans, 1e-9 * picture.timeline.makespan), strict=True):
        place = top + track * scene.track
        yield _box(scene, span.action.kind, span, place, scene.track - 1.0, _hover(picture, span), _name(span.action))


def _draw_frees(scene: Scene, picture: Picture, timeline: RankTimeline, y: float) -> Iterator[str]:
    """Draw a tick on the lane of gathers where an action frees weights: at its end."""
    for lane in (lane for lane in scene.lanes if lane.name == "gathers"):
        for span in timeline.compute:
            if span.action.frees:
                place = f'x="{scene.x(span.end) - 0.4:.2f}" y="{y + lane.offset:.2f}"'
                hover = f"{format_actions(span.action.frees)}: {picture.time_text(span.end)}"
                yield (
                    f'<rect class="freed" {place} width="0.8" height="{lane.height - 1.0:.2f}">'
                    f"<title>{escape(hover)}</title></rect>"
                )


def _draw_memory(scene: Scene, panel: Panel, rank: int, y: float) -> Iterator[str]:
    """Draw the memory of a rank as a filled step curve, with a dot and a text at its peak."""
    picture = panel.picture
    curve = picture.memory[rank]
    if not curve:
        return
    bottom, scale = y + scene.memory_height, scene.memory_height / panel.most_memory
    steps = [f"M{scene.x(curve[0][0]):.2f} {bottom:.2f}"]
    steps += [f"H{scene.x(time):.2f}V{bottom - held * scale:.2f}" for time, held in curve]
    steps.append(f"H{scene.x(picture.timeline.makespan):.2f}V{bottom:.2f}Z")
    peak = picture.peaks[rank]
    at = next(time for time, held in curve if held == peak)
    text = picture.memory_text(peak)
    hover = f"memory of rank {rank}: at most {text}, from {picture.time_text(at)}"
    height = bottom - peak * scale
    yield f'<path class="held" d="{"".join(steps)}"><title>{escape(hover)}</title></path>'
    yield f'<circle class="top" cx="{scene.x(at):.2f}" cy="{height:.2f}" r="1.6"/>'
    yield f'<text class="lane" x="{scene.left - 6:.1f}" y="{y + scene.memory_height / 2 + 3:.1f}">memory</text>'
    x = scene.left + scene.plot_width + 8
    yield f'<text class="peak" x="{x:.1f}" y="{bottom - 3:.1f}">peak {escape(text)}</text>'
    if picture.limit and picture.knows_bytes:
        limit, right = bottom - picture.limit * scale, scene.left + scene.plot_width
        yield f'<path class="limit" d="M{scene.left:.1f} {limit:.2f}H{right:.1f}"/>'
        yield f'<text class="beyond" x="{x:.1f}" y="{bottom - 14:.1f}">limit {escape(bytes_text(picture.limit))}</text>'


def _draw_critical_path(scene: Scene, panel: Panel) -> Iterator[str]:
    """Underline the boxes of the critical path, and connect those of different ranks, lower edge to upper edge."""
    path = [
        (panel.rows + rank * scene.pitch, scene.x(span.start), scene.x(span.end))
        for rank, span in panel.picture.timeline.critical_path
        if span.action.kind not in TRANSFERS | BUCKET and span.duration > 0.0
    ]
    for y, start, end in path:
        below = y + scene.box_height + 0.9
        yield f'<path class="critical" stroke-width="1.8" d="M{start:.2f} {below:.2f}H{end:.2f}"/>'
    for (y, _, end), (next_y, start, _) in pairwise(path):
        if y != next_y:
            leave = y + scene.box_height * (next_y > y)
            arrive = next_y + scene.box_height * (next_y < y)
            yield f'<path class="critical" stroke-width="0.9" d="M{end:.2f} {leave:.2f}L{start:.2f} {arrive:.2f}"/>'


def _box(scene: Scene, style: str, span: Span, y: float, height: float, hover: str, name: str = "") -> str:
    """Return a box as wide as its span, less a small gap that separates neighbours."""
    start, end = scene.x(span.start), scene.x(span.end)
    hair = min(0.4, 0.1 * (end - start))
    data = f' data-action="{name}"' if name else ""
    return (
        f'<rect class="{style}"{data} x="{start + hair:.2f}" y="{y:.2f}" width="{end - start - 2 * hair:.2f}" '
        f'height="{height:.2f}"><title>{escape(hover)}</title></rect>'
    )


def _style(span: Span, place_of: Mapping[int, int]) -> str:
    """Return the classes of a computed action's box: its kind, and the shade of its chunk."""
    chunk = span.action.chunk
    return f"{span.action.kind} s{0 if chunk is None else place_of[chunk]}"


def _name(action: Action) -> str:
    """Return the action's text without its sub-actions."""
    return str(action).partition("[")[0]


def _hover(picture: Picture, span: Span) -> str:
    action, plan = span.action, picture.plan
    times = f"{picture.time_text(span.start, with_unit=False)} to {picture.time_text(span.end)}"
    if plan is None or action.kind not in TRANSFERS:
        return f"{action}: {times}"
    direction = "to" if action.kind in (Kind.SEND_F, Kind.SEND_B) else "from"
    size = f", {bytes_text(transfer_bytes(plan, action))}" if picture.knows_bytes else ""
    return f"{action} {direction} rank {plan.peer(action)}{size}: {times}"
