"""The flags of a training run, made from the dataclasses of config/settings.py: `--section.field-name VALUE`.

A switch is `--name`, or `--no-name`; its `no-` stands before the last part. Whatever is wrong is one line: the rule,
the values, the nearest legal choice. That is why the pass over the arguments is written out here: argparse and tyro end
a process with a box, or a usage of hundreds of lines. tyro writes the help. Which numbers are legal config/rules.py
says.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tpengine.config import Config
from tpengine.config.settings import ModelDetails, ParameterGroup
from tpengine.dtypes import Dtype, dtype_named
from tpengine.spelling import choose, meant

# Digits of a number that a message reckons with; characters of a wrong value that it shows.
_MOST_DIGITS, _MOST_SHOWN = 18, 60


@dataclass(frozen=True)
class _Setting:
    """One flag's type and default."""

    hint: Any
    default: object

    @property
    def choices(self) -> tuple[Any, ...]:
        """Its values, where they are listed."""
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of its values, where they are not."""
        return get_args(self.hint) or (self.hint,)


def parse_flags(flags: Sequence[str], base: Config) -> dict[str, Any]:
    """Return the settings that flags give, by name as `train.seq_len`; of a flag that is repeated the last one counts.

    Args:
        flags: arguments.
        base: what they are given over: its values are the examples of messages.

    Raises:
        ValueError: the first that is wrong.
    """
    settings = _settings(base)
    given: dict[str, Any] = {}
    found: Any
    arguments, before = iter(flags), ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before and not argument.startswith("--"):
            # Behind a switch: --train.keep-best true.
            name, equals, value = before, "=", argument
        before = ""
        name = name.replace("_", "-")
        switch = name.replace(".no-", ".").replace("--no-", "--")
        if switch in settings and settings[switch].hint is bool:
            if equals:
                no = switch.replace(".", ".no-") if "." in switch else switch.replace("--", "--no-")
                raise ValueError(f"{name} takes no value: got {value!r}: use {switch} or {no}")
            before, key, found = name, switch, name == switch
        elif name in settings:
            text = value if equals else next(arguments, None)
            if text is None or text.startswith("--"):
                example = settings[name].default or "VALUE"
                raise ValueError(f"{name} needs a value: got {text or 'nothing'}: use {name} {example}")
            key, found = name, _value(name, text, settings[name])
        else:
            raise ValueError(_unknown(name, settings))
        given[key.lstrip("-").replace("-", "_")] = found
    return given


def with_flags(config: Config, given: Mapping[str, Any]) -> Config:
    """Return the configuration with settings as `parse_flags` returns them."""
    for name, value in given.items():
        section, _, field = name.rpartition(".")
        change = {section: replace(getattr(config, section), **{field: value})} if section else {field: value}
        config = replace(config, **change)
    return config


def flags_help(base: Config, program: str, description: str) -> str:
    """Return the help of all flags, with their values in `base`: what is written below each field in the sources."""
    # It takes longer to import than all flags to be read.
    import tyro

    for without_flags in (ModelDetails, ParameterGroup):
        tyro.conf.configure(tyro.conf.Suppress)(without_flags)
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        tyro.cli(Config, prog=program, description=description, default=base, args=["--help"])
    return out.getvalue().rstrip()


def _settings(base: Any, prefix: str = "--") -> dict[str, _Setting]:
    """Return every flag by its name; numbers of an architecture come from its config.json, groups from TOML."""
    found: dict[str, _Setting] = {}
    for name, hint in get_type_hints(type(base)).items():
        value = getattr(base, name)
        if isinstance(value, ModelDetails | tuple):
            continue
        if is_dataclass(value):
            found |= _settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}".replace("_", "-")] = _Setting(hint, value)
    return found


def _value(name: str, text: str, setting: _Setting) -> Any:
    """Return the value that a text spells.

    Raises:
        ValueError: it spells none of the flag's type.
    """
    if setting.hint == Dtype:
        text = dtype_named(text)  # bf16 is bfloat16
    if setting.choices:
        for choice in setting.choices:
            if text == str(choice):
                return choice
        is_number = text.isdecimal() and len(text) <= _MOST_DIGITS
        remedy = choose(int(text) if is_number else text, setting.choices)
        names = ", ".join(map(str, setting.choices))
        raise ValueError(f"{name} must be one of {names}: got {_shown(text)}: {remedy}")
    if text == "None" and type(None) in setting.kinds:
        return None
    for kind in (int, float, str):
        if kind in setting.kinds and (value := _spelled(text, kind)) is not None:
            return value
    noun = "a number" if float in setting.kinds else "an integer"
    number = _spelled(text, float)
    is_finite = number is not None and math.isfinite(number)
    near = round(number) if is_finite else setting.default
    raise ValueError(f"{name} must be {noun}: got {_shown(text)}: use {1 if near is None else near}")


def _spelled(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


def _shown(text: str) -> str:
    """Return a value as it was given; a long one by its beginning."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."


def _unknown(name: str, settings: Mapping[str, _Setting]) -> str:
    """Return the message for a flag that does not exist, with a likely one: `--lr` is `--optim.lr`."""
    if not name.startswith("-"):
        return f"settings are given as --section.name value: got {name!r}, which is neither: see --help"
    section, _, last_part = name.lstrip("-").rpartition(".")
    by_last_part: dict[str, list[str]] = {}
    for flag in settings:
        by_last_part.setdefault(flag.rpartition(".")[2].lstrip("-"), []).append(flag)
    in_section = {part: [flag] for part, flags in by_last_part.items() for flag in flags if _section(flag) == section}
    # The section that was given counts first; without one, a last part that two sections have means either.
    near: list[str] = []
    for known in (in_section if section else {}, by_last_part):
        if not near and (part := meant(last_part, known)) is not None:
            near = known[part]
    remedy = f"perhaps you meant {' or '.join(near)}" if near else "see --help for all options"
    if section and not near and in_section:
        remedy = f"{section} has {', '.join(in_section)}"
    return f"unknown option {name}: {remedy}"


def _section(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[0]
