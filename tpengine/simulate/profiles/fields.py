"""Fields of a profile's JSON, each checked: its type, its range, its length. A file may come from anybody."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)


class WrongProfile(Exception):
    """What is wrong with a profile's content, as the message."""


def each(content: Any, name: str, parse: Callable[[Any], T]) -> list[T]:
    """Return the items of a list, parsed."""
    return [parse(item) for item in field_of(content, name, list)]


def field_of(content: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of an object, of one of some types."""
    if not isinstance(content, dict):
        raise WrongProfile(f"{name} must be in an object: got {shown(content)}")

    if name not in content:
        raise WrongProfile(f"it has no {name}")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def name_of(content: Any, name: str) -> str:
    """Return a field that is a short printable text."""
    value: str = field_of(content, name, str)
    if not value.isprintable() or len(value) > 200:
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def word_of(content: Any, name: str, words: type[Word]) -> Word:
    """Return a field that is one of some words."""
    value = field_of(content, name, str)
    if value not in list(words):
        raise WrongProfile(f"{name} is one of {', '.join(words)}: got {shown(value)}")
    return words(value)


def count_of(content: Any, name: str, least: int = 0) -> int:
    """Return a field that counts: an integer of at least `least`."""
    value: int = field_of(content, name, int)
    if not least <= value < 2**62:
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def number_of(content: Any, name: str) -> float:
    """Return a field that is a finite number of at least 0."""
    value = field_of(content, name, (int, float))
    if not (0.0 <= value < 1e12 and math.isfinite(value)):
        raise WrongProfile(f"{name} is {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """Return a value's text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
