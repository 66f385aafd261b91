"""Verify: a plan that passes finishes, and loses no gradient. What runs is exactly what was verified.

The checks are one file each beside this one and run from the simple to the involved, so that a broken plan is
reported by the rule nearest to its cause. They share nothing with lowering but the meaning of a single
action.
"""

from __future__ import annotations

from tpengine.plan.plan import Plan
from tpengine.plan.verify.compute import check_compute
from tpengine.plan.verify.gradients import check_gradients
from tpengine.plan.verify.matching import check_matching
from tpengine.plan.verify.posting import check_posting
from tpengine.plan.verify.progress import check_blocking, check_channels
from tpengine.plan.verify.receives import check_receives
from tpengine.plan.verify.structure import check_structure


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
