"""Write a picture to a file: the name's ending decides the format; the file appears whole, by a rename.

.svg    the picture as svg.py makes it
.html   one self-contained page: the SVG with zoom and movement, and its figures as a table
.png    the SVG, rendered. Needs the extra `plot`: the font files in matplotlib are used, found without importing
        it, so that text looks the same on machines without fonts
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from tpengine import files
from tpengine.planner.draw.picture import Picture, on_one_axis
from tpengine.planner.draw.svg import draw_svg

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
# Pixels of the picture times the zoom squared: 256 MB of memory.
_MAX_PIXELS = 64_000_000
_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")
_FORMS: Mapping[str, Callable[[Sequence[Picture]], bytes]] = MappingProxyType(
    {
        ".svg": lambda pictures: draw_svg(pictures).encode(),
        ".html": lambda pictures: draw_html(pictures).encode(),
        ".png": lambda pictures: render_png(draw_svg(pictures)),
    }
)


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


def check_png() -> None:
    """Raise ValueError if the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("resvg_py", "matplotlib")):
        raise ValueError("drawing a .png needs: pip install 'tpengine[plot]'")


def render_png(svg: str, zoom: float = 2.0) -> bytes:
    """Render an SVG of `draw_svg`.

    Args: svg: the document. zoom: pixels per pixel of the SVG.
    Returns: the bytes of a PNG file, RGBA.
    Raises: ValueError: the extra is not installed, or the image has more than 64 million pixels.
    """
    check_png()
    from resvg_py import svg_to_bytes

    width, height = size_of(svg)
    if width * height * zoom * zoom > _MAX_PIXELS:
        raise ValueError(
            f"a .png must have at most {_MAX_PIXELS} pixels: got {width * zoom:.0f} times {height * zoom:.0f}: "
            "draw an .svg, or fewer ranks"
        )
    files = [str(_font_directory() / name) for name in _FONTS]
    return bytes(svg_to_bytes(svg_string=svg, zoom=zoom, skip_system_fonts=True, font_files=files))


def size_of(svg: str) -> tuple[int, int]:
    """Return the width and height that an SVG of `draw_svg` states."""
    match = re.match(r'<svg [^>]*?width="(\d+)" height="(\d+)"', svg)
    assert match, "draw_svg states the size"
    return int(match[1]), int(match[2])


def _font_directory() -> Path:
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None, "check_png has found matplotlib"
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def check_picture_file(path: Path) -> None:
    """Refuse, before any work, what `draw_to_file` would refuse after it.

    Raises: ValueError: another ending, a directory that does not exist, or no renderer for a .png.
    """
    _check_form(path)
    check_file(path)
    if path.suffix == ".png":
        check_png()


def check_file(path: Path) -> None:
    """Refuse, before any work, what `write_beside` would refuse after it.

    Raises: ValueError: the file cannot be written; one line with path and reason.
    """
    check_place(path)
    with _refused(path):
        files.try_to_write(path)


def picture_bytes(path: Path, pictures: Sequence[Picture]) -> bytes:
    """Return the content of a picture file, in the format of its name's ending.

    Raises: ValueError: an ending other than .svg, .html, .png, or as `draw_svg` and `render_png`.
    """
    _check_form(path)
    return _FORMS[path.suffix](pictures)


def draw_to_file(path: Path, pictures: Sequence[Picture]) -> None:
    """Draw timelines below each other to a file; a reader sees the whole old file or the whole new one.

    Raises: ValueError: as `picture_bytes`, or the file cannot be written.
    """
    write_beside(path, picture_bytes(path, pictures))


def write_beside(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that readers never see a part of it.

    Raises: ValueError: it cannot be written; one line with path and reason.
    """
    check_place(path)
    with _refused(path):
        files.write_beside(path, content)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Refuse in one line, as of the file itself, whatever fails beside it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"a file must be writable: {path}: {error.strerror}: choose another file") from None


def _check_form(path: Path) -> None:
    if path.suffix not in _FORMS:
        endings = ", ".join(_FORMS)
        raise ValueError(f"a picture's name must end in one of {endings}: got {path}: use {path.stem or 'out'}.svg")


def check_place(path: Path) -> None:
    """Refuse a file where none can be.

    Raises: ValueError: its directory does not exist, or it is a directory or device itself.
    """
    if not path.resolve().parent.is_dir():
        raise ValueError(f"a file must lie in a directory that exists: got {path}: make {path.parent} first")
    if path.exists() and not path.is_file():
        raise ValueError(
            f"a file can only replace a regular file: {path} is a directory or device: choose another name"
        )
