"""The TOML form of a configuration: what a run writes to its directory, and what `--config` reads. No torch, no numpy.

A file that a user names is its values, or one line that says what is wrong. Values that are read must have the types of
their fields; config.validate checks everything else.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpengine.config.lengths import DECIDING, last_said, open_settings
from tpengine.config.settings import NUMBERS_OF_EXPERTS, Config, ModelDetails, ParameterGroup
from tpengine.dtypes import Dtype, dtype_named
from tpengine.spelling import choose, did_you_mean

# A plain number, within what a float counts exactly.
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
# Characters of a wrong value that a message shows.
_MOST_SHOWN = 60


def read_toml(path: str | Path, option: str) -> dict[str, Any]:
    """Return the values of a TOML file.

    Args: path: of the file. option: which names it, for messages.

    Raises:
        ValueError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{option} needs a TOML file in UTF-8: {path}: some bytes are not: check the path") from None
    except OSError as error:
        raise ValueError(f"{option} needs a readable file: {path}: {error.strerror}: check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{option} needs valid TOML: {path}: {error}: correct the file") from None
    except (ValueError, RecursionError) as error:
        # A path with a zero byte; an integer of thousands of digits; brackets within thousands of brackets.
        raise ValueError(f"{option} needs a TOML file of a run: {str(path)!r}: {error}: correct it") from None


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML, without values that are None; `load_toml` reads it back equal."""
    # Only what writes a run directory needs it: a trainer without one runs where it is not installed.
    import tomli_w

    values = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in asdict(config).items()
    }
    groups = values["optim"].pop("groups")
    if groups:
        values["optim"]["groups"] = [{k: v for k, v in group.items() if v is not None} for group in groups]
    details = config.model.details
    if details == ModelDetails():
        del values["model"]["details"]
    elif not details.num_experts:
        for name in NUMBERS_OF_EXPERTS:
            del values["model"]["details"][name]
    # What is left open is written as it was said, not as numbers that it will decide.
    undecided = set(open_settings(config.train))
    values["train"] = {
        name: value
        for name, value in values["train"].items()
        if name not in undecided and (value or name not in DECIDING)
    }
    return tomli_w.dumps(values)


def load_toml(path: str | Path, base: Config) -> Config:
    """Read a TOML file over `base`: sections model, parallel, train, data, optim; top-level device, run_dir and resume.

    Raises:
        ValueError: no such file, malformed TOML, an unknown key, a value of the wrong type, two settings that say the
            same, as train.steps and train.tokens.
    """
    values = read_toml(path, "--config")
    config = updated(base, values, str(path))
    return last_said(config, values.get("train", ()), str(path))


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
            raise ValueError(f"{path}: unknown key {key}: {did_you_mean(name, list(known), prefix)}")
        if is_dataclass(known[name]):
            if not isinstance(value, dict):
                raise ValueError(f"{path}: {key} must be a table: got {_spelled(value)}: write [{key}]")
            changes[name] = _updated(known[name], value, key + ".", path)
        else:
            changes[name] = _typed(hints[name], value, known[name], key, path)
    return replace(base, **changes)


def _typed(hint: Any, value: Any, default: Any, key: str, path: str) -> Any:
    """Check a TOML value against a field's type: an integer is a float too, and nothing else is another type.

    Args: hint: of the field. value: as tomllib reads it. default: a legal value, for the message.
    """
    if hint == Dtype and isinstance(value, str):
        value = dtype_named(value)
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices:
        # Python takes true for 1, and 1.0 too.
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        names = ", ".join(map(str, choices))
        raise ValueError(f"{path}: {key} must be one of {names}: got {_spelled(value)}: {choose(value, choices)}")
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        if of is ParameterGroup:
            return _groups(value, key, path)
        kinds = (float, int) if of is float else (of,)
        if not isinstance(value, list) or any(type(entry) not in kinds for entry in value):
            raise ValueError(
                f"{path}: {key} must be an array of {of.__name__}: got {_spelled(value)}: use {_spelled(list(default))}"
            )
        return tuple(map(of, value))
    wanted = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
    if float in wanted and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) not in wanted:
        names = " or ".join(t.__name__ for t in wanted)
        remedy = _as_one_of(wanted, value, default)
        raise ValueError(f"{path}: {key} must be of type {names}: got {_spelled(value)}: {remedy}")
    return value


def _groups(value: Any, key: str, path: str) -> tuple[ParameterGroup, ...]:
    """Return groups of parameters from an array of tables."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{path}: {key} must be tables: got {_spelled(value)}: use [[{key}]] before each")
    return tuple(_updated(ParameterGroup(""), entry, f"{key}.", path) for entry in value)


def _as_one_of(wanted: Sequence[type], value: Any, default: Any) -> str:
    """Return the remedy for a value of another type: the same value, where it is only written otherwise."""
    if bool in wanted and str(value).lower() in ("0", "1", "true", "false"):
        return f"use {_spelled(str(value).lower() in ('1', 'true'))}"
    number = value.strip() if isinstance(value, str) else str(value)
    if {int, float} & set(wanted) and type(value) in (str, float, int) and _NUMBER.fullmatch(number):
        whole = float(number) == int(float(number))
        if float in wanted:
            return f"use {float(number)!r}"
        return f"use {int(float(number))}" if whole else f"use {round(float(number))}"
    return f"use {_spelled(default)}" if default is not None else "leave it out"


def _spelled(value: object) -> str:
    """Return a value as TOML has it, more or less: a table or a long text by its beginning."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
