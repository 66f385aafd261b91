"""A picture as PNG: the SVG, rendered. Needs the extra `plot`.

Only the font files in matplotlib are used, found without importing it: text looks the same on machines without fonts.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

# Pixels of the picture times the zoom squared: 256 MB of memory.
_MAX_PIXELS = 64_000_000
_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")


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
