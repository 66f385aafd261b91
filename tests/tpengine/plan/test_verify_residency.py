"""Rung: pure. The verifier names the rule for every way we know to break gathers, frees and reductions of slices.

Whatever else one changes in such a plan: test_verify_mutations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from support.plans.held_bytes import held_bytes
from support.plans.sharded import sharded

from tpengine.plan import (
    Plan,
    PlanError,
    Reduced,
    Residency,
    Weights,
    format_actions,
    parse_actions,
    verify,
)
from tpengine.plan.verify_transfers import check_posting

CountMutations = Callable[[str, int, int], None]

USED = "weights are gathered and waited for before use"
ONCE = "every micro-batch's contribution is reduced exactly once"
GATHERED = "a bucket is not gathered while gathered"
FREED = "a bucket is freed while gathered"
HALVES = "a bucket is not freed between I and W"
LEFT = "a sliced bucket is freed again when all computation is done"
ORDER = "an action gathers, then reduces, then frees"
WHOLE = "a whole bucket is never gathered or freed"
LISTED = "the buckets of a backward are reduced in listed order"
OWN_BACKWARD = "a bucket is reduced inside its own chunk's backward"

# Replacements in the list of rank 1, or of the rank named.
Edits = Mapping[str, tuple[tuple[tuple[str, str], ...], str]]

# Of zbv over 2 ranks and 2 micro-batches, a bucket per chunk, sliced, freed after each use:
# g1 1RECV_F0 1RECV_F1 w[g1 1RECV_F0] 1F0[g2 f1] w[g2] 2F0[g1 f2] 2SEND_F0 w[1RECV_F1 g1] 1F1[g2 f1] 2RECV_B0 w[g2]
# 2F1[f2] g2 w[2SEND_F0] 2SEND_F1 w[2RECV_B0 g2] 2I0[g1] 2RECV_B1 w[g1] 1I0 1SEND_B0 w[2SEND_F1 2RECV_B1] 2I1 1I1
# w[1SEND_B0] 1SEND_B1 2W0[r2] 1W0[r1] w[r2] 2W1[r2 f2] w[r1] 1W1[r1 f1] w[1SEND_B1 r2 r1] CLIP STEP
SLICED: Edits = {
    "a gather too late": ((("1F0[g2 f1] w[g2] 2F0[g1 f2]", "1F0[f1] 2F0[g2 g1 f2] w[g2]"),), USED),
    "a gather waited for too late": ((("w[g2] 2F0[g1 f2]", "2F0[g1 f2] w[g2]"),), USED),
    "the first gather behind its use": ((("g1 1RECV_F0", "1RECV_F0"), ("1F0[g2 f1]", "1F0[g2 g1 f1]")), USED),
    "a gather missing": ((("1F0[g2 f1] w[g2] 2F0", "1F0[f1] 2F0"),), USED),
    "a gather missing, but not its wait": ((("1F0[g2 f1] w[g2] 2F0", "1F0[f1] w[g2] 2F0"),), USED),
    "a gather of an action of its own missing": (
        ((" g2 w[2SEND_F0]", " w[2SEND_F0]"), ("2RECV_B0 g2]", "2RECV_B0]")),
        USED,
    ),
    "a gather that is not waited for": ((("w[g2] 2F0", "2F0"),), USED),
    "a gather doubled": ((("1F0[g2 f1]", "1F0[g2 g2 f1]"),), GATHERED),
    "a gather doubled by an action of its own": ((("1F0[g2 f1] w[g2]", "1F0[g2 f1] g2 w[g2]"),), GATHERED),
    "a gather of what is gathered": ((("2I0[g1]", "2I0[g1 g2]"),), GATHERED),
    "a gather of another rank's bucket": (
        (("1F0[g2 f1]", "1F0[g2 g0 f1]"),),
        "a rank gathers and frees its own chunks' buckets",
    ),
    "a free of a bucket that is not there": (
        (("1F0[g2 f1]", "1F0[g2 f1 f9]"),),
        "a rank gathers and frees its own chunks' buckets",
    ),
    "freed by I": ((("1I0 1SEND_B0", "1I0[f1] 1SEND_B0"),), HALVES),
    "freed between I and W by another chunk": ((("2I1 1I1", "2I1[f1] 1I1"),), HALVES),
    "freed between I and W, and gathered again": ((("2I1 1I1", "2I1[f1] g1 w[g1] 1I1"),), HALVES),
    "freed after the first of two W": ((("1W0[r1]", "1W0[r1 f1]"), ("1W1[r1 f1]", "1W1[r1]")), HALVES),
    "freed twice": ((("2W1[r2 f2]", "2W1[r2 f2 f2]"),), FREED),
    "freed twice, later": ((("1W1[r1 f1]", "1W1[r1 f1 f2]"),), FREED),
    "freed while it is gathered": ((("2I0[g1]", "2I0[g1 f1]"),), FREED),
    "freed too early": ((("2F0[g1 f2]", "2F0[g1 f1 f2]"),), FREED),
    "freed before its use": ((("w[g2] 2F0[g1 f2]", "f2 w[g2] 2F0[g1]"),), "a compute action frees, when it ends"),
    "not freed": ((("2F0[g1 f2]", "2F0[g1]"),), GATHERED),
    "not freed in the end": ((("1W1[r1 f1]", "1W1[r1]"),), LEFT),
    "gathered again in the end": ((("CLIP STEP", "g1 w[g1] CLIP STEP"),), LEFT),
    "gathered again after CLIP": ((("CLIP STEP", "CLIP g1 w[g1] STEP"),), "a training plan ends with"),
    "freed before its contribution was sent": ((("2W1[r2 f2]", "2W1[f2 r2]"),), ORDER),
    "freed before another is gathered": ((("2F0[g1 f2]", "2F0[f2 g1]"),), ORDER),
    "gathered after a reduction has started": ((("2W1[r2 f2]", "2W1[r2 g1 f2]"),), ORDER),
    "all but the last micro-batch's gradients dropped": (
        (("2W0[r2]", "2W0"), ("1W0[r1]", "1W0"), ("w[r2] 2W1", "2W1"), ("w[r1] 1W1", "1W1")),
        ONCE,
    ),
    "the last micro-batch's gradients dropped": ((("2W1[r2 f2]", "2W1[f2]"), ("1SEND_B1 r2", "1SEND_B1")), ONCE),
    "a micro-batch added up twice": ((("2W0[r2]", "2W0[r2 r2]"),), ONCE),
    "a micro-batch reduced by I too": ((("2I0[g1]", "2I0[g1 r2]"),), ONCE),
    "a micro-batch reduced by I instead": ((("2I0[g1]", "2I0[g1 r2]"), ("2W0[r2]", "2W0")), ONCE),
    "a reduction by another chunk": ((("2W0[r2] 1W0[r1]", "2W0 1W0[r2 r1]"),), OWN_BACKWARD),
    "a reduction by a forward": ((("2F0[g1 f2]", "2F0[g1 r2 f2]"),), OWN_BACKWARD),
    "a reduction of its own": ((("2W0[r2]", "2W0 r2"),), OWN_BACKWARD),
    "a reduction under way when the bucket is filled": (
        (("w[r2] 2W1[r2 f2]", "2W1[r2 f2]"),),
        "a reduction has ended before the bucket is filled again",
    ),
    "a reduction that outlasts CLIP": (
        (("w[1SEND_B1 r2 r1] CLIP", "w[1SEND_B1 r2] CLIP w[r1]"),),
        "reductions end before ties and CLIP",
    ),
    "a reduction that is not waited for": ((("1SEND_B1 r2 r1]", "1SEND_B1 r2]"),), "everything posted is waited for"),
}

# Of 1f1b over 2 ranks and 2 micro-batches, two updated buckets per chunk:
# g2 g3 1RECV_F0 1RECV_F1 w[g2 g3 1RECV_F0] 1F0 1B0[r3 r2] 1SEND_B0 w[1RECV_F1] 1F1 w[r3 r2] 1B1[r3 r2] ...
UPDATED: Edits = {
    "a gather missing": ((("g2 g3 1RECV_F0", "g2 1RECV_F0"), ("w[g2 g3", "w[g2")), USED),
    "a gather in the second forward": (
        (("g2 g3 1RECV_F0", "g2 1RECV_F0"), ("w[g2 g3", "w[g2"), ("1F1", "1F1[g3]")),
        USED,
    ),
    "a gather doubled": ((("1F0 ", "1F0[g3] "),), "an updated bucket is gathered once"),
    "freed": ((("1F1", "1F1[f3]"),), "an updated bucket is never freed"),
    "two reductions swapped": (
        (("1B0[r3 r2]", "1B0[r2 r3]"),),
        "the buckets of a backward are reduced in listed order",
    ),
    "all but the last micro-batch's gradients dropped": ((("1B0[r3 r2]", "1B0"), ("w[r3 r2] 1B1", "1B1")), ONCE),
}


def edited(plan: Plan, *edits: tuple[str, str]) -> Plan:
    text = format_actions(plan.actions[1])
    for old, new in edits:
        assert old in text, f"no {old}: {text}"
        text = text.replace(old, new, 1)
    return replace(plan, actions=(plan.actions[0], parse_actions(text)))


@pytest.mark.parametrize(
    ("plan", "mutations"),
    [
        (sharded("zbv", 2, 2, Residency.USE), SLICED),
        (sharded("1f1b", 2, 2, Residency.STEP, Weights.UPDATED, num_buckets=2), UPDATED),
    ],
    ids=["sliced", "updated"],
)
def test_every_mutation_is_killed(plan: Plan, mutations: Edits, count_mutations: CountMutations) -> None:
    verify(plan)
    survivors = {}
    for name, (edits, rule) in mutations.items():
        try:
            verify(edited(plan, *edits))
            survivors[name] = "accepted"
        except PlanError as error:
            if not str(error).startswith(rule):
                survivors[name] = str(error)
            assert "\n" not in str(error)
    count_mutations("weights and gradients of slices (verifier)", len(mutations) - len(survivors), len(mutations))
    assert not survivors


def test_a_whole_bucket_stays_where_it_is() -> None:
    plan = sharded("1f1b", 2, 1, Residency.USE, Weights.WHOLE)
    verify(plan)
    for word, mutant in (("1F0", "1F0[g1]"), ("1F0", "1F0[f1]"), ("1F0", "g1 1F0")):
        with pytest.raises(PlanError, match=f"{WHOLE}: found [gf]1"):
            verify(edited(plan, (word, mutant)))


def test_a_bucket_reduced_once_a_step_is_reduced_by_the_last_backward_alone() -> None:
    plan = sharded("1f1b", 2, 2, Residency.USE, reduced=Reduced.STEP)
    verify(plan)
    with pytest.raises(PlanError, match="every bucket is reduced exactly once: bucket 1 of chunk 1 2 times"):
        verify(edited(plan, ("1B0[f1]", "1B0[r1 f1] w[r1]")))


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("1F0[f1] g1 w[1RECV_F1 g1]", "1F0[f1] w[1RECV_F1]", USED),
        ("1F0[f1] g1", "1F0[f1] g1 g1", GATHERED),
        ("1F1[f1]", "1F1", f"{LEFT}: bucket 1 is not when the list ends"),
        ("1F1[f1]", "1F1[r1 f1]", "only a training plan updates weights"),
    ],
)
def test_a_forward_plan_gathers_and_frees_too(old: str, new: str, rule: str) -> None:
    plan = sharded("forward_only", 2, 2, Residency.USE)
    verify(plan)
    with pytest.raises(PlanError, match=rule):
        verify(edited(plan, (old, new)))


def test_what_is_posted_again_was_waited_for() -> None:
    """No plan that passes the checks before comes as far."""
    plan = sharded("1f1b", 2, 1, Residency.USE)
    with pytest.raises(PlanError, match="an action is not posted again before it was waited for: g1 is"):
        check_posting(edited(plan, ("g1 ", "g1 g1 ")))


def test_the_error_shows_state_and_place() -> None:
    plan = edited(sharded("zbv", 2, 2, Residency.USE), ("w[g2] 2F0", "2F0"))
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert str(caught.value) == (
        f"{USED}: 2F0[g1 f2] uses bucket 2, which is gathered but not waited for (rank 1, action 5)"
    )
    listing, arrow = caught.value.picture.splitlines()
    assert listing[arrow.index("^") :].startswith("2F0[g1 f2] 2SEND_F0")


def test_bytes_held_at_every_place() -> None:
    """Weights from the gather's start to the free, a gradient buffer until it has been waited for."""
    plan = sharded("1f1b", 2, 1, Residency.USE)
    assert format_actions(plan.actions[0]) == (
        "g0 w[g0] 0F0[f0] g0 0SEND_F0 0RECV_B0 w[g0 0SEND_F0 0RECV_B0] 0B0[r0 f0] w[r0] CLIP STEP"
    )
    assert held_bytes(plan, 0, {0: 10.0}, {0: 4.0}) == [10, 10, 10, 10, 10, 10, 10, 14, 4, 0, 0]
    # Tensors that replicas hold whole all the time, or reduce once per step, are counted as resident bytes.
    whole = sharded("1f1b", 2, 1, Residency.USE, Weights.UPDATED, Reduced.STEP)
    assert not any(held_bytes(whole, 0, {0: 10.0}, {0: 4.0}))
