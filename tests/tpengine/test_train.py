"""Rung: gloo ranks, through torchrun and `python -m tpengine.train` as a user starts them.

What only a GPU checks: --device cuda.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import Running, finish_all, run_module, run_ranks
from support.ranks.progress import run_program

from tpengine import train
from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.config import Config
from tpengine.config.toml import load_toml
from tpengine.data import write_tokens

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48"),
    *("--train.seq-len", "32", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
    *("--train.steps", "4", "--train.eval-micro-batches", "2", "--train.sample-tokens", "5", "--device", "cpu"),
)


def alone(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Train in one process."""
    return run_module("tpengine.train", *arguments, cwd=cwd)


def by_torchrun(
    num_ranks: int, *arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "tpengine.train")
) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_program(
        [sys.executable, *launcher, *program, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.by_default("2-sizes1")
@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(1, (1, 1, 1)), (2, (2, 1, 1)), pytest.param(4, (2, 2, 1), marks=pytest.mark.slow)]
)
def test_a_run_says_its_plan_and_leaves_its_files(tmp_path: Path, num_ranks: int, sizes: tuple[int, int, int]) -> None:
    """Four ranks are started by torchrun."""
    arguments = *SMALL, "--run-dir", "out"
    if num_ranks == 1:
        done = alone(*arguments, cwd=tmp_path)
    elif num_ranks == 2:
        done, other = run_ranks(2, "tpengine.train", *arguments, cwd=tmp_path)
        assert not other.stdout, "more than one rank printed"
    else:
        done = by_torchrun(4, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tp, pp, dp = sizes
    for text in (
        f"tp {tp} x pp {pp} x dp {dp}",
        "parameters",
        "bubble",
        "out",
        "step 4/4",
        "tokens/s",
        "held-out loss",
        "sample, continuing",
    ):
        assert text in done.stdout, done.stdout
    assert done.stdout.count("\nheld-out loss") == 1, "more than one rank printed"
    assert done.stdout.count("MB per rank with gradients and moments") == pp
    assert done.stdout.count("MB per rank by the plan: weights ") == pp

    steps = records(tmp_path / "out")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "step_seconds", "tokens_per_second", "peak_memory_bytes"} <= set(steps[0])
    resolved = load_toml(tmp_path / "out" / "config.toml", Config())
    assert (resolved.parallel.tp, resolved.parallel.pp, resolved.parallel.dp) == sizes
    assert resolved.device == "cpu" and resolved.train.steps == 4


@pytest.mark.slow
def test_a_saved_configuration_repeats_the_run_in_another_layout(tmp_path: Path) -> None:
    first = alone(*SMALL, "--train.dtype", "float64", "--run-dir", "one", cwd=tmp_path)
    layout = "--parallel.tp", "1", "--parallel.pp", "2"
    again = run_ranks(2, "tpengine.train", "--config", "one/config.toml", *layout, "--run-dir", "two", cwd=tmp_path)
    assert [done.returncode for done in (first, *again)] == [0, 0, 0], first.stderr + again[0].stderr
    for a, b in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-9 * a["loss"]


