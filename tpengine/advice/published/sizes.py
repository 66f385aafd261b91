"""What a row says of its model, batch and layout, in whole numbers; without these there is no prediction.

What is not said is assumed where one value is usual: for micro-batches, recomputation and ZeRO see predict.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tpengine.advice.published.row import Row

# GPT-2's vocabulary, padded as Megatron pads it, which most rows without one have.
_VOCABULARY = 50304
# No published model is deeper; a plan of so many units takes seconds.
_MOST_LAYERS = 1000
_STAGES = {
    **{"3": "3", "zero3": "3", "fsdp": "3", "fsdp1": "3", "fsdp2": "3", "full": "3", "hsdp": "3", "stage3": "3"},
    **{"2": "2", "zero2": "2", "grad": "2", "stage2": "2", "1": "1", "zero1": "1", "stage1": "1", "distributed": "1"},
    **{"0": "0", "zero0": "0", "none": "0", "no": "0", "ddp": "0", "false": "0", "off": "0", "yes": "1", "true": "1"},
}
# They train by FSDP alone, unless the row says otherwise.
_ONLY_FSDP = ("torchtitan", "mosaic", "foundry", "fsdp")


@dataclass(frozen=True)
class Sizes:
    """What a row says of its model, batch and layout, in whole numbers.

    Attributes:
        head_size: elements of a head.
        num_micro_batches: of one replica; a last one that is not full counts as one.
        params_b: billions of parameters, to tell whether embeddings are tied; 0 where not known.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
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
        hidden, seq = row.number("hidden"), row.number("seq_len")
        # Heads of 128 are what most models have.
        heads = row.number("heads", max(1, hidden // 128))
        # A gate's network has two thirds of the width, which makes its three matrices as large as the others' two.
        ffn = row.number("ffn_hidden", -(-(8 * hidden // 3) // 256) * 256 if row.mlp() == "swiglu" else 4 * hidden)
        zero = _zero(row)
        tp, pp, dp, cp, gpus = _axes(row, zero)
        batch, micro = row.number("global_batch"), row.number("micro_batch", 1)
        if batch < dp * micro:
            raise ValueError(
                f"global_batch must hold dp * micro_batch: got {batch} for {dp} * {micro}: correct one of them"
            )
        if batch % (dp * micro):
            row.assumed.append("the last micro-batch as long as the others")
        kv_heads, head_size = row.number("kv_heads", heads), _head_size(row, hidden, heads)
        if heads < tp or heads % kv_heads:
            raise ValueError(
                f"heads must be at least tp and a multiple of kv_heads: got {heads}, {tp}, {kv_heads}: correct one"
            )
        layers = row.number("layers")
        if layers > _MOST_LAYERS:
            raise ValueError(f"layers must be at most {_MOST_LAYERS}: got {layers}: correct it")
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            ffn=ffn,
            vocab=row.number("vocab", _VOCABULARY),
            seq=seq,
            gpus=gpus,
            tp=tp,
            pp=pp,
            chunks=row.number("vpp", 2 if "interleav" in schedule_words(row) else 1) if pp > 1 else 1,
            dp=dp,
            cp=cp,
            micro_batch=micro,
            num_micro_batches=-(-batch // (dp * micro)),
            zero=zero,
            params_b=_size_in_words(row.columns.get("params_b", "")),
        )


def _axes(row: Row, zero: int) -> tuple[int, int, int, int, int]:
    """Return tp, pp, dp, cp and the number of GPUs; what the row leaves open follows from the others.

    Raises:
        ValueError: two that follow from nothing, or a product that is not the GPUs.
    """
    gpus, cp = row.number("gpus"), row.number("cp", 1)
    # FSDP is one axis, if no other is named.
    alone = 1 if zero == 3 or row.text("dp") == str(gpus) else None
    tp, pp = row.number("tp", alone), row.number("pp", alone)
    dp = row.number("dp", max(1, gpus // (tp * pp * cp)))
    if cp > 1 and dp * tp * pp == gpus and dp % cp == 0:
        row.assumed.append(f"dp {dp} to include cp {cp}")
        dp //= cp
    if dp * tp * pp * cp != gpus:
        raise ValueError(f"tp * pp * dp * cp must be gpus: got {tp} * {pp} * {dp} * {cp} for {gpus}: correct one")
    return tp, pp, dp, cp, gpus


def schedule_words(row: Row) -> str:
    """Return what a row says of its schedule, without what it says that it is not; empty for none."""
    text = re.sub(r"(non|not|no|without)[ -]*interleav\w*", "", row.text("schedule")).strip()
    return "" if text in ("none", "no", "default", "()") else text


def _zero(row: Row) -> int:
    if not row.text("zero_stage"):
        return 3 if any(word in row.system() for word in _ONLY_FSDP) else 0
    return int(row.choice("zero_stage", _STAGES, "0"))


def _head_size(row: Row, hidden: int, heads: int) -> int:
    for name in ("head_dim", "head_size"):
        if row.text(name):
            return row.number(name)
    if hidden % heads:
        raise ValueError(f"heads must divide hidden: got {heads} for {hidden}: correct one, or add head_dim to notes")
    return hidden // heads


def _size_in_words(text: str) -> float:
    try:
        value = float(text.lower().removesuffix("b"))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
