"""A picture as one self-contained page: the SVG with zoom and movement, and its figures as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from tpengine.simulate.draw.picture import Picture, on_one_axis
from tpengine.simulate.draw.svg import draw_svg

_STYLE = """
body { font: 14px/1.4 Helvetica, Arial, 'DejaVu Sans', sans-serif; margin: 1.5em; color: #1a1a1a; }
#view { border: 1px solid #d5d5d5; height: 72vh; overflow: hidden; }
#view svg { width: 100%; height: 100%; cursor: grab; touch-action: none; }
#view.one rect[data-action]:not(.same) { opacity: 0.25; }
table { border-collapse: collapse; margin: 1em 0; }
caption { text-align: left; font-weight: bold; padding: 0.3em 0; }
th, td { padding: 0.2em 0.8em; text-align: right; border-top: 1px solid #d5d5d5; }
"""

# Wheel zooms at the pointer, drag moves, double click resets; hovering a box highlights its micro-batch on all ranks.
_SCRIPT = """
const view = document.getElementById('view'), svg = view.querySelector('svg');
const whole = svg.getAttribute('viewBox').split(' ').map(Number);
let box = [...whole], held = null;
const show = () => svg.setAttribute('viewBox', box.join(' '));
const at = (event, frame) => {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(frame.inverse());
  return [point.x, point.y];
};
svg.addEventListener('wheel', event => {
  event.preventDefault();
  const [x, y] = at(event, svg.getScreenCTM());
  const scale = Math.min(Math.exp(event.deltaY / 400), whole[2] / box[2]);
  box = [x - (x - box[0]) * scale, y - (y - box[1]) * scale, box[2] * scale, box[3] * scale];
  show();
}, { passive: false });
svg.addEventListener('pointerdown', event => {
  held = { frame: svg.getScreenCTM(), box: [...box], from: at(event, svg.getScreenCTM()) };
  svg.setPointerCapture(event.pointerId);
});
svg.addEventListener('pointermove', event => {
  if (!held) return;
  const [x, y] = at(event, held.frame);
  box = [held.box[0] + held.from[0] - x, held.box[1] + held.from[1] - y, box[2], box[3]];
  show();
});
svg.addEventListener('pointerup', () => { held = null; });
svg.addEventListener('pointercancel', () => { held = null; });
svg.addEventListener('dblclick', () => { box = [...whole]; show(); });
const microbatch = rect => (/^\\d+[A-Z_]+(\\d+)$/.exec(rect.dataset.action) || [])[1];
svg.addEventListener('pointerover', event => {
  const over = event.target.closest('rect[data-action]'), number = over ? microbatch(over) : undefined;
  view.classList.toggle('one', number !== undefined);
  svg.querySelectorAll('rect[data-action]').forEach(rect =>
    rect.classList.toggle('same', number !== undefined && microbatch(rect) === number));
});
"""


def draw_html(pictures: Sequence[Picture]) -> str:
    """Draw timelines as a page: `draw_svg` with zoom, movement and highlighting, then the figures by rank.

    Args: pictures: as for `draw_svg`.
    Returns: a complete HTML document that loads no other file.
    Raises: ValueError: as `draw_svg`.
    """
    pictures = on_one_axis(pictures)
    title = escape("; ".join(picture.title for picture in pictures))
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f'<div id="view">\n{draw_svg(pictures)}</div>',
        "<p>Wheel: zoom. Drag: move. Double click: the whole. A box lights up its micro-batch on all ranks.</p>",
    ]
    for picture in pictures:
        parts += _table(picture)
    return "\n".join([*parts, f"<script>{_SCRIPT}</script>\n</body>\n</html>"]) + "\n"


def _table(picture: Picture) -> Iterator[str]:
    timeline, figures = picture.timeline, picture.figures
    columns = {
        "rank": [str(number) for number in range(len(timeline.ranks))],
        "computes": [picture.time_text(sum(span.duration for span in rank.compute)) for rank in timeline.ranks],
    }
    if figures is not None:
        columns["waits for communication"] = [picture.time_text(rank.exposed) for rank in figures.ranks]
        columns["waits for another rank"] = [picture.time_text(rank.bubble) for rank in figures.ranks]
        columns["has nothing to do"] = [picture.time_text(rank.idle) for rank in figures.ranks]
    held = "peak memory" if picture.knows_bytes else "most live micro-batches"
    columns[held] = [picture.memory_text(peak) for peak in picture.peaks]
    yield f"<table>\n<caption>{escape(picture.title)}</caption>"
    yield f"<tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>"
    for cells in zip(*columns.values(), strict=True):
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"
    sentence = f"; {figures.sentence()}" if figures is not None else ""
    whole = f"makespan {picture.time_text(timeline.makespan)}, bubble {timeline.bubble:.1%}{sentence}"
    yield f"<p>{escape(whole)}</p>"
