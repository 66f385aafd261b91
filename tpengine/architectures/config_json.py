"""config.json of a model's directory: typed reading of its numbers, and the sizes that Llama and its relatives share.

This is the one place that knows both spellings of rotary positions, to read and to write. transformers 4 has
`rope_theta` and `rope_scaling`; transformers 5 has `rope_parameters`. Where both are there, they must say the same.
What is written has both.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.config import ModelConfig
from tpengine.config.ranges import RANGES
from tpengine.config.settings import ModelDetails, RopeScaling
from tpengine.dtypes import DTYPES

_THETA = 10000.0
# What each kind needs, and what it may have besides.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "llama_4_scaling_beta"),
    "longrope": ("factor", "attention_factor"),
}
# Numbers of each pair of a head's elements.
_LISTS = ("short_factor", "long_factor")
# Not written where they are zero.
_ZEROS = ("attention_factor", "llama_4_scaling_beta")
_AT_LEAST_ONE = ("factor", "original_max_position_embeddings")
# Numbers of other models' variants of a kind, by the value that changes nothing.
_PART, _MSCALES = "partial_rotary_factor", ("mscale", "mscale_all_dim")
_NEUTRAL: Mapping[str, Any] = {_PART: 1.0, **dict.fromkeys(_MSCALES)}
_REQUIRED = object()
_MOST = 2**53
# Characters of how weights are quantized that a message shows.
_MOST_SHOWN = 80


def read_rope(
    values: Mapping[str, Any],
    path: str,
    section: str | None = None,
    default: float = _THETA,
    *,
    rotates_parts: bool = False,
) -> tuple[float, RopeScaling]:
    """Return the base of the rotary frequencies and their scaling.

    Args:
        values: config.json.
        path: of it, for errors.
        section: the kind of layers, where `rope_parameters` has an entry for each.
        default: the base where the file has none.
        rotates_parts: the architecture may rotate a part of each head.

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
    read = [_scaling({**values, **spelling}, path, rotates_parts) for spelling in (old, new) if spelling]
    if not read and rotates_parts:
        read = [_scaling({_PART: values.get(_PART)}, path, rotates_parts)]
    if len(read) == 2 and read[0] != read[1]:
        raise ValueError(
            f"{path}: rope_scaling and rope_parameters must say the same: {old} and {new}: remove the wrong one"
        )
    return float(theta), read[-1] if read else RopeScaling()


def written_rope(
    theta: float, scaling: RopeScaling, local_theta: float = 0.0, longest: int | None = None
) -> dict[str, Any]:
    """Return the entries of config.json, in both spellings.

    Args:
        theta: base of the frequencies.
        scaling: of them.
        local_theta: base of the layers that have a window, where they have their own; 0 where they have not.
        longest: max_position_embeddings of the file: a factor of longrope that follows from it is not written.
    """
    kind = scaling.rope_type
    names = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    numbers = {name: getattr(scaling, name) for name in names if name not in _ZEROS or getattr(scaling, name)}
    if kind == "longrope" and scaling.factor == _factor_of(longest, scaling.original_max_position_embeddings):
        del numbers["factor"]
    numbers |= {name: list(numbers[name]) for name in _LISTS if name in numbers}
    part = {} if scaling.partial_rotary_factor == 1 else {_PART: scaling.partial_rotary_factor}
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, **numbers, **part}
    written = {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **numbers},
        "rope_parameters": parameters,
        **part,
    }
    if kind == "longrope":
        # Version 4 wants the original length beside rope_scaling, and three entries in it.
        original = numbers.pop("original_max_position_embeddings")
        written |= {"rope_scaling": {"type": kind, **numbers}, "original_max_position_embeddings": original}
    if local_theta:
        local = {"rope_type": "default", "rope_theta": local_theta}
        sections = {"full_attention": parameters, "sliding_attention": local}
        written |= {"rope_local_base_freq": local_theta, "rope_parameters": sections}
    return written


