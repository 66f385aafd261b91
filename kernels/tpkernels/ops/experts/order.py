"""The order of rows by experts: a stable counting sort, without atomics.

    pair t * k + j is token t's choice j, R = T * k pairs in all
    order[R]: row r of the sorted rows is pair order[r];  offsets[E + 1]: expert e has rows offsets[e] .. offsets[e + 1]
    places[R]: the row of each pair, order's inverse

An expert's rows are in the order of their pairs. On a GPU pairs are cut into blocks. One kernel counts each block's
pairs per expert; a running sum over (expert, block) says where each block's pairs of an expert begin; another kernel
adds to that the pair's place within its block. Experts, counts and offsets stay on the device: nothing waits for the
host.

The decision a reader will question: each pair of a block is compared with all others of the block, 64 * 64 comparisons,
instead of an atomic counter per expert. Atomics would number equal experts in the order of arrival.

Source: Knuth, The Art of Computer Programming 3, section 5.2, algorithm D; Gale et al., "MegaBlocks", arXiv 2211.15841,
section 5.2, for sorting instead of a capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import by_triton, cdiv, jit, power_of_2, run, tl

# Pairs of a program; with 4 warps 32 comparisons per thread. Not tuned: no GPU has timed it yet.
_BLOCK_PAIRS = 64
_BLOCK_EXPERTS = 64
_MOST_PAIRS = 2**31 - 1


class ExpertOrder(NamedTuple):
    """order, offsets and places, int32, as the module has them."""

    order: Tensor
    offsets: Tensor
    places: Tensor


def sort_by_expert_reference(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return order and offsets by going through all pairs: the specification."""
    pairs = experts.reshape(-1).tolist()
    rows = [[pair for pair, expert in enumerate(pairs) if expert == e] for e in range(num_experts)]
    order = [pair for of_expert in rows for pair in of_expert]
    offsets = [sum(len(of_expert) for of_expert in rows[:e]) for e in range(num_experts + 1)]
    return experts.new_tensor(order), experts.new_tensor(offsets)


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_pairs_kernel(
    p_experts: tl.tensor,
    p_counts: tl.tensor,
    num_pairs: tl.int64,
    num_blocks: tl.int64,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
) -> None:
    """Count the pairs of each expert in one block of pairs per program; counts[E, num_blocks]."""
    i_block = tl.program_id(0).to(tl.int64)
    o_pair = i_block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    # [BLOCK_PAIRS]
    b_experts = tl.load(p_experts + o_pair, mask=o_pair < num_pairs, other=-1)
    # An expert that does not exist is taken for the nearest: nothing is written outside.
    b_experts = tl.where(o_pair < num_pairs, tl.minimum(tl.maximum(b_experts, 0), NUM_EXPERTS - 1), -1)
    for first in range(0, NUM_EXPERTS, BLOCK_EXPERTS):
        o_expert = first + tl.arange(0, BLOCK_EXPERTS)
        count = tl.sum((b_experts[:, None] == o_expert[None, :]).to(tl.int32), axis=0)
        tl.store(p_counts + o_expert * num_blocks + i_block, count, mask=o_expert < NUM_EXPERTS)


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_pairs_kernel(
    p_experts: tl.tensor,
    p_ends: tl.tensor,
    p_counts: tl.tensor,
    p_order: tl.tensor,
    p_places: tl.tensor,
    num_pairs: tl.int64,
    num_blocks: tl.int64,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """Write the places of one block of pairs per program; its pairs of an expert end at ends[E, num_blocks]."""
    i_block = tl.program_id(0).to(tl.int64)
    o_inside = tl.arange(0, BLOCK_PAIRS)
    o_pair = i_block * BLOCK_PAIRS + o_inside
    m_pair = o_pair < num_pairs
    # [BLOCK_PAIRS]
    b_experts = tl.load(p_experts + o_pair, mask=m_pair, other=0)
    b_experts = tl.minimum(tl.maximum(b_experts, 0), NUM_EXPERTS - 1)
    # The same again, along the other dim of the comparison.
    o_before = tl.arange(0, BLOCK_PAIRS)
    # [BLOCK_PAIRS]
    b_before = tl.load(p_experts + i_block * BLOCK_PAIRS + o_before, mask=m_pair, other=0)
    b_before = tl.minimum(tl.maximum(b_before, 0), NUM_EXPERTS - 1)
    m_earlier = (b_before[None, :] == b_experts[:, None]) & (o_before[None, :] < o_inside[:, None])
    earlier = tl.sum(m_earlier.to(tl.int32), axis=1)
    o_counts = b_experts.to(tl.int64) * num_blocks + i_block
    # [BLOCK_PAIRS]
    first = tl.load(p_ends + o_counts, mask=m_pair, other=0) - tl.load(p_counts + o_counts, mask=m_pair, other=0)
    tl.store(p_places + o_pair, first + earlier, mask=m_pair)
    tl.store(p_order + (first + earlier).to(tl.int64), o_pair.to(tl.int32), mask=m_pair)


def launch_sort(experts: Tensor, num_experts: int) -> ExpertOrder:
    """Run the operator tpkernels::sort_by_expert with its kernels, on contiguous experts."""
    num_pairs = experts.numel()
    num_blocks = cdiv(num_pairs, _BLOCK_PAIRS)
    counts = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=experts.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    places = torch.empty_like(order)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    if not num_pairs:
        return ExpertOrder(order, offsets, places)
    run(
        _count_pairs_kernel,
        (num_blocks,),
        experts,
        counts,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_PAIRS=_BLOCK_PAIRS,
        BLOCK_EXPERTS=min(_BLOCK_EXPERTS, power_of_2(num_experts)),
        num_warps=4,
    )
    ends = counts.view(-1).cumsum(0, dtype=torch.int32).view(num_experts, num_blocks)
    offsets[1:] = ends[:, -1]
    run(
        _place_pairs_kernel,
        (num_blocks,),
        experts,
        ends,
        counts,
        order,
        places,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_PAIRS=_BLOCK_PAIRS,
        num_warps=4,
    )
    return ExpertOrder(order, offsets, places)


def _on_host(experts: Tensor, num_experts: int) -> ExpertOrder:
    pairs = experts.reshape(-1).clamp(0, num_experts - 1)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(pairs, minlength=num_experts).cumsum(0)
    order = pairs.sort(stable=True).indices.int()
    return ExpertOrder(order, offsets, places_of(order))


def places_of(order: Tensor) -> Tensor:
    """Return the row of each pair, int32 [R], from the pair of each row."""
    rows = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(order).scatter_(0, order.long(), rows)


def sort_forward(experts: Tensor, num_experts: int) -> ExpertOrder:
    """Run `sort_by_expert_op` without torch's dispatcher, and return places too; for the forward of a Function."""
    return (launch_sort if by_triton(experts) else _on_host)(experts.contiguous(), num_experts)


@torch.library.custom_op("tpkernels::sort_by_expert", mutates_args=())
def sort_by_expert_op(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return order[R] and offsets[E + 1], new and contiguous, of experts int32 [T, k]."""
    order, offsets, _ = sort_forward(experts, num_experts)
    return order, offsets


@sort_by_expert_op.register_fake
def _(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return experts.new_empty(experts.numel()), experts.new_empty(num_experts + 1)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the choices of tokens by their experts, keeping the order of equal ones.

        row r of the sorted rows is pair order[r] = t * k + j: token t's choice j, R = T * k
        expert e has the rows offsets[e] .. offsets[e + 1] - 1

    Args:
        experts: [T, k] of int32, values from 0 to E - 1, any strides, possibly without rows. Another value is taken
            for the nearest of these.
        num_experts: E, at least 1.

    Returns:
        order int32 [R], offsets int32 [E + 1], new and contiguous; offsets[E] is R. Neither has a gradient.

    Raises:
        ValueError: experts is not a matrix of int32, or has too many elements; num_experts is below 1.

    Cost: reads the experts three times and writes order and places; counts take E / 16 bytes per pair twice. No wait
    for the host on a GPU.
    Numerics: exact; the same on every device.
    Source: see the module.
    """
    if experts.dim() != 2 or experts.dtype != torch.int32 or num_experts < 1 or experts.numel() > _MOST_PAIRS:
        raise ValueError(
            f"sort_by_expert takes experts[T, k] of int32, T * k to {_MOST_PAIRS}, and num_experts of at least 1: "
            f"experts are {tuple(experts.shape)} {experts.dtype}, num_experts is {num_experts}: pass what route returns"
        )
    found: tuple[Tensor, Tensor] = sort_by_expert_op(experts, num_experts)
    return found
