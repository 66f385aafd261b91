"""The TOML form of a configuration: what a run writes to its directory, and what `--config` reads. No torch, no numpy.

Values that are read must have the types of their fields; config.validate checks everything else.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpengine.config.details import ModelDetails
from tpengine.config.settings import Config


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML, without values that are None; `load_toml` reads it back equal."""
    # Only what writes a run directory needs it: a trainer without one runs where it is not installed.
    import tomli_w

    values = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in asdict(config).items()
    }
    if config.model.details == ModelDetails():
        del values["model"]["details"]
    return tomli_w.dumps(values)


def load_toml(path: str | Path, base: Config) -> Config:
    """Read a TOML file over `base`: sections model, parallel, train, data, optim; top-level device, run_dir and resume.

    Raises:
        ValueError: no such file, malformed TOML, an unknown key (with the nearest), a value of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--config needs a TOML file in UTF-8: {path}: some bytes are not: check the path") from None
    except OSError as error:
        raise ValueError(f"--config needs a readable file: {path}: {error.strerror}: check the path") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config needs valid TOML: {path}: {error}: correct the file") from None
    return updated(base, values, str(path))


def updated(base: Config, values: Mapping[str, Any], path: str) -> Config:
    """Return `base` with values of a TOML file, sections as tables.

    Raises:
        ValueError: an unknown key, a value of the wrong type; `path` begins the message.
    """
    changed: Config = _updated(base, values, "", path)
    return changed


def _updated(base: Any, values: Mapping[str, Any], prefix: str, path: str) -> Any:
    hints = typing.get_type_hints(type(base))
    known = {f.name: getattr(base, f.name) for f in fields(base)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{path}: unknown key {key}: did you mean {prefix}{nearest}?")
        if is_dataclass(known[name]):
            if not isinstance(value, dict):
                raise ValueError(f"{path}: {key} must be a table: got {value!r}: write [{key}]")
            changes[name] = _updated(known[name], value, key + ".", path)
        else:
            changes[name] = _typed(hints[name], value, key, path)
    return replace(base, **changes)


def _typed(hint: Any, value: Any, key: str, path: str) -> Any:
    """Check a TOML value against a field's type: an integer is accepted as a float, a boolean not as an integer."""
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices:
        if value in choices:
            return value
        raise ValueError(f"{path}: {key} must be one of {', '.join(choices)}: got {value!r}: use {choices[0]}")
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        if not isinstance(value, list) or any(type(entry) is not of for entry in value):
            raise ValueError(f"{path}: {key} must be an array of {of.__name__}: got {value!r}: correct the value")
        return tuple(value)
    wanted = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
    if float in wanted and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) not in wanted:
        names = " or ".join(t.__name__ for t in wanted)
        raise ValueError(f"{path}: {key} must be of type {names}: got {value!r}: correct the value")
    return value