def _factor_of(longest: Any, original: Any) -> float | None:
    """Return how many times as long sequences become; None where the lengths are no numbers."""
    both = (longest, original)
    known = all(isinstance(of, int) and not isinstance(of, bool) and 0 < of <= _MOST for of in both)
    return max(1.0, longest / original) if known else None


def _scaling(values: Mapping[str, Any], path: str, rotates_parts: bool) -> RopeScaling:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _NEEDED:
        raise ValueError(
            f"{path}: rope_type must be one of {', '.join(_NEEDED)}: got {kind!r}: use a model with one of these"
        )
    for name, neutral in _NEUTRAL.items():
        is_read = rotates_parts if name == _PART else kind == "yarn"
        if not is_read and values.get(name, neutral) not in (neutral, None):
            raise ValueError(f"{path}: {name} of rotary positions must be {neutral}: got {values[name]}: use another")
    given = _given(values, kind)
    if missing := [name for name in _NEEDED[kind] if given[name] is None]:
        raise ValueError(f"{path}: rope_type {kind} needs {', '.join(missing)}: it has none: add them")
    if rotates_parts:
        given[_PART] = values.get(_PART)
    numbers: dict[str, Any] = {
        name: (_factors if name in _LISTS else _number)(value, name, f"{path}: {name} of rope_type {kind}")
        for name, value in given.items()
        if value is not None
    }
    amplitudes = [values.get(name) for name in _MSCALES]
    if kind == "yarn" and "attention_factor" not in numbers and all(amplitudes):
        of, of_all = (
            0.1 * _number(value, name, f"{path}: {name} of rope_type yarn") * math.log(numbers["factor"]) + 1.0
            for name, value in zip(_MSCALES, amplitudes, strict=True)
        )
        numbers["attention_factor"] = of / of_all
    scaling = RopeScaling(kind, **numbers)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if not getattr(scaling, low) < getattr(scaling, high):
            raise ValueError(
                f"{path}: {low} of rope_type {kind} must be below {high}: got {getattr(scaling, low)} and "
                f"{getattr(scaling, high)}: correct them"
            )
    return scaling


def _given(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what a kind reads of the values, as they are; None where there is none."""
    given = {name: values.get(name) for name in (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))}
    given["llama_4_scaling_beta"] = given.get("llama_4_scaling_beta") or None
    longest, length = values.get("max_position_embeddings"), "original_max_position_embeddings"
    if kind in ("yarn", "longrope") and given[length] is None:
        given[length] = longest
    if kind == "longrope" and given["factor"] is None:
        given["factor"] = _factor_of(longest, given[length])
    return given


def _number(value: Any, name: str, what: str) -> Any:
    """Return a number of rotary positions, or true or false, of the type that it has here."""
    kinds = bool if name == "truncate" else int if name.startswith("original") else (int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise ValueError(f"{what} must be a number: got {value!r}: correct it")
    if abs(value) > sys.float_info.max:
        raise ValueError(f"{what} must be finite: it is beyond every float: correct it")
    least = 1 if name in _AT_LEAST_ONE else 0
    if name != "truncate" and not (least <= value < math.inf and value > 0):
        bound = f"at least {least}" if least else "above 0"
        raise ValueError(f"{what} must be {bound} and finite: got {value}: correct it")
    return float(value) if kinds == (int, float) else value


def _factors(value: Any, name: str, what: str) -> tuple[float, ...]:
    """Return an array of positive numbers."""
    if not isinstance(value, list) or any(isinstance(of, bool) or not isinstance(of, int | float) for of in value):
        raise ValueError(f"{what} must be an array of numbers: got {_shown(value)}: correct it")
    if not all(0 < of <= sys.float_info.max for of in value):
        raise ValueError(f"{what} must be above 0 and finite: got {_shown(value)}: correct it")
    return tuple(map(float, value))


def _object(values: Mapping[str, Any], name: str, path: str) -> dict[str, Any]:
    """Return an entry that is an object, or none, without its nulls."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be an object: got {value!r}: correct it")
    return {key: entry for key, entry in (value or {}).items() if entry is not None}


