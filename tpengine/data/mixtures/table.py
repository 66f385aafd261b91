"""The file of a mixture: a table of sources in TOML.

    web  = { path = "web.tokens",  weight = 0.6 }
    code = { path = "code.tokens", weight = 0.3, epochs = 4 }
    math = { path = "math.tokens", weight = 0.1, epochs = inf, held_out = "math-test.tokens" }

The order of the table is part of the order of samples: what a source gives is keyed by its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tpengine.config.toml_file import read_toml
from tpengine.spelling import did_you_mean

# A row of metrics.jsonl names each source three times.
_MOST_SOURCES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class SourceEntry:
    """A source as the file gives it.

    Attributes:
        name: what metrics and messages call it.
        path: as --data.path; relative to the directory where the run is started.
        weight: its share of the samples, relative to the others'; 0 for a source that is held out only.
        epochs: how often its text may be read at most; inf for without end.
        held_out: a text of its own that is evaluated for it, as data.held_out; empty for the last part of its text.
    """

    name: str
    path: str
    weight: float
    epochs: float = 1.0
    held_out: str = ""


_KEYS = tuple(field.name for field in fields(SourceEntry) if field.name != "name")


def read_table(path: str | Path) -> tuple[SourceEntry, ...]:
    """Read the file of a mixture.

    Raises:
        ValueError: it cannot be read, or is no table of sources; one line with path, place and remedy.
    """
    values = read_toml(path, "--data.mixture")
    try:
        entries = tuple(_entry(name, value) for name, value in values.items())
        _check_all(entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return entries


def _check_all(entries: tuple[SourceEntry, ...]) -> None:
    if not 1 <= len(entries) <= _MOST_SOURCES:
        raise ValueError(
            f"a mixture has 1 to {_MOST_SOURCES} sources: got {len(entries)}: write a line for each, such as "
            'web = { path = "web.tokens", weight = 0.7 }'
        )
    if not any(entry.weight for entry in entries):
        raise ValueError(
            f"weights of a mixture must not all be 0: those of {', '.join(entry.name for entry in entries)} are: give "
            "each its share, such as 0.7 and 0.3"
        )


def _entry(name: str, value: object) -> SourceEntry:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a source's name has letters, digits, _, . and -, at most 64: got {name!r}: rename it, as in "
            'web = { path = "web.tokens", weight = 0.7 }'
        )
    if not isinstance(value, dict):
        raise ValueError(
            f'a source must be a table: {name} is {value!r}: write {name} = {{ path = "web.tokens", weight = 0.7 }}'
        )
    for key in value:
        if key not in _KEYS:
            raise ValueError(f"unknown key {name}.{key}: {did_you_mean(key, _KEYS, f'{name}.')}")
    path = value.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(f'a source must say where it is: {name}.path is {path!r}: give path = "{name}.tokens"')
    held_out = value.get("held_out", "")
    if not isinstance(held_out, str):
        raise ValueError(
            f"a held-out text must be named: {name}.held_out is {held_out!r}: give held_out = "
            f'"{name}-test.tokens", or leave it out'
        )
    weight = _number(name, "weight", value, "its share, such as 0.3")
    epochs = _number(name, "epochs", {"epochs": 1, **value}, "how often it may be read, such as 2, or inf")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight must be finite and at least 0: {name}.weight is {weight}: give its share, as 0.3")
    if not epochs > 0:
        raise ValueError(
            f"a source may be read some times at most: {name}.epochs is {epochs}: use a number above 0, or inf; to "
            "leave it out of training, weight = 0"
        )
    return SourceEntry(name, path, weight, epochs, held_out)


def _number(name: str, key: str, value: Mapping[str, Any], what: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or (abs(number) >= 2**53 and number != math.inf):
        raise ValueError(f"{key} must be a number: {name}.{key} is {number!r}: give {what}")
    return float(number)