@pytest.mark.slow
def test_a_schedule_file_stays_with_the_run(tmp_path: Path) -> None:
    """The run can be repeated and continued when the file is gone, also in another directory."""
    mine = tmp_path / "mine.txt"
    mine.write_text("rank 0: 0F0 0F1 0B1 0B0\n")
    sizes = "--train.num-micro-batches", "2", "--train.micro-batch-size", "1"
    done = alone(*SMALL, *sizes, "--parallel.schedule", str(mine), "--run-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = mine.read_bytes()
    mine.unlink()
    (tmp_path / "out").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "mine.txt").read_bytes() == text
    done = alone("--run-dir", "moved", "--resume", "--train.steps", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_toml(tmp_path / "moved" / "config.toml", Config()).parallel.schedule == "moved/mine.txt"
    assert len(records(tmp_path / "moved")) == 5


@pytest.mark.slow
def test_an_earlier_run_in_the_same_directory_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        done = alone(*SMALL, "--train.checkpoint-every", "0", "--run-dir", ".", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "metrics.1.jsonl" in done.stderr
    assert len(records(tmp_path)) == 4
    assert len((tmp_path / "metrics.1.jsonl").read_text().splitlines()) == 4
    assert tomllib.loads((tmp_path / "config.1.toml").read_text())["train"]["steps"] == 4


def test_a_run_with_checkpoints_is_continued_or_left_alone(tmp_path: Path) -> None:
    """Forgetting --resume must not hide what there is."""
    assert alone(*SMALL, "--run-dir", "out", cwd=tmp_path).returncode == 0
    done = alone(*SMALL, "--run-dir", "out", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "must not hide the checkpoints of another: out has step-00000004: continue it with --resume" in done.stderr
    done = alone("--run-dir", "out", "--resume", cwd=tmp_path)
    assert done.returncode == 0 and "all 4 steps are done" in done.stdout and "held-out loss" in done.stdout
    done = alone("--run-dir", "out", "--resume", "--train.steps", "3", cwd=tmp_path)
    assert done.returncode == 2 and "must not be shorter than it is" in done.stderr
    longer = ("--train.steps", "5", "--optim.lr", "0.001", "--optim.warmup-steps", "1")
    done = alone("--run-dir", "out", "--resume", *longer, cwd=tmp_path)
    assert done.returncode == 0
    changed = [line for line in done.stdout.splitlines() if line.startswith("changed since the checkpoint: ")]
    assert [line.partition(": ")[2] for line in changed] == [
        "optim.lr from 0.003 to 0.001",
        "optim.warmup_steps from 20 to 1",
        "train.steps from 4 to 5",
    ]
    assert records(tmp_path / "out")[4]["lr"] == pytest.approx(0.0001)
    assert "the learning rate is at its end, 0.0001, from step 4 on: --optim.decay-steps 5 would stretch" in done.stdout
    assert load_toml(tmp_path / "out/config.toml", Config()).optim.decay_steps == 4
    assert len(records(tmp_path / "out")) == 5


@pytest.mark.slow
def test_metrics_of_a_run_that_cannot_be_continued_are_kept(tmp_path: Path) -> None:
    """--resume without any checkpoint starts at step 1."""
    assert alone(*SMALL, "--train.checkpoint-every", "0", "--run-dir", "out", cwd=tmp_path).returncode == 0
    done = alone("--run-dir", "out", "--resume", "--train.steps", "2", cwd=tmp_path)
    assert done.returncode == 0 and "no checkpoint yet: starting at step 1" in done.stdout
    assert len((tmp_path / "out" / "metrics.1.jsonl").read_text().splitlines()) == 4
    assert len(records(tmp_path / "out")) == 2


LONG = (*SMALL, "--train.steps", "100000", "--run-dir", "out")


def start_long_run(tmp_path: Path) -> Running:
    """A run in one process that has made its first step."""
    running = Running("tpengine.train", *LONG, cwd=tmp_path)
    running.wait_until(lambda running: "\nstep 1/" in running.said(), "the run makes no step")
    return running


def test_a_directory_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    running = start_long_run(tmp_path)
    for arguments in (SMALL, ("--resume",)):
        done = alone(*arguments, "--run-dir", "out", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "a run directory belongs to one run at a time: out cannot be locked" in done.stderr
    running.send_signal(signal.SIGINT)
    (end,) = finish_all(running)
    assert end.returncode == 130 and "continue with --run-dir out --resume" in end.stderr
    done = alone("--run-dir", "out", "--resume", "--train.steps", str(len(records(tmp_path / "out"))), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nobody_reading_the_output_ends_no_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = Running("tpengine.train", *LONG, cwd=tmp_path, output=pipe)
    with pipe.open() as output:
        assert any(line.startswith("step 1/") for line in output)
    before = len(records(tmp_path / "out"))
    running.wait_until(
        lambda _: len(records(tmp_path / "out")) >= before + 30, "the run ended because nobody read its output"
    )
    running.send_signal(signal.SIGTERM)
    (end,) = finish_all(running)
    assert end.returncode == 143 and "terminated after step" in end.stderr


def test_the_default_run_directory_is_dated(tmp_path: Path) -> None:
    done = alone(*SMALL, "--train.steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert len(records(run_dir)) == 1


@pytest.mark.slow
def test_other_tokens_than_bytes(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", np.arange(20000) % 997, vocab_size=1000)
    data = "--data.path", "tokens.bin", "--model.vocab-size", "1001", "--data.ignore-token", "5"
    done, _ = run_ranks(2, "tpengine.train", *SMALL, *data, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sampled = done.stdout.split("sample, continuing")[1].splitlines()[1].split()
    assert len(sampled) == 5 and all(0 <= int(token) < 1001 for token in sampled)


THREADS_LEFT = """
import pathlib, sys
from tpengine.train import main
main()
names = sorted(p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm"))
sys.stdout.write(f"threads {names}\\n")  # in one piece: the ranks share the pipe
"""


@pytest.mark.slow
def test_no_communication_thread_outlives_the_run(tmp_path: Path) -> None:
    """A gloo thread that lets go of a tensor while the interpreter ends aborts the process (once in 100 runs)."""
    (tmp_path / "script.py").write_text(THREADS_LEFT)
    done = by_torchrun(2, *SMALL, "--run-dir", "out", cwd=tmp_path, program=("script.py",))
    assert done.returncode == 0, done.stderr
    threads = [line for line in done.stdout.splitlines() if line.startswith("threads [")]
    assert len(threads) == 2 and not any("gloo" in line for line in threads), threads


SIX_CORES = """
import os, tpengine.distributed.launch
tpengine.distributed.launch.num_cores = lambda: 6
from tpengine.train import main
main()
if os.environ["RANK"] == "1":
    import torch
    print(f"threads of rank 1: {torch.get_num_threads()}, {os.environ['OMP_NUM_THREADS']}")
"""


@pytest.mark.slow
def test_ranks_of_a_run_share_the_cores(tmp_path: Path) -> None:
    """torchrun gives each rank one thread. The number is said, saved, and compared by a run that goes on."""
    (tmp_path / "script.py").write_text(SIX_CORES)
    environ = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    short = "--train.steps", "2", "--train.eval-micro-batches", "0", "--train.sample-tokens", "0"
    done = run_program(
        [*torchrun, *SMALL, *short, "--run-dir", "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "threads   3 per rank, its share of 6 cores (OMP_NUM_THREADS sets another number)" in done.stdout
    assert "threads of rank 1: 3, 3" in done.stdout
    assert read_index(checkpoints_of(tmp_path / "out").of_step(2)).state["threads"] == 3
    done = alone("--run-dir", "out", "--resume", cwd=tmp_path)
    assert "threads   1 per rank\n" in done.stdout, done.stderr
    assert "changed since the checkpoint: threads per rank from 3 to 1, which may change the last bits" in done.stdout


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "tpengine: error:" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel.tp", "3"), "tp*pp*dp must equal the number of processes"),
        (("--data.path", "absent.bin"), "absent.bin"),
        (("--data.path", "damaged.bin"), "damaged.bin"),
        (("--device", "cuda"), "--device cuda needs a CUDA device"),
        (("--run-dir", "damaged.bin"), "--run-dir must be a directory that can be written to: damaged.bin"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, str], message: str) -> None:
    (tmp_path / "damaged.bin").write_bytes(b"TPTOKENS" + bytes(100))
    done = alone(*SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_only_training_finds_is_one_line_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "sevens", np.full(90000, 7), vocab_size=8)
    ends = run_ranks(2, "tpengine.train", *SMALL, "--data.path", "sevens", "--data.ignore-token", "7", cwd=tmp_path)
    assert [done.returncode for done in ends] == [2, 2]
    assert len(error_lines(ends[0])) == 1 and "at least one valid target" in error_lines(ends[0])[0]
    assert not error_lines(ends[1])
    done = alone(*SMALL, "--optim.lr", "1e30", "--optim.clip-norm", "0", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(error_lines(done)) == 1 and "--optim.lr" in error_lines(done)[0]


@pytest.mark.slow  # but always in CI: .ci/run names it
def test_the_default_run_of_four_ranks_learns(tmp_path: Path) -> None:
    """The README's first command, whole: the mean training loss of the last 20 steps is below 1.9 nats."""
    done = run_module("tpengine.cli", "train", "--nproc", "4", "--device", "cpu", "--run-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in records(tmp_path / "out")]
    assert sum(losses[-20:]) / 20 < 1.9
    held_out = float(done.stdout.split("held-out loss")[1].split()[0])
    assert held_out < 1.9


@pytest.mark.slow
def test_under_torchrun_only_rank_0_speaks(tmp_path: Path) -> None:
    done = by_torchrun(2, *SMALL, "--model.num-heads", "5", cwd=tmp_path)
    assert done.returncode != 0
    assert len(error_lines(done)) == 1 and "hidden_size" in error_lines(done)[0]
    assert "exitcode  : 2" in done.stderr
    assert "traceback : hidden_size must be" in done.stderr, "torchrun's own report does not end with the reason"


def test_an_interrupt_saves_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    running = start_long_run(tmp_path)
    running.send_signal(signal.SIGINT)
    (end,) = finish_all(running)
    assert end.returncode == 130
    steps = len(records(tmp_path / "out"))
    saved = f"saved in out/checkpoints/step-{steps:08}; continue with --run-dir out --resume"
    assert end.stderr == f"tpengine: interrupted after step {steps} of 100000: {saved}\n"


@pytest.mark.slow  # but always in CI: .ci/run names it
def test_one_command_starts_its_ranks_and_an_interrupt_saves_them(tmp_path: Path) -> None:
    """What the ranks and their ends are: distributed/test_launcher.py."""
    long = ("--train.steps", "100000", "--train.checkpoint-every", "100000", "--run-dir", "out")
    running = Running("tpengine.cli", "train", "--nproc", "2", *SMALL, *long, cwd=tmp_path)
    running.wait_until(lambda running: "\nstep 1/" in running.said(), "the run makes no step")
    running.send_signal(signal.SIGINT)
    (end,) = finish_all(running)
    assert end.returncode == 130 and "layout    tp 2 x pp 1 x dp 1 on cpu" in end.stdout, end.stderr
    steps = len(records(tmp_path / "out"))
    saved = f"saved in out/checkpoints/step-{steps:08}; continue with --run-dir out --resume"
    assert end.stderr == f"tpengine: interrupted after step {steps} of 100000: {saved}\n"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_which_say_so(tmp_path: Path) -> None:
    running = Running("tpengine.cli", "train", "--nproc", "2", *SMALL, "--train.steps", "100000", cwd=tmp_path)
    running.wait_until(lambda running: "\nstep 1/" in running.said(), "the run makes no step")
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    (rank,) = (pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(rank), signal.SIGKILL)
    (end,) = finish_all(running)
    died, reported = sorted(end.stderr.splitlines(), key=lambda line: "rank 0 ends" in line)
    assert (end.returncode, died) == (70, "tpengine: rank 1 was ended by SIGKILL: the other ranks end too")
    assert reported.startswith("tpengine: rank 0 ends: ") and "waiting for rank 1 (" in reported


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--nproc", "2", "--model.num-heads", "5"), "hidden_size must be"),
        (("--nproc", "0"), "--nproc must be the number of processes to start on this host, 1 to 256: got 0"),
    ],
)
def test_a_mistake_is_said_before_any_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: Any, message: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as end:
        train.main([*SMALL, *given, "--run-dir", str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("tpengine: error: ") and message in line


def test_ranks_that_torchrun_has_started_start_no_ranks(tmp_path: Path) -> None:
    ends = run_ranks(2, "tpengine.train", *SMALL, "--nproc", "2", cwd=tmp_path)
    assert [done.returncode for done in ends] == [2, 2]
    (line,) = [line for done in ends for line in done.stderr.splitlines()]
    assert line.startswith("tpengine: error: --nproc starts ranks, and this process is rank 0 of 2 already: leave it")


def test_help_ends_well(tmp_path: Path) -> None:
    done = alone("--help", cwd=tmp_path)
    assert done.returncode == 0
    for flag in ("--preset", "--config", "--model.hidden-size", "--parallel.tp", "--run-dir"):
        assert flag in done.stdout


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_of_zero(tmp_path: Path) -> None:
    """What was decided for one layout is not written down for another."""
    first = *SMALL, "--run-dir", "out", "--parallel.tp", "1", "--parallel.dp", "2", "--train.checkpoint-every", "2"
    done, _ = run_ranks(2, "tpengine.train", *first, "--parallel.zero", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero 3 residency step" in done.stdout
    assert 'residency = "auto"' in (tmp_path / "out" / "config.toml").read_text()
    more = "--run-dir", "out", "--resume", "--train.steps", "6", "--parallel.zero", "1"
    done, _ = run_ranks(2, "tpengine.train", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ", zero 1\n" in done.stdout and "step 6/6" in done.stdout
    # An elastic job that shrinks to one replica: the stage stays, and says that it is none.
    done = alone("--run-dir", "out", "--resume", "--train.steps", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero 1 with dp 1 is zero 0 in effect" in done.stdout and "step 7/7" in done.stdout
    assert "zero = 1" in (tmp_path / "out" / "config.toml").read_text()
