"""Rung: gloo ranks. Ranks are killed and hung on purpose; every run must end, say why, and go on.

By default one accident of each kind on two ranks that are started by themselves. Chains of accidents, and all that
torchrun passes on, ends or starts again, are slow: there every start loads torch.

What only a GPU checks: the same over NCCL, which does not notice a dead peer by itself (the watch's patience does).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.programs import Running, finish_all, start_ranks
from support.ranks.progress import finish, wait_until
from support.readmes import the_command

from tpengine.checkpoint.index import Index, read_index
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.last_words import read_last_words
from tpengine.planner.diagnose import chain

PROGRAM = str(ROOT / "tests/support/engine/drill_program.py")
STEPS = 16
FOREVER = ("--train.steps", "100000", "--train.checkpoint-every", "100000")
SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "4"),
    *("--train.steps", str(STEPS), "--train.checkpoint-every", "2", "--train.eval-micro-batches", "0"),
    *("--train.sample-tokens", "0", "--train.dtype", "float64", "--device", "cpu"),
)
LAYOUTS = {
    "pp x tp": ("--parallel.pp", "2", "--parallel.tp", "2"),
    "pp x dp": ("--parallel.pp", "2", "--parallel.dp", "2"),
    "pp x tp, plain": ("--parallel.pp", "2", "--parallel.tp", "2", "--parallel.tp-comm", "plain"),
}
DOING = (
    r"(\d+[FB]\d+(\[.*\])?|w\[.*\]|\d+(SEND|RECV)_[FB]\d+|CLIP|STEP|counting its targets|reading its text|"
    r"ending the step with all ranks|waiting for the checkpoint before|checking what is to be saved|"
    r"copying a checkpoint aside)"
)
ACTION = rf"step \d+, in {DOING} for [\d.]+ s, waiting for (ranks? [\d, ]+|nobody)"


def start(
    *arguments: str, drill: str = "none:0:0", num_ranks: int = 4, restarts: int = 0, signals: str = ""
) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher += ["--max-restarts", str(restarts), *(["--signals-to-handle", signals] if signals else [])]
    return subprocess.Popen(
        [sys.executable, *launcher, PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DRILL": drill},
    )


def start_two(*arguments: str, drill: str = "none:0:0") -> list[Running]:
    """The program on two ranks that are started by themselves."""
    return start_ranks(2, "support.engine.drill_program", *arguments, DRILL=drill)


def end_of_two(*arguments: str, drill: str = "none:0:0") -> tuple[list[int], str]:
    """Exit codes of two ranks, and what both wrote to standard error."""
    ends = finish_all(*start_two(*arguments, drill=drill))
    return [end.returncode for end in ends], "".join(end.stderr for end in ends)


def errors_of(process: subprocess.Popen[str]) -> str:
    """Wait for the run; return what it wrote to standard error."""
    _, errors = finish(process)
    return str(errors)


def last_words(errors: str) -> dict[int, str]:
    """The report of each rank that gave one."""
    return {int(m[1]): m[2] for m in re.finditer(r"^tpengine: rank (\d+) ends: (.*)$", errors, re.MULTILINE)}


def final_state(run_dir: Path, num_steps: int = STEPS) -> Index:
    newest = checkpoints_of(run_dir).newest()
    assert newest is not None
    index = read_index(newest)
    assert index.step == num_steps
    return index


# What befalls one attempt after the other: (place, rank). A layout's two chains hold each rank in each of its places.
CHAINS = {
    "pp x tp": (
        (("F", 0), ("B", 1), ("F", 2), ("B", 3)),
        (("B", 0), ("F", 1), ("B", 2), ("F", 3)),
    ),
    "pp x dp": (
        (("reduce", 0), ("write", 1), ("reduce", 2), ("write", 3)),
        (("write", 0), ("reduce", 1), ("write", 2), ("reduce", 3)),
    ),
    "pp x tp, plain": ((("F", 0), ("F", 1), ("F", 2), ("F", 3)),),
}


@pytest.mark.slow
def test_a_rank_is_killed_and_all_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """The end is the undisturbed run's, bit by bit; the ranks are started again by hand."""
    arguments = (*SMALL, "--train.steps", "6", "--parallel.pp", "2", "--preset", "tiny", "--resume", "--run-dir")
    codes, errors = end_of_two(*arguments, str(tmp_path / "undisturbed"))
    assert codes == [0, 0], errors
    run_dir = tmp_path / "disturbed"
    codes, errors = end_of_two(*arguments, str(run_dir), drill="B:1:3")
    assert codes == [70, -signal.SIGKILL], errors
    check_reports("B", 1, last_words(errors), num_ranks=2)
    codes, errors = end_of_two(*arguments, str(run_dir))
    assert codes == [0, 0] and not last_words(errors), errors
    assert final_state(run_dir, 6).files == final_state(tmp_path / "undisturbed", 6).files
    assert not [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "chain"),
    [
        pytest.param(layout, chain, id=f"{layout}, {'-'.join(what for what, _ in chain)}")
        for layout, chains in CHAINS.items()
        for chain in chains
    ],
)
def test_any_rank_may_be_killed_anywhere(tmp_path: Path, layout: str, chain: tuple[tuple[str, int], ...]) -> None:
    """In each attempt another rank dies in another place; torchrun restarts all, --resume goes on from the newest
    checkpoint.

    The end is the undisturbed run's, bit by bit. A run that died before its first checkpoint starts again.
    """
    arguments = (*SMALL, *LAYOUTS[layout], "--preset", "tiny", "--resume", "--run-dir")
    process = start(*arguments, str(tmp_path / "undisturbed"))
    errors = errors_of(process)
    assert process.returncode == 0, errors
    want = final_state(tmp_path / "undisturbed")
    run_dir = tmp_path / "disturbed"
    drill = ",".join(f"{what}:{rank}:3" for what, rank in chain)
    process = start(*arguments, str(run_dir), drill=drill, restarts=len(chain))
    errors = errors_of(process)
    assert process.returncode == 0, errors
    attempts = errors.split("drill: attempt ")[1:]
    numbers = [int(attempt[0]) for attempt in attempts]
    assert numbers == list(range(len(chain) + 1)), f"not every rank died: {errors}"
    for (what, dead), attempt in zip(chain, attempts, strict=False):
        check_reports(what, dead, last_words(attempt))
    assert not last_words(attempts[-1])
    assert final_state(run_dir).files == want.files, "weights or moments differ from the undisturbed run"
    assert not [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == STEPS


def check_reports(what: str, dead: int, reports: dict[int, str], num_ranks: int = 4) -> None:
    """Every survivor says what it did and whom it waited for, and one of them that the dead rank is gone."""
    assert sorted(reports) == [rank for rank in range(num_ranks) if rank != dead], f"{what} on rank {dead}: {reports}"
    for report in reports.values():
        assert re.search(ACTION, report), report
    assert any(re.search(rf"waiting for .*\b{dead}\b.* gone", report) for report in reports.values()), reports


@pytest.mark.slow
def test_a_restart_gets_past_a_damaged_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is damaged and a rank dies; the restart goes on from the one before, and to the end."""
    out = tmp_path / "out"
    layout = ("--parallel.pp", "2", "--parallel.tp", "1", "--train.steps", "7", "--train.keep-checkpoints", "9")
    # The rank dies in the sixth step that it does; after the restart there are five.
    arguments = (*SMALL, *layout, "--preset", "tiny", "--resume", "--run-dir", str(out))
    process = start(*arguments, drill="damage:0:5", num_ranks=2, restarts=1)
    errors = errors_of(process)
    assert process.returncode == 0, errors
    pattern = r"^tpengine: .*step-(\d+) is damaged, continuing from step-(\d+): .*; it is kept as (\S+)$"
    assert re.findall(pattern, errors, re.MULTILINE) == [("00000004", "00000002", "step-00000004.damaged")]
    assert (out / "checkpoints/step-00000004.damaged").is_dir()
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 8)) and checkpoints_of(out).steps() == [2, 4, 6, 7]


def documented_restart(readme: Path, values: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """A README's command for nodes that come and go: its environment and arguments, with words replaced."""
    variable = the_command(readme, "export TORCH").removeprefix("export ").partition("=")
    line = the_command(readme, "torchrun --nnodes 1:").removeprefix("torchrun ")
    for word, value in values.items():
        assert word in line, word
        line = line.replace(word, value)
    return {variable[0]: variable[2]}, line.split()


def start_node(environ: dict[str, str], arguments: list[str], drill: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DRILL": drill},
    )


@pytest.mark.slow
def test_a_node_dies_and_the_rest_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Two torchruns on the loopback stand for two nodes; one dies with its ranks, whoever of them is rank 0.

    The other goes on alone from the newest checkpoint, with twice as many micro-batches per replica. In exact mode the
    losses are those of one process that nobody disturbed, bit by bit.
    """
    sizes = [*SMALL, "--train.reduction", "exact", "--train.steps", "12", "--parallel.tp", "1", "--parallel.pp", "2"]
    at = sizes.index("--train.num-micro-batches")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ, arguments = documented_restart(
        ROOT / "tpengine/checkpoint/README.md",
        {
            "HOST:29500": f"127.0.0.1:{port}",
            "DIR": str(tmp_path / "out"),
            "--nnodes 1:4": "--nnodes 1:2",
            "--nproc-per-node 8": "--nproc-per-node 2",
            "-m tpengine.train": PROGRAM,
        },
    )
    # The node that dies is not the one where they meet.
    arguments = [*arguments, *sizes[:at], *sizes[at + 2 :]]
    first = start_node(environ, arguments, drill="none:0:0")
    wait_until_listening(port, first)
    second = start_node(environ, arguments, drill="node:any:5")
    finish(second)
    assert second.returncode == -signal.SIGKILL
    out, errors = finish(first)
    assert first.returncode == 0, errors
    assert "changed since the checkpoint: parallel.dp from 2 to 1" in out
    assert "changed since the checkpoint: train.num_micro_batches from 4 to 8" in out
    alone = [*sizes[:at], *sizes[at + 2 :], "--train.num-micro-batches", "8", "--parallel.pp", "1"]
    process = start(*alone, "--run-dir", str(tmp_path / "alone"), num_ranks=1)
    errors = errors_of(process)
    assert process.returncode == 0, errors
    got, want = (numbers_of(tmp_path / name / "metrics.jsonl") for name in ("out", "alone"))
    assert len(want) == 12 and got == want


def wait_until_listening(port: int, process: subprocess.Popen[str]) -> None:
    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, process, "nobody listens where the nodes meet")


def numbers_of(metrics: Path) -> list[tuple[int, float, float, float]]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(record["step"], record["loss"], record["grad_norm"], record["lr"]) for record in records]


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_hand(tmp_path: Path) -> None:
    """Without restarts torchrun ends all ranks: the dead one by its signal, the others by themselves, with code 70."""
    out = str(tmp_path / "out")
    process = start(*SMALL, "--run-dir", out, drill="B:1:3")
    errors = errors_of(process)
    assert process.returncode != 0
    check_reports("B", 1, last_words(errors))
    assert "exitcode  : -9" in errors and errors.count("exitcode  : 70") == 3, errors
    process = start("--run-dir", out, "--resume", num_ranks=1)
    errors = errors_of(process)
    assert process.returncode == 0, errors
    final_state(Path(out))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow, id="4, by torchrun")])
def test_a_hanging_rank_ends_the_run_with_a_report_of_every_rank(tmp_path: Path, num_ranks: int) -> None:
    arguments = (*SMALL, "--run-dir", str(tmp_path / "out"), "--train.timeout-seconds", "10")
    if num_ranks == 2:
        codes, errors = end_of_two(*arguments, drill="hang:1:3")
        assert codes == [70, 70], errors
    else:
        process = start(*arguments, drill="hang:1:3")
        errors = errors_of(process)
        assert process.returncode != 0
    reports = last_words(errors)
    assert sorted(reports) == list(range(num_ranks)), errors
    assert "--train.timeout-seconds 10 is over" in errors
    for report in reports.values():
        assert re.search(ACTION, report), report
    assert re.search(r"in 0F1 for", reports[1]), reports[1]
    # tpengine diagnose follows the waits to the rank that hangs.
    kept = read_last_words(tmp_path / "out")
    assert sorted(kept) == list(range(num_ranks)) and kept[1].doing == "0F1", kept
    assert re.search(r"rank 1 \((tp|pp)\), which was in 0F1 for [\d.]+ s, waiting for nobody: ", chain(kept)), chain(
        kept
    )


def wait_for(path: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    def is_so() -> bool:
        return path.exists() and len(path.read_text().splitlines()) >= num_lines

    wait_until(is_so, process, f"{path} has not {num_lines} lines")


@pytest.mark.slow
def test_ranks_blocked_in_a_collective_still_hear_a_request_to_stop(tmp_path: Path) -> None:
    """No Python signal handler runs in them; the watch's thread reports before torchrun's SIGKILL."""
    out = tmp_path / "out"
    process = start(*SMALL, "--run-dir", str(out), drill="hang:3:2")
    wait_for(out / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGTERM)
    errors = errors_of(process)
    reports = last_words(errors)
    assert sorted(reports) == [0, 1, 2, 3], errors
    assert any("SIGTERM, and nothing moved" in report for report in reports.values()), reports


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_saves_and_the_run_goes_on_elsewhere(tmp_path: Path, number: signal.Signals) -> None:
    """torchrun is asked to stop; all ranks save at the end of their step. Then two processes go on instead of four."""
    out = tmp_path / "out"
    process = start(*SMALL, *FOREVER, "--run-dir", str(out))
    wait_for(out / "metrics.jsonl", 3, process)
    process.send_signal(number)
    errors = errors_of(process)
    (line,) = re.findall(r"^tpengine: .*after step.*$", errors, re.MULTILINE)
    what = "interrupted" if number == signal.SIGINT else "terminated"
    match = re.fullmatch(
        rf"tpengine: {what} after step (\d+) of 100000: saved in (\S+); continue with --run-dir (\S+) --resume", line
    )
    assert match is not None, line
    step = int(match[1])
    assert match[2] == str(out / "checkpoints" / f"step-{step:08}") and match[3] == str(out)
    assert not last_words(errors), "a rank that could save reported an end instead"

    process = start("--run-dir", str(out), "--resume", "--train.steps", str(step + 2), num_ranks=2)
    errors = errors_of(process)
    assert process.returncode == 0, errors
    assert len((out / "metrics.jsonl").read_text().splitlines()) == step + 2


def test_a_notice_of_preemption_to_one_rank_saves(tmp_path: Path) -> None:
    """SLURM sends SIGUSR1 or SIGUSR2; a rank that alone is sent one takes all along."""
    out = tmp_path / "out"
    ranks = start_two(*SMALL, *FOREVER, "--parallel.pp", "2", "--run-dir", str(out))
    metrics = out / "metrics.jsonl"
    ranks[0].wait_until(lambda _: metrics.exists() and metrics.read_text().count("\n") >= 2, "no two steps are done")
    ranks[1].send_signal(signal.SIGUSR2)
    ends = finish_all(*ranks)
    assert [end.returncode for end in ends] == [128 + signal.SIGUSR2] * 2, ends
    check_saved(out, ends[0].stderr + ends[1].stderr, "SIGUSR2")


def check_saved(out: Path, errors: str, number: str) -> None:
    """One rank says so, once, and no rank reports an end instead."""
    (step,) = re.findall(
        rf"^tpengine: asked to stop by {number} after step (\d+) of 100000: saved", errors, re.MULTILINE
    )
    newest = checkpoints_of(out).newest()
    assert newest is not None and read_index(newest).step == int(step)
    assert not last_words(errors), "a rank that could save reported an end instead"


@pytest.mark.slow
@pytest.mark.parametrize("through_torchrun", [True, False])
def test_a_notice_of_preemption_saves(tmp_path: Path, through_torchrun: bool) -> None:
    """torchrun passes SIGUSR1 on if it is told to."""
    out = tmp_path / "out"
    arguments = (*SMALL, *FOREVER, "--parallel.pp", "2", "--run-dir", str(out))
    process = start(*arguments, num_ranks=2, signals="SIGTERM,SIGINT,SIGUSR1")
    wait_for(out / "metrics.jsonl", 2, process)
    if through_torchrun:
        process.send_signal(signal.SIGUSR1)
    else:
        os.kill(children_of(process.pid)[-1], signal.SIGUSR2)
    check_saved(out, errors_of(process), "SIGUSR1" if through_torchrun else "SIGUSR2")


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.slow
def test_ranks_that_outlive_torchrun_save_and_leave(tmp_path: Path) -> None:
    """kill -9 of torchrun itself: nobody passes on anything to its ranks any more, and nothing may be left behind."""
    out = tmp_path / "out"
    process = start(*SMALL, *FOREVER, "--run-dir", str(out))
    wait_for(out / "metrics.jsonl", 3, process)
    process.kill()
    # Standard error ends with its last writer.
    errors = errors_of(process)
    (step,) = re.findall(r"^tpengine: terminated after step (\d+) of 100000: saved in", errors, re.MULTILINE)
    newest = checkpoints_of(out).newest()
    assert newest is not None and read_index(newest).step == int(step)
