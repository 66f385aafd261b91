"""config.json of a model's directory: typed reading of its numbers."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.architectures.describe.rope import read_rope
from tpengine.config.ranges import RANGES
from tpengine.config.settings import RopeScaling
from tpengine.dtypes import DTYPES

_REQUIRED = object()
_MOST = 2**53


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

    def rope(self, section: str | None = None, default: float = 10000.0) -> tuple[float, RopeScaling]:
        """Return the base of the rotary frequencies and their scaling: see read_rope."""
        return read_rope(self.values, self.path, section, default)

    def section_theta(self, section: str) -> float:
        """Return the base of a kind of layers whose frequencies are not scaled; only `rope_parameters` has it.

        Raises:
            ValueError: they are scaled.
        """
        theta, scaling = self.without("rope_theta", "rope_scaling").rope(section)
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


def _shown(value: object) -> str:
    """Return a value for a message, shortened; Python spells no integer of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)
