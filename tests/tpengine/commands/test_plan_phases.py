"""Rung: pure; processes when slow. `tpengine schedule`, `plan` and `certify` know the plan of each phase of a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tpengine.checkpoint.run_directory import write_config
from tpengine.cli import main
from tpengine.commands import certify
from tpengine.commands.certify import CertifiedLayout, CertifyOptions
from tpengine.config import ParallelConfig, phases_of, validate_run
from tpengine.config.presets import preset_config
from tpengine.layout.step_plan import phase_layouts, training_plan

PHASES = """
[[phase]]
until = 4
micro_batches = 8

[[phase]]
until = 6
micro_batches = 2
train.seq_len = 64
"""


@pytest.fixture
def phases(tmp_path: Path) -> Path:
    path = tmp_path / "phases.toml"
    path.write_text(PHASES)
    return path


def test_a_schedule_is_that_of_the_phase_asked_for(
    tmp_path: Path, phases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = replace(preset_config("tiny"), phases=str(phases), parallel=ParallelConfig(1, 2, 2))
    all_of_run = phases_of(validate_run(base, 4))
    for number, (phase, layout) in enumerate(zip(all_of_run, phase_layouts(all_of_run), strict=True), 1):
        text = tmp_path / f"{number}.plan"
        argv = ["schedule", "--model", "tiny", "--pp", "2", "--dp", "2", "--phases", str(phases)]
        assert main([*argv, "--phase", str(number), "--plan-text", str(text)]) == 0
        assert text.read_text() == training_plan(phase.config, layout).text()
        train = phase.config.train
        assert (
            f"phase {number} of 2, steps {phase.first_step + 1} to {phase.end_step}: {train.num_micro_batches} "
            f"micro-batches of {train.micro_batch_size} x {train.seq_len} tokens per replica\n"
        ) in capsys.readouterr().out


def test_a_last_phase_without_until_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the preset's number of steps is; --steps says where it ends."""
    plan = ["plan", "--model", "tiny", "--machine", "cpu", "--ranks", "2", "--pp", "2"]
    schedule = ["schedule", "--model", "tiny", "--pp", "2", "--phase", "2"]
    guess = "; layers are split for phase 2, taken for the longest: --steps N says how long it is\n"
    for until, seq_len in ((1000, 128), (100, 64)):
        path = tmp_path / f"{until}.toml"
        path.write_text(f"[[phase]]\nuntil = {until}\n[[phase]]\ntrain.seq_len = {seq_len}\n")
        for argv in (plan, schedule):
            assert main([*argv, "--phases", str(path)]) == 0
            shown = capsys.readouterr().out
            assert f"phase 2 of 2, steps {until + 1} on: " in shown
            assert (guess in shown) == (seq_len == 64)
            assert argv is schedule or shown.endswith(f" --phases {path} --train.steps N\n")
            assert main([*argv, "--phases", str(path), "--steps", "1001"]) == 0
            shown = capsys.readouterr().out
            assert f"phase 2 of 2, steps {until + 1} to 1001: " in shown and guess not in shown
            assert argv is schedule or shown.endswith(f" --phases {path} --train.steps 1001\n")
        options = CertifyOptions(
            CertifiedLayout(dp=2), None, "tiny", None, "float32", "1f1b", "fused", 0, 1, False, phases=str(path)
        )
        assert len(certify._phases(options, options.layout)) == 2


def test_a_sheet_is_worked_out_for_every_phase(
    tmp_path: Path, phases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sheet.json"
    argv = ["plan", "--model", "tiny", "--machine", "h200", "--tp", "1", "--pp", "2", "--dp", "2", "--json", str(out)]
    assert main([*argv, "--phases", str(phases)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^phase (\d) of 2", shown, re.MULTILINE) == ["1", "2"] and shown.count("\nstep ") == 2
    assert f" --phases {phases}\n" in shown
    first, second = json.loads(out.read_text())["phases"]
    assert first["step_seconds"] > second["step_seconds"]


def test_a_run_like_another_is_started_with_its_phases(
    tmp_path: Path, phases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the copy that it keeps, wherever it is now: the file that it was given may be gone."""
    was, run = tmp_path / "was", tmp_path / "run"
    was.mkdir()
    config = replace(preset_config("tiny"), phases=str(phases), run_dir=str(was))
    write_config(validate_run(config, 1), was, keeps_equal=False)
    was.rename(run)
    phases.unlink()
    argv, kept = ["plan", "--machine", "cpu", "--ranks", "1"], run / "phases.toml"
    assert main([*argv, "--model", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f" --phases {kept} --train.steps 6\n")
    assert main([*argv, "--resume", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "phase 2 of 2" in shown and "--phases" not in shown
    advise = ["advise", *argv[1:], "--seconds", "1000", "--micro-batch", "1"]
    assert main([*advise, "--model", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{kept} has phases: this is advice for the settings of config.toml, which" in shown
    assert re.search(rf"^run it: .* --phases {kept} --train.steps 6 ", shown, re.MULTILINE)
    assert main([*advise, "--resume", str(run)]) == 0
    assert "--phases" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["schedule", "--model", "tiny", "--phase", "2"], "--phase must be one of 1 to 1: got 2, a run without"),
        (["schedule", "--model", "tiny", "--phases", "FILE", "--phase", "3"], "--phase must be one of 1 to 2: got 3"),
        (["schedule", "--model", "tiny", "--phases", "FILE", "--steps", "5"], "--steps 5, FILE ends at step 6: leave"),
        (["plan", "--model", "tiny", "--ranks", "1", "--steps", "5"], "--steps is for the phases of a run: got 5, no"),
        (
            ["schedule", "--model", "tiny", "--phases", "FILE", "--micro-batches", "16"],
            "tokens per replica: got --micro-batches 16, it has 8: leave --micro-batches out",
        ),
        (["plan", "--model", "tiny", "--ranks", "1", "--phases", "FILE", "--global-batch", "48"], "it has 64: leave"),
        (["schedule", "--phases", "FILE"], "--phases is for a model: got no --model"),
        (["schedule", "--model", "tiny", "--phases", "nowhere.toml"], "nowhere.toml"),
        (["plan", "--model", "tiny", "--dp", "4", "--ranks", "4", "--phases", "FILE"], "phase 2 has 2 per step, dp 4"),
        (["certify", "--tp", "2", "--fast", "--phases", "FILE"], "--fast compares one phase: got --phases"),
        (["certify", "--tp", "2", "--phases", "nowhere.toml"], "nowhere.toml"),
        (["certify", "--dp", "4", "--phases", "FILE"], "phase 2"),
    ],
)
def test_what_no_phase_can_be_is_one_line(
    phases: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    assert main([str(phases) if word == "FILE" else word for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error.replace("FILE", str(phases)) in line


def test_certify_trains_each_phase_by_itself(phases: Path) -> None:
    options = CertifyOptions(
        CertifiedLayout(dp=2), None, "certify", None, "float32", "1f1b", "fused", 0, 1, False, phases=str(phases)
    )
    for layout in (options.layout, CertifiedLayout()):
        configs = certify._phases(options, layout)
        assert [config.train.num_micro_batches * layout.dp for config in configs] == [8, 2]
        assert [config.train.seq_len for config in configs][1] == 64 and {config.phases for config in configs} == {""}


@pytest.mark.slow
def test_phases_are_certified(phases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--dp", "2", "--steps", "1", "--phases", str(phases)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("of 2, from drawn weights:\n") == 2 and shown.endswith("certified: identical\n")
