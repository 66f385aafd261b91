"""Rotary positions in config.json: the one place that knows both spellings, to read and to write.

transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 has `rope_parameters`. Where both are there, they
must say the same. What is written has both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from tpengine.config.settings import RopeScaling

_THETA = 10000.0
# What each kind needs, and what it may have besides.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}
_AT_LEAST_ONE = ("factor", "original_max_position_embeddings")
# Numbers of other models' variants of a kind, by the value that changes nothing.
_NEUTRAL: Mapping[str, Any] = {"partial_rotary_factor": 1.0, "mscale": None, "mscale_all_dim": None}


def read_rope(
    values: Mapping[str, Any], path: str, section: str | None = None, default: float = _THETA
) -> tuple[float, RopeScaling]:
    """Return the base of the rotary frequencies and their scaling.

    Args:
        values: config.json.
        path: of it, for errors.
        section: the kind of layers, where `rope_parameters` has an entry for each.
        default: the base where the file has none.

    Raises:
        ValueError: a kind that is not there, a missing number, or two spellings that differ.
    """
    old, new = (_object(values, name, path) for name in ("rope_scaling", "rope_parameters"))
    if section is not None and section in new:
        new = _object(new, section, path)
    theta = values.get("rope_theta", new.get("rope_theta", default))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta <= sys.float_info.max:
        theta = theta if not isinstance(theta, int) or theta.bit_length() <= 64 else "a far larger one"
        raise ValueError(f"{path}: rope_theta must be a finite number above 1: got {theta!r}: correct it")
    if new.get("rope_theta", theta) != theta:
        raise ValueError(
            f"{path}: rope_theta and rope_parameters must say the same: {theta} and {new['rope_theta']}: "
            "remove the wrong one"
        )
    read = [_scaling({**values, **spelling}, path) for spelling in (old, new) if spelling]
    if len(read) == 2 and read[0] != read[1]:
        raise ValueError(
            f"{path}: rope_scaling and rope_parameters must say the same: {old} and {new}: remove the wrong one"
        )
    return float(theta), read[-1] if read else RopeScaling()


def written_rope(theta: float, scaling: RopeScaling, local_theta: float = 0.0) -> dict[str, Any]:
    """Return the entries of config.json, in both spellings.

    Args:
        theta: base of the frequencies.
        scaling: of them.
        local_theta: base of the layers that have a window, where they have their own; 0 where they have not.
    """
    kind = scaling.rope_type
    names = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    numbers = {name: getattr(scaling, name) for name in names if name != "attention_factor" or scaling.attention_factor}
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, **numbers}
    written = {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **numbers},
        "rope_parameters": parameters,
    }
    if local_theta:
        local = {"rope_type": "default", "rope_theta": local_theta}
        sections = {"full_attention": parameters, "sliding_attention": local}
        written |= {"rope_local_base_freq": local_theta, "rope_parameters": sections}
    return written


def _scaling(values: Mapping[str, Any], path: str) -> RopeScaling:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _NEEDED:
        raise ValueError(
            f"{path}: rope_type must be one of {', '.join(_NEEDED)}: got {kind!r}: use a model with one of these"
        )
    for name, neutral in _NEUTRAL.items():
        if values.get(name, neutral) not in (neutral, None):
            raise ValueError(f"{path}: {name} of rotary positions must be {neutral}: got {values[name]}: use another")
    given = {name: values.get(name) for name in (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))}
    if kind == "yarn" and given["original_max_position_embeddings"] is None:
        given["original_max_position_embeddings"] = values.get("max_position_embeddings")
    if missing := [name for name in _NEEDED[kind] if given[name] is None]:
        raise ValueError(f"{path}: rope_type {kind} needs {', '.join(missing)}: it has none: add them")
    numbers: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        kinds = bool if name == "truncate" else int if name.startswith("original") else (int, float)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ValueError(f"{path}: {name} of rope_type {kind} must be a number: got {value!r}: correct it")
        if abs(value) > sys.float_info.max:
            raise ValueError(f"{path}: {name} of rope_type {kind} must be finite: it is beyond every float: correct it")
        numbers[name] = float(value) if kinds == (int, float) else value
        least = 1 if name in _AT_LEAST_ONE else 0
        if name != "truncate" and not (least <= value < math.inf and value > 0):
            bound = f"at least {least}" if least else "above 0"
            raise ValueError(f"{path}: {name} of rope_type {kind} must be {bound} and finite: got {value}: correct it")
    scaling = RopeScaling(kind, **numbers)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if not getattr(scaling, low) < getattr(scaling, high):
            raise ValueError(
                f"{path}: {low} of rope_type {kind} must be below {high}: got {getattr(scaling, low)} and "
                f"{getattr(scaling, high)}: correct them"
            )
    return scaling


def _object(values: Mapping[str, Any], name: str, path: str) -> dict[str, Any]:
    """Return an entry that is an object, or none, without its nulls."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be an object: got {value!r}: correct it")
    return {key: entry for key, entry in (value or {}).items() if entry is not None}
