"""The engine of a row, as options of its costs: what its framework computes, keeps and sends otherwise than ours.

Chosen by what the row says of its system, precision and layout, from the frameworks' own sources and papers; never by
what was measured. README.md lists each option with its source.

    FSDP            zero 3: a unit is a block, gathered before each use and scattered in each backward; a flash kernel;
                    the rest each a kernel of eager torch, unless it is compiled
    DeepSpeed       Megatron's layers; gradients in 16 bits, added and reduced so
    nanotron        Megatron's exchanges; torch's products, so each gradient is added by a kernel
    InternEvo       InternLM's: kernels of apex and flash_attn in eager torch; gradients in 16 bits
    Scaling         Aleph Alpha's: Megatron's layout in eager torch; the whole loss on each rank; gradients in 16 bits
    Megatron        gradients in float32, added by the products; the loss in float32, step by step; transfers of 1F1B
                    block; before Hopper attention of GPT writes its scores
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.published.engine import (
    CUDNN_ON_HOPPER,
    FLASH_1_IN_CUDA_ON_AMPERE,
    FLASH_1_ON_AMPERE,
    FLASH_1_ON_HOPPER,
    FLASH_2_ON_AMPERE,
    FLASH_2_ON_HOPPER,
    FLASH_3_ON_HOPPER,
    Beside,
    Engine,
    FlashKernel,
    Steps,
)
from benchmarks.planner.published.row import SCALING, Row, meaning_of, what_is_used
from benchmarks.planner.published.sizes import Sizes, schedule_words
from tpengine.planner.modelled.memory import ALLOCATOR_SHARE

_HOPPER_AND_LATER = ("h100", "h200", "h800", "b200", "b300", "mi3")
_FRAMEWORKS_WITH_FLASH = (
    *("torchtitan", "mosaic", "nemo", "llama", "internlm", "internevo", "olmo", "flash", "nanotron", "picotron"),
    *("fsdp", "bridge", "levanter"),
)
# Recipes of NVIDIA's benchmarks. They set sequence parallelism wherever they set tp (it is older than Hopper, whose
# runs are taken to have it), and keep and reduce gradients in 16 bits (grad_reduce_in_fp32 = False).
_RECIPES = ("nemo", "bridge", "dgxc")
# Processors of their exchanges: of rings none, which copy; of scatters in four parts, and of those beside gradients, as
# in userbuffers_bf16_h100_h8192_tp4 (Megatron-Bridge, training/comm_overlap).
_USERBUFFERS = Beside(kept=(0, 24, 0, 16), lent_by_inputs=(4, 0, 2, 0), lent_by_weights=(24, 0, 4, 0), num_splits=4)
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
# Once per step Scaling joins gradients (2 + 2), divides (2 + 2), copies to float32 and back (6 + 6), apart (2 + 2),
# scales them (2 + 2), and takes their norm (2).
_SCALING_ONCE = 30
# Of eager torch, per element of 16 bits, beside what one kernel reads and writes. A rotation: four products and sums of
# halves, or copied to float32, multiplied, copied back (6 + 8 + 6), less 4; backward of the halves: products (4 + 4),
# negative (2), each half copied into zeros (2 + 2, 2 + 2), added (6), added to the other (6), less 4. A gate:
# activation (4) and product (6) beside 6; backward: two products (12) and one more (6) beside 10. A norm of llama's
# model code: copied to float32 (2 + 4), square (8), mean (4), product with the root (8), copied back (6), with the
# weight (4), less 4; its backward: with the weight, forth and back (4 + 4 + 6), of the product (8 + 12), of the square
# and the mean (16), added (12), copied back (6), less 6.
_LLAMA_STEPS = Steps(norm=36, norm_backward=62, rotation=16, rotation_backward=26, gate=4, gate_backward=8, kept_norm=6)
_ONE_NORM_KERNEL = replace(_LLAMA_STEPS, norm=0, norm_backward=0, kept_norm=0)
# InternEvo's norms, apex kernels, take float32: copied (2 + 4), read wide (2 more). Their backward reads wide twice and
# writes wide (2 + 2 + 2), and copies back (4 + 2); blocks that are not computed again make their norms again (6 + 6).
_INTERN_STEPS = Steps(norm=8, norm_backward=12, rotation=0, rotation_backward=0, gate=0, gate_backward=0, kept_norm=0)
_NORMS_AGAIN = 12
# Its optimizer copies gradients into buckets and back (4 + 4), and reads them for their norm (2).
_INTERN_ONCE = 10
# Per score, beside a softmax: a copy (4) and a mask written over it (5); backward the same.
_MASK_STEPS = (9, 9)
# InternLM's training, of both names.
_INTERN = ("internevo", "internlm")
# What else differs in Scaling; its launcher splits embedding, blocks, last norm and head as equal layers.
_OF_SCALING: dict[str, Any] = {
    **{"keeps_rotated": True, "keeps_gathered": True, "reduces_gate_apart": True, "whole_logits": True},
    "joins_heads": True,
}
# What Scaling's tensors cannot use: an allocator without fragments wins back 15 % of torch's memory on the average of
# large models' runs (Guo et al., "GMLake", ASPLOS 2024), and Scaling makes whole logits of gigabytes several times,
# between activations that stay. Chosen with its runs in view. Megatron's and FSDP's reach 92 % of the memory.
_IN_FRAGMENTS = 0.15
# Words for kernels of attention and norms.
_FLASH = re.compile(r"flash|sdpa|xformers|cudnn|triton|\bfa ?[123]\b")
_FLASH_1 = re.compile(r"flash[ _-]?att(entio)?n?[ _-]?(v?1|v?0)|\bfa ?1\b")
_FLASH_3 = re.compile(r"flash[ _-]?att(entio)?n?[ _-]?v?3|\bfa ?-?3\b")
_IN_MEMORY = re.compile(r"\b(torch|unfused|core|math|naive|eager|megatron)\b|\bfused\b(?!.?att)")
_NORM_KERNEL = re.compile(r"(?<!no )(?<!without )(rms\W?(norm)?\W?kernel|fused\W?(rms|norm))")
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
    **{"fp16": "float16", "float16": "float16", "half": "float16", "mixed": "bfloat16", "amp": "bfloat16"},
}
_RECOMPUTED = {
    **{"none": "none", "no": "none", "off": "none", "disabled": "none", "op": "operators", "enabled": "full"},
    **{"selective": "selective", "core": "selective", "full": "full", "block": "full", "uniform": "full"},
    **{"sac": "selective", "partial": "selective", "attn": "selective"},
    **{"attention": "selective", "yes": "full", "true": "full", "on": "full", "1": "full", "checkpoint": "full"},
    **{"layer": "full", "remat": "full", "all": "full", "every": "full", "ckpt": "full", "gc": "full", "ac": "full"},
    **{"recomp": "full", "enable": "full", "y": "full"},
}
# Bytes per logit: kept from forward to backward; besides in forward; besides in backward.
# vocab_parallel_cross_entropy: softmax in float32; beside it the logits, then their gradient, in 16 bits.
_MEGATRON_LOSS = (4, 2, 2)
# nanotron's sharded_cross_entropy subtracts the maximum into a new tensor.
_NANOTRON_LOSS = (4, 6, 2)
# torch's cross entropy of logits.float(): the logits and their log-softmax; its input; two gradients in float32.
_TORCH_LOSS = (6, 4, 8)
# Scaling's pipeline keeps the logits of the micro-batch before, too, until the next ones overwrite them.
_SCALING_LOSS = (8, 4, 8)
# torchtitan's training loop deletes the logits before backward.
_TITAN_LOSS = (4, 6, 8)
# FlashAttention's fused loss, which llm-foundry's models default to: the logits, then their gradient, in 16 bits.
_FUSED_LOSS = (2, 0, 2)


@dataclass(frozen=True)
class EngineOfRow:
    """An engine and how its plan is lowered.

    Attributes:
        engine: options of its costs.
        name: of the framework's kind.
        dtype: of weights and activations in products.
        recomputes: whether each block is computed again.
        in_units: each block is a chunk of its own, gathered for one use.
        num_buckets: of a chunk's gradients; 1 where nothing overlaps with their reduction.
        fuses: exchanges of tensor-parallel ranks overlap with their products.
        left_share: of a device's memory, which its tensors cannot take.
        num_ends: what a launcher counts as layers beside blocks: embedding, last norm, head; 0 if it counts none.
        words: the options, for the notes.
    """

    engine: Engine
    name: str
    dtype: str
    recomputes: bool
    in_units: bool
    num_buckets: int
    fuses: bool
    left_share: float
    num_ends: int
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
    kind = _Kind.of(row, sizes)
    is_new = any(word in row.text("gpu") for word in _HOPPER_AND_LATER)
    cuts_unless_said = kind.in_units or kind.adds or is_new or kind.is_recipe
    cuts = sizes.tp == 1 or row.flag("sequence_parallel", default=cuts_unless_said)
    scores = not kind.in_units and _keeps_scores(row, sizes, system)
    is_one_by_one = sizes.pp > 1 and _is_one_by_one(schedule_words(row)) and sizes.chunks == 1
    is_compiled = _is_compiled(row)
    is_eager = (kind.in_units and not is_compiled) or kind.is_scaling or kind.is_intern
    # Model code of Hugging Face's form has a product for each of q, k, v, gate and up.
    is_apart = row.mlp() == "swiglu" and ((kind.in_units and not kind.is_mosaic) or "picotron" in system)
    flash = None if scores else _flash(row, system)
    fuses = bool(sizes.tp > 1 and cuts and _overlaps_exchanges(row, system))
    engine = Engine(
        cuts_rows=cuts,
        beside=_USERBUFFERS if fuses and kind.is_recipe else None,
        adds_parts=fuses and kind.in_units and not kind.is_recipe,
        keeps_scores=scores,
        computes_scores_again=recompute == "selective" and not kind.is_scaling,
        computes_half_again=recompute == "operators",
        flash=flash,
        joins_residuals=is_compiled and not kind.is_scaling and not kind.is_intern,
        reads_norms_twice=is_eager,
        steps=_steps(row, kind, recompute) if is_eager and row.mlp() == "swiglu" else None,
        score_steps=_MASK_STEPS if scores and kind.is_scaling and "fused" not in _kernel_words(row) else (0, 0),
        splits_gate=is_apart or kind.is_scaling or kind.is_intern,
        splits_heads=is_apart,
        copies_heads=scores or (is_eager and not kind.is_scaling and not kind.is_intern),
        drops=row.mlp() == "gelu" and not kind.in_units and scores,
        wide_loss=not kind.is_mosaic and not kind.is_intern and (kind.is_titan or not is_compiled),
        loss_bytes=kind.loss_bytes(),
        frees_reduced=kind.in_units,
        waits_for_transfers=is_one_by_one,
        scatters_transfers=is_one_by_one and sizes.tp > 1 and not cuts and not kind.is_scaling,
        context_ranks=sizes.cp,
        weight_item=4 if kind.in_units else 2,
        gradient_item=kind.gradient_item(),
        # Moments and a master copy; with units the weights are the masters.
        optimizer_item=8 if kind.in_units else 12,
        added_item=kind.added_item(),
        reduces_whole=kind.is_scaling or kind.sums_wide,
        copied_item=_COPIED_OUT if kind.in_units and kind.is_titan else 0,
        reduced_item=kind.reduced_item(),
        once_item=_SCALING_ONCE if kind.is_scaling else _INTERN_ONCE if kind.is_intern else 0,
        **_OF_SCALING if kind.is_scaling else {},
    )
    # DeepSpeed's pipelines reduce behind the last backward (runtime/pipe/engine).
    is_late = kind.is_scaling or (kind.is_deepspeed and sizes.pp > 1)
    overlaps = (sizes.zero in (1, 2) and not is_late) or kind.is_titan
    words = [kind.name, *_words(engine, sizes, recompute, is_eager=is_eager, fuses=fuses)]
    if kind.in_units:
        words.append("a unit is a block")
    elif sizes.dp * sizes.cp > 1:
        words.append("reductions overlap" if overlaps else "reductions after backward")
    if is_one_by_one:
        words.append("transfers block")
    if sizes.cp > 1:
        words.append(f"ring attention over {sizes.cp} ranks")
    return EngineOfRow(
        engine=engine,
        name=kind.name,
        dtype=dtype,
        recomputes=recompute == "full",
        in_units=kind.in_units,
        num_buckets=8 if overlaps else 1,
        fuses=fuses,
        left_share=_IN_FRAGMENTS if kind.is_scaling else ALLOCATOR_SHARE,
        num_ends=3 if kind.is_scaling else 0,
        words=tuple(words),
    )


def _is_one_by_one(schedule: str) -> bool:
    is_named = any(word in schedule for word in ("1f1b", "pipedream", "dapple"))
    return not schedule or (is_named and "interleav" not in schedule and "1f1b-i" not in schedule)


def _words(engine: Engine, sizes: Sizes, recompute: str, *, is_eager: bool, fuses: bool) -> list[str]:
    """Return what a rank computes and exchanges, for the notes."""
    words = []
    if sizes.tp > 1:
        words.append("gather and scatter" if engine.cuts_rows else "all-reduce, no sequence parallelism")
    if fuses:
        words.append("exchanges overlap with products")
    flash = engine.flash.name if engine.flash else "flash attention"
    words.append("scores in memory" if engine.keeps_scores else flash)
    if is_eager:
        words.append("kernels of eager torch")
    if engine.steps is not None and not engine.steps.norm:
        words.append("norms in one kernel")
    if recompute != "none":
        again = {"full": "blocks", "selective": "scores", "operators": "every second product and all small operators"}
        words.append(f"{again[recompute]} computed again")
    return words


@dataclass(frozen=True)
class _Kind:
    """What a row's framework is, by its name and layout."""

    in_units: bool
    is_deepspeed: bool
    is_titan: bool
    is_mosaic: bool
    is_scaling: bool
    is_intern: bool
    is_recipe: bool
    adds: bool
    is_pure: bool
    sums_wide: bool

    @classmethod
    def of(cls, row: Row, sizes: Sizes) -> _Kind:
        """Return the kind of a row's engine; that of a row which names none that is known is said to be assumed."""
        system, in_units = row.system(), sizes.zero == 3
        found = cls(
            in_units=in_units,
            is_deepspeed="deepspeed" in system and not in_units,
            is_titan="torchtitan" in system,
            is_mosaic="mosaic" in system or "foundry" in system,
            is_scaling=not in_units and row.is_of(SCALING),
            is_intern=not in_units and any(word in system for word in _INTERN),
            is_recipe=any(word in system for word in _RECIPES),
            adds=any(word in system for word in _ADDING_BY_A_KERNEL) and not in_units,
            # Composer's mixed precision PURE reduces in 16 bits, its default in 32 (get_mixed_precision).
            is_pure=in_units and "pure" in row.columns.get("notes", "").lower(),
            # DeepSpeed's pipelines in bfloat16 have the BF16_Optimizer: gradients are summed in float32 beside them.
            sums_wide="deepspeed" in system and not in_units and sizes.pp > 1 and "bf" in row.text("precision"),
        )
        if found.name == "Megatron" and not (found.is_recipe or "megatron" in system):
            row.assumed.append("engine Megatron")
        return found

    @property
    def name(self) -> str:
        if self.in_units:
            return "FSDP"
        if self.is_scaling or self.is_intern:
            return "Scaling" if self.is_scaling else "InternEvo"
        return "Megatron-DeepSpeed" if self.is_deepspeed else "nanotron" if self.adds else "Megatron"

    def loss_bytes(self) -> tuple[int, int, int]:
        """Return bytes per logit: kept; besides in forward; besides in backward."""
        if self.is_mosaic or self.is_intern:
            return _FUSED_LOSS
        if self.is_titan:
            return _TITAN_LOSS
        if self.in_units:
            return _TORCH_LOSS
        if self.is_scaling:
            return _SCALING_LOSS
        return _NANOTRON_LOSS if self.adds else _MEGATRON_LOSS

    def gradient_item(self) -> int:
        """Return bytes per parameter of gradients; of both kinds, where they are summed in another."""
        if self.sums_wide:
            return 6
        return 2 if self.is_deepspeed or self.is_scaling or self.is_intern or self._is_narrow_recipe else 4

    @property
    def _is_narrow_recipe(self) -> bool:
        return self.is_recipe and not self.in_units

    def reduced_item(self) -> int:
        """Return bytes per parameter of gradients on their way between replicas."""
        is_narrow = (
            (self.is_deepspeed and not self.sums_wide) or self.is_pure or self.is_intern or self._is_narrow_recipe
        )
        return 2 if is_narrow else 4

    def added_item(self) -> int:
        """Return bytes per parameter that kernels read and write for a micro-batch's gradient, beside the products."""
        if self.in_units:
            pure = _SCATTERED_IN_16_BITS if self.is_pure else _SCATTERED_IN_32_BITS
            return _SCATTERED_BY_FSDP_2 if self.is_titan else pure
        if self.sums_wide:
            # Copied to float32 (2 + 4), added (4 + 4 + 4).
            return 18
        # Both gradients read, the sum written.
        return 6 if self.is_deepspeed or self.is_scaling or self.is_intern else 10 if self.adds else 0


