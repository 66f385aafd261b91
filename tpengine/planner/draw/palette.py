"""Colours and patterns, after Okabe and Ito (2008). Colour-blind readers can tell them apart; patterns help in grey.

A kind is a hue with a pattern; the chunks of a rank are its shades, from full (first) to light (last).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tpengine.plan.actions import Kind

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
