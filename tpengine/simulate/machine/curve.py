"""A measured quantity by size: points, and lines between them over the logarithms of both."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """A positive quantity by a positive size.

    Between two points the quantity is a power of the size, which a line over logarithms is; before the first and behind
    the last point it stays as it is there.

    Args:
        points: (size, quantity), sizes rising.

    Raises:
        ValueError: no points, sizes that do not rise, or numbers that are not above 0.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or min(min(point) for point in self.points) <= 0.0:
            raise ValueError(
                f"a curve must be points [size, quantity] above 0, sizes rising: got {[list(p) for p in self.points]}: "
                "sort them by size, and name each size once"
            )

    @classmethod
    def flat(cls, quantity: float) -> Curve:
        """Return the curve that has one quantity at every size."""
        return cls(((1.0, quantity),))

    def at(self, size: float) -> float:
        """Return the quantity at a size."""
        points = self.points
        place = bisect_right(points, size, key=lambda point: point[0])
        if place == 0:
            return points[0][1]
        if place == len(points):
            return points[-1][1]
        (low, before), (high, after) = points[place - 1], points[place]
        if math.isinf(before) or math.isinf(after):
            return before
        share = math.log(size / low) / math.log(high / low)
        return before * (after / before) ** share
