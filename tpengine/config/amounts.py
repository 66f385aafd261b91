"""Lengths of a run in steps or in tokens: 2000, "4e9 tokens", "500M tokens", 2B."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

_FORM = re.compile(r"([0-9]{1,19}(?:\.[0-9]{0,9})?(?:e\+?[0-9]{1,2})?) *([kmbt]?) *(steps?|tokens?)?", re.IGNORECASE)
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Nobody trains as many steps, so that without a word these are tokens; 2k may be either.
_OF_TOKENS = ("m", "b", "t")
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


def amount_of(value: object, key: str) -> Amount:
    """Read a length in steps or tokens.

    Args:
        value: a number of steps, or a text: a number, maybe with k, M, B or T for thousands to millions of millions,
            and "steps" or "tokens". 2M, 2B and 2T alone are tokens.
        key: for the message.

    Raises:
        ValueError: anything else.
    """
    if type(value) is int and value < 0:
        raise ValueError(f"{key} must be at least 0: got {value}: use 0")
    rule = f'{key} must be a number of steps, or of tokens: got {_shown(value)}: use 2000 or "4e9 tokens"'
    number, letter, word = _parts(value, rule)
    if not word and letter == "k":
        raise ValueError(f'{key} must say of what it is: got {value!r}: use "{value} tokens" or "{value} steps"')
    return Amount(number, "tokens" if word == "tokens" or (not word and letter in _OF_TOKENS) else "steps")


def tokens_of(value: object, key: str) -> int:
    """Read a number of tokens: 2000000, or a text as "2e9 tokens", 2B, 500M.

    Args: value: of the setting. key: for the message.

    Raises:
        ValueError: anything else.
    """
    rule = f'{key} must be a number of tokens, at least 0: got {_shown(value)}: use 2000000, 2B or "4e9 tokens"'
    number, _, word = _parts(value, rule)
    if word == "steps":
        raise ValueError(rule)
    return number


def _parts(value: object, rule: str) -> tuple[int, str, str]:
    """Return a number, the letter that it was written with, and the word behind it: steps, tokens or none.

    Raises: ValueError: `rule`: it is no such text, no whole number, or too large.
    """
    # true and 1.0 are numbers of Python, too.
    match = _FORM.fullmatch(str(value).strip()) if type(value) in (int, str) else None
    if match is None:
        raise ValueError(rule)
    letter, word = match[2].lower(), (match[3] or "").lower()
    # A float has not the digits of every whole number.
    number = Decimal(match[1]) * _TIMES[letter]
    if number > _MOST or number != int(number):
        raise ValueError(rule)
    return int(number), letter, f"{word.removesuffix('s')}s" if word else ""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60]
