"""Rung: pure; what is slow: interpreter. The GPU command without a GPU: faults cost themselves alone, nothing is lost.

Only a GPU shows what its cases find, and that a hanging device does not outlive its case.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, CountMutations
from support.ranks.progress import run_program

from benchmarks.gpu.declared import FIRST_PHASE, Case
from benchmarks.gpu.folder import opened
from benchmarks.gpu.process.run_cases import run_cases
from benchmarks.gpu.rehearsal import differences, small_cases
from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import HOW, RUN_CASE, STARTED, Where, done, outcomes, results
from benchmarks.harness.journal import append, read
from benchmarks.run import main

FAULTS = "benchmarks.gpu.cases.faults"
REHEARSE = """
import sys, time
from pathlib import Path
from benchmarks.gpu.rehearsal import rehearse
sys.modules["tyro"] = sys.modules["torch"] = None
sys.exit(rehearse(Path(sys.argv[1]), lambda work: [], time.monotonic() + 3600))
"""
RUN_AND_WAIT = """
import sys, time
from pathlib import Path
from benchmarks.gpu.declared import Case
from benchmarks.gpu.folder import opened
from benchmarks.gpu.process.run_cases import run_cases
from benchmarks.gpu.tables.rows import Where
out = Path(sys.argv[1])
case = Case("waits", "a", 1.0, 1.0, "benchmarks.gpu.cases.faults:is_cut", {"marker": str(out / "pid")})
with opened(out) as folder:
    run_cases([case], folder, Where("A GPU", "abc"), time.monotonic() + 3600)
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **pipes)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a rehearsal of the planted faults alone, by a process that has neither torch nor tyro."""
    out = tmp_path_factory.mktemp("rehearsed")
    process = started(REHEARSE, str(out))
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "rehearsal: every planted fault was noticed" in said
    return out


def packed(out: Path, name: str) -> str:
    with zipfile.ZipFile(out / "rest.zip") as archive:
        return archive.read(name).decode()


def test_planted_faults_cost_themselves_alone(rehearsed: Path) -> None:
    rows = read(rehearsed / "rows.jsonl")
    assert {name.removeprefix("rehearsal/"): how for name, how in outcomes(rows).items()} == {
        "passes": "passed",
        "raises": "crashed",
        "dies": "crashed",
        "hangs": "hung",
        "is_wrong": "wrong",
        "is_cut": "passed",
        "needs": "left out",
        "no_time": "no time",
    }
    assert [row["case"] for row in results(rows)] == [f"rehearsal/{n}" for n in ("passes", "raises", "is_wrong")]
    log = packed(rehearsed, "log.txt")
    assert "about to die" in log and "time.sleep(600)" not in log
    # Where it hung, the innermost call first.
    for hung in [row for row in rows if row.get(HOW) == "hung"]:
        assert any("faults.py" in line for line in hung["last_lines"][:3]), hung


def test_what_was_done_is_not_run_again(rehearsed: Path) -> None:
    rows = read(rehearsed / "rows.jsonl")
    starts = [row[RUN_CASE] for row in rows if row.get(HOW) == STARTED]
    # What hung may only have waited for the compiler: it has a second start, and no third.
    for twice in ("rehearsal/is_cut", "rehearsal/hangs"):
        assert starts.count(twice) == 2
        starts.remove(twice)
    assert len(starts) == len(set(starts)) == 6, starts


def test_what_hung_has_one_more_start() -> None:
    def ended(*hows: str) -> tuple[bool, str]:
        rows = [{RUN_CASE: "one", HOW: how} for how in hows]
        return "one" in done(rows, Where(None, None)), outcomes(rows)["one"]

    assert ended(STARTED, "hung") == (False, "hung")
    assert ended(STARTED, "hung", "no time") == (False, "hung")
    assert ended(STARTED, "hung", STARTED) == (False, "cut")
    assert ended(STARTED, "hung", STARTED, "passed") == (True, "passed")
    assert ended(STARTED, "hung", STARTED, "hung", "no time") == (True, "hung")
    assert ended(STARTED, "crashed", "left out") == (True, "crashed")


def test_a_rehearsal_that_notices_nothing_fails(
    rehearsed: Path, tmp_path: Path, count_mutations: CountMutations
) -> None:
    report = packed(rehearsed, "report.txt")
    assert differences(rehearsed, [], report) == []
    rows = read(rehearsed / "rows.jsonl")
    own = [place for place, row in enumerate(rows) if RUN_CASE in row]
    noticed = 0
    for place in own:
        mutant = tmp_path / str(place)
        mutant.mkdir()
        for row in rows[:place] + rows[place + 1 :]:
            append(mutant / "rows.jsonl", row)
        noticed += bool(differences(mutant, [], report))
    # Each start again says anew what there is no time and no module for: one of the two may be missing.
    again = [rows[place][RUN_CASE] for place in own if rows[place][HOW] in ("left out", "no time")]
    assert noticed == len(own) - len([name for name in again if again.count(name) > 1])
    assert differences(rehearsed, [], report.replace("SIGSEGV", "")) == ["the tables do not say 'SIGSEGV'"]
    count_mutations("the GPU command's rows", noticed, noticed)


def test_an_interrupt_ends_the_case_and_is_written_down(tmp_path: Path) -> None:
    process = started(RUN_AND_WAIT, str(tmp_path))
    while not (tmp_path / "pid").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert "KeyboardInterrupt" in said
    assert outcomes(read(tmp_path / "rows.jsonl")) == {"waits": "cut"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "rest.zip", "rows.jsonl"]
    case = Path("/proc", (tmp_path / "pid").read_text())
    while case.exists():
        time.sleep(0.05)


def test_a_run_that_was_cut_has_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    append(rows, {RUN_CASE: "one", HOW: STARTED})
    append(rows, {"case": "host/fused/gather", "check": "passed", "host_us": 61.0})
    append(rows, {"case": "kernels/norm/x/forward", "check": "failed: output 0 is wrong by 3"})
    with rows.open("a") as file:
        file.write('{"case": "half a li')
    assert main(["gpu", "--report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cut one" in said and "short 61 of 1 rows" in said and "wrong by 3" in said and "half a li" not in said
    # A later row does not join the half line.
    append(rows, {"case": "after", "check": "passed"})
    assert [row["case"] for row in results(read(rows))][-1] == "after"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a run needs --out: got none"),
        (["--out", "{}", "--minutes", "0"], "--minutes must be above 0"),
        (["--report", "{}"], "has no rows.jsonl"),
        (["--out", "{}/new", "--continue-from", "{}"], "--continue-from needs the directory of a run"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", *(argument.format(tmp_path) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("benchmarks: error: ") and message in said and said.count("\n") == 1


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Started as a user does, on a machine without tyro."""
    code = "import sys; sys.modules['tyro'] = None; from benchmarks.run import main; sys.exit(main(sys.argv[1:]))"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: error: benchmarks gpu needs a GPU") and done.stderr.count("\n") == 1


