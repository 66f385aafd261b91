"""The step plan. It is generated, lowered and verified here, simulated and drawn in planner/, executed in pipeline/.

Nothing here imports torch. Read actions.py, plan.py, schedules/, lower/, verify/ in this order.
"""

from tpengine.plan.actions import Action, Kind, counterpart, format_actions, parse_action, parse_actions
from tpengine.plan.clock import clock
from tpengine.plan.lower import lower
from tpengine.plan.lower.slack import slack
from tpengine.plan.lower.slots import ReceiveSlots, receive_slots
from tpengine.plan.partition import partition_layers
from tpengine.plan.plan import Bucket, Chunk, Gathered, Plan, Recompute, Reduced, Residency, TensorSpec, Tie, Weights
from tpengine.plan.schedules import SCHEDULES, ComputeLists, Schedule, forward_only, make_schedule
from tpengine.plan.text import parse_plan
from tpengine.plan.timeline import RankTimeline, Span, Timeline
from tpengine.plan.verify import verify
from tpengine.plan.verify.fault import PlanError

__all__ = [
    "SCHEDULES",
    "Action",
    "Bucket",
    "Chunk",
    "ComputeLists",
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