def _kernel_words(row: Row) -> str:
    """Return what a row says of its attention's kernel."""
    names = ("attn", "attention", "kernel", "kernels", "attention_kernel", "attn_impl", "attn_kernel")
    return " ".join(row.text(name) for name in names)


def _steps(row: Row, kind: _Kind, recompute: str) -> Steps:
    """Return the kernels of eager torch; a norm may be one kernel where the row says so."""
    if kind.is_intern:
        again = 0 if recompute == "full" else _NORMS_AGAIN
        return replace(_INTERN_STEPS, norm_backward=_INTERN_STEPS.norm_backward + again)
    if _NORM_KERNEL.search(f"{_kernel_words(row)} {row.columns.get('notes', '').lower()}"):
        return _ONE_NORM_KERNEL
    return _LLAMA_STEPS


def recomputation_of(row: Row) -> str:
    """Return what a row says of recomputation: none, selective (of scores), operators or full.

    A kind that is negated is not used; another one that is named counts. torchtitan's selective checkpointing is by
    operator unless it says otherwise.

    Raises:
        ValueError: a word that is not known.
    """
    name = next((name for name in ("recompute", "ac", "activation_checkpointing") if row.text(name)), "recompute")
    used = what_is_used(row.text(name))
    found = row.choice(name, _RECOMPUTED, "none") if used is None else meaning_of(used, _RECOMPUTED) or "none"
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
    said = _kernel_words(row)
    if _FLASH.search(said):
        return False
    if _IN_MEMORY.search(said):
        return True
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
    said = _kernel_words(row)
    if not is_hopper and _FLASH_1.search(said):
        return FLASH_1_IN_CUDA_ON_AMPERE
    if "mosaic" in system:
        # llm-foundry's benchmarks ask for attn_impl triton (submit_benchmarks at b2a43a1, 5e85bd6).
        return FLASH_1_ON_HOPPER if is_hopper else FLASH_1_ON_AMPERE
    if is_hopper and _FLASH_3.search(said):
        return FLASH_3_ON_HOPPER
    if is_hopper:
        return FLASH_2_ON_HOPPER if is_own else CUDNN_ON_HOPPER
    return FLASH_2_ON_AMPERE
