"""Verify: a plan that passes finishes and loses no gradient. The plan that runs is the plan that was verified.

Each check is a file beside this one. They run from the simple to the involved, so that a broken plan is reported by the
rule nearest to the cause. They share no code with lowering except the meaning of a single action.
"""

from __future__ import annotations

from tpengine.plan.plan import Plan
from tpengine.plan.verify.compute import check_compute
from tpengine.plan.verify.gradients import check_gradients
from tpengine.plan.verify.matching import check_matching
from tpengine.plan.verify.posting import check_posting
from tpengine.plan.verify.progress import check_blocking, check_channels
from tpengine.plan.verify.receives import check_receives
from tpengine.plan.verify.residency import check_residency
from tpengine.plan.verify.structure import check_structure


def verify(plan: Plan) -> None:
    """Check a plan completely.

    In this order: chunks, layers, buckets and ties exist; each (chunk, micro-batch) is computed once in each direction
    and in order, also between chunks of one rank; sends and receives pair up; every contribution to a
    bucket or tie is reduced once, before CLIP STEP; weights are gathered before their use and freed after it;
    everything posted is waited for in time; no receive slot is overwritten; no deadlock, with blocking transfers or
    in-order channels. The order in which micro-batches add to a weight's gradient is not checked here: see
    `Schedule.keeps_order`. Bytes are not known here: `simulate` counts them.

    Raises: PlanError: the first rule that is broken, with rank, position and picture.
    Cost: linear in the number of actions, sub-actions included; 0.75 s for 16 ranks with 4 chunks each and 64
        micro-batches.
    """
    check_structure(plan)
    check_compute(plan)
    check_matching(plan)
    check_gradients(plan)
    check_residency(plan)
    check_posting(plan)
    check_receives(plan)
    check_blocking(plan)
    check_channels(plan)
