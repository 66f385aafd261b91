"""The step plan. It is generated, lowered and verified here, simulated and drawn in planner/, executed in pipeline/.

Nothing here imports torch. Read actions.py, plan.py, generators.py, lower.py, verify.py in this order.
"""

from tpengine.plan.actions import Action, Kind, counterpart, format_actions, parse_action, parse_actions
from tpengine.plan.clock import RankTimeline, Span, Timeline, clock
from tpengine.plan.generators import SCHEDULES, forward_only, make_schedule
from tpengine.plan.lower import lower, slack
from tpengine.plan.partition import partition_layers
from tpengine.plan.plan import (
    Bucket,
    Chunk,
    CountBucket,
    Gathered,
    Plan,
    PlanError,
    Recompute,
    Reduced,
    Residency,
    TensorSpec,
    Tie,
    Weights,
)
from tpengine.plan.schedule import ComputeLists, Schedule
from tpengine.plan.slots import ReceiveSlots, receive_slots
from tpengine.plan.text import parse_plan
from tpengine.plan.verify import verify

__all__ = [
    "SCHEDULES",
    "Action",
    "Bucket",
    "Chunk",
    "ComputeLists",
    "CountBucket",
    "Gathered",
    "Kind",
    "Plan",
    "PlanError",
    "RankTimeline",
    "ReceiveSlots",
    "Recompute",
    "Reduced",
    "Residency",
    "Schedule",
    "Span",
    "TensorSpec",
    "Tie",
    "Timeline",
    "Weights",
    "clock",
    "counterpart",
    "format_actions",
    "forward_only",
    "lower",
    "make_schedule",
    "parse_action",
    "parse_actions",
    "parse_plan",
    "partition_layers",
    "receive_slots",
    "slack",
    "verify",
]
