"""Legal values near a wrong one, for the remedy of a message: computed from divisors, never found by counting.

What a user may type has no bound, so that a search from there to the next legal value has none either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from tpengine.config.settings import round_up


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number of at least 1, ascending. Cost: its square root."""
    below = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*below, *(number // size for size in below)}))


def nearest_of(name: str, number: int, legal: Iterable[int]) -> str:
    """Return the legal values on both sides of a number as text: "tp 2 or 4"."""
    known = sorted(legal)
    below = [value for value in known if value <= number][-1:]
    above = [value for value in known if value >= number][:1]
    found = dict.fromkeys(map(str, below + above))
    return f"{name} {' or '.join(found)}" if found else f"another {name}"


def nearest_multiples(name: str, number: int, multiple: int, most: int | None = None) -> str:
    """Return the multiples on both sides of a number as text: "seq_len 126 or 128".

    Args: most: the largest legal value; None for no bound.
    """
    up = round_up(number, multiple)
    return nearest_of(name, number, (of for of in (up - multiple, up) if of > 0 and (most is None or of <= most)))
