"""How many rows every rank sends every expert, told to all ranks by a kernel, and where each row goes, as tables.

    counts[E, N]    rows that rank s has for expert e
    places[E, N]    where those begin among the rows of all experts: by expert, then by rank
    firsts[E, N]    where they begin among the rows of rank s, which it has sorted by expert

A *segment* is the rows of one expert from one rank: an element of a table. The rows of rank j's experts are the E
segments from number j E on, one behind the other, because it owns E/N consecutive experts, of N ranks each. Where they
begin at their owner is `places` less that of the owner's first segment.

Every rank writes its E counts into its slot of each peer's block, raises one flag there, and waits for those of the
others. Nothing is asked of the host, so buffers have a size that was fixed before: at most `bound` rows per owner. What
does not fit is counted for every owner, by every rank alike. The tables are kept for backward.

The decision a reader will question: one program does it all. E numbers of N ranks are 4 KiB where E is 128 and N is 8,
and several programs would have to wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.launch import jit, power_of_2, target_of, tl
from tpkernels.symmetric.signals_kernel import (
    arrived_line,
    begin,
    block_of,
    claim,
    control_at,
    end_launch,
    is_last_claim,
    notify,
    rank_of,
    wait,
)

# More than that have not been compiled.
MOST_EXPERTS = 512


class Tables(NamedTuple):
    """What `launch_counts` writes; int32, on the device.

    Attributes:
        segments: [3, E, N]: counts, places and firsts, as the module has them.
        offsets: [E/N + 1]: rows offsets[i] to offsets[i + 1] are those of this rank's expert i, as far as they fit.
        spilled: [N]: rows of each owner's experts that do not fit; the same on every rank.
    """

    segments: Tensor
    offsets: Tensor
    spilled: Tensor


@jit(do_not_specialize=["num_experts", "bound", "generation", "call"])
def counts_kernel(
    p_counts: tl.tensor,
    p_segments: tl.tensor,
    p_offsets: tl.tensor,
    p_spilled: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    num_experts: tl.int32,
    bound: tl.int32,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    BLOCK_WORLD: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Tell every peer counts[num_experts], wait for theirs, and write the tables; one program."""
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    per_rank = num_experts // WORLD
    # Numbers are drawn so that a lost program shows, as in every launch; this one's only number is the last.
    item = claim(p_control)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    # Send: slot `rank` of every peer's block.
    # [BLOCK_E]
    b_own = tl.load(p_counts + o_e, mask=m_e, other=0)
    for i in range(1, WORLD):
        peer = (rank + i) % WORLD
        tl.store(block_of(p_control, peer, block_offset, tl.int32) + rank * BLOCK_E + o_e, b_own)
        notify(p_control, peer, arrived_line(rank, 0), epoch, call)
    # Wait. What came stays in registers: no thread reads what another has stored.
    o_w = tl.arange(0, BLOCK_WORLD)
    # [BLOCK_WORLD, BLOCK_E]
    b_counts = tl.where((o_w == rank)[:, None], b_own[None, :], 0)
    for i in range(1, WORLD):
        source = (rank + i) % WORLD
        wait(p_control, source, arrived_line(source, 0), epoch, call)
        # [BLOCK_E]
        b_theirs = tl.load(block_of(p_control, rank, block_offset, tl.int32) + source * BLOCK_E + o_e)
        b_counts = tl.where((o_w == source)[:, None], b_theirs[None, :], b_counts)
    # Tables. Sums are of whole numbers: their order has no say.
    b_totals = tl.sum(b_counts, 0)
    b_begins = tl.cumsum(b_totals, 0) - b_totals
    b_places = b_begins[None, :] + tl.cumsum(b_counts, 0) - b_counts
    b_firsts = tl.cumsum(b_counts, 1) - b_counts
    p_table = p_segments + o_e[None, :] * WORLD + o_w[:, None]
    m_table = m_e[None, :] & (o_w < WORLD)[:, None]
    tl.store(p_table, b_counts, mask=m_table)
    tl.store(p_table + num_experts * WORLD, b_places, mask=m_table)
    tl.store(p_table + 2 * num_experts * WORLD, b_firsts, mask=m_table)
    # Offsets of this rank's experts, and what does not fit at any owner.
    first = rank * per_rank
    begin_own = tl.sum(tl.where(o_e < first, b_totals, 0), 0)
    m_own = (o_e >= first) & (o_e < first + per_rank)
    tl.store(p_offsets, 0)
    b_ends = tl.minimum(b_begins + b_totals - begin_own, bound)
    tl.store(p_offsets + 1 + o_e - first, b_ends, mask=m_own)
    for owner in range(WORLD):
        m_theirs = (o_e >= owner * per_rank) & (o_e < (owner + 1) * per_rank)
        total = tl.sum(tl.where(m_theirs, b_totals, 0), 0)
        tl.store(p_spilled + owner, tl.maximum(total - bound, 0))
    if is_last_claim(item, 0):
        end_launch(p_control, epoch, generation)


def slots_bytes(num_experts: int, world: int) -> int:
    """Return how many bytes of a generation the counts of all ranks take."""
    return 4 * world * power_of_2(num_experts)


def launch_counts(counts: Tensor, bound: int, arena: DeviceArena, generation: int, call: int) -> Tables:
    """Tell all ranks counts[E], int32 and contiguous, and return the tables; at most `bound` rows fit at an owner."""
    num_experts, world = len(counts), arena.world
    segments = torch.empty(3, num_experts, world, dtype=torch.int32, device=counts.device)
    offsets = torch.empty(num_experts // world + 1, dtype=torch.int32, device=counts.device)
    spilled = torch.empty(world, dtype=torch.int32, device=counts.device)
    tables = Tables(segments, offsets, spilled)
    key = "counts", num_experts, bound, generation
    if arena.launches.again(key, call, counts, *tables):
        return tables
    # Without a limit ptxas gives it too few for sm_80, and spills. One program may have that many.
    limit = {"maxnreg": 128} if target_of(counts).backend == "cuda" else {}
    arena.launches.first(
        key,
        {"p_counts": counts, "p_segments": segments, "p_offsets": offsets, "p_spilled": spilled},
        counts_kernel,
        (1,),
        counts,
        *tables,
        arena.address,
        arena.offset_of(generation),
        num_experts,
        bound,
        generation,
        call,
        WORLD=world,
        BLOCK_WORLD=power_of_2(world),
        BLOCK_E=power_of_2(num_experts),
        num_warps=4 if num_experts <= 256 else 16,
        **limit,
    )
    return tables
