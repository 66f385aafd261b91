"""What one rank attains in the engine's own operators, by name, measured in microbenchmarks.

A measured quantity by size is a `Curve`: points, and lines between them over the logarithms of both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

# What a rank does once per step, or each time a tensor passes by; names of `Measured.operators`.
OPERATORS = (
    *("norm", "norm_backward", "rope", "rope_backward", "activation", "activation_backward", "add"),
    *("cross_entropy", "cross_entropy_gradient", "embedding", "embedding_backward"),
    *("attention", "attention_backward", "adamw", "zero", "prepare"),
)
_ATTENTION = ("attention", "attention_backward")
# A matmul of a layer: forward, the gradient of its input (each also by a weight that was converted once per step), and
# the gradient of its weight, which is added.
PRODUCTS = ("forward", "input_gradient", "prepared_forward", "prepared_input_gradient", "weight_gradient")


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


@dataclass(frozen=True)
class Measured:
    """Rates of one dtype.

    Attributes:
        products: by kind of product and number of rows, floating-point operations per second by the elements of the
            matrix, which comes from memory, or from caches where `Machine.cached` holds the rates.
        operators: by name, bytes per second by the bytes of one call; of attention floating-point operations per second
            by the length of a sequence. What is not there takes the machine's general rates.
    """

    products: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    operators: Mapping[str, Curve] = field(default_factory=dict)

    def flops_per_s(self, kind: str, rows: int, elements: int) -> float | None:
        """Return the rate of a product: a power of the number of rows between two measured ones; None if not known.

        Of fewer rows than were measured it is that of the fewest, which is too fast: `reaches` tells.
        """
        by_rows = self.products.get(kind)
        if not by_rows:
            return None
        known = sorted(by_rows)
        place = bisect_right(known, rows)
        low, high = known[max(0, place - 1)], known[min(place, len(known) - 1)]
        before, after = by_rows[low].at(elements), by_rows[high].at(elements)
        if low >= high or rows <= low:
            return before
        return float(before * (after / before) ** (math.log(rows / low) / math.log(high / low)))

    def reaches(self, kind: str, rows: int) -> bool:
        """Return whether so few rows of a product, or fewer, were measured."""
        return min(self.products[kind]) <= rows

    def slower(self, times: float) -> Measured:
        """Return the rates of a chip that takes so many times as long for what power limits: products, attention."""

        def divided(curve: Curve) -> Curve:
            return Curve(tuple((size, rate / times) for size, rate in curve.points))

        return Measured(
            products={
                kind: {rows: divided(curve) for rows, curve in by_rows.items()}
                for kind, by_rows in self.products.items()
            },
            operators={name: divided(curve) if name in _ATTENTION else curve for name, curve in self.operators.items()},
        )

    def at_best(self) -> Measured:
        """Return the rates, products by weights as they are and by converted ones both as fast as the faster."""

        def faster(curve: Curve, other: Curve | None) -> Curve:
            if other is None:
                return curve
            return Curve(tuple((size, max(rate, other.at(size))) for size, rate in curve.points))

        best: dict[str, dict[int, Curve]] = {}
        for kind, by_rows in self.products.items():
            plain = kind.removeprefix("prepared_")
            others = self.products.get(plain if plain != kind else f"prepared_{kind}", {})
            best[kind] = {rows: faster(curve, others.get(rows)) for rows, curve in by_rows.items()}
        return Measured(best, self.operators)

    def partly(self, cached: Measured, cold_share: float) -> Measured:
        """Return the rates where a part of what is read comes from memory, as here, and the rest from caches.

        Args:
            cached: the rates where all comes from caches; what it lacks always comes from memory.
            cold_share: of the time that memory costs more than caches, what is left.
        """

        def mixed(cold: Curve, warm: Curve | None) -> Curve:
            if warm is None:
                return cold
            # Times add up, not rates. A cache makes nothing slower, whatever a measurement says.
            return Curve(
                tuple(
                    (size, 1.0 / (cold_share / rate + (1.0 - cold_share) / max(rate, warm.at(size))))
                    for size, rate in cold.points
                )
            )

        return Measured(
            products={
                kind: {rows: mixed(curve, cached.products.get(kind, {}).get(rows)) for rows, curve in by_rows.items()}
                for kind, by_rows in self.products.items()
            },
            operators={name: mixed(curve, cached.operators.get(name)) for name, curve in self.operators.items()},
        )