@dataclass(frozen=True)
class ConfigJson:
    """The numbers of a model, as its directory has them.

    Attributes:
        values: the JSON object.
        path: named in errors.
    """

    values: Mapping[str, Any]
    path: str = "config.json"

    @classmethod
    def read(cls, directory: str | Path) -> ConfigJson:
        """Read DIR/config.json.

        Raises:
            ValueError: there is none, or it is not a JSON object.
        """
        path = Path(directory) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"a model's directory has a config.json: {path}: {error.strerror}: use one that transformers saved"
            ) from None
        except ValueError as error:
            raise ValueError(f"config.json must be valid JSON: {path}: {error}: copy it again") from None
        if not isinstance(values, dict):
            raise ValueError(f"config.json must be an object: {path}: got {type(values).__name__}: copy it again")
        return cls(values, str(path))

    @property
    def architecture(self) -> str:
        """The name of the architecture."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(
                f"config.json names one architecture: {self.path}: architectures {names!r}: "
                'write "architectures": ["LlamaForCausalLM"], say'
            )
        return names[0]

    @property
    def dtype(self) -> str | None:
        """Return the dtype that the file says its weights have; None where it says none of ours.

        Transformers 4 writes torch_dtype, transformers 5 dtype; both may have "torch." before the name.
        """
        said = self.values.get("dtype", self.values.get("torch_dtype"))
        name = said.removeprefix("torch.") if isinstance(said, str) else None
        return name if name in DTYPES else None

    def without(self, *names: str) -> ConfigJson:
        """Return the same without some entries."""
        return ConfigJson({name: value for name, value in self.values.items() if name not in names}, self.path)

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 0) -> int:
        """Return an integer; null is the default.

        Raises:
            ValueError: another value, one below the least, or of more than 53 bits.
        """
        found = int(self._typed(name, default, (int,), "an integer"))
        self._check(name, found, least, _MOST)
        return found

    def size(self, name: str, setting: str, default: Any = _REQUIRED) -> int:
        """Return an integer that is a setting of the model, as the setting may be; null is the default."""
        found = self.integer(name, default)
        low, high = RANGES[f"model.{setting}"]
        self._check(name, found, low or 0, high or _MOST)
        return found

    def num_layers(self, name: str) -> int:
        """Return how many layers there are.

        Raises:
            ValueError: more than a model may have; refused here, before anything is listed by layers.
        """
        return self.size(name, "num_layers")

    def number(self, name: str, default: Any = _REQUIRED, least: float = 0.0) -> float:
        """Return a number; null is the default.

        Raises:
            ValueError: another value, one below the least, or none that is finite.
        """
        found = self._typed(name, default, (int, float), "a number")
        if not abs(found) <= sys.float_info.max:
            raise ValueError(f"{self.path}: {name} must be finite: got {_shown(found)}: correct it")
        self._check(name, found, least, sys.float_info.max)
        return float(found)

    def _check(self, name: str, found: float, low: float, high: float) -> None:
        if not low <= found <= high:
            bound = f"at least {low:g}" if found < low else f"at most {high}"
            raise ValueError(f"{self.path}: {name} must be {bound}: got {_shown(found)}: correct it")

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; null is the default."""
        return bool(self._typed(name, default, (bool,), "true or false"))

    def text(self, name: str, default: str) -> str:
        """Return a string; null is the default."""
        return str(self._typed(name, default, (str,), "a string"))

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse another value than those that the architecture's code knows; a missing one is allowed.

        Raises:
            ValueError: names it.
        """
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{self.path}: {name} {value!r} is not there yet: {name} must be "
                f"{' or '.join(map(repr, allowed))}: write an architecture of your own (--model.architecture FILE.py)"
            )

    def layers(self, name: str, num_layers: int) -> frozenset[int]:
        """Return the numbers of layers that an array has; null or a missing one is none."""
        found = self._typed(name, [], (list,), "an array of layers")
        if any(type(layer) is not int or not 0 <= layer < num_layers for layer in found):
            raise ValueError(
                f"{self.path}: {name} must be numbers of layers below {num_layers}: got {_shown(found)}: correct it"
            )
        return frozenset(found)

    def windows(self, num_layers: int, is_local: Sequence[bool], default: int) -> tuple[int, ...]:
        """Return the window of each layer by `sliding_window` and, where it is there, `layer_types`.

        Args:
            num_layers: of the model.
            is_local: which layers have a window where `layer_types` does not say.
            default: the window where there is no `sliding_window`; null is none.
        """
        window = self.integer("sliding_window", 0 if "sliding_window" in self.values else default, least=-_MOST)
        if window < 1 and self.values.get("sliding_window") is not None:
            raise ValueError(
                f"{self.path}: sliding_window must be at least 1, a query's own key: got {window}: use null for none"
            )
        types = self.values.get("layer_types")
        if types is not None:
            known = ("full_attention", "sliding_attention")
            if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
                raise ValueError(
                    f"{self.path}: layer_types must be {' or '.join(known)} of each of {num_layers} layers: "
                    f"got {types!r}: correct it"
                )
            is_local = [kind == known[1] for kind in types]
        windows = tuple(window if local else 0 for local in is_local)
        return windows if any(windows) else ()

    def rope(
        self, section: str | None = None, default: float = 10000.0, *, rotates_parts: bool = False
    ) -> tuple[float, RopeScaling]:
        """Return the base of the rotary frequencies and their scaling: see read_rope."""
        return read_rope(self.values, self.path, section, default, rotates_parts=rotates_parts)

    def section_theta(self, section: str, default: float = 10000.0) -> float:
        """Return the base of a kind of layers whose frequencies are not scaled; only `rope_parameters` has it.

        Args:
            section: the kind.
            default: the base where it has none.

        Raises:
            ValueError: they are scaled.
        """
        theta, scaling = self.without("rope_theta", "rope_scaling").rope(section, default)
        if scaling.rope_type != "default":
            raise ValueError(
                f"{self.path}: rope_type of {section} must be default: got {scaling.rope_type!r}: use a model whose "
                "layers of this kind are not scaled"
            )
        return theta

    def _typed(self, name: str, default: Any, types: tuple[type, ...], what: str) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ValueError(f"{self.path} must have {name}, {what}: it is missing: add it")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{self.path}: {name} must be {what}: got {_shown(value)}: correct it")
        return value


def quantization_of(values: Mapping[str, Any]) -> str | None:
    """Return how the weights of a config.json are quantized, in a few words, the method's name first; None if not."""
    method = values.get("quantization_config")
    if isinstance(method, dict) and "quant_method" in method:
        method = {"quant_method": method["quant_method"], **method}
    return None if method is None else str(method)[:_MOST_SHOWN]


