"""The step plan: data that is generated, lowered, verified, simulated, drawn and executed. No torch in here.

Read actions.py, plan.py, schedules.py, lower.py, verify.py in this order.
"""

from tpengine.plan.actions import Action, Kind, counterpart, format_actions, parse_action, parse_actions
from tpengine.plan.checks.fault import PlanError
from tpengine.plan.draw import describe, grid
from tpengine.plan.lower import lower
from tpengine.plan.partition import partition_layers
from tpengine.plan.plan import Bucket, Chunk, Plan, TensorSpec, Tie
from tpengine.plan.schedules import SCHEDULES, ComputeLists, Generator, forward_only, gpipe, one_f_one_b
from tpengine.plan.simulate import UNIT_DURATIONS, Span, Timeline, simulate
from tpengine.plan.slots import ReceiveSlots, receive_slots
from tpengine.plan.text import parse_plan
from tpengine.plan.verify import verify, verify_loss_weights

__all__ = [
    "SCHEDULES",
    "UNIT_DURATIONS",
    "Action",
    "Bucket",
    "Chunk",
    "ComputeLists",
    "Generator",
    "Kind",
    "Plan",
    "PlanError",
    "ReceiveSlots",
    "Span",
    "TensorSpec",
    "Tie",
    "Timeline",
    "counterpart",
    "describe",
    "format_actions",
    "forward_only",
    "gpipe",
    "grid",
    "lower",
    "one_f_one_b",
    "parse_action",
    "parse_actions",
    "parse_plan",
    "partition_layers",
    "receive_slots",
    "simulate",
    "verify",
    "verify_loss_weights",
]
