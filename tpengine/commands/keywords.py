"""The configuration of a run from Python: a Config or a TOML file, then keywords, then flags. No torch.

Keywords are the settings, a section as a dictionary: `model={"num_layers": 2}, train={"steps": 100}, device="cpu"`.
They override a Config and a file, which are older than the call; flags, which are typed later, override them.
What a caller writes counts as the user's word, as what a command line gives does (trust.py); of a TOML file, what
--config would make of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from tpengine.commands.arguments import Asked, asked_by, base_config
from tpengine.commands.parsing import permit_settings
from tpengine.config import Config
from tpengine.config.optimizers import OptimizerKind, OwnName
from tpengine.config.toml import updated
from tpengine.spelling import did_you_mean, meant

# What tpengine.run takes besides settings, for messages.
_PARAMETERS = ("loss", "count", "metrics", "optimizer", "callbacks", "data", "preset")


def asked_in_python(
    config: Config | str | os.PathLike[str] | Sequence[str],
    preset: str | None,
    settings: Mapping[str, Any],
    optimizer: Any = None,
) -> Asked:
    """Return what a call of `tpengine.run` asks for.

    Args:
        config: a configuration, the path of a TOML file, or flags as a command line has them.
        preset: what the file and the settings are given over; None for tiny.
        settings: by section and name.
        optimizer: of the user's own (training/elementwise.py: UpdateRule), whose name is then optim.name.

    Raises:
        ValueError: any mistake in them, one line.
        HelpRequested: the flags ask for help.
    """
    path = os.fspath(config) if isinstance(config, str | os.PathLike) else None
    if preset is not None and config and path is None:
        raise ValueError(
            f"preset= is what a file or settings are given over: got preset {preset!r} and a configuration or flags: "
            "leave it out, or give the flag --preset"
        )
    if isinstance(config, Config):
        permit_settings(config, architecture=True, after_checkpoint=True)
        asked = Asked(config, {}, is_alone=False)
    elif path is not None or preset is not None:
        asked = Asked(base_config(preset, path), {}, is_alone=False)
    elif isinstance(config, Sequence) and all(isinstance(flag, str) for flag in config):
        asked = asked_by(config)
    else:
        raise ValueError(
            f"config must be a tpengine.Config, the path of a TOML file, or flags: got {type(config).__name__}: give "
            "settings by keywords, as train={'steps': 100}"
        )
    given = _given(settings, asked.base) | asked.given
    if all(hasattr(optimizer, part) for part in ("name", "states", "operations")):
        # Else it is none, which Trainer says.
        given["optim.name"] = OwnName.of(optimizer.name, OptimizerKind(tuple(optimizer.states), optimizer.operations))
    return asked._replace(given=given)


def _given(settings: Mapping[str, Any], base: Config) -> dict[str, Any]:
    """Return settings by name as `train.seq_len`, each checked against its type."""
    values = {name: _plain(value, getattr(base, name, None)) for name, value in settings.items()}
    _check_names(values)
    config = updated(base, values, "tpengine.run")
    given: dict[str, Any] = {}
    for name, value in values.items():
        found = getattr(config, name)
        if is_dataclass(found):
            given |= {f"{name}.{inner}": getattr(found, inner) for inner in value}
        else:
            given[name] = found
    return given


def _plain(value: Any, before: object) -> Any:
    """Return a value as a TOML file would have it.

    Args: before: what the value is without it; of a section that is given whole what differs is given.
    """
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: (getattr(value, field.name), getattr(before, field.name, None)) for field in fields(value)}
        return {name: _plain(inner, old) for name, (inner, old) in given.items() if inner != old}
    if isinstance(value, Mapping):
        return {name: _plain(inner, getattr(before, str(name), None)) for name, inner in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(inner, None) for inner in value] if isinstance(value, list | tuple) else value


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if one is neither a section nor a setting outside of sections."""
    default = Config()
    known = {field.name: getattr(default, field.name) for field in fields(default)}
    for name in settings:
        if name in known:
            continue
        remedy = did_you_mean(name, [*known, *_PARAMETERS])
        if meant(name, [*known, *_PARAMETERS]) is None:
            sections = {section: fields(value) for section, value in known.items() if is_dataclass(value)}
            near = {section: meant(name, [field.name for field in of]) for section, of in sections.items()}
            ways = [f"{section}={{{inner!r}: ...}}" for section, inner in near.items() if inner]
            remedy = f"use {' or '.join(ways)}" if ways else remedy
        raise ValueError(f"tpengine.run has no setting {name}: {remedy}")
