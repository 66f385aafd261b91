"""Draw: timelines and plans for people. A grid of characters, or a picture: .svg, .html, .png.

Read picture.py (what is drawn), scene.py (where it lies), palette.py (its colours), svg.py in this order.
"""

from tpengine.plan.draw.file import check_picture_file, draw_to_file, picture_bytes, write_beside
from tpengine.plan.draw.grid import describe, grid
from tpengine.plan.draw.html import draw_html
from tpengine.plan.draw.picture import Picture, bytes_text, check_num_boxes
from tpengine.plan.draw.png import render_png
from tpengine.plan.draw.svg import draw_svg

__all__ = [
    "Picture",
    "bytes_text",
    "check_num_boxes",
    "check_picture_file",
    "describe",
    "draw_html",
    "draw_svg",
    "draw_to_file",
    "grid",
    "picture_bytes",
    "render_png",
    "write_beside",
]
