"""Rung: pure. Whatever one drops, doubles, swaps or moves in a plan, the verifier goes red, or the plan is as good.

Which of the accepted ones are as good is not for the verifier to say: support/plans/oracle.py plays them with
symbolic tensors. They come from what has no order: waits in a wait, a post or a wait a little earlier
or later, compute actions that do not need each other. They do not count as tried. A dropped or doubled action is never
one.

Nor is the verifier stricter than it must be: what it refuses fails when played, but for a few rules (CONVENTIONS).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from support.plans.oracle import why_illegal
from support.plans.sharded import sharded

from tpengine.plan import SCHEDULES, Action, Kind, Plan, PlanError, Residency, Weights, format_actions, verify

BuildPlan = Callable[..., Plan]
CountMutations = Callable[[str, int, int], None]
List = tuple[Action, ...]
# What was done, and the list it gives.
Mutant = tuple[str, List]

# Rules that a plan can break and still compute the right thing.
CONVENTIONS = (
    "the buckets of a backward are reduced in listed order",
    "a training plan ends with one CLIP and one STEP",
    "an action gathers, then reduces, then frees",
)

NAMES = [*sorted(SCHEDULES), "forward_only"]


def mutants(actions: List) -> Iterator[Mutant]:
    """Yield every list that one change of an action or of a sub-action makes of this one."""
    places = range(len(actions))
    for i in places:
        yield "drop", without(actions, i)
        yield "double", insert(actions, i, actions[i])
    for i, j in combinations(places, 2):
        yield "double", insert(actions, j + 1, actions[i])
        yield "double", insert(actions, i, actions[j])
        yield "swap", insert(without(insert(without(actions, j), j, actions[i]), i), i, actions[j])
        if j > i + 1:
            yield "move", insert(without(actions, i), j, actions[i])
            yield "move", insert(without(actions, j), i, actions[j])
    for i in places:
        for what, changed in sub_mutants(actions[i]):
            yield what, (*actions[:i], *changed, *actions[i + 1 :])
        yield from moved_subs(actions, i)


def without(actions: List, place: int) -> List:
    return actions[:place] + actions[place + 1 :]


def insert(actions: List, place: int, action: Action) -> List:
    return (*actions[:place], action, *actions[place:])


def sub_mutants(action: Action) -> Iterator[tuple[str, List]]:
    """Yield what one change inside an action makes of it; nothing is left of a wait without members."""
    subs = action.subs
    for i, sub in enumerate(subs):
        yield "drop a sub-action", with_subs(action, without(subs, i))
        yield "double a sub-action", with_subs(action, (*subs, sub))
    for i, j in combinations(range(len(subs)), 2):
        order = list(subs)
        order[i], order[j] = order[j], order[i]
        yield "swap sub-actions", with_subs(action, tuple(order))


def moved_subs(actions: List, i: int) -> Iterator[Mutant]:
    """Yield lists in which one sub-action has gone to another action of the list that can take it."""
    for k, sub in enumerate(actions[i].subs):
        left = with_subs(actions[i], without(actions[i].subs, k))
        for j, other in enumerate(actions):
            if j == i:
                continue
            try:
                taken = with_subs(other, (*other.subs, sub))
            except ValueError:
                continue
            changed = [(action,) for action in actions]
            changed[i], changed[j] = left, taken
            yield "move a sub-action", tuple(action for part in changed for action in part)


def with_subs(action: Action, subs: List) -> List:
    return () if action.kind is Kind.WAIT and not subs else (replace(action, subs=subs),)


def judge(plan: Plan, lists: Iterator[tuple[int, Mutant]], what: str, count_mutations: CountMutations) -> None:
    """Verify and play every changed plan; verdicts must agree."""
    assert why_illegal(plan) is None
    num_killed, as_good, wrong = 0, Counter[str](), []
    for rank, (change, actions) in lists:
        if actions == plan.actions[rank]:
            continue
        mutant = replace(plan, actions=(*plan.actions[:rank], actions, *plan.actions[rank + 1 :]))
        reason, refusal = why_illegal(mutant), refusal_of(mutant)
        if refusal is not None:
            num_killed += 1
        elif reason is None:
            as_good[change] += 1
        if (reason is None) != (refusal is None) and not (refusal or "").startswith(CONVENTIONS):
            wrong.append(f"{change} on rank {rank}: played: {reason}, verified: {refusal}: {format_actions(actions)}")
    num_missed = sum("verified: None" in text for text in wrong)
    count_mutations(f"{what} (and {as_good.total()} as good)", num_killed, num_killed + num_missed)
    assert not wrong
    assert num_killed > 0
    assert not [change for change in as_good if change.startswith(("drop", "double"))]


def refusal_of(plan: Plan) -> str | None:
    try:
        verify(plan)
    except PlanError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


# Without buckets it is the ties alone that look at the last backward. By default whole and split backwards, without
# buckets and with them; and a sample of several chunks per rank, below.
@pytest.mark.parametrize(
    ("name", "has_buckets"),
    [
        *(pytest.param(name, True, marks=() if name == "1f1b" else pytest.mark.slow) for name in NAMES),
        pytest.param("1f1b", False, marks=pytest.mark.slow),
        ("zb-h1", False),
    ],
)
def test_every_change_of_a_small_plan(
    build_plan: BuildPlan, name: str, has_buckets: bool, count_mutations: CountMutations
) -> None:
    plan = build_plan(name, 2, 2, has_buckets)
    every = ((rank, mutant) for rank, actions in enumerate(plan.actions) for mutant in mutants(actions))
    judge(
        plan, every, f"{name} plans of 2 ranks with{'' if has_buckets else 'out'} buckets, every one", count_mutations
    )


@pytest.mark.parametrize("name", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zbv", "zb-h1"))])
def test_every_change_of_a_plan_that_counts(build_plan: BuildPlan, name: str, count_mutations: CountMutations) -> None:
    plan = build_plan(name, 2, 2, False, has_counts=True)
    every = ((rank, mutant) for rank, actions in enumerate(plan.actions) for mutant in mutants(actions))
    judge(plan, every, f"{name} plans of 2 ranks with counts, every one", count_mutations)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zbv" else pytest.mark.slow) for name in NAMES]
)
def test_sampled_changes_of_a_larger_plan(build_plan: BuildPlan, name: str, count_mutations: CountMutations) -> None:
    plan = build_plan(name, 4, 5)
    sampled: list[tuple[int, Mutant]] = []
    for rank, actions in enumerate(plan.actions):
        sampled += [(rank, mutant) for mutant in random.Random(rank).sample(list(mutants(actions)), 60)]
    judge(plan, iter(sampled), f"{name} plans of 4 ranks, sampled", count_mutations)


@pytest.mark.by_default("updated")
@pytest.mark.parametrize("weights", [Weights.SLICED, Weights.UPDATED])
def test_every_change_of_a_small_plan_of_slices(weights: Weights, count_mutations: CountMutations) -> None:
    plan = sharded("1f1b", 2, 2, Residency.USE, weights)
    every = ((rank, mutant) for rank, actions in enumerate(plan.actions) for mutant in mutants(actions))
    judge(plan, every, f"1f1b plans of 2 ranks with {weights} weights, every one", count_mutations)


@pytest.mark.by_default("step")
@pytest.mark.parametrize("residency", Residency)
def test_sampled_changes_of_a_plan_of_slices(residency: Residency, count_mutations: CountMutations) -> None:
    plan = sharded("zbv", 2, 3, residency, num_buckets=2)
    sampled: list[tuple[int, Mutant]] = []
    for rank, actions in enumerate(plan.actions):
        sampled += [(rank, mutant) for mutant in random.Random(rank).sample(list(mutants(actions)), 120)]
    judge(
        plan,
        iter(sampled),
        f"zbv plans of 2 ranks with sliced weights, kept for one {residency}, sampled",
        count_mutations,
    )
