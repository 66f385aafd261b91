"""Rung: pure. A machine as a recorded run found it, on runs that the simulator made at other rates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans.synthetic_runs import Truth, write_run

from tpengine.cli import main
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig, validate
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.question import Question, candidates, shapes
from tpengine.planner.advice.recorded import machine_as_recorded
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.diagnose.evidence import read_evidence
from tpengine.planner.machine import MACHINES, Machine

CPU = replace(MACHINES["cpu"], ranks_per_node=4)


def config_of(tp: int, pp: int, dp: int) -> Config:
    config = Config(
        model=ModelConfig(hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=512),
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        train=TrainConfig(seq_len=64, micro_batch_size=2, num_micro_batches=4, steps=30),
        device="cpu",
    )
    return validate(config, tp * pp * dp)


def slower(machine: Machine, times: float) -> Machine:
    return replace(machine, recorded=dict.fromkeys(("F", "B", "I", "W", "STEP"), times))


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_the_recorded_layout_takes_what_was_recorded(tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    config = config_of(tp, pp, dp)
    # Every chunk computes three times as long as the machine says, and a reduction takes 1 ns a byte.
    truth = Truth(work=dict.fromkeys(range(pp), 3.0), seconds_per_byte=1e-9)
    evidence = read_evidence(write_run(tmp_path / "run", config, truth))
    recorded = machine_as_recorded(CPU, evidence)
    said, took = (Sheet.of(config, machine).seconds for machine in (CPU, recorded))
    assert took > 1.5 * said
    assert took == pytest.approx(evidence.profile.plan_seconds, rel=0.02)


def test_messages_that_were_recorded_take_the_links_between_nodes_too(tmp_path: Path) -> None:
    """Four stages on nodes of two: one pair crosses, and the run has one rate for all."""
    machine = replace(CPU, ranks_per_node=2, between=replace(CPU.between, bytes_per_s=1e3, latency_s=1.0))
    evidence = read_evidence(write_run(tmp_path / "run", config_of(1, 4, 1), Truth(work=dict.fromkeys(range(4), 3.0))))
    told = replace(evidence, profile=replace(evidence.profile, link_seconds=1e-3))
    recorded = machine_as_recorded(machine, told)
    assert recorded.within.bytes_per_s == recorded.between.bytes_per_s > 1e4
    assert recorded.within.latency_s == recorded.between.latency_s == 0.0
    one_node = machine_as_recorded(replace(machine, ranks_per_node=4), told)
    assert one_node.between.bytes_per_s == 1e3 and one_node.within == recorded.within


def test_other_layouts_are_as_much_slower() -> None:
    config = config_of(1, 1, 2)
    three = slower(CPU, 3.0)
    for number in (1, 4):
        other = replace(config, train=replace(config.train, num_micro_batches=number))
        fast, slow = (Sheet.of(other, machine) for machine in (CPU, three))
        assert slow.parts.compute == pytest.approx(3 * fast.parts.compute)
        assert slow.parts.step == pytest.approx(slow.seconds)


@pytest.mark.slow
def test_bounds_stay_below_what_was_recorded() -> None:
    question = Question(config_of(1, 1, 1), slower(CPU, 0.4), 4, 8)
    bounds, seen = Bounds(question), 0
    for shape in shapes(question):
        for layout in list(candidates(question, shape))[::7]:
            try:
                sheet = Sheet.of(layout.config(question), question.machine)
            except ValueError:
                continue
            assert bounds.seconds(layout) <= sheet.seconds * (1 + 1e-9), layout.words()
            assert bounds.played_seconds(layout) <= sheet.seconds * (1 + 1e-9), layout.words()
            seen += 1
    assert seen > 20


def test_the_command_takes_a_run_and_refuses_that_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", config_of(1, 2, 1), Truth(work={0: 3.0, 1: 3.0}))
    asked = ["plan", "--model", str(run), "--ranks", "2", "--pp", "2", "--micro-batch", "2", "--global-batch", "8"]

    def seconds_of(*more: str) -> float:
        assert main([*asked, *more]) == 0
        step = re.search(r"step ([0-9.]+) (s|ms)", capsys.readouterr().out)
        assert step is not None
        return float(step[1]) * (1e-3 if step[2] == "ms" else 1.0)

    assert seconds_of("--profile", str(run)) > 2 * seconds_of()
    assert seconds_of("--profile", str(run / "profile.json")) == seconds_of("--profile", str(run))
    assert main(["plan", "--model", "bench", "--ranks", "2", "--pp", "2", "--profile", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another model: hidden_size 256, asked 512: record a run" in line
    assert main([*asked, "--seq-len", "32", "--profile", str(run)]) == 2
    assert "another sequence length: 64, asked 32" in capsys.readouterr().err
