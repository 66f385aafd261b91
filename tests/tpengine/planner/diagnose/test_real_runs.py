"""Rung: gloo ranks. Faults put into real runs of 2 and 4 ranks are named first.

The faults' sizes are shares of the step, and verdicts are of the recorded medians: no time decides. How near what a
change brings is to what it brought was measured once: benchmarks/planner/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.faults.cases import NAMED_FROM, Case, all_cases, paced_config, settings_of
from support.faults.faulty_runs import Fault, run_with
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.planner.diagnose.changes import changed
from tpengine.planner.diagnose.evidence import Fault as Verdict
from tpengine.planner.diagnose.evidence import read_evidence
from tpengine.planner.diagnose.verdict import Diagnosis, diagnose, diagnosed

# Of runs that compute, which are dear, one size of each fault is enough. A slow reader is none of them: it is as slow
# as a step was before, and a step that takes longer, beside another test, hides it.
_OTHER_SIZES = (0.1, 0.4)
CASES = {
    case.name: case
    for case in all_cases()
    if "computing" not in case.name or (case.share not in _OTHER_SIZES and case.verdict is not Verdict.SLOW_INPUT)
}


def ran(ranks: RankPool, run_dir: Path, config: Config, fault: Fault, case: Case) -> list[float]:
    run_dir.mkdir()
    return max(ranks.run(run_with, case.num_ranks, config, str(run_dir), fault, case.forward_seconds))


def judged(run_dir: Path) -> Diagnosis:
    """The diagnosis of the recorded medians, as if the run's steps did not differ: a busy host makes them differ."""
    evidence = read_evidence(run_dir)
    middle = sorted(evidence.profile.steps, key=lambda step: step.seconds)[len(evidence.profile.steps) // 2]
    steady = replace(evidence, profile=replace(evidence.profile, steps=(middle,)), step_seconds=())
    return diagnosed(steady)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.verdict is not Verdict.NONE], ids=lambda case: case.name
)
def test_a_fault_is_named_first(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    """From a share of 20 % on; of smaller ones none is named instead.

    A rank whose core another test takes is slow in truth; a verdict of ours that is wrong comes again.
    """
    allowed = (case.verdict,) if case.share >= NAMED_FROM else (case.verdict, Verdict.NONE)
    for number in range(3):
        bare, faulty = tmp_path / f"bare {number}", tmp_path / f"with {number}"
        step = 0.0 if case.healed is None else min(ran(ranks, bare, case.config, case.bare, case))
        ran(ranks, faulty, case.config, case.fault(step), case)
        found = judged(faulty)
        print(*found.lines(), sep="\n")
        if found.fault in allowed:
            break
    assert found.fault in allowed, found.lines()
    if case.healed is None and found.findings:
        # The change is a run's: it is legal, and it starts.
        settings = settings_of(found.findings[0].change)
        validate(changed(case.config, **settings), case.num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.verdict is Verdict.NONE], ids=lambda case: case.name
)
def test_a_healthy_run_has_no_verdict(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    """A rank whose core another test takes is slow in truth; a verdict of ours that is wrong comes again."""
    for number in range(3):
        run_dir = tmp_path / f"run {number}"
        ran(ranks, run_dir, case.config, case.fault(0.0), case)
        found = diagnose(run_dir)
        print(*found.lines(), sep="\n")
        if found.fault is Verdict.NONE:
            break
    assert found.fault is Verdict.NONE, found.lines()


@pytest.mark.slow
def test_a_slow_reader_in_a_short_run(ranks: RankPool, tmp_path: Path) -> None:
    """By default one real run: what meter, trace and files say comes together. The fault is most of the step.

    Reading takes longer than all else, so that it holds the step up even where it is done beside it.
    """
    config = paced_config(2, m=2)
    case = Case("short", Verdict.SLOW_INPUT, 0.5, config, lambda _: Fault(read=1.0), forward_seconds=0.004)
    ran(ranks, tmp_path / "run", config, case.fault(0.0), case)
    found = judged(tmp_path / "run")
    assert found.fault is Verdict.SLOW_INPUT, found.lines()
    assert found.findings[0].seconds >= 0.5 and "rank 0 reads" in found.findings[0].evidence
