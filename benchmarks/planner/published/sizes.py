"""What a row says of its model, batch and layout, in whole numbers; without these there is no prediction.

What is not said is assumed where one value is usual: for micro-batches, recomputation and ZeRO see predict.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from benchmarks.planner.published.row import Row

# GPT-2's vocabulary, padded as Megatron pads it, which most rows without one have.
_VOCABULARY = 50304
# No published model is deeper; a plan of so many units takes seconds.
_MOST_LAYERS = 1000
# Of pipelines, which take the longer to simulate the more stages they have; published ones have up to 64. An engine may
# count embedding, last norm and head as layers.
_MOST_STAGES, _MOST_ENDS = 128, 3
_STAGES = {
    **{"3": "3", "zero3": "3", "fsdp": "3", "fsdp1": "3", "fsdp2": "3", "full": "3", "hsdp": "3", "stage3": "3"},
    **{"2": "2", "zero2": "2", "grad": "2", "stage2": "2", "1": "1", "zero1": "1", "stage1": "1", "distributed": "1"},
    **{"0": "0", "zero0": "0", "none": "0", "no": "0", "ddp": "0", "false": "0", "off": "0", "yes": "1", "true": "1"},
    **{"optim": "1", "dist": "1", "gemini": "3", "sharded": "3"},
}
# A stage by its number, wherever it stands: `FSDP (ZeRO-2 style)`, `zero1.size=8`.
_STAGE = re.compile(r"(?:zero|stage)[ _-]*(?:stage)?[ _-]*([0-3])(?!\d)")
# A batch in tokens; M are 2^20 where that is a whole number of micro-batches, else 10^6.
_IN_TOKENS = re.compile(r"(\d[\d,_ ]*(?:\.\d+)?) *([km]?) *(?:tok\w*)?")
_UNITS = {"": (1, 1), "k": (1 << 10, 1000), "m": (1 << 20, 1_000_000)}
# No published batch has as many sequences: such a number counts tokens.
_FEWEST_TOKENS = 1 << 18
_BATCH_IN_TOKENS = ("global_batch_tokens", "batch_tokens", "tokens_per_batch", "tokens_per_step", "global_tokens")
_NUM_MICRO_BATCHES = (
    *("grad_accum", "gas", "gradient_accumulation", "gradient_accumulation_steps", "accumulation_steps"),
    *("grad_accumulation", "num_micro_batches", "num_microbatches", "micro_batches", "microbatches"),
)
_FFN_OF_HIDDEN = re.compile(r"(\d+(?:\.\d+)?)(?:/(\d+))? *[x*\u00d7]? *(?:h|d|hidden|d_model)")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
# Families by name and what their cards say, by number of layers: hidden, heads, kv_heads, ffn_hidden, vocab.
_FAMILIES: tuple[tuple[re.Pattern[str], dict[int, tuple[int, int, int, int, int]]], ...] = (
    (
        re.compile(r"llama[ _-]*3"),
        {
            **{16: (2048, 32, 8, 8192, 128256), 28: (3072, 24, 8, 8192, 128256), 32: (4096, 32, 8, 14336, 128256)},
            **{80: (8192, 64, 8, 28672, 128256), 126: (16384, 128, 8, 53248, 128256)},
        },
    ),
    (
        re.compile(r"llama[ _-]*2.*70|70.*llama[ _-]*2"),
        {80: (8192, 64, 8, 28672, 32000)},
    ),
    (
        re.compile(r"llama"),
        {
            **{32: (4096, 32, 32, 11008, 32000), 40: (5120, 40, 40, 13824, 32000)},
            **{60: (6656, 52, 52, 17920, 32000), 80: (8192, 64, 64, 22016, 32000)},
        },
    ),
    (re.compile(r"mistral[ _-]*7"), {32: (4096, 32, 8, 14336, 32000)}),
)
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
        row = _with_known_sizes(row)
        hidden, seq = row.number("hidden"), row.number("seq_len")
        # Heads of 128 are what most models have.
        heads = row.number("heads", max(1, hidden // 128))
        # A gate's network has two thirds of the width, which makes its three matrices as large as the others' two.
        ffn = _ffn_in_words(row, hidden) or row.number(
            "ffn_hidden", -(-(8 * hidden // 3) // 256) * 256 if row.mlp() == "swiglu" else 4 * hidden
        )
        zero = _zero(row)
        tp, pp, dp, cp, gpus = _axes(row, zero)
        micro = row.number("micro_batch", 1)
        batch = _batch(row, seq, dp, micro)
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
        chunks = row.number("vpp", 2 if re.search("interleav|virtual", schedule_words(row)) else 1) if pp > 1 else 1
        if pp > _MOST_STAGES or pp * chunks > layers + _MOST_ENDS:
            raise ValueError(
                f"stages must be at most {_MOST_STAGES}, their chunks at most the layers and their ends: got pp {pp}, "
                f"vpp {chunks}, {layers} layers: correct one of them"
            )
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
            chunks=chunks,
            dp=dp,
            cp=cp,
            micro_batch=micro,
            num_micro_batches=-(-batch // (dp * micro)),
            zero=zero,
            params_b=_size_in_words(row.columns.get("params_b", "")),
        )


def _with_known_sizes(row: Row) -> Row:
    """Return the row with sizes that it leaves empty and that its model's name tells, if those that it has agree."""
    name, layers = row.text("model"), row.text("layers")
    for pattern, by_layers in _FAMILIES:
        if not pattern.search(name):
            continue
        known = by_layers.get(row.number("layers")) if layers else None
        if known is None or (row.text("hidden") and row.number("hidden") != known[0]):
            return row
        missing = {size: str(value) for size, value in zip(_SIZES[1:], known, strict=True) if not row.text(size)}
        # Heads of another number would be another model's.
        if row.text("heads") and row.number("heads") != known[1]:
            return row
        filled = row.filled(**missing)
        row.assumed[:] = filled.assumed
        return replace(filled, assumed=row.assumed)
    return row