def _shown(value: object) -> str:
    """Return a value for a message, shortened; Python spells no integer of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


def llama_sizes(
    config: ConfigJson,
    *,
    ties: bool = False,
    kv_heads: int | None = None,
    theta: float = _THETA,
    eps: float = 1e-6,
    rotates_parts: bool = False,
) -> ModelConfig:
    """Return the sizes of config.json.

    Args:
        config: the file.
        ties: whether the ends are tied where it does not say.
        kv_heads: how many there are where it has no entry; None, and where it has null, as many as query heads.
        theta: base of the rotary frequencies where it does not say.
        eps: added to mean squares where it does not say.
        rotates_parts: it may rotate a part of each head.
    """
    config.must_be("hidden_act", "silu")
    theta, rope = config.rope(default=theta, rotates_parts=rotates_parts)
    num_heads = config.size("num_attention_heads", "num_heads")
    is_silent = kv_heads is not None and "num_key_value_heads" not in config.values
    return ModelConfig(
        hidden_size=config.size("hidden_size", "hidden_size"),
        num_layers=config.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", "num_kv_heads", kv_heads if is_silent else num_heads),
        ffn_size=config.size("intermediate_size", "ffn_size"),
        vocab_size=config.size("vocab_size", "vocab_size"),
        tie_embeddings=config.flag("tie_word_embeddings", ties),
        rope_theta=theta,
        norm_eps=config.number("rms_norm_eps", eps),
        details=ModelDetails(head_size=config.integer("head_dim", 0), rope=rope),
    )
