"""A machine as a recorded run found it: what the run measured takes the place of what the machine's rates say.

A run with --train.profile-steps knows what the actions of one layout take, and what its messages and reductions do. Of
other layouts it knows the kinds of action: each kind is taken to be as much faster or slower than the rates say as it
was in the run, on the mean over its stages. So all layouts, the run's own too, are compared by one measure.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tpengine import journal
from tpengine.plan import Kind
from tpengine.plan.actions import COMPUTE
from tpengine.planner import Costs
from tpengine.planner.costs import spec_bytes
from tpengine.planner.diagnose.evidence import Evidence
from tpengine.planner.machine import Curve, Link, Machine
from tpengine.planner.modelled.costs import model_costs
from tpengine.planner.profiles.costs import costs_for

# As many steps say how even experts are used now.
_STEPS = 100
_LOAD = "expert_load/"


def load_recorded(run_dir: Path) -> float | None:
    """Return how uneven a run used its experts: tokens of the hottest one over the mean, the mean over layers.

    A rank whose experts get most has at most as much over the mean rank, and in each layer it may be another.

    Args:
        run_dir: of the run; metrics.jsonl has the load of each layer and step.

    Returns: the median of the last 100 steps that have it; None if there are none.
    """
    try:
        rows = journal.read_steps(run_dir / "metrics.jsonl")
    except OSError:
        return None
    found = []
    for row in rows:
        loads = [load for name, load in row.items() if name.startswith(_LOAD) and _is_load(load)]
        if loads:
            found.append(statistics.fmean(loads))
    return statistics.median(found[-_STEPS:]) if found else None


def _is_load(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 1.0 <= value < math.inf


def machine_as_recorded(machine: Machine, evidence: Evidence) -> Machine:
    """Return a machine whose costs of a recorded run's layout are the recorded ones, kind by kind of action.

    Args:
        machine: its rates stay where the run measured nothing: sizes of memory, attained shares by size, other links.
        evidence: the run's plan and profile.

    Returns: the machine with `recorded` set, and with the measured messages and reductions in its links.

    Cost: one cost model of the run's plan; nothing is simulated.
    """
    modelled = model_costs(evidence.config, evidence.layout, evidence.plan, machine)
    measured = costs_for(evidence.profile, evidence.plan)
    recorded = {str(kind): _ratio(_of_kind(measured, kind), _of_kind(modelled, kind)) for kind in COMPUTE}
    recorded[str(Kind.STEP)] = _ratio([measured.clip, measured.step], [modelled.clip, modelled.step])
    layout = evidence.layout
    # Stages are neighbours at this distance, replicas at tp.
    machine = _with_messages(evidence, machine, modelled)
    machine = _with_link(machine, layout.dp, layout.tp, _with_reductions(evidence, machine, modelled, measured))
    # Where replicas' sums take the cores, what actions of a run with replicas took has them in it.
    share = machine.reduce_share if layout.dp == 1 else 0.0
    return replace(machine, recorded=recorded, reduce_share=share, source=f"{machine.source}; what a run recorded")


def _of_kind(costs: Costs, kind: Kind) -> list[float]:
    return [seconds for (of, _), seconds in costs.compute.items() if of is kind]


def _ratio(measured: Iterable[float], modelled: Iterable[float]) -> float:
    """Return how much longer something takes than modelled; 1 where either is nothing."""
    took, said = sum(measured), sum(modelled)
    return took / said if took > 0 and said > 0 else 1.0


def _with_link(machine: Machine, num_ranks: int, stride: int, link: Link) -> Machine:
    """Return the machine with a link in the place of the one between such ranks."""
    is_within = machine.fits_a_node(num_ranks, stride)
    return replace(machine, within=link) if is_within else replace(machine, between=link)


def _with_messages(evidence: Evidence, machine: Machine, modelled: Costs) -> Machine:
    """Return the machine with the recorded rate of messages, which have one size, in the links that they take."""
    profile, pairs = evidence.profile, itertools.pairwise(chunk.rank for chunk in evidence.plan.chunks)
    if evidence.layout.pp == 1 or profile.boundary is None or not profile.link_seconds:
        return machine
    crossing = {pair in modelled.links for pair in pairs if pair[0] != pair[1]}
    rate = spec_bytes(profile.boundary) / profile.link_seconds
    taken = {"between" if crosses else "within" for crosses in crossing}
    links = {name: replace(getattr(machine, name), bytes_per_s=rate, latency_s=0.0) for name in taken}
    return replace(machine, **links)


def _with_reductions(evidence: Evidence, machine: Machine, modelled: Costs, measured: Costs) -> Link:
    """Return the link between replicas with the recorded rate of their reductions."""
    layout = evidence.layout
    link = machine.within if machine.fits_a_node(layout.dp, layout.tp) else machine.between
    took = _ratio(measured.reductions.values(), modelled.reductions.values())
    if layout.dp == 1 or took == 1.0:
        return link
    rings = {
        num: Curve(tuple((size, rate / took) for size, rate in curve.points)) for num, curve in link.measured.items()
    }
    return replace(link, ring_bytes_per_s=link.ring_bytes_per_s / took, measured=rings)
