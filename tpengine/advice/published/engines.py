"""The engine of a row, as options of the cost model: what its framework computes, keeps and sends otherwise than ours.

Chosen by what the row says of its system, precision and layout, from the frameworks' own sources and papers; never by
what was measured.

    FSDP            zero 3: a unit is a block, gathered before each use and scattered in each backward; a flash kernel;
                    the rest each a kernel of eager torch, unless it is compiled
    DeepSpeed       Megatron's layers; gradients in 16 bits, added and reduced so
    Megatron        gradients in float32, added by the products; the loss in float32, step by step; transfers of 1F1B
                    block; before Hopper attention of GPT writes its scores
"""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.advice.published.row import Row, Sizes
from tpengine.simulate.modelled.engine import Engine
from tpengine.simulate.modelled.flash import (
    CUDNN_ON_HOPPER,
    FLASH_1_ON_AMPERE,
    FLASH_2_ON_AMPERE,
    FLASH_2_ON_HOPPER,
    FlashKernel,
)

_HOPPER_AND_LATER = ("h100", "h200", "h800", "b200", "b300", "mi3")
_FRAMEWORKS_WITH_FLASH = ("torchtitan", "mosaic", "nemo", "llama", "internlm", "olmo", "flash")
# Longer sequences than this are not trained with scores in memory.
_LONGEST_WITH_SCORES = 4096
# Composer's and torchtitan's attention is that of torch or of FlashAttention; others call cuDNN on Hopper.
_WITHOUT_CUDNN = ("torchtitan", "mosaic", "olmo", "picotron")


@dataclass(frozen=True)
class EngineOfRow:
    """An engine and how its plan is lowered.

    Attributes:
        engine: options of the cost model.
        name: of the framework's kind.
        recomputes: whether each block is computed again.
        in_units: each block is a chunk of its own, gathered for one use.
        num_buckets: of a chunk's gradients; 1 where nothing overlaps with their reduction.
        words: the options, for the notes.
    """

    engine: Engine
    name: str
    recomputes: bool
    in_units: bool
    num_buckets: int
    words: tuple[str, ...]


def engine_of(row: Row, sizes: Sizes) -> EngineOfRow:
    """Return the engine of a row.

    Raises:
        ValueError: a precision or recomputation that is not known; one line.
    """
    precision = row.choice("precision", {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "mixed": "bf16"}, "bf16")
    if precision == "fp8":
        raise ValueError("precision must be fp16 or bf16: got fp8, whose kernels are not modelled")
    system = f"{row.text('system')} {row.text('source')} {row.text('framework')}"
    recompute = row.choice(
        "recompute", {"none": "none", "no": "none", "selective": "selective", "full": "full", "block": "full"}, "none"
    )
    in_units = sizes.zero == 3
    is_deepspeed = "deepspeed" in system and not in_units
    cuts = sizes.tp == 1 or bool(row.flag("sequence_parallel"))
    scores = not in_units and _keeps_scores(row, sizes, system)
    is_gpt = "gelu" in row.text("mlp") and not in_units
    is_one_by_one = sizes.pp > 1 and _schedule_word(row) in ("", "1f1b") and sizes.chunks == 1
    is_compiled = "torchtitan" in system or "compile" in row.columns.get("notes", "").lower()
    is_eager = in_units and not is_compiled
    flash = None if scores else _flash(row, system)
    engine = Engine(
        cuts_rows=cuts,
        keeps_scores=scores,
        computes_scores_again=recompute == "selective",
        flash=flash,
        joins_residuals=is_compiled,
        reads_norms_twice=is_eager,
        copies_heads=scores or is_eager,
        drops=is_gpt and scores,
        wide_loss=not is_compiled,
        frees_reduced=in_units,
        waits_for_transfers=is_one_by_one,
        scatters_transfers=is_one_by_one and sizes.tp > 1 and not cuts,
        context_ranks=sizes.cp,
        weight_item=4 if in_units else 2,
        gradient_item=2 if is_deepspeed else 4,
        # Moments and a master copy; with units the weights are the masters.
        optimizer_item=8 if in_units else 12,
        # Both gradients read, the sum written.
        added_item=6 if is_deepspeed else 0,
        reduced_item=2 if is_deepspeed or (in_units and "mosaic" in system) else 4,
    )
    overlaps = sizes.zero in (1, 2) or "torchtitan" in system
    name = "FSDP" if in_units else "Megatron-DeepSpeed" if is_deepspeed else "Megatron"
    words = [name]
    if sizes.tp > 1:
        words.append("gather and scatter" if cuts else "all-reduce, no sequence parallelism")
    words.append("scores in memory" if scores else flash.name if flash else "flash attention")
    if is_eager:
        words.append("kernels of eager torch")
    if recompute != "none":
        words.append("blocks computed again" if recompute == "full" else "scores computed again")
    if in_units:
        words.append("a unit is a block")
    elif sizes.dp * sizes.cp > 1:
        words.append("reductions overlap" if overlaps else "reductions after backward")
    if is_one_by_one:
        words.append("transfers block")
    if sizes.cp > 1:
        words.append(f"ring attention over {sizes.cp} ranks")
    return EngineOfRow(engine, name, recompute == "full", in_units, 8 if overlaps else 1, tuple(words))


def _keeps_scores(row: Row, sizes: Sizes, system: str) -> bool:
    everything = f"{system} {row.text('attn')} {row.text('attention')} {row.text('caveat')}"
    gpu = row.text("gpu")
    if any(word in everything for word in _FRAMEWORKS_WITH_FLASH) or any(word in gpu for word in _HOPPER_AND_LATER):
        return False
    return "swiglu" not in row.text("mlp") and sizes.seq <= _LONGEST_WITH_SCORES


def _flash(row: Row, system: str) -> FlashKernel | None:
    """Return the attention kernel: what was there when the framework ran, on this kind of GPU."""
    gpu, is_own = row.text("gpu"), any(word in system for word in _WITHOUT_CUDNN)
    if any(word in gpu for word in ("h100", "h200", "b200", "b300")):
        return FLASH_2_ON_HOPPER if is_own else CUDNN_ON_HOPPER
    if "a100" not in gpu and "a800" not in gpu:
        return None
    # llm-foundry's benchmarks ask for attn_impl triton (its submit_benchmarks).
    return FLASH_1_ON_AMPERE if "mosaic" in system else FLASH_2_ON_AMPERE


def _schedule_word(row: Row) -> str:
    return row.text("schedule")
