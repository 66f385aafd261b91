"""What a rank holds, as a sheet of formulas with their numbers put in: `tpengine plan --explain-memory`."""

from __future__ import annotations

from collections.abc import Iterator

from tpengine.advice.sheets.sheet import Sheet
from tpengine.layout.state_bytes import num_weights, state_bytes
from tpengine.layout.step_plan import dtype_bytes, gradient_bytes
from tpengine.plan import Recompute
from tpengine.simulate.modelled.held.bytes import BlockBytes

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
        yield _line("weights", f"{numel:,} x {narrow}{shares[0]}", state.weights)
        yield _line("gradients", f"{numel:,} x {wide}{shares[1]}", state.gradients)
        if state.masters:
            yield _line("masters", f"{numel:,} x {wide}{shares[2]}", state.masters)
        yield _line("moments", f"{numel:,} x 2 x {wide}{shares[2]}", state.moments)
        if state.padding:
            yield _line("of these padding", "slices of buckets", state.padding)
        if memory.prepared:
            yield _line("for matmuls", f"2 x {narrow} an element of the large matrices", memory.prepared)
        for name, num_bytes in (
            ("gathered weights", memory.gathered),
            ("not summed yet", memory.unsummed),
            ("receive slots", memory.slots),
            ("activations", memory.activations),
        ):
            if num_bytes:
                yield _line(name, "the most at once", num_bytes)
        yield _line("peak", f"at {memory.compute_action}, not the sum: what is held then", memory.peak)
    yield from _block_lines(sheet)


def _block_lines(sheet: Sheet) -> Iterator[str]:
    config, layout = sheet.config, sheet.layout
    chunk = sheet.plan.chunks[0]
    block = BlockBytes.of(config, layout.tp, chunk.gathered)
    recompute = Recompute(config.parallel.recompute)
    t, d, e, a = block.own_tokens, block.hidden, block.item, block.wide
    rows = block.gathered // (d * e)
    yield f"a block keeps of a micro-batch from F to B, with recompute {recompute.value}:"
    yield _line("its input", f"t D e = {t} x {d} x {e}", block.x)
    if recompute in (Recompute.NONE, Recompute.ATTENTION):
        yield _line("sum after attention", f"t D e = {t} x {d} x {e}", block.x)
        yield _line("second norm", f"t {block.norm_statistics} a = {t} x {block.norm_statistics} x {a}", block.norm)
        yield _line("its gathered rows", f"{_rows(block)} D e = {rows} x {d} x {e}", block.gathered)
        middle = block.mlp - block.x - block.norm - block.gathered
        factor = block.num_gated + 1
        yield _line("gate, up, product", f"{factor} T F e = {factor} x {block.tokens} x {block.ffn} x {e}", middle)
    if recompute is Recompute.NONE:
        yield _line("first norm", f"t {block.norm_statistics} a = {t} x {block.norm_statistics} x {a}", block.norm)
        yield _line("its gathered rows", f"{_rows(block)} D e = {rows} x {d} x {e}", block.gathered)
        sizes = f"{block.tokens} x ({block.heads} + {block.kv_heads}) x {block.head_size} x {e}"
        rest = block.attention - block.norm - block.gathered
        yield _line("attention", f"at least 2 T (H + G) E e = 2 x {sizes}", rest)
    yield _line("together", "", block.saved(recompute))
    yield _LEGEND


def _rows(block: BlockBytes) -> str:
    return "T" if block.keeps_gathered else "t"


def _line(name: str, formula: str, num_bytes: float) -> str:
    return f"  {name:<20} {formula:<60} {num_bytes:>20,.0f}"
