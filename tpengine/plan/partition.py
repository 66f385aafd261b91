"""Partition: which layers each chunk holds, so that all ranks have the same work as nearly as possible.

With one chunk per rank, dynamic programming finds the best split. With several chunks per rank, a long chunk can be
balanced by a short one on the same rank. Then a split is improved by moving one layer at a time from one chunk to
another, until no move helps. If all layers cost the same, the result is the best split (Frank and Murota, "Decreasing
minimization on M-convex sets", arXiv 2007.09616, theorem 3.3). If they do not and there are few splits, all are tried;
if there are many, the result may not be the best.

Costs are compared as integers. Floats are binary fractions, so over a common denominator every sum and square is exact,
and every machine finds the same split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, combinations, pairwise, permutations

Split = tuple[tuple[int, int], ...]

# With more splits than this, trying all of them would take seconds.
_MOST_TRIED = 10_000


def partition_layers(layer_costs: Sequence[float], first_cost: float, last_cost: float, ranks: Sequence[int]) -> Split:
    """Split the layers into contiguous chunks so that the slowest rank is as fast as possible.

    The result is the optimum with one chunk per rank, with layers of equal cost, and where at most 10,000 splits are
    possible. Ties are broken in this order: the least maximum over ranks; the least sum of squares (with several chunks
    per rank: the fastest second-slowest rank, and so on); the least sum of squared chunk costs; the split whose earlier
    chunks end first, because 1F1B holds more activations on earlier stages.

    Args:
        layer_costs: cost of each layer, in any unit.
        first_cost: what the first chunk costs besides its layers (embedding), same unit.
        last_cost: what the last chunk costs besides its layers (head and loss), same unit.
        ranks: the rank of each chunk, in model order; each chunk holds at least one layer.
    Returns: half-open layer ranges, one per chunk, in order.
    Raises: ValueError: no chunks, more chunks than layers, or a cost that is negative or not finite.
    Cost: O(chunks * layers^2) integer operations; with several chunks per rank O(chunks^3) more for each layer that
        moves.
    """
    _check(layer_costs, first_cost, last_cost, len(ranks))
    chunk_cost = _chunk_costs(layer_costs, first_cost, last_cost)
    if len(set(layer_costs)) == 1 and (sizes := _sizes_of_equal_layers(len(layer_costs), ranks, chunk_cost)):
        return tuple(pairwise(accumulate(sizes, initial=0)))
    ends = _balanced_chunks(len(layer_costs), len(ranks), chunk_cost)
    if len(set(ranks)) < len(ranks):
        ends = _balanced_ranks(ends, ranks, chunk_cost, are_equal=len(set(layer_costs)) == 1)
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _sizes_of_equal_layers(
    num_layers: int, ranks: Sequence[int], chunk_cost: Callable[[int, int], int]
) -> list[int] | None:
    """Return how many of equal layers each chunk holds, given one by one to the rank that has least so far.

    The result is the one that moving layers would end at. None where costs are 0, or where a rank with an end of the
    model ties with another: there more than the ranks' loads decides.
    """
    num_chunks = len(ranks)
    sizes, layer = [1] * num_chunks, chunk_cost(1, 2) if num_layers > 2 else 0
    if not layer:
        return None
    of_ends = [0] * num_chunks
    of_ends[0] += chunk_cost(0, 1) - layer
    of_ends[-1] += chunk_cost(num_layers - 1, num_layers) - layer
    chunks_of: dict[int, list[int]] = {}
    for chunk, rank in enumerate(ranks):
        chunks_of.setdefault(rank, []).append(chunk)
    end_of = {rank: sum(of_ends[chunk] for chunk in chunks) for rank, chunks in chunks_of.items()}
    load = {rank: len(chunks) * layer + end_of[rank] for rank, chunks in chunks_of.items()}
    # Of a rank's chunks the cheapest takes the next layer; among equal ones, and equal ranks, the latest in the model.
    following = {rank: min(chunks, key=lambda c: (of_ends[c], -c)) for rank, chunks in chunks_of.items()}
    for _ in range(num_layers - num_chunks):
        least = min(load.values())
        tied = [rank for rank, cost in load.items() if cost == least]
        if len(tied) > 1 and any(end_of[rank] or len(chunks_of[rank]) != len(chunks_of[tied[0]]) for rank in tied):
            return None
        rank = max(tied, key=following.__getitem__)
        sizes[following[rank]] += 1
        load[rank] += layer
        following[rank] = min(chunks_of[rank], key=lambda c: (sizes[c] * layer + of_ends[c], -c))
    return sizes


def _balanced_chunks(num_layers: int, num_chunks: int, chunk_cost: Callable[[int, int], int]) -> tuple[int, ...]:
    """Return the ends of chunks of which the slowest is as fast as possible."""
    maximum, _ = _best_split(num_layers, num_chunks, chunk_cost, max)

    # More than the sum of squares of any split.
    too_slow = chunk_cost(0, num_layers) ** 2 + 1

    def square_within_maximum(start: int, end: int) -> int:
        cost = chunk_cost(start, end)
        return cost * cost if cost <= maximum else too_slow

    _, ends = _best_split(num_layers, num_chunks, square_within_maximum, lambda chunk, rest: chunk + rest)
    return ends


def _balanced_ranks(
    ends: tuple[int, ...], ranks: Sequence[int], chunk_cost: Callable[[int, int], int], *, are_equal: bool
) -> tuple[int, ...]:
    """Return the best of all splits, or improve this one by moving one layer at a time until no move helps."""

    def badness(ends: tuple[int, ...]) -> tuple[list[int], int, tuple[int, ...]]:
        loads = dict.fromkeys(ranks, 0)
        squares = 0
        for rank, start, end in zip(ranks, (0, *ends[:-1]), ends, strict=True):
            cost = chunk_cost(start, end)
            loads[rank] += cost
            squares += cost * cost
        return sorted(loads.values(), reverse=True), squares, ends

    num_layers, num_cuts = ends[-1], len(ends) - 1
    if not are_equal and math.comb(num_layers - 1, num_cuts) <= _MOST_TRIED:
        cuts = combinations(range(1, num_layers), num_cuts)
        return min(badness((*cut, num_layers)) for cut in cuts)[2]
    best = badness(ends)
    while True:
        better = min(map(badness, _neighbours(best[2])), default=best)
        if better >= best:
            return best[2]
        best = better


def _neighbours(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the splits that differ by one layer: one chunk loses it, another gains it, those between are shifted."""
    for giver, taker in permutations(range(len(ends)), 2):
        if ends[giver] - (ends[giver - 1] if giver else 0) > 1:
            first, last, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
            yield (*ends[:first], *(end + step for end in ends[first:last]), *ends[last:])