def _ffn_in_words(row: Row, hidden: int) -> int:
    """Return a width that is said as a multiple of the hidden size, as `4h` or `8/3 h`; 0 if it is a number."""
    found = _FFN_OF_HIDDEN.fullmatch(row.text("ffn_hidden"))
    return round(float(found[1]) / int(found[2] or 1) * hidden) if found else 0


def num_micro_batches_said(row: Row) -> int:
    """Return the micro-batches of a replica that a row's notes say; 0 if they do not."""
    for name in _NUM_MICRO_BATCHES:
        if row.text(name):
            return row.number(name)
    return 0


def _batch(row: Row, seq: int, dp: int, micro: int) -> int:
    """Return the sequences of a step: as said, of so many tokens, or of so many micro-batches.

    Raises:
        ValueError: none of them is said.
    """
    text = row.text("global_batch")
    tokens = text if "tok" in text else ""
    if not text:
        tokens = next((row.text(name) for name in _BATCH_IN_TOKENS if row.text(name)), "")
        num = num_micro_batches_said(row)
        if num and not tokens:
            row.assumed.append(f"global_batch {num * dp * micro}")
            return num * dp * micro
    if not tokens:
        batch = row.number("global_batch")
        if batch < _FEWEST_TOKENS:
            return batch
        tokens = str(batch)
    found = _IN_TOKENS.fullmatch(re.sub(r"\(.*\)$|^~", "", tokens).strip())
    if not found:
        raise ValueError(f"global_batch must be a number of sequences or of tokens: got {tokens!r}: correct it")
    binary, decimal = (float(re.sub("[,_ ]", "", found[1])) * unit for unit in _UNITS[found[2]])
    each = dp * micro
    batch = int(binary) // seq if binary % (seq * each) == 0 else max(1, round(decimal / seq / each)) * each
    row.assumed.append(f"global_batch {batch} sequences")
    return batch


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
    numbered = _STAGE.search(row.text("zero_stage"))
    return int(numbered[1] if numbered else row.choice("zero_stage", _STAGES, "0"))


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
