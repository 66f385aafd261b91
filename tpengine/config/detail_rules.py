"""Which details of a model are legal. Those of a config.json are checked as it is read, in the file's own words
(architectures/describe); a TOML file may say anything. No torch.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from tpengine.config.details import ModelDetails
from tpengine.config.settings import ModelConfig

_MOST = 2**31
# Characters of a wrong value that a message shows.
_MOST_SHOWN = 40

# What is divided by, or logarithms are taken of, by the kinds that read it.
_POSITIVE = {
    "factor": ("linear", "llama3", "yarn"),
    "original_max_position_embeddings": ("llama3", "yarn"),
    "low_freq_factor": ("llama3",),
    "beta_slow": ("yarn",),
}
_BELOW = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


def check_details(model: ModelConfig) -> None:
    """Raise ValueError for the first detail whose value is none by itself, or that does not fit the layers."""
    details = model.details
    _check_each(details, ModelDetails(), "model.details.")
    rope = details.rope
    for name, kinds in _POSITIVE.items():
        if rope.rope_type in kinds and getattr(rope, name) <= 0:
            raise ValueError(
                f"model.details.rope.{name} must be positive with rope_type {rope.rope_type}: got "
                f"{getattr(rope, name)}: use that of config.json"
            )
    if rope.rope_type in _BELOW:
        low, high = _BELOW[rope.rope_type]
        if not getattr(rope, low) < getattr(rope, high):
            raise ValueError(
                f"model.details.rope.{low} must be below {high}: got {getattr(rope, low)} and {getattr(rope, high)}: "
                "use those of config.json"
            )
    if 0 < details.local_rope_theta < 1:
        raise ValueError(
            f"model.details.local_rope_theta must be at least 1, or 0: got {details.local_rope_theta}: use 0 for "
            "model.rope_theta"
        )
    if len(details.windows) not in (0, model.num_layers):
        raise ValueError(
            f"model.details.windows must be one of each layer, or none: got {len(details.windows)} with num_layers "
            f"{model.num_layers}: use [] or {model.num_layers} of them"
        )


def _check_each(owner: Any, default: Any, prefix: str) -> None:
    for name in (field.name for field in fields(owner)):
        value, key = getattr(owner, name), prefix + name
        if is_dataclass(value):
            _check_each(value, getattr(default, name), f"{key}.")
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool | str):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{key} must be finite: got {number}: use {_shown(getattr(default, name))}")
            if number < 0:
                raise ValueError(f"{key} must be at least 0: got {_shown(number)}: use 0")
            if isinstance(number, int) and number > _MOST:
                raise ValueError(f"{key} must be at most {_MOST}: got {_shown(number)}: use {_MOST}")


def _shown(value: object) -> str:
    """Return a value as TOML has it; a long one by its beginning."""
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
