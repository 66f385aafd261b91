"""What a rank holds, as a sheet of formulas with their numbers put in: `tpengine plan --explain-memory`."""

from __future__ import annotations

from collections.abc import Iterator

from tpengine.advice.sheets.sheet import Sheet
from tpengine.dtypes import dtype_bytes
from tpengine.layout.state_bytes import num_weights, state_bytes
from tpengine.layout.step_plan import gradient_bytes
from tpengine.plan import Recompute
from tpengine.simulate.modelled.held.bytes import BlockBytes
from tpengine.simulate.modelled.held.prepared import FORMS

_LEGEND = (
    "letters: T tokens of a micro-batch, t of this rank, D width, H and G query and KV heads of this rank, E head\n"
    "size, F columns of this rank, e and a bytes of the dtype and of float32 or wider"
)


def memory_lines(sheet: Sheet) -> Iterator[str]:
    """Yield the state of each stage, what a block keeps of a micro-batch, and the peak with its action."""
    config, layout = sheet.config, sheet.layout
    narrow, wide = dtype_bytes(config.train.dtype), gradient_bytes(config.train.dtype)
    shares = [f" / dp {layout.dp}" if layout.zero >= stage else "" for stage in (3, 2, 1)]
    for rank, memory in enumerate(sheet.memory):
        numel, state = num_weights(config, layout, rank), state_bytes(config, layout, rank)
        yield f"rank {rank}: {numel:,} weights"
        kinds = (("weights", 1, narrow), ("gradients", 1, wide), ("masters", 1, wide), ("moments", 2, wide))
        for (name, times, item), share in zip(kinds, (*shares, shares[-1]), strict=True):
            formula = f"{numel:,} x {times} x {item}" if times > 1 else f"{numel:,} x {item}"
            # Exact mode cuts by blocks of its own, and has gradients in the trees that add them up (exact_sizes.py).
            if config.train.reduction == "exact" and (layout.zero or name == "gradients"):
                formula, share = "by blocks, and the trees that add them up", ""
            if num_bytes := getattr(state, name):
                yield _line(name, formula + share, num_bytes)
        if state.padding:
            yield _line("of these padding", "slices of buckets", state.padding)
        if memory.prepared:
            yield _line("for matmuls", f"{FORMS} forms of the large matrices", memory.prepared)
        for name, num_bytes in (
            ("gathered weights", memory.gathered),
            ("not summed yet", memory.unsummed),
            ("receive slots", memory.slots),
            ("activations", memory.activations),
        ):
            if num_bytes:
                yield _line(name, "the most at once", num_bytes)
        held = f"at {memory.compute_action}: what is held then; a kind may peak elsewhere"
        yield _line("peak", held, memory.peak)
    yield from _block_lines(sheet)


def _block_lines(sheet: Sheet) -> Iterator[str]:
    config, layout = sheet.config, sheet.layout
    chunk = sheet.plan.chunks[0]
    block = BlockBytes.of(config, layout.tp, chunk.gathered)
    recompute = Recompute(config.parallel.recompute)
    t, d, e = block.own_tokens, block.hidden, block.item
    rows = block.gathered // (d * e)
    yield f"a block keeps of a micro-batch from F to B, with recompute {recompute.value}:"
    yield _line("its input", f"t D e = {t} x {d} x {e}", block.x)
    if recompute in (Recompute.NONE, Recompute.ATTENTION):
        yield _line("sum after attention", f"t D e = {t} x {d} x {e}", block.x)
        yield _norm_line("second norm", block)
        yield _line("its gathered rows", f"{_rows(block)} D e = {rows} x {d} x {e}", block.gathered)
        factor = block.num_gated + 1
        middle = factor * block.middle * e
        yield _line("gate, up, product", f"{factor} T F e = {factor} x {block.tokens} x {block.ffn} x {e}", middle)
        if block.normed_output:
            yield _line("norm of its output", "its input and statistics", block.normed_output)
        if masks := block.mlp - block.x - block.norm - block.gathered - middle - block.normed_output:
            yield _line("masks of dropout", "a byte an element", masks)
    if recompute is Recompute.NONE:
        yield _norm_line("first norm", block)
        yield _line("its gathered rows", f"{_rows(block)} D e = {rows} x {d} x {e}", block.gathered)
        yield from _attention_lines(block)
    yield _line("together", "", block.saved(recompute))
    yield _LEGEND


def _attention_lines(block: BlockBytes) -> Iterator[str]:
    """Yield what attention keeps: queries, keys, values and output; what else there is."""
    statistics = block.tokens * block.heads * block.wide
    heads, rest = divmod(block.attended - statistics, block.tokens * block.head_size * block.item)
    # Torch's attention with dropout is wider.
    if not rest and (block.is_windowed or not block.drops_attention):
        copies = (heads - 2 * block.kv_heads) // block.heads
        sizes = f"{block.tokens} x {heads} x {block.head_size} x {block.item}"
        yield _line("attention", f"T ({copies} H + 2 G) E e = {sizes}", block.attended - statistics)
        yield _line("its log-sum-exp", f"T H a = {block.tokens} x {block.heads} x {block.wide}", statistics)
    else:
        yield _line("attention", "with dropout, in float32", block.attended)
    if block.normed_heads:
        yield _line("norms of heads", "their inputs and statistics", block.normed_heads)
    if block.normed_output:
        yield _line("norm of its output", "its input and statistics", block.normed_output)
    masks = block.attention - block.norm - block.gathered - block.attended - block.normed_heads - block.normed_output
    if masks:
        yield _line("mask of dropout", f"t D = {block.own_tokens} x {block.hidden}", masks)


def _norm_line(name: str, block: BlockBytes) -> str:
    t, d, a, each = block.own_tokens, block.hidden, block.wide, block.norm_statistics
    if block.offsets_norms:
        return _line(name, f"({each} t + D) a = ({each} x {t} + {d}) x {a}", block.norm)
    return _line(name, f"t {each} a = {t} x {each} x {a}", block.norm)


def _rows(block: BlockBytes) -> str:
    return "T" if block.keeps_gathered else "t"


def _line(name: str, formula: str, num_bytes: float) -> str:
    return f"  {name:<20} {formula:<60} {num_bytes:>20,.0f}"
