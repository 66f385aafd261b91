"""Verify: a plan that passes finishes, and loses no gradient. What runs is exactly what was verified.

The checks are one file each under checks/ and run from the simple to the involved, so that a broken plan is
reported by the rule nearest to its cause. They share nothing with lowering but the meaning of a single
action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational

from tpengine.plan.plan import Plan
from tpengine.plan.verify.compute import check_compute
from tpengine.plan.verify.fault import PlanError
from tpengine.plan.verify.gradients import check_gradients
from tpengine.plan.verify.matching import check_matching
from tpengine.plan.verify.posting import check_posting
from tpengine.plan.verify.progress import check_blocking, check_channels
from tpengine.plan.verify.receives import check_receives
from tpengine.plan.verify.structure import check_structure

_TOLERANCE = 1e-12


def verify(plan: Plan) -> None:
    """Check a plan completely.

    In order: chunks, layers, buckets and ties; each (chunk, micro-batch) computed once each way and in order, from
    chunk to chunk of a rank too; sends and receives pair up; buckets and ties reduced once, inside or after their last
    contribution, before CLIP STEP; everything posted is waited for in time; receive slots are not overwritten; no
    deadlock, blocking or over in-order channels. In which order the micro-batches add to a weight's gradient is no rule
    here: `Schedule.keeps_order` tells it.

    Raises: PlanError: the first rule that is broken, with rank, position and picture.
    Cost: linear in the number of actions; 0.75 s for 16 ranks of 4 chunks and 64 micro-batches.
    """
    check_structure(plan)
    check_compute(plan)
    check_matching(plan)
    check_gradients(plan)
    check_posting(plan)
    check_receives(plan)
    check_blocking(plan)
    check_channels(plan)


def verify_loss_weights(weights: Sequence[Sequence[Fraction | float]]) -> None:
    """Check that the micro-batches' loss weights make one mean: not negative, and one in total.

    Args: weights: by [replica][micro-batch]. Sums of fractions must be exactly one, of floats within 1e-12.
    Raises: PlanError: a weight is negative or not a number, or the sum is not one.
    """
    for replica, row in enumerate(weights):
        for microbatch, weight in enumerate(row):
            if not weight >= 0:
                place = f"replica {replica}, micro-batch {microbatch}"
                raise PlanError(f"loss weights are not negative: {weight} at {place}")
    total = _total([weight for row in weights for weight in row])
    tolerance = _TOLERANCE if isinstance(total, float) else 0
    if not -tolerance <= total - 1 <= tolerance:
        raise PlanError(f"loss weights sum to one: got {total}")


def _total(weights: Sequence[Fraction | float]) -> Fraction | float:
    """Return the exact sum of fractions and integers, or the nearest float to the sum of floats."""
    exact = [Fraction(weight) for weight in weights if isinstance(weight, Rational)]
    return sum(exact, Fraction(0)) if len(exact) == len(weights) else math.fsum(weights)
