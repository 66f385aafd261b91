"""A row of a table of published runs, as text: its columns and notes, and what had to be assumed. Measured columns are
not read. sizes.py makes numbers of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

# Measured, or made from what was measured: never read.
_MEASURED = ("step_s", "step_src", "hfu_pct", "model_tf", "model_tf_uniform", "total_tokens_s", "mfu_pct")
_YES, _NO = ("yes", "true", "1", "on", "y", "sp", "enabled"), ("no", "false", "0", "off", "n", "none", "disabled")
# Cells that say that nothing is said.
_BLANK = (
    *("", "-", "--", "\u2013", "\u2014", "n/a", "na", "n.a.", "nan", "null", "?", "unknown", "unspecified", "tbd"),
    *("not stated", "not given", "not reported", "not specified"),
)
# Marks that stand for a word where they are the whole cell.
_MARKS = {
    **{"\u2713": "yes", "\u2714": "yes", "\u2705": "yes"},
    **{"\u2717": "no", "\u2718": "no", "\u00d7": "no", "\u274c": "no", "x": "no"},
}
# Units that may follow a number, by column; a batch in tokens is none in sequences.
_UNITS = {
    **{"seq_len": r"tokens?|tok", "gpus": r"gpus?|cards?|devices?", "layers": r"layers?|blocks?", "heads": r"heads?"},
    **{"global_batch": r"sequences?|seqs?|samples?", "micro_batch": r"sequences?|seqs?|samples?"},
}
# Before a number: `TP=4`, `GBS 128`, `virtual stages 4`.
_NAME_BEFORE = re.compile(r"^[a-z][a-z_ ]*[=: ]*(?=\d)")
# Two factors, of columns that count devices: `16 x 8`, `4 nodes x 8 GPUs`; or a number of a kind: `8x A100`.
_COUNTS = ("gpus", "dp")
_GROUPS = r"node|host|server|machine|instance|system|boxe?|pod|superpod|rack|island|dgx|hgx|p[345]\w*"
_FACTORS = re.compile(rf"^(\d+) *(?:(?:{_GROUPS})s?)? *[x*\u00d7] *(\d+) *(?:gpus?)?$")
# What counts groups of devices counts no devices: `16 DGX H100`, `2 pods of 256`, `16 x 8 x 2`.
_OF_A_KIND = re.compile(rf"^(\d+)(?: *x *| +)(?!(?:{_GROUPS})s?\b|x\b)[a-z](?!.*\b(?:of|x) *\d)[\w .-]*$")
# Where 0 means that there is no such axis.
_NO_AXIS = ("vpp", "cp")
# Shorter words count only where they stand alone: `no` is not in `layernorm`.
_SHORTEST_PART = 4
_MLPS = {
    **{"swiglu": "swiglu", "geglu": "swiglu", "reglu": "swiglu", "glu": "swiglu"},
    **{"silu": "swiglu", "swish": "swiglu", "gated": "swiglu"},
    **{"gelu": "gelu", "relu": "relu", "4h": "gelu"},
}
# Words that negate what follows, up to the next comma: `selective, not full`; and what stands before: `full: off`.
_NOT, _OFF = ("not", "no", "non", "never", "without", "0"), ("none", "off", "disabled", "unused", "false")
_NOT_USED = re.compile(r"\b(not|never)[ _-]+(used|enabled|on|applied|needed|set|active|activated)\b")
_CLAUSES = re.compile(r"[,;()/]| but ")
# Aleph Alpha's engine, by the names of its releases and of the paper that compares its layouts.
SCALING = ("aleph", "aa-scaling", "hagemann", "parallelization layouts", "parallelization-layouts", "2311.05610")
# Of models without a word for their network: what their papers describe.
_PLAIN_MODELS = ("gpt", "opt", "bloom", "mpt", "megatron", "turing", "mt-nlg", "neox", "pythia", "falcon")


def _unless_blank(text: str) -> str:
    """Return a cell's text, or nothing where it says that nothing is said."""
    text = text.strip()
    return "" if text.lower() in _BLANK else _MARKS.get(text.lower(), text)


