"""Rung: pure. The simulator's channels beside a machine that runs the same plans by NCCL's rules: equal times.

What only GPUs check: how long a transfer takes, and what it takes from what is computed beside it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.nccl.machine import Machine, NoProgress
from support.nccl.plans import late, programs_of

from tpengine.plan import SCHEDULES, Bucket, Chunk, Kind, Plan, Reduced, TensorSpec, Tie, Weights, lower, make_schedule
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import Channels, unit_costs

# 100 bytes, so that a bandwidth of 100 / t occupies a link for t.
BOUNDARY = TensorSpec((25,), "float32")


def plan_of(name: str, pp: int, micro_batches: int, *, sliced: bool = False) -> Plan:
    """A plan whose ends share a parameter; with `sliced` every micro-batch gathers and reduces."""
    schedule = make_schedule(name, pp, micro_batches, 2)
    last = len(schedule.ranks) - 1
    chunks = [
        Chunk(rank, (index, index + 1), BOUNDARY if index else None, BOUNDARY if index < last else None)
        for index, rank in enumerate(schedule.ranks)
    ]
    weights, reduced = (Weights.SLICED, Reduced.MICROBATCH) if sliced else (Weights.WHOLE, Reduced.STEP)
    buckets = [Bucket(number, (number // 2,), weights, reduced) for number in range(2 * (last + 1))]
    ties = [Tie(0, (0, last))] if schedule.ranks[0] != schedule.ranks[last] else []
    return lower(schedule, chunks, buckets, ties, micro_batches, last + 1, True)


def drawn_costs(plan: Plan, seed: int) -> Costs:
    """Durations of every action and link that do not divide each other, and communication that is not hidden."""
    chance = random.Random(seed)
    indices = [bucket.index for bucket in plan.buckets]
    return replace(
        unit_costs(plan),
        compute={(kind, chunk): chance.uniform(0.5, 2) for kind in Kind for chunk in range(len(plan.chunks))},
        bytes_per_time=100 / chance.uniform(0.01, 0.7),
        links={(1, 0): (0.0, 100 / chance.uniform(0.01, 2))},
        reductions={index: chance.uniform(0, 2) for index in indices},
        gathers={index: chance.uniform(0, 2) for index in indices},
        ties=0.25,
        clip=0.5,
        step=1.0,
    )


@pytest.mark.parametrize("channels", Channels)
@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_those_of_the_machine(name: str, channels: Channels) -> None:
    for seed, (pp, micro_batches, sliced) in enumerate([(2, 4, False), (3, 6, True), (4, 8, False), (4, 8, True)]):
        plan = plan_of(name, pp, micro_batches, sliced=sliced)
        # Messages of a pair overlap in their latencies: that one rule is the simulator's alone.
        latency = 0.0 if channels is Channels.PAIR else 0.3
        costs = replace(drawn_costs(plan, seed), channels=channels, latency=latency)
        machine = Machine(programs_of(plan, costs))
        assert simulate(plan, costs).makespan == pytest.approx(machine.run(), rel=1e-12), (pp, micro_batches, sliced)


def slower(name: str, channels: Channels) -> str:
    """How much longer 4 stages and 16 micro-batches take over a link of a tenth of a forward than over free links."""
    plan = plan_of(name, 4, 16)
    free = unit_costs(plan)
    costs = replace(free, bytes_per_time=100 / 0.1, channels=channels)
    return f"{simulate(plan, costs).makespan / simulate(plan, free).makespan:.3f}"


@pytest.mark.parametrize(
    ("name", "pair", "one", "direction"),
    [
        ("gpipe", "1.011", "1.011", "1.011"),
        ("1f1b", "1.053", "1.060", "1.053"),
        ("interleaved", "1.027", "1.059", "1.027"),
        ("zb-h1", "1.024", "1.090", "1.024"),
        ("zbv", "1.030", "1.034", "1.034"),
    ],
)
def test_what_one_communicator_costs(name: str, pair: str, one: str, direction: str) -> None:
    """The figures of tpengine/plan/README.md."""
    assert [slower(name, channels) for channels in (Channels.PAIR, Channels.ONE, Channels.DIRECTION)] == [
        pair,
        one,
        direction,
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_early_receives_keep_one_communicator_alive(name: str) -> None:
    """With receives posted late all but gpipe hang: in the machine, and in the simulator, which says so."""
    plan = plan_of(name, 4, 8)
    costs = replace(unit_costs(plan), channels=Channels.ONE)
    broken = replace(plan, actions=tuple(map(tuple, late(plan))))
    if name == "gpipe":
        assert Machine(programs_of(broken, costs)).run() == pytest.approx(simulate(broken, costs).makespan)
        return
    with pytest.raises(NoProgress, match=r"rank 0: .*SEND_F\d: send to rank 1 over pp has begun, the others have not"):
        Machine(programs_of(broken, costs)).run()
    with pytest.raises(ValueError, match=r"a plan must finish: rank \d waits in .* with rank"):
        simulate(broken, costs)
    # A communicator for each direction helps those whose tensors of a direction all go one way round.
    of_directions = replace(costs, channels=Channels.DIRECTION)
    if name in ("interleaved", "zbv"):
        with pytest.raises(NoProgress):
            Machine(programs_of(broken, of_directions)).run()
    else:
        assert Machine(programs_of(broken, of_directions)).run() == pytest.approx(
            simulate(broken, of_directions).makespan
        )