def test_another_gpu_or_revision_runs_what_was_done_and_has_tables_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only two files are left behind, and what is packed is there at the next start."""
    one = Case("one", FIRST_PHASE, 0.0, 1.0, f"{FAULTS}:passes")
    started_at: list[Where] = []
    for where in (Where("A", "abc"), Where("A", "abc"), Where("B", "abc"), Where("A", "def"), Where("A", "def")):
        with opened(tmp_path) as folder:
            if folder.log.exists():
                assert "==== one" in folder.log.read_text()
            before = len(read(folder.rows))
            run_cases([one], folder, where, time.monotonic() + 3600)
            started_at += [where] * (len(read(folder.rows)) > before)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rest.zip", "rows.jsonl"]
    assert started_at == [Where("A", "abc"), Where("B", "abc"), Where("A", "def")]
    append(tmp_path / "rows.jsonl", {"case": "x", "gpu": "B", "commit": "abc", "check": "failed: wrong by 3"})
    capsys.readouterr()
    print_report(tmp_path / "rows.jsonl", None)
    said = " ".join(capsys.readouterr().out.split())
    places = [said.find(f"{gpu}, revision {commit}") for gpu, commit in (("A", "abc"), ("A", "def"), ("B", "abc"))]
    assert -1 not in places and places == sorted(places) and said.find("wrong by 3") > places[2], said


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "gpu", "--rehearse", "--out", str(tmp_path)]
    done = run_program(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = outcomes(read(tmp_path / "rows.jsonl"))
    assert all(ended[one.name] == "passed" for one in small_cases(tmp_path))
    print_report(tmp_path / "rows.jsonl", None)


def test_it_starts_where_nothing_of_this_project_is_installed() -> None:
    """As on a GPU that is lent for a short while: its table of machines needs tpkernels all the same."""
    hidden = "import sys; sys.path[:] = [p for p in sys.path if not p.rstrip('/').endswith('/kernels')]; "
    hidden += "import importlib.util; assert importlib.util.find_spec('tpkernels') is None; "
    done = subprocess.run(
        [sys.executable, "-c", hidden + "import benchmarks.gpu.command"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
