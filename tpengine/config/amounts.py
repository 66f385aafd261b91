"""Lengths of a run in steps or in tokens: 2000, or "4e9 tokens"."""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+]?[0-9]{1,2})?) *(steps|tokens)?")
_MOST = 2**62


class Amount(NamedTuple):
    """A length.

    Attributes:
        number: at least 0.
        unit: "steps" or "tokens".
    """

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def amount_of(value: int | str, key: str) -> Amount:
    """Read a length.

    Args: value: a number of steps, or a text of a number and "steps" or "tokens". key: for the message.

    Raises:
        ValueError: anything else.
    """
    if type(value) is int and value < 0:
        raise ValueError(f"{key} must be at least 0: got {value}: use 0")
    match = _FORM.fullmatch(str(value).strip())
    number = float(match.group(1)) if match else -1.0
    if match is None or number > _MOST or number != int(number):
        raise ValueError(f'{key} must be a number of steps, or of tokens: got {value!r}: use 2000 or "4e9 tokens"')
    # A plain integer keeps its digits; 4e9 has them all in a float.
    digits = match.group(1)
    return Amount(int(digits) if digits.isdecimal() else int(number), match.group(2) or "steps")
