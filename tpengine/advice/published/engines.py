"""The engine of a row, as options of the cost model: what its framework computes, keeps and sends otherwise than ours.

Chosen by what the row says of its system, precision and layout, from the frameworks' own sources and papers; never by
what was measured. README.md lists each option with its source.

    FSDP            zero 3: a unit is a block, gathered before each use and scattered in each backward; a flash kernel;
                    the rest each a kernel of eager torch, unless it is compiled
    DeepSpeed       Megatron's layers; gradients in 16 bits, added and reduced so
    nanotron        Megatron's exchanges; torch's products, so each gradient is added by a kernel
    Megatron        gradients in float32, added by the products; the loss in float32, step by step; transfers of 1F1B
                    block; before Hopper attention of GPT writes its scores
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpengine.advice.published.row import Row
from tpengine.advice.published.sizes import Sizes
from tpengine.simulate.modelled.engine import Engine
from tpengine.simulate.modelled.flash import (
    CUDNN_ON_HOPPER,
    FLASH_1_ON_AMPERE,
    FLASH_1_ON_HOPPER,
    FLASH_2_ON_AMPERE,
    FLASH_2_ON_HOPPER,
    FlashKernel,
)

_HOPPER_AND_LATER = ("h100", "h200", "h800", "b200", "b300", "mi3")
_FRAMEWORKS_WITH_FLASH = (
    *("torchtitan", "mosaic", "nemo", "llama", "internlm", "internevo", "olmo", "flash", "nanotron", "picotron"),
    *("fsdp", "bridge", "levanter"),
)
# Longer sequences than this are not trained with scores in memory.
_LONGEST_WITH_SCORES = 4096
# Their attention is that of torch or of FlashAttention; others call cuDNN on Hopper.
_WITHOUT_CUDNN = ("torchtitan", "mosaic", "olmo", "picotron", "nanotron", "internlm", "internevo")
# Their products add gradients to the buffer in float32 with a kernel of its own.
_NOT_COMPILED = re.compile(r"(no|without|w/o) (torch.)?compile|compile *[=:] *(no|false|off|0)|eager")
_ADDING_BY_A_KERNEL = ("nanotron", "picotron")
# FSDP's gradients on their way into a reduce-scatter. FSDP 1: joined into the flat gradient (2 + 2), copied to float32
# (2 + 4), divided (4 + 4); in 16 bits joined and divided. FSDP 2: copied in, to float32 (2 + 4).
_SCATTERED_IN_32_BITS, _SCATTERED_IN_16_BITS, _SCATTERED_BY_FSDP_2 = 18, 8, 6
# FSDP 2 copies gathered weights out of the buffer (2 + 2).
_COPIED_OUT = 4
_PRECISIONS = {
    **{
        "mxfp8": "8",
        "fp8": "8",
        "float8": "8",
        "nvfp4": "4",
        "mxfp4": "4",
        "fp4": "4",
        "int8": "8",
        "bf16": "bfloat16",
        "bfloat16": "bfloat16",
    },
    **{"fp16": "float16", "float16": "float16", "half": "float16", "mixed": "bfloat16"},
}
_RECOMPUTED = {
    **{"none": "none", "no": "none", "false": "none", "off": "none", "0": "none", "op": "operators"},
    **{"selective": "selective", "core": "selective", "full": "full", "block": "full", "uniform": "full"},
    **{"yes": "full", "true": "full", "on": "full", "1": "full", "checkpoint": "full", "layer": "full"},
}
# Bytes per logit: kept from forward to backward; besides in forward; besides in backward.
# vocab_parallel_cross_entropy: softmax in float32; beside it the logits, then their gradient, in 16 bits.
_MEGATRON_LOSS = (4, 2, 2)
# nanotron's sharded_cross_entropy subtracts the maximum into a new tensor.
_NANOTRON_LOSS = (4, 6, 2)
# torch's cross entropy of logits.float(): the logits and their log-softmax; its input; two gradients in float32.
_TORCH_LOSS = (6, 4, 8)
# torchtitan's training loop deletes the logits before backward.
_TITAN_LOSS = (4, 6, 8)
# FlashAttention's fused loss, which llm-foundry's models default to: the logits, then their gradient, in 16 bits.
_FUSED_LOSS = (2, 0, 2)


@dataclass(frozen=True)
class EngineOfRow:
    """An engine and how its plan is lowered.

    Attributes:
        engine: options of the cost model.
        name: of the framework's kind.
        dtype: of weights and activations in products.
        recomputes: whether each block is computed again.
        in_units: each block is a chunk of its own, gathered for one use.
        num_buckets: of a chunk's gradients; 1 where nothing overlaps with their reduction.
        fuses: exchanges of tensor-parallel ranks overlap with their products.
        words: the options, for the notes.
    """

    engine: Engine
    name: str
    dtype: str
    recomputes: bool
    in_units: bool
    num_buckets: int
    fuses: bool
    words: tuple[str, ...]


def engine_of(row: Row, sizes: Sizes) -> EngineOfRow:
    """Return the engine of a row.

    Raises:
        ValueError: a precision or recomputation that is not known; one line.
    """
    dtype = row.choice("precision", _PRECISIONS, "bfloat16")
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"precision must be fp16 or bf16: got {row.text('precision')}, whose kernels are not modelled")
    system, recompute = row.system(), recomputation_of(row)
    in_units = sizes.zero == 3
    is_deepspeed = "deepspeed" in system and not in_units
    is_titan, is_mosaic = "torchtitan" in system, "mosaic" in system or "foundry" in system
    # Composer's mixed precision PURE reduces in 16 bits, its default in 32 (get_mixed_precision).
    is_pure = in_units and "pure" in row.columns.get("notes", "").lower()
    adds = any(word in system for word in _ADDING_BY_A_KERNEL) and not in_units
    cuts = sizes.tp == 1 or row.flag("sequence_parallel", default=sizes.tp > 1 and (in_units or adds))
    scores = not in_units and _keeps_scores(row, sizes, system)
    is_gpt = row.mlp() == "gelu" and not in_units
    is_one_by_one = sizes.pp > 1 and row.text("schedule") in ("", "1f1b") and sizes.chunks == 1
    is_compiled = _is_compiled(row)
    is_eager = in_units and not is_compiled
    flash = None if scores else _flash(row, system)
    engine = Engine(
        cuts_rows=cuts,
        keeps_scores=scores,
        computes_scores_again=recompute == "selective",
        computes_half_again=recompute == "operators",
        flash=flash,
        joins_residuals=is_compiled,
        reads_norms_twice=is_eager,
        splits_steps=is_eager and row.mlp() == "swiglu",
        copies_heads=scores or is_eager,
        drops=is_gpt and scores,
        wide_loss=not is_mosaic and (is_titan or not is_compiled),
        loss_bytes=(
            _FUSED_LOSS
            if is_mosaic
            else _TITAN_LOSS
            if is_titan
            else _TORCH_LOSS
            if in_units
            else _NANOTRON_LOSS
            if adds
            else _MEGATRON_LOSS
        ),
        frees_reduced=in_units,
        waits_for_transfers=is_one_by_one,
        scatters_transfers=is_one_by_one and sizes.tp > 1 and not cuts,
        context_ranks=sizes.cp,
        weight_item=4 if in_units else 2,
        gradient_item=2 if is_deepspeed else 4,
        # Moments and a master copy; with units the weights are the masters.
        optimizer_item=8 if in_units else 12,
        added_item=_added_item(in_units, is_deepspeed, adds, is_titan, is_pure),
        copied_item=_COPIED_OUT if in_units and is_titan else 0,
        reduced_item=2 if is_deepspeed or is_pure else 4,
    )
    overlaps = sizes.zero in (1, 2) or is_titan
    fuses = bool(sizes.tp > 1 and cuts and _overlaps_exchanges(row, system))
    name = "FSDP" if in_units else "Megatron-DeepSpeed" if is_deepspeed else "nanotron" if adds else "Megatron"
    words = [name]
    if sizes.tp > 1:
        words.append("gather and scatter" if cuts else "all-reduce, no sequence parallelism")
    if fuses:
        words.append("exchanges overlap with products")
    words.append("scores in memory" if scores else flash.name if flash else "flash attention")
    if is_eager:
        words.append("kernels of eager torch")
    if recompute != "none":
        again = {"full": "blocks", "selective": "scores", "operators": "every second product and all small operators"}
        words.append(f"{again[recompute]} computed again")
    if in_units:
        words.append("a unit is a block")
    elif sizes.dp * sizes.cp > 1:
        words.append("reductions overlap" if overlaps else "reductions after backward")
    if is_one_by_one:
        words.append("transfers block")
    if sizes.cp > 1:
        words.append(f"ring attention over {sizes.cp} ranks")
    num_buckets = 8 if overlaps else 1
    return EngineOfRow(engine, name, dtype, recompute == "full", in_units, num_buckets, fuses, tuple(words))


def _added_item(in_units: bool, is_deepspeed: bool, adds: bool, is_titan: bool, is_pure: bool) -> int:
    """Return bytes per parameter that kernels read and write for a micro-batch's gradient, beside the products."""
    if in_units:
        return _SCATTERED_BY_FSDP_2 if is_titan else _SCATTERED_IN_16_BITS if is_pure else _SCATTERED_IN_32_BITS
    # Both gradients read, the sum written.
    return 6 if is_deepspeed else 10 if adds else 0


