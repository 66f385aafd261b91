"""The step plan: data that is generated, lowered, verified, simulated, drawn and executed. No torch in here.

Read actions.py, plan.py, schedules/, lower/, verify.py in this order.
"""

from tpengine.plan.actions import Action, Kind, counterpart, format_actions, parse_action, parse_actions
from tpengine.plan.checks.fault import PlanError
from tpengine.plan.clock import clock
from tpengine.plan.costs import ChunkBytes, Costs
from tpengine.plan.draw import (
    Picture,
    bytes_text,
    check_num_boxes,
    check_picture_file,
    describe,
    draw_html,
    draw_svg,
    draw_to_file,
    grid,
    picture_bytes,
    render_png,
    write_beside,
)
from tpengine.plan.figures import StepFigures
from tpengine.plan.lower import lower
from tpengine.plan.lower.slack import slack
from tpengine.plan.partition import partition_layers
from tpengine.plan.plan import Bucket, Chunk, Gathered, Plan, Recompute, TensorSpec, Tie
from tpengine.plan.schedules import SCHEDULES, ComputeLists, Schedule, forward_only, make_schedule
from tpengine.plan.simulate import simulate
from tpengine.plan.slots import ReceiveSlots, receive_slots
from tpengine.plan.text import parse_plan
from tpengine.plan.timeline import RankTimeline, Span, Timeline
from tpengine.plan.verify import verify, verify_loss_weights

__all__ = [
    "SCHEDULES",
    "Action",
    "Bucket",
    "Chunk",
    "ChunkBytes",
    "ComputeLists",
    "Costs",
    "Gathered",
    "Kind",
    "Picture",
    "Plan",
    "PlanError",
    "RankTimeline",
    "ReceiveSlots",
    "Recompute",
    "Schedule",
    "Span",
    "StepFigures",
    "TensorSpec",
    "Tie",
    "Timeline",
    "bytes_text",
    "check_num_boxes",
    "check_picture_file",
    "clock",
    "counterpart",
    "describe",
    "draw_html",
    "draw_svg",
    "draw_to_file",
    "format_actions",
    "forward_only",
    "grid",
    "lower",
    "make_schedule",
    "parse_action",
    "parse_actions",
    "parse_plan",
    "partition_layers",
    "picture_bytes",
    "receive_slots",
    "render_png",
    "simulate",
    "slack",
    "verify",
    "verify_loss_weights",
    "write_beside",
]
