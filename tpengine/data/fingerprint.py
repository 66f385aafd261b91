"""What identifies the data of a run, so that a continued run can say which file has changed and how.

A text has a line. A mixture has a JSON object of what its sources are, by name; what is below "paths" says where they
are, which may change, and is named in messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_PATHS = "paths"


class Change(NamedTuple):
    """The first difference of two fingerprints: what, and its values; None where it is not there."""

    what: str
    before: str | None
    now: str | None


def joined(parts: Mapping[str, Any], paths: Mapping[str, str]) -> str:
    """Return the fingerprint of several parts.

    Args: parts: what each is; a part that is such an object itself has parts. paths: where each part's data is.
    """
    return json.dumps({**parts, _PATHS: dict(paths)})


def change_of(before: str, now: str) -> Change | None:
    """Return the first difference of two fingerprints; None if the data are the same."""
    old, new = _parts(before), _parts(now)
    if old is None or new is None:
        return None if before == now else Change("the text", _spelled(before, old), _spelled(now, new))
    paths = {**old.pop(_PATHS, {}), **new.pop(_PATHS, {})}
    flat_old, flat_new = dict(_flat(old)), dict(_flat(new))
    for what in [*flat_old, *flat_new]:
        if flat_old.get(what) != flat_new.get(what):
            owner = what.partition(" of ")[2]
            path = f" ({paths[owner]})" if owner in paths else ""
            return Change(f"the {what}{path}", flat_old.get(what), flat_new.get(what))
    return None


def _parts(fingerprint: str) -> dict[str, Any] | None:
    """Return the parts of a fingerprint; None of a text's line."""
    try:
        found = json.loads(fingerprint)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _flat(parts: Mapping[str, Any], owner: str = "") -> list[tuple[str, str]]:
    """Return what each part is called, as "weight of web", and its value."""
    found = []
    for name, value in parts.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{name} of {owner}" if owner else name)
        else:
            found.append((f"{name} of {owner}" if owner else name, str(value)))
    return found


def _spelled(fingerprint: str, parts: Mapping[str, Any] | None) -> str:
    return fingerprint if parts is None else f"a mixture of {', '.join(parts[_PATHS])}"