def recomputation_of(row: Row) -> str:
    """Return what a row says of recomputation: none, selective (of scores), operators or full.

    torchtitan's selective checkpointing is by operator unless it says otherwise.

    Raises:
        ValueError: a word that is not known.
    """
    name = next((name for name in ("recompute", "ac", "activation_checkpointing") if row.text(name)), "recompute")
    found = row.choice(name, _RECOMPUTED, "none")
    if found == "selective" and "torchtitan" in row.system():
        return "operators"
    return found


def _is_compiled(row: Row) -> bool:
    """Return whether blocks are compiled: where the row says so; no framework's default options compile."""
    text = f"{row.text('system')} {row.columns.get('notes', '').lower()} {row.text('table')}"
    return "compile" in text and not _NOT_COMPILED.search(text)


def _overlaps_exchanges(row: Row, system: str) -> bool:
    """Return whether tp exchanges overlap with products: where the row says so; NeMo's recipes and asynchronous tp."""
    text = f"{system} {row.columns.get('notes', '').lower()}"
    says = ("tp_comm_overlap", "tp overlap", "async tp", "asynctp", "async_tp", "userbuffer", "nemo", "bridge", "dgxc")
    return any(word in text for word in says)


def _keeps_scores(row: Row, sizes: Sizes, system: str) -> bool:
    everything = f"{system} {row.text('attn')} {row.text('attention')} {row.text('caveat')}"
    gpu = row.text("gpu")
    if any(word in everything for word in _FRAMEWORKS_WITH_FLASH) or any(word in gpu for word in _HOPPER_AND_LATER):
        return False
    return row.mlp() != "swiglu" and sizes.seq <= _LONGEST_WITH_SCORES


def _flash(row: Row, system: str) -> FlashKernel | None:
    """Return the attention kernel: what was there when the framework ran, on this kind of GPU."""
    gpu, is_own = row.text("gpu"), any(word in system for word in _WITHOUT_CUDNN)
    is_hopper = any(word in gpu for word in ("h100", "h200", "h800", "b200", "b300"))
    if not is_hopper and "a100" not in gpu and "a800" not in gpu:
        return None
    if "mosaic" in system:
        # llm-foundry's benchmarks ask for attn_impl triton (submit_benchmarks at b2a43a1, 5e85bd6).
        return FLASH_1_ON_HOPPER if is_hopper else FLASH_1_ON_AMPERE
    if is_hopper:
        return FLASH_2_ON_HOPPER if is_own else CUDNN_ON_HOPPER
    return FLASH_2_ON_AMPERE