@dataclass
class Row:
    """One row, as text by column, and the notes as text by key.

    Attributes:
        columns: what the file says.
        notes: `key=value` pairs of the column of that name, less what is measured.
        name: what the file calls the row, letter for letter.
        assumed: what was taken where the row says nothing, in words.
    """

    columns: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
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
        name = next((value or "" for key, value in columns.items() if str(key).strip().lower() == "id"), "")
        return cls(texts, {key: value for key, value in notes.items() if key not in _MEASURED}, name)

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

    def is_of(self, names: Iterable[str]) -> bool:
        """Return whether framework, source or table hold one of the names."""
        said = f"{self.system()} {self.text('table')}"
        return any(name in said for name in names)

    def mlp(self) -> str:
        """Return the kind of feed-forward network: swiglu for a gate and two more matrices, gelu or relu for two.

        Raises:
            ValueError: a word that is not known.
        """
        if self.text("mlp"):
            return self.choice("mlp", _MLPS, "swiglu")
        if self._is_four_times_as_wide():
            return "gelu"
        return "gelu" if any(word in self.text("model") for word in _PLAIN_MODELS) else "swiglu"

    def _is_four_times_as_wide(self) -> bool:
        """Return whether the network is: a gate's is narrower, so that it has as many parameters."""
        if not self.text("ffn_hidden"):
            return False
        try:
            return self.number("ffn_hidden") == 4 * self.number("hidden")
        except ValueError:
            return self.text("ffn_hidden") in ("4h", "4d", "4x", "4 x hidden", "4*h")

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1; thousands may be cut by commas or blanks, or be a `k` of 1,024.

        A unit or a remark in brackets may follow, as in `64 GPUs` and `512 (sequences)`, a name may stand before it, as
        in `TP=4`; devices may be a product, as in `4 nodes x 8 GPUs`. A vocabulary's `k` is 1,000.

        Args:
            name: of the column, or of a note.
            default: where it is empty; None if the row is of no use then.

        Raises:
            ValueError: empty without a default, a word, or below 1.
        """
        text = (
            re.sub(r"\(.*\)$", "", (self.columns.get(name) or self.notes.get(name, "")).lower())
            .strip()
            .removeprefix("~")
        )
        text = _NAME_BEFORE.sub("", text)
        if name in _COUNTS and (factors := _FACTORS.match(text)):
            return int(factors[1]) * int(factors[2]) or self._refused(name, text)
        if name == "gpus" and (of_a_kind := _OF_A_KIND.match(text)):
            text = of_a_kind[1]
        text = re.sub(r"[_ ]|,(?=\d{3}(?!\d))", "", text)
        text = re.sub(rf"(?<=[\dk])({_UNITS.get(name, 'x')})$", "", text)
        if text in ("", "none") or (name in _NO_AXIS and text == "0"):
            if default is None:
                raise ValueError(f"{name} must be a number: got none: add it")
            self.assumed.append(f"{name} {default}")
            return default
        thousands = re.fullmatch(r"(\d+)k", text, re.IGNORECASE)
        try:
            value = float(thousands[1]) * (1000 if name == "vocab" else 1024) if thousands else float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 1 or value != int(value):
            return self._refused(name, text)
        return int(value)

    @staticmethod
    def _refused(name: str, text: str) -> int:
        raise ValueError(f"{name} must be a whole number of at least 1: got {text!r}: correct it")

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
        # A remark says what it is not: `bf16 (no fp8)`, `bf16 (FP8 off)`.
        text = re.sub(r"\((no|not|without)\b[^)]*\)|\([^)]*\b(off|disabled)\)", "", text).replace("w/o", "without ")
        meaning = meaning_of(text, known)
        if meaning is not None:
            return meaning
        raise ValueError(f"{name} must contain one of {', '.join(known)}: got {text!r}: correct it")


def meaning_of(text: str, known: Mapping[str, str]) -> str | None:
    """Return the meaning of the first word of `known` that a text holds; None if it holds none."""
    alone = re.split(r"[^a-z0-9]+", text)
    for word, meaning in known.items():
        if word in alone or (len(word) >= _SHORTEST_PART and word in text):
            return meaning
    return None


def what_is_used(text: str) -> str | None:
    """Return a text without the words that it negates, nothing of `none (full is slower)`; None if it negates none."""
    text, found, is_negated = _NOT_USED.sub("off", text.replace("w/o", "without")), list[list[str]](), False
    for number, clause in enumerate(_CLAUSES.split(text)):
        words = re.findall(r"[a-z0-9]+", clause)
        used: list[str] = []
        for place, word in enumerate(words):
            is_last = place == len(words) - 1
            if word not in _NOT + _OFF:
                used.append(word)
                continue
            is_negated = True
            if word in _NOT and not is_last:
                break
            if len(words) == 1:
                # `none (...)`; `full (off)`.
                if number == 0:
                    return ""
                found[-1:] = []
            used = []
        found.append(used)
    return " ".join(word for used in found for word in used) if is_negated else None
