"""A row of a table of published runs: its numbers and notes, and what had to be assumed. Measured columns are not read.

What a row does not say is assumed where one value is usual, and said; without sizes, batch or layout there is no
prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Measured, or made from what was measured: never read.
_MEASURED = ("step_s", "step_src", "hfu_pct", "model_tf", "model_tf_uniform", "total_tokens_s", "mfu_pct")
# GPT-2's vocabulary, padded as Megatron pads it, which most rows without one have.
_VOCABULARY = 50304


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
        texts = {name: (value or "").strip() for name, value in columns.items() if isinstance(value, str | None)}
        pairs = [part.partition("=") for part in texts.get("notes", "").split(";")]
        notes = {key.strip().lower(): value.strip() for key, _, value in pairs if key.strip()}
        return cls(texts, {key: value for key, value in notes.items() if key not in _MEASURED})

    def text(self, name: str) -> str:
        """Return a column, or a note where there is no such column, in lower case; empty if there is neither."""
        return (self.columns.get(name) or self.notes.get(name, "")).lower()

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1.

        Args:
            name: of the column.
            default: where it is empty; None if the row is of no use then.

        Raises:
            ValueError: empty without a default, a word, or below 1.
        """
        text = self.columns.get(name, "").replace(",", "")
        if not text:
            if default is None:
                raise ValueError(f"{name} must be a number: got none: add it")
            self.assumed.append(f"{name} {default}")
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 1 or value != int(value):
            raise ValueError(f"{name} must be a whole number of at least 1: got {text!r}: correct it")
        return int(value)

    def flag(self, name: str) -> bool | None:
        """Return a yes or no; None where the row does not say."""
        text = self.text(name)
        if text in ("yes", "true", "1", "on"):
            return True
        return False if text in ("no", "false", "0", "off") else None

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return what a column's word means.

        Raises:
            ValueError: a word that is not known.
        """
        text = self.text(name)
        if not text:
            self.assumed.append(f"{name} {default}")
            return default
        for word, meaning in known.items():
            if word in text:
                return meaning
        raise ValueError(f"{name} must contain one of {', '.join(known)}: got {text!r}: correct it")


@dataclass(frozen=True)
class Sizes:
    """What a row says of its model, batch and layout, in whole numbers.

    Attributes:
        params_b: billions of parameters, to tell whether embeddings are tied; 0 where not known.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gpus: int
    tp: int
    pp: int
    chunks: int
    dp: int
    cp: int
    micro_batch: int
    num_micro_batches: int
    zero: int
    params_b: float

    @classmethod
    def of(cls, row: Row) -> Sizes:
        """Return the sizes of a row.

        Raises:
            ValueError: something is missing or does not fit together; one line.
        """
        gated = "swiglu" in row.text("mlp") or "geglu" in row.text("mlp")
        hidden, seq = row.number("hidden"), row.number("seq_len")
        # Heads of 128 are what most models have.
        heads = row.number("heads", max(1, hidden // 128))
        # A gate's network has two thirds of the width, which makes its three matrices as large as the others' two.
        ffn = row.number("ffn_hidden", -(-(8 * hidden // 3) // 256) * 256 if gated else 4 * hidden)
        tp, pp = row.number("tp"), row.number("pp")
        cp, gpus = row.number("cp", 1), row.number("gpus")
        dp = row.number("dp", max(1, gpus // (tp * pp * cp)))
        if dp * tp * pp * cp != gpus:
            raise ValueError(f"tp * pp * dp * cp must be gpus: got {tp} * {pp} * {dp} * {cp} for {gpus}: correct one")
        batch, micro = row.number("global_batch"), row.number("micro_batch", 1)
        if batch % (dp * micro):
            raise ValueError(f"dp * micro_batch must divide global_batch: got {dp} * {micro} for {batch}: correct one")
        zero = row.columns.get("zero_stage", "") or "0"
        if zero not in ("0", "1", "2", "3"):
            raise ValueError(f"zero_stage must be 0 to 3: got {zero!r}: correct it")
        return cls(
            layers=row.number("layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=row.number("kv_heads", heads),
            ffn=ffn,
            vocab=row.number("vocab", _VOCABULARY),
            seq=seq,
            gpus=gpus,
            tp=tp,
            pp=pp,
            chunks=row.number("vpp", 1),
            dp=dp,
            cp=cp,
            micro_batch=micro,
            num_micro_batches=batch // (dp * micro),
            zero=int(zero),
            params_b=_size_in_words(row.columns.get("params_b", "")),
        )


def _size_in_words(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
