"""Which steps a run records by itself (train.profile_steps auto): a few of one phase, after its warm-up."""

from __future__ import annotations

from tpengine.distributed.mesh import Shape
from tpengine.plan import Plan
from tpengine.training.planned_run import PlannedRun

_NUM_STEPS = 8
# The first steps of a start load kernels, prepare weights and fill caches.
_WARM_UP_STEPS = 4
# One of warm-up, one to record.
_FEWEST_STEPS = 2
# Of all ranks and recorded steps: rank 0 holds them, at some 300 bytes each, until they are written.
_MOST_EVENTS = 200_000


def chosen_steps(planned: PlannedRun, first_step: int) -> range:
    """Return the steps to record of a run that begins or continues at `first_step`, from 0; none if nothing fits.

    They are of one phase, since another has another plan: of that in which the run warms up.
    """
    phase = planned.phases.at(first_step)
    while phase.number + 1 < len(planned.phases) and phase.end_step - first_step < _FEWEST_STEPS:
        phase = planned.phases.at(phase.end_step)
    shape = Shape.of(planned.config.parallel)
    num_events = shape.dp * shape.tp * events_of_pipeline(planned.parts[phase.number].plan)
    return steps_after_warm_up(max(first_step, phase.first_step), phase.end_step, num_events)


def steps_after_warm_up(begin: int, end: int, num_events: int) -> range:
    """Return the steps to record of those from `begin` to `end`; of few steps a third is warm-up, and at least one.

    Args: num_events: that a step records, on all ranks together.
    """
    warm_up = min(_WARM_UP_STEPS, max(1, (end - begin) // 3))
    number = min(_NUM_STEPS, end - begin - warm_up, _MOST_EVENTS // num_events)
    return range(begin + warm_up, begin + warm_up + max(0, number))


def events_of_pipeline(plan: Plan) -> int:
    """Return how many events the ranks of a pipeline record in a step."""
    return sum(1 + len(action.posts) for actions in plan.actions for action in actions)
