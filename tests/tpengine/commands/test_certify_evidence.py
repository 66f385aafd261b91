"""Rung: pure. Observations merge over ranks and compare in causal order; a group's hash covers its tensors."""

from __future__ import annotations

import pytest

from tpengine.commands.certify_compare import (
    GRADIENT,
    WEIGHT,
    Observation,
    ObservedPlace,
    Seen,
    StepEvidence,
    StepPhase,
)


def seen(
    name: str,
    digest: str,
    *,
    step: int = 0,
    phase: StepPhase = StepPhase.FORWARD,
    mb: int = -1,
    depth: int = 0,
    shard: int = -1,
) -> Observation:
    return Observation(ObservedPlace(step, phase, mb, depth, name, shard), digest, f"action of {name}")


BASE = [
    seen("output of layers.1", "a", mb=0, depth=16),
    seen("output of layers.0", "b", mb=0, depth=8),
    seen("gradient of the output of layers.0", "c", phase=StepPhase.BACKWARD, mb=0, depth=8),
    seen(GRADIENT + "norm.weight", "d", phase=StepPhase.SUM),
    seen("gradient norm", "e", phase=StepPhase.UPDATE),
    seen(WEIGHT + "norm.weight", "f", phase=StepPhase.UPDATE, depth=1),
]


def changed(name: str, digest: str) -> list[Observation]:
    return [Observation(o.place, digest, o.action) if o.place.name == name else o for o in BASE]


def test_equal_runs_have_no_difference_whoever_saw_what() -> None:
    assert StepEvidence([BASE]).first_difference(StepEvidence([BASE[::2], BASE[1::2]])) is None


@pytest.mark.parametrize("first", range(len(BASE)))
def test_the_first_difference_by_cause_is_found(first: int) -> None:
    """Everything differs from one place on, in causal order."""
    in_order = sorted(BASE, key=lambda o: o.place)
    other = in_order[:first] + [Observation(o.place, "x", "another action") for o in in_order[first:]]
    difference = StepEvidence([BASE]).first_difference(StepEvidence([[], other]))
    assert difference is not None and difference.place == in_order[first].place
    assert difference.left == Seen(in_order[first].digest, in_order[first].action, 0)
    assert difference.right == Seen("x", "another action", 1)


def test_what_one_side_lacks_is_a_difference() -> None:
    left, right = StepEvidence([BASE]), StepEvidence([[o for o in BASE if o.place.depth != 8 or o.place.phase]])
    difference = left.first_difference(right)
    assert difference is not None and difference.place.name == "output of layers.0" and difference.right is None
    mirrored = right.first_difference(left)
    assert mirrored is not None and mirrored.left is None


def test_ranks_of_one_run_that_disagree_are_found() -> None:
    evidence = StepEvidence([BASE, changed(WEIGHT + "norm.weight", "other")])
    assert evidence.disagreement is not None
    assert evidence.disagreement.left == Seen("f", f"action of {WEIGHT}norm.weight", 0)
    assert evidence.disagreement.right is not None and evidence.disagreement.right.rank == 1
    assert StepEvidence([BASE, BASE]).disagreement is None


def test_groups_change_with_their_own_tensors_only() -> None:
    base = StepEvidence([BASE]).groups()
    assert list(base) == ["weights", "gradients", "optimizer"] and len(set(base.values())) == 3
    for name, group in ((WEIGHT + "norm.weight", "weights"), (GRADIENT + "norm.weight", "gradients")):
        other = StepEvidence([changed(name, "other")]).groups()
        assert [key for key in base if base[key] != other[key]] == [group]
    assert StepEvidence([changed("output of layers.0", "other")]).groups() == base


def test_a_place_reads_as_a_sentence() -> None:
    assert str(ObservedPlace(1, StepPhase.BACKWARD, 3, 0, "gradient of x", 5)) == (
        "step 2: gradient of x, micro-batch 3, shard 5"
    )
    assert str(ObservedPlace(0, StepPhase.UPDATE, -1, 0, "gradient norm", -1)) == "step 1: gradient norm"
