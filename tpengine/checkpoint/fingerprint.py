"""What identifies the data of a run, so that a continued run can say which file has changed and how.

A text of one file has a line. One of several files, and a mixture, have a JSON object of what their parts are, by name;
what is below "paths" says where these are, which may change, and is named in messages. Where a text of its own is held
out, an object has both: the fingerprint of what is trained on, and that of the held-out text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_PATHS, _SOURCES = "paths", "sources of the mixture"
_HELD_OUT = "held-out text"
_WHOLE = "the text"


class TextChange(NamedTuple):
    """The first difference of two fingerprints: what, and its values; None where it is not there."""

    what: str
    before: str | None
    now: str | None


def of_files(lines: Mapping[str, str], fit: str = "", columns: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the fingerprint of a text of several files.

    Args:
        lines: what each is, by its path, in order. Their names do not count.
        fit: what the index of their fitted samples is; empty for none.
        columns: what each column that is read with their tokens is, by its name.
    """
    return json.dumps(
        {
            **{f"file {number}": line for number, line in enumerate(lines.values(), 1)},
            **({"fit index": fit} if fit else {}),
            **{f"column {name}": line for name, line in columns.items()},
            _PATHS: {f"file {number}": path for number, path in enumerate(lines, 1)},
        }
    )


def of_mixture(sources: Mapping[str, tuple[str, Mapping[str, float], str]]) -> str:
    """Return the fingerprint of a mixture.

    Args: sources: of each, by name and in order: its path, how it is mixed, and its text's fingerprint.
    """
    parts: dict[str, Any] = {_SOURCES: ", ".join(sources)}
    for name, (_, mixed, text) in sources.items():
        trained, held_out = _apart(text)
        parts[name] = {**mixed, **(_parts(trained) or {"text": trained})}
        if held_out is not None:
            path, own = held_out
            parts[name] |= {_HELD_OUT: _parts(own) or own, _PATHS: {**parts[name].get(_PATHS, {}), _HELD_OUT: path}}
    return json.dumps({**parts, _PATHS: {name: path for name, (path, _, _) in sources.items()}})


def with_held_out(trained: str, held_out: tuple[str, str] | None) -> str:
    """Return the fingerprint of what is trained on, and of a text of its own that is held out.

    Args: trained: fingerprint of the first. held_out: where the second is, and its fingerprint; None for none.
    """
    return trained if held_out is None else json.dumps({"trained on": trained, _HELD_OUT: held_out})


def change_of(before: str, now: str) -> TextChange | None:
    """Return the first difference of two fingerprints; None if the data are the same."""
    (trained, old), (trained_now, new) = _apart(before), _apart(now)
    change = _change_of_trained(trained, trained_now)
    if change is not None or (old is None and new is None):
        return change
    path = (new or old or ("", ""))[0]
    if old is None or new is None:
        was, becomes = (None if of is None else _spelled(of[1], _parts(of[1])) for of in (old, new))
        return TextChange(f"the {_HELD_OUT} ({path})", was, becomes)
    change = _change_of_trained(old[1], new[1])
    if change is None:
        return None
    what = f"the {_HELD_OUT} ({path})" if change.what == _WHOLE else f"{change.what} of the {_HELD_OUT}"
    return change._replace(what=what)


def _change_of_trained(before: str, now: str) -> TextChange | None:
    old, new = _parts(before), _parts(now)
    if old is None or new is None or (_SOURCES in old) != (_SOURCES in new):
        return None if before == now else TextChange(_WHOLE, _spelled(before, old), _spelled(now, new))
    flat_old, flat_new = ({what: (value, path) for what, value, path in _flat(parts)} for parts in (old, new))
    for what in [*flat_old, *flat_new]:
        (was, was_at), (becomes, is_at) = flat_old.get(what, (None, "")), flat_new.get(what, (None, ""))
        if was != becomes:
            path = is_at or was_at
            return TextChange(f"the {what}" + (f" ({path})" if path else ""), was, becomes)
    return None


def _apart(fingerprint: str) -> tuple[str, tuple[str, str] | None]:
    """Return the fingerprint of what is trained on; and path and fingerprint of a held-out text, None for none."""
    match _parts(fingerprint):
        case {"trained on": str(trained), "held-out text": [str(path), str(held_out)]}:
            return trained, (path, held_out)
    return fingerprint, None


def _parts(fingerprint: str) -> dict[str, Any] | None:
    """Return the parts of a fingerprint; None of a text's line."""
    try:
        found = json.loads(fingerprint)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _flat(parts: Mapping[str, Any], owner: str = "", of_owner: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield what each part is called, as "weight of web", its value, and its path."""
    paths = parts.get(_PATHS, {})
    for name, value in parts.items():
        what, path = f"{name} of {owner}" if owner else name, paths.get(name, of_owner)
        if isinstance(value, Mapping) and name != _PATHS:
            yield from _flat(value, what, path)
        elif name != _PATHS:
            yield what, str(value), path


def _spelled(fingerprint: str, parts: Mapping[str, Any] | None) -> str:
    if parts is None:
        return fingerprint
    return f"a mixture of {parts[_SOURCES]}" if _SOURCES in parts else f"{len(parts.get(_PATHS, {}))} files"
