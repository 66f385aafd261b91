"""Partition: which layers each pipeline stage holds, balanced by cost. Exact, not a heuristic.

Costs are compared as integers: floats are binary fractions, so over a common denominator every sum and square
is exact, and equal splits are equal on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

Split = tuple[tuple[int, int], ...]


def partition_layers(layer_costs: Sequence[float], first_cost: float, last_cost: float, num_stages: int) -> Split:
    """Split the layers into contiguous stages so that the slowest stage is as fast as possible.

    Among the splits with the least maximum, take the least sum of squared stage costs; among these, the one
    whose earlier stages end first (1F1B holds more activations on earlier stages).

    Args:
        layer_costs: cost of each layer, in any unit.
        first_cost: what the first stage bears besides its layers (embedding), same unit.
        last_cost: what the last stage bears besides its layers (head and loss), same unit.
        num_stages: number of stages, each of which holds at least one layer.
    Returns: half-open layer ranges, one per stage, in order.
    Raises: ValueError: no stages, more stages than layers, or a cost that is negative or not finite.
    Cost: O(num_stages * layers^2) integer operations.
    """
    _check(layer_costs, first_cost, last_cost, num_stages)
    stage_cost = _stage_costs(layer_costs, first_cost, last_cost)
    num_layers = len(layer_costs)
    maximum, _ = _best_split(num_layers, num_stages, stage_cost, max)

    # More than the sum of squares of any split.
    too_slow = stage_cost(0, num_layers) ** 2 + 1

    def square_within_maximum(start: int, end: int) -> int:
        cost = stage_cost(start, end)
        return cost * cost if cost <= maximum else too_slow

    _, ends = _best_split(num_layers, num_stages, square_within_maximum, lambda stage, rest: stage + rest)
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _stage_costs(layer_costs: Sequence[float], first_cost: float, last_cost: float) -> Callable[[int, int], int]:
    """Return the cost of a stage of layers [start, end) as a function into integers."""
    fractions = [Fraction(cost) for cost in (*layer_costs, first_cost, last_cost)]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    *layers, first, last = (int(fraction * scale) for fraction in fractions)
    before = [0]
    for layer in layers:
        before.append(before[-1] + layer)

    def stage_cost(start: int, end: int) -> int:
        ends = first * (start == 0) + last * (end == len(layers))
        return before[end] - before[start] + ends

    return stage_cost


def _best_split(
    num_layers: int,
    num_stages: int,
    price: Callable[[int, int], int],
    combine: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]]:
    """Return the least combined price and the stages' ends, the earliest that reach it."""

    @cache
    def best(start: int, stages: int) -> tuple[int, tuple[int, ...]]:
        if stages == 1:
            return price(start, num_layers), (num_layers,)
        candidates = []
        for end in range(start + 1, num_layers - stages + 2):
            rest_price, rest_ends = best(end, stages - 1)
            candidates.append((combine(price(start, end), rest_price), (end, *rest_ends)))
        return min(candidates)

    return best(0, num_stages)


def _check(layer_costs: Sequence[float], first_cost: float, last_cost: float, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"a model needs at least one stage: got {num_stages}, use 1")
    if num_stages > len(layer_costs):
        raise ValueError(
            f"every stage needs a layer: {len(layer_costs)} layers do not fill {num_stages} stages, "
            f"use at most {len(layer_costs)} stages"
        )
    for cost in (*layer_costs, first_cost, last_cost):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs must be finite and not negative: got {cost}, use 0 for a free part")
