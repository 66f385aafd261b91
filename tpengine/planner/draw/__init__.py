"""Draw timelines and plans: a grid of characters, or a picture as .svg, .html or .png.

Read picture.py (what is drawn), scene.py (where it is placed, in which colours), svg.py in this order.
"""

from tpengine.planner.draw.file import (
    check_picture_file,
    check_place,
    draw_html,
    draw_to_file,
    picture_bytes,
    render_png,
    write_beside,
)
from tpengine.planner.draw.picture import MAX_BOXES, Picture, bytes_text, check_num_boxes, describe, grid
from tpengine.planner.draw.svg import draw_svg

__all__ = [
    "MAX_BOXES",
    "Picture",
    "bytes_text",
    "check_num_boxes",
    "check_picture_file",
    "check_place",
    "describe",
    "draw_html",
    "draw_svg",
    "draw_to_file",
    "grid",
    "picture_bytes",
    "render_png",
    "write_beside",
]
