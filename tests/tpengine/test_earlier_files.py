"""Rung: pure, gloo ranks. What an earlier version wrote is read, drawn, diagnosed, resumed and generated from.

The files in earlier_files are of revision 6da7eea, which counted steps from 0: a token file and its fit index, a plan,
and two runs, each with configuration, metrics, samples and a checkpoint. `fast` is of one process, went back three
times, was resumed, and has a schedule of its own, a profile and a trace. `exact` is of tp 2 x dp 2 with ZeRO 1, and
skipped its last step. earlier_files/write.sh has the command lines that made them. earlier_files/said is what 6da7eea
itself made of them, and is compared with what is made today.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.programs import run_module, run_ranks

from tpengine.checkpoint.rollbacks import read_rollbacks
from tpengine.checkpoint.run_directory import is_running
from tpengine.cli import main
from tpengine.config import Config, DataConfig, TrainConfig
from tpengine.data import open_corpus
from tpengine.plan import parse_plan, verify
from tpengine.plan.actions import parse_actions

WRITTEN = Path(__file__).parent / "earlier_files"
SAID = WRITTEN / "said"
RUNS = ("fast", "exact")
# Of a row of metrics.jsonl: what no clock decides.
NUMBERS = ("loss", "grad_norm", "lr", "held_out_loss", "spike_loss", "spike_grad_norm")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, which is the current directory: their configurations name the text beside them."""
    copy = tmp_path / "files"
    shutil.copytree(WRITTEN, copy)
    monkeypatch.chdir(copy)
    return copy


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said_now(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def assert_went_on(run: str) -> None:
    """The run's rows are those that the earlier version came to, with steps counted from 1."""
    got, earlier = rows(Path(run, "metrics.jsonl")), rows(SAID / f"{run}.metrics.jsonl")
    assert [row["step"] for row in got] == [row["step"] + 1 for row in earlier]
    for now, before in zip(got, earlier, strict=True):
        assert [now.get(name) for name in ("skipped", "event")] == [before.get(name) for name in ("skipped", "event")]
        for name in NUMBERS:
            # Other machines round otherwise.
            assert now.get(name) == (None if name not in before else pytest.approx(before[name], rel=1e-3)), name


GO_ON = ("--resume", "--train.steps", "10", "--train.profile-steps", "")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_goes_on_as_the_version_that_began_it(files: Path, run: str) -> None:
    """In one process each: `exact` in another layout than it was written in."""
    layout = ("--parallel.tp", "1", "--parallel.dp", "1", "--parallel.zero", "0")
    done = run_module("tpengine.train", "--run-dir", run, *GO_ON, *layout, cwd=files)
    assert done.returncode == 0, done.stderr
    assert_went_on(run)


@pytest.mark.slow
def test_an_exact_run_goes_on_in_its_own_layout(files: Path) -> None:
    ends = run_ranks(4, "tpengine.train", "--run-dir", "exact", *GO_ON, cwd=files)
    assert [done.returncode for done in ends] == [0] * 4, ends[0].stderr
    assert_went_on("exact")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_generated_from(files: Path, capsys: pytest.CaptureFixture[str], forked_ranks: None, run: str) -> None:
    asked = ("--prompt", "tokens", "--max-tokens", "12", "--temperature", "1", "--seed", "3")
    assert said_now(capsys, "generate", run, *asked) == (SAID / f"{run}.generate.txt").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_are_listed_and_whole(files: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    # The last column is an age.
    table = [line.rsplit("  ", 1)[0].split() for line in said_now(capsys, "checkpoint", "ls", run).splitlines()]
    earlier = (SAID / f"{run}.checkpoints.txt").read_text().splitlines()
    assert table == [line.rsplit("  ", 1)[0].split() for line in earlier]
    assert said_now(capsys, "checkpoint", "verify", run)


@pytest.mark.parametrize("run", RUNS)
def test_metrics_are_drawn(files: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    said_now(capsys, "watch", run, "--once", "--svg", "drawn.svg")
    drawn = Path("drawn.svg").read_text()
    assert run in drawn and "skip" in drawn
    assert ("rollback" in drawn) == (run == "fast")


def test_a_profile_is_diagnosed_and_predicts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said_now(capsys, "diagnose", "fast", "--json")) == json.loads(
        (SAID / "diagnose.json").read_text()
    )
    other = ("--schedule", "gpipe", "--pp", "1", "--micro-batches", "4")
    said = said_now(capsys, "schedule", "--profile", "fast/profile.json", *other, "--draw", "drawn.svg")
    assert said.startswith((SAID / "schedule.txt").read_text())
    assert Path("drawn.svg").read_text().startswith("<svg")
    for event in json.loads(Path("fast/trace.json").read_text())["traceEvents"]:
        assert event["ph"] == "M" or parse_actions(event["name"].split(" <- ")[0])


def test_rollbacks_are_read() -> None:
    found = read_rollbacks(WRITTEN / "fast" / "rollbacks.jsonl")
    assert [(of.step, of.to, of.samples) for of in found] == [(2, 0, ((4 * n, 4 * n + 4),)) for n in (2, 3, 4)]


def test_a_plan_is_read_and_is_legal() -> None:
    text = (WRITTEN / "plan.txt").read_text()
    plan = parse_plan(text)
    verify(plan)
    assert plan.text() == text


@pytest.mark.parametrize(("packing", "samples"), [("cut", 187), ("documents", 187), ("fit", 188)])
def test_a_token_file_is_read(files: Path, capsys: pytest.CaptureFixture[str], packing: Any, samples: int) -> None:
    assert "6,002 tokens" in said_now(capsys, "data", "--check", "text.tokens")
    config = replace(Config(), data=DataConfig(path="text.tokens", packing=packing), train=TrainConfig(seq_len=16))
    assert open_corpus(config).train.num_windows == samples


@pytest.mark.slow
def test_weights_are_imported_and_exported(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in RUNS:
        said_now(capsys, "import", run, "--out", f"{run}.new", "--data.path", "text.tokens", "--train.seq-len", "16")
        done = run_module("tpengine.train", "--run-dir", f"{run}.new", "--resume", "--train.steps", "1", cwd=files)
        assert done.returncode == 0, done.stderr
        said_now(capsys, "export", run, "--out", f"{run}.exported")


def test_nothing_names_the_machine_that_wrote_it() -> None:
    for path in (path for path in WRITTEN.rglob("*") if path.is_file()):
        assert not any(word in path.read_bytes() for word in (b"/tmp", b"/work", b"/home", b"/root")), path
    assert is_running(WRITTEN / "fast") in (None, False)