def _chunk_costs(layer_costs: Sequence[float], first_cost: float, last_cost: float) -> Callable[[int, int], int]:
    """Return the cost of a chunk of layers [start, end) as a function into integers."""
    fractions = [Fraction(cost) for cost in (*layer_costs, first_cost, last_cost)]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    *layers, first, last = (int(fraction * scale) for fraction in fractions)
    before = [0]
    for layer in layers:
        before.append(before[-1] + layer)

    def chunk_cost(start: int, end: int) -> int:
        ends = first * (start == 0) + last * (end == len(layers))
        return before[end] - before[start] + ends

    return chunk_cost


def _best_split(
    num_layers: int,
    num_chunks: int,
    price: Callable[[int, int], int],
    combine: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]]:
    """Return the least combined price and the chunks' ends, the earliest that reach it."""

    @cache
    def best(start: int, chunks: int) -> tuple[int, tuple[int, ...]]:
        if chunks == 1:
            return price(start, num_layers), (num_layers,)
        candidates = []
        for end in range(start + 1, num_layers - chunks + 2):
            rest_price, rest_ends = best(end, chunks - 1)
            candidates.append((combine(price(start, end), rest_price), (end, *rest_ends)))
        return min(candidates)

    return best(0, num_chunks)


def _check(layer_costs: Sequence[float], first_cost: float, last_cost: float, num_chunks: int) -> None:
    if num_chunks < 1:
        raise ValueError(f"a model needs at least one chunk: got {num_chunks}: use 1")
    if num_chunks > len(layer_costs):
        raise ValueError(
            f"every chunk needs a layer: {len(layer_costs)} layers do not fill {num_chunks} chunks: "
            f"use at most {len(layer_costs)} chunks"
        )
    for cost in (*layer_costs, first_cost, last_cost):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs must be finite and not negative: got {cost}, use 0 for a free part")
