"""The groups of an optimizer: options as they are compared, and the numbers that torch gives to parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

# Of a group, what is no option.
_NO_OPTIONS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says beside its parameters."""
    return {key: value for key, value in group.items() if key not in _NO_OPTIONS}


def words_of(options: Mapping[str, Any]) -> str:
    """Return options as one line that is equal where they are."""
    words = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options.items()}
    return ", ".join(f"{key} {value!r}" for key, value in sorted(words.items()))


def numbers_of(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, int]:
    """Return the numbers that torch's state dicts give to parameters."""
    numbers: dict[Tensor, int] = {}
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in groups)):
        numbers.setdefault(parameter, number)
    return numbers
