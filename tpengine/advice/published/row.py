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
# Cells that say that nothing is said.
_BLANK = ("", "-", "--", "n/a", "na", "n.a.", "nan", "null", "?", "unknown", "unspecified", "not stated", "not given")
# Units that may follow a number, by column; a batch in tokens is none in sequences.
_UNITS = {
    **{"seq_len": r"tokens?|tok", "gpus": r"gpus?|cards?|devices?", "layers": r"layers?|blocks?", "heads": r"heads?"},
    **{"global_batch": r"sequences?|seqs?|samples?", "micro_batch": r"sequences?|seqs?|samples?"},
}
# Where 0 means that there is no such axis.
_NO_AXIS = ("vpp", "cp")
# Shorter words count only where they stand alone: `no` is not in `layernorm`.
_SHORTEST_PART = 4
_MLPS = {
    **{"swiglu": "swiglu", "geglu": "swiglu", "reglu": "swiglu", "glu": "swiglu"},
    **{"silu": "swiglu", "swish": "swiglu", "gated": "swiglu"},
    **{"gelu": "gelu", "relu": "relu", "4h": "gelu"},
}
# Of models without a word for their network: what their papers describe.
_PLAIN_MODELS = ("gpt", "opt", "bloom", "mpt", "megatron", "turing", "mt-nlg", "neox", "pythia", "falcon")


def _unless_blank(text: str) -> str:
    """Return a cell's text, or nothing where it says that nothing is said."""
    text = text.strip()
    return "" if text.lower() in _BLANK else text


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
            str(name).strip().lower(): _unless_blank(value or "")
            for name, value in columns.items()
            if isinstance(value, str | None)
        }
        pairs = [part.partition("=") for part in re.split(r"[;\n]", texts.get("notes", ""))]
        notes = {key.strip().lower(): _unless_blank(value) for key, _, value in pairs if key.strip()}
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

        A unit or a remark in brackets may follow, as in `64 GPUs` and `512 (sequences)`.

        Args:
            name: of the column, or of a note.
            default: where it is empty; None if the row is of no use then.

        Raises:
            ValueError: empty without a default, a word, or below 1.
        """
        text = re.sub(r"\(.*\)$", "", (self.columns.get(name) or self.notes.get(name, "")).lower())
        text = re.sub(r"[_ ]|,(?=\d{3}(?!\d))", "", text).removeprefix("~")
        text = re.sub(rf"(?<=[\dk])({_UNITS.get(name, 'x')})$", "", text)
        if text in ("", "none") or (name in _NO_AXIS and text == "0"):
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
        for word in (text, text.split(" ")[0].rstrip(",;:")):
            if word in _YES + _NO:
                return word in _YES
        return default

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return what a column's word means: that of the first word of `known` that the text holds.

        Raises:
            ValueError: a word that is not known.
        """
        text = self.text(name)
        if not text:
            self.assumed.append(f"{name} {default}")
            return default
        # A remark says what it is not: `bf16 (no fp8)`.
        text = re.sub(r"\((no|not|without)\b[^)]*\)", "", text)
        alone = re.split(r"[^a-z0-9]+", text)
        for word, meaning in known.items():
            if word in alone or (len(word) >= _SHORTEST_PART and word in text):
                return meaning
        raise ValueError(f"{name} must contain one of {', '.join(known)}: got {text!r}: correct it")
