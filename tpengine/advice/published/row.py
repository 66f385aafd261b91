"""A row of a table of published runs, as text: its columns and notes, and what had to be assumed. Measured columns are
not read. sizes.py makes numbers of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Measured, or made from what was measured: never read.
_MEASURED = ("step_s", "step_src", "hfu_pct", "model_tf", "model_tf_uniform", "total_tokens_s", "mfu_pct")
_YES, _NO = ("yes", "true", "1", "on", "y", "sp", "enabled"), ("no", "false", "0", "off", "n", "none", "disabled")
# Shorter words count only where they stand alone: `no` is not in `layernorm`.
_SHORTEST_PART = 4
_MLPS = {
    **{"swiglu": "swiglu", "geglu": "swiglu", "silu": "swiglu", "swish": "swiglu", "gated": "swiglu"},
    **{"gelu": "gelu", "relu": "relu"},
}
# Of models without a word for their network: what their papers describe.
_PLAIN_MODELS = ("gpt", "opt", "bloom", "mpt", "megatron", "turing", "mt-nlg", "neox", "pythia", "falcon")


@dataclass
class Row:
    """One row, as text by column, and the notes as text by key.

    Attributes:
        columns: what the file says.
        notes: `key=value` pairs of the column of that name, less what is measured.
        assumed: what was taken where the row says nothing, in words.
    """

    columns: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, columns: Mapping[str, str | None]) -> Row:
        """Return a row of a file's columns by name."""
        texts = {
            str(name).strip().lower(): (value or "").strip()
            for name, value in columns.items()
            if isinstance(value, str | None)
        }
        pairs = [part.partition("=") for part in re.split(r"[;\n]", texts.get("notes", ""))]
        notes = {key.strip().lower(): value.strip() for key, _, value in pairs if key.strip()}
        return cls(texts, {key: value for key, value in notes.items() if key not in _MEASURED})

    def filled(self, **columns: str) -> Row:
        """Return the row with more columns, which are said to be assumed."""
        said = [f"{name} {value}" for name, value in columns.items()]
        return replace(self, columns={**self.columns, **columns}, assumed=[*self.assumed, *said])

    def text(self, name: str) -> str:
        """Return a column, or a note where there is no such column, in lower case; empty if there is neither."""
        return (self.columns.get(name) or self.notes.get(name, "")).lower()

    def system(self) -> str:
        """Return what the row says of its framework, in lower case."""
        return f"{self.text('system')} {self.text('source')} {self.text('framework')} {self.text('engine')}"

    def mlp(self) -> str:
        """Return the kind of feed-forward network: swiglu for a gate and two more matrices, gelu or relu for two.

        Raises:
            ValueError: a word that is not known.
        """
        if self.text("mlp"):
            return self.choice("mlp", _MLPS, "swiglu")
        return "gelu" if any(word in self.text("model") for word in _PLAIN_MODELS) else "swiglu"

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1; thousands may be cut by commas or blanks, or be a `k` of 1,024.

        Args:
            name: of the column, or of a note.
            default: where it is empty; None if the row is of no use then.

        Raises:
            ValueError: empty without a default, a word, or below 1.
        """
        text = re.sub(r"[,_ ]", "", self.columns.get(name) or self.notes.get(name, ""))
        if not text or text.lower() in ("-", "n/a", "na", "none", "?"):
            if default is None:
                raise ValueError(f"{name} must be a number: got none: add it")
            self.assumed.append(f"{name} {default}")
            return default
        thousands = re.fullmatch(r"(\d+)k", text, re.IGNORECASE)
        try:
            value = float(thousands[1]) * 1024 if thousands else float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 1 or value != int(value):
            raise ValueError(f"{name} must be a whole number of at least 1: got {text!r}: correct it")
        return int(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a yes or no; the default where the row does not say."""
        text = self.text(name)
        return True if text in _YES else False if text in _NO else default

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return what a column's word means: that of the first word of `known` that the text holds.

        Raises:
            ValueError: a word that is not known.
        """
        text = self.text(name)
        if not text:
            self.assumed.append(f"{name} {default}")
            return default
        alone = re.split(r"[^a-z0-9]+", text)
        for word, meaning in known.items():
            if word in alone or (len(word) >= _SHORTEST_PART and word in text):
                return meaning
        raise ValueError(f"{name} must contain one of {', '.join(known)}: got {text!r}: correct it")
