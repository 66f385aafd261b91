"""Rung: pure; what is slow: interpreter. The GPU command without a GPU: faults cost themselves alone, nothing is lost.

Only a GPU shows what its cases find, and that a hanging device does not outlive its case.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from support import ROOT, CountMutations
from support.ranks.progress import run_program
from support.readmes import the_command

from benchmarks.gpu.cases.clock import Gap, covered, gaps
from benchmarks.gpu.cases.kernels import operators
from benchmarks.gpu.cases.training import host_parts
from benchmarks.gpu.decisive import decisive
from benchmarks.gpu.declared import FIRST_PHASE, PHASES, Case, chosen
from benchmarks.gpu.folder import opened
from benchmarks.gpu.plan import cases_for
from benchmarks.gpu.process import runner
from benchmarks.gpu.process.run_cases import run_cases
from benchmarks.gpu.rehearsal import differences, small_cases
from benchmarks.gpu.tables.bars import verdicts
from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import HOW, RUN_CASE, STARTED, Where, done, outcomes, results
from benchmarks.harness.journal import append, read
from benchmarks.harness.shapes import MODELS, REHEARSED, WHOLE_MODELS
from benchmarks.kernels.cases.cases import CASES, OURS, RIVALS, Contestant, Shape, cases_of
from benchmarks.run import main
from tpengine.config.presets import PRESETS

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


def case(name: str, worth: float, seconds: float, phase: str = "b") -> Case:
    return Case(name, phase, worth, seconds, f"{FAULTS}:passes")


def test_what_fits_is_chosen_by_worth_per_second() -> None:
    cases = [case("long", 50, 100, "c"), case("good", 30, 10, "d"), case("poor", 1, 10, "b"), case("best", 40, 10, "d")]

    def names(seconds: float) -> list[str]:
        return [one.name for one in chosen(cases, seconds)]

    assert names(9) == []
    assert names(10) == ["best"]
    assert names(29) == ["good", "best"], "in the order of phases, within one as declared"
    assert names(30) == ["poor", "good", "best"]
    assert names(120) == ["long", "good", "best"]
    assert names(130) == ["poor", "long", "good", "best"]


def test_what_decides_is_taken_in_its_order_as_far_as_it_fits() -> None:
    cases = [case("last", 99, 1, "b"), *(case(name, 0, 10, FIRST_PHASE) for name in ("one", "two", "three"))]
    names = {seconds: [one.name for one in chosen(cases, seconds)] for seconds in (9, 19, 20, 25, 31)}
    assert names == {
        9: ["last"],
        19: ["one", "last"],
        20: ["one", "two"],
        25: ["one", "two", "last"],
        31: ["one", "two", "three", "last"],
    }
    short = [*cases, case("short", 0, 5, FIRST_PHASE)]
    assert [one.name for one in chosen(short, 26)] == ["one", "two", "short", "last"], "three is too long"


def test_nine_minutes_decide_and_three_calls_ask_something_of_every_phase(tmp_path: Path) -> None:
    """Phases that overrun take time from later ones only."""
    cases, seconds = cases_for(tmp_path), 60 * 9 - 5
    first = [one.name for one in cases if one.phase == FIRST_PHASE]
    assert first == [one.name for one in decisive(tmp_path)]
    # The tables' seconds are off already; a look at the GPU takes a few more.
    at_once = [one.name for one in chosen(cases, seconds - 10)]
    assert at_once[: len(first)] == first, "all fit, whatever else there is"
    in_table = re.findall(r"^\| \d+ \|.*\| (\d+) \|$", (ROOT / "benchmarks/gpu/README.md").read_text(), re.MULTILINE)
    assert sum(map(int, in_table)) == sum(one.seconds for one in decisive(tmp_path)) == 520
    waiting, phases = cases, set[str]()
    for _ in range(3):
        call = chosen(waiting, seconds)
        waiting = [one for one in waiting if one not in call]
        phases |= {one.phase for one in call}
    assert phases == set(PHASES)


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


def test_the_hosts_time_is_divided_by_four_steps() -> None:
    def host_us(micro_batches: int, layers: int) -> float:
        return layers * (700.0 + micro_batches * 30.0) + 200.0 + micro_batches * 50.0

    medians = {(n, layers): host_us(n, layers) for n in (1, 2) for layers in (1, 3)}
    assert host_parts(medians, (1, 3), (1, 2)) == pytest.approx(
        {
            "host_of_layer_per_micro_batch_us": 30.0,
            "host_of_layer_per_step_us": 700.0,
            "host_of_rest_per_micro_batch_us": 50.0,
            "host_of_rest_per_step_us": 200.0,
        }
    )


def test_the_wheels_that_the_readme_carries_are_all_that_deciding_cases_need(tmp_path: Path) -> None:
    """Of the machine torch and triton are known, and nothing else."""
    command = the_command(ROOT / "benchmarks" / "gpu" / "README.md", "python -m pip download")
    carried = {re.split("[<=>]", word)[0] for word in command.partition(" -d .wheels ")[2].replace("'", "").split()}
    modules = {"pytest-xdist": "xdist", "markdown-it-py": "markdown_it", "tomli-w": "tomli_w"}
    needed = {name for one in decisive(tmp_path) for name in one.needs} | {"rich", "einops"}
    assert needed <= {modules.get(name, name) for name in carried}
    for name in carried:
        wanted = [Requirement(line) for line in metadata.requires(name) or []]
        # Tests run with Python 3.12 there, whatever it is here.
        here = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
        missing = [one.name for one in wanted if one.marker is None or one.marker.evaluate(here)]
        assert {re.sub("[-_.]+", "-", one).lower() for one in missing} <= carried, name


def test_a_family_that_is_wrong_is_a_row_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, families = tmp_path / "rows.jsonl", {"rms_norm": "norm", "swiglu": "activation"}
    assert operators.smoke(rows, families, REHEARSED.name, 8) == 0
    (right,) = read(rows)
    assert (right["check"], right["num_right"], right["num_cases"]) == ("passed", 2, 2)
    honest = operators.cases_of

    def planted(op: str, shape: Any) -> list[Any]:
        def off(**inputs: Any) -> Any:
            return 1.01 * honest_one.contestants[OURS].function(**inputs)

        found = list(honest(op, shape))
        if op == "norm":
            honest_one = found[0]
            found[0] = replace(honest_one, contestants={OURS: Contestant(off)})
        return found

    monkeypatch.setattr(operators, "cases_of", planted)
    assert operators.smoke(rows, families, REHEARSED.name, 8) == 1
    _, wrong, summary = read(rows)
    assert wrong["case"] == "smoke/rms_norm" and "is wrong by" in wrong["check"]
    assert summary["num_right"] == 1 and summary["check"] == "failed: 1 families are wrong"


def test_bars_are_met_short_or_not_measured() -> None:
    assert {verdict.state for verdict in verdicts([])} == {"not measured"}
    ratio = "tpkernels_speedup_over_torch_median_ratio"
    product = {"case": "kernels/matmul_qkv/x", "op": "matmul", "model": "llama3_8b", "dtype": "bfloat16", "seq": 4096}
    sdpa = {"contestants": ["tpkernels", "torch", "sdpa_flash", "sdpa_cudnn"], "torch_median_seconds": 0.1}
    sdpa |= {"sdpa_flash_median_seconds": 4.0, "sdpa_cudnn_median_seconds": 2.0, "tpkernels_median_seconds": 3.0}
    attention = {"case": "kernels/attention/x", "direction": "forward", "seq": 4096, "model": "llama3_8b", **sdpa}
    step = {"case": "train/llama_1b/against_torch", "gpu": "NVIDIA H100 80GB HBM3", "mfu_attention_half_percent": 53.0}
    step |= {"ours_over_torch_median_ratio": 0.96, "ours_over_torch_float32_median_ratio": 0.89}
    rows = [
        product | {ratio: 1.1},
        product | {ratio: 1.05},
        product | {ratio: 0.8},
        product | {ratio: 0.1, "check": "failed: wrong"},
        product | {ratio: 0.1, "seq": 512},
        product | {ratio: 0.1, "num_samples": 1},
        product | {ratio: 0.1, "case": "kernels/matmul_swiglu/x"},
        attention,
        {"case": "host/fused/gather", "host_us": 30.0, "by_engine": False},
        {"case": "host/fused/gather/engine", "host_us": 70.0, "by_engine": True},
        step,
        step | {"ours_over_torch_median_ratio": 0.5, "num_samples": 1},
        *[
            {"case": f"blind/{n}", "predicted_over_measured_ratio": ratio, "num_layouts": 2, "num_samples": 4}
            for n, ratio in enumerate((1.04, 0.88))
        ],
        {"case": "architectures/gpt2/float32", "kl_over_limit_ratio": 0.01},
        {"case": "architectures/gpt2/bfloat16", "error_over_transformers_ratio": 1.1},
        {"case": "architectures/qwen3/bfloat16", "error_over_transformers_ratio": 1.6, "check": "failed: 1.6 times"},
    ]
    found = {verdict.bar: (verdict.state, verdict.found.partition(" ")[0]) for verdict in verdicts(rows)}
    assert list(found.values()) == [
        ("met", "1.05"),
        ("short", "0.8"),
        ("short", "0.667"),
        ("not measured", ""),
        ("met", "30"),
        ("short", "70"),
        ("short", "0.96"),
        ("met", "0.89"),
        ("not measured", ""),
        ("short", "53"),
        ("short", "0.12"),
        ("met", "0.01"),
        ("short", "1.6"),
    ]


def test_a_layout_that_was_not_measured_leaves_the_bar_short() -> None:
    rows = [{"case": f"blind/{n}", "predicted_over_measured_ratio": 1.0, "num_layouts": 3} for n in range(3)]
    for found, state in ((rows, "met"), (rows[:2], "short"), ([], "not measured")):
        (verdict,) = [verdict for verdict in verdicts(found) if "predicted" in verdict.bar]
        assert verdict.state == state


def test_cases_are_what_they_call(tmp_path: Path) -> None:
    """Every function takes its case's arguments; operators, models, rivals, files of tests and presets exist."""
    every = [*cases_for(tmp_path), *small_cases(tmp_path)]
    assert len({one.name for one in every}) == len(every)
    assert {one.phase for one in cases_for(tmp_path)} == set(PHASES)
    models = {model.name for model in (*MODELS, *WHOLE_MODELS, REHEARSED)}
    for one in every:
        module, _, name = one.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(tmp_path, **one.arguments)
        for inner, given in one.arguments.get("calls", ()) if name == "several" else ():
            module, _, name = inner.partition(":")
            called = getattr(importlib.import_module(f"benchmarks.gpu.cases.{module}"), name)
            inspect.signature(called).bind(tmp_path, **given)
        assert (one.worth > 0) != (one.phase == FIRST_PHASE) and one.limit > one.seconds > 0
        arguments = one.arguments
        assert set(arguments.get("ops", ())) <= set(CASES) and set(arguments.get("rivals", ())) <= set(RIVALS)
        shape = Shape(MODELS[0], 512, torch.bfloat16, "cpu")
        known = {made.name: op for op in CASES for made in cases_of(op, shape)}
        assert set(arguments.get("cases", ())) <= {n for n, op in known.items() if op in arguments.get("ops", ())}
        assert arguments.get("families", {}).items() <= known.items()
        assert {arguments.get("model", REHEARSED.name), *arguments.get("models", ())} <= models
        assert all((ROOT / path).exists() for path in arguments.get("paths", ())), one
        assert arguments.get("preset", "tiny") in PRESETS


def test_training_needs_nothing_that_only_the_command_line_does(tmp_path: Path) -> None:
    """In a fork, which has torch already: what is of this project is imported again, as on a machine without these."""
    pid = os.fork()
    if not pid:
        try:
            for name in list(sys.modules):
                if name.partition(".")[0] in ("tpengine", "benchmarks", "tomli_w", "tyro"):
                    del sys.modules[name]
            sys.modules.update(dict.fromkeys(("tomli_w", "tyro")))  # type: ignore[arg-type]
            importlib.import_module("benchmarks.gpu.cases.training")
            os._exit(0)
        except BaseException as error:
            (tmp_path / "error").write_text(repr(error))
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (tmp_path / "error").read_text()


def test_a_device_is_busy_while_any_kernel_runs() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


def test_gaps_are_told_by_their_sides() -> None:
    assert gaps([]) == []
    spans = [(0, 4, "a"), (1, 2, "short"), (6, 7, "b"), (8, 9, "a"), (10, 11, "b"), (14, 15, "c"), (15, 16, "a")]
    assert gaps(spans) == [Gap("a", "b", 3, 2), Gap("b", "c", 3, 1), Gap("b", "a", 1, 1)]


@pytest.mark.slow
def test_tests_are_a_case(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('rung', ['cpu', 'gpu'])\n"
        "def test_one(rung): assert rung == 'cpu', 'planted'\ndef test_two(): assert 0, 'not chosen'\n"
    )
    rows, arguments = tmp_path / "rows.jsonl", {"paths": [str(tmp_path / "test_some.py")], "chosen": "[gpu"}
    one = Case("tests/some", "b", 1.0, 1.0, "benchmarks.gpu.cases.tests:run", arguments)
    assert runner.run(one, rows, tmp_path / "log.txt", 3600.0).how == "wrong"
    failed, summary = read(rows)
    assert failed["case"].endswith("test_some.py::test_one[gpu]") and "planted" in failed["check"]
    assert summary["num_failed"] == 1 and "num_passed" not in summary
    assert summary["check"] == "failed: 1 of the 1 tests that ran"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_tests_that_see_no_gpu_are_no_success(tmp_path: Path) -> None:
    """Others of the same names run on a CPU, and pass."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('rung', ['cpu', 'gpu'])\n"
        "def test_one(rung):\n    if rung == 'gpu': pytest.skip('needs a GPU')\n"
    )
    rows, arguments = tmp_path / "rows.jsonl", {"paths": [str(tmp_path / "test_some.py")], "chosen": "test_one"}
    one = Case("tests/some", "b", 1.0, 1.0, "benchmarks.gpu.cases.tests:run", arguments)
    assert runner.run(one, rows, tmp_path / "log.txt", 3600.0).how == "wrong"
    (summary,) = read(rows)
    assert summary["check"] == "failed: 1 tests see no GPU" and summary["num_passed"] == 1


@pytest.mark.slow
def test_tests_of_a_gpu_are_chosen_by_names_that_only_they_have(tmp_path: Path) -> None:
    """Collected once for all cases: no name that one of them chooses is in another's file."""
    names = [f"tests/{name}" for name in ("fused", "fused_calls", "fused_kinds", "attention", "matmul")]
    asked = [one.arguments for one in cases_for(tmp_path) if one.name in names]
    expression = " or ".join(f"({one['chosen']})" for one in asked)
    # Of the last two the files in which no test has a rung in its name.
    alone = {
        "test_torch_attention.py": "test_on_a_gpu_errors_are_at_most_twice_ours",
        "test_tuned.py": "test_a_tuned_tile_is_launched",
        "test_wgrad_choice.py": "test_a_gpu_adds_without_rounding",
    }
    paths = sorted(path for one in asked for path in one["paths"] if "fused" in path or Path(path).name in alone)
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-k", expression, *paths]
    done = run_program(command, capture_output=True, text=True, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    fused = [line for line in found if "/fused/" in line]
    assert len(fused) == 7 and all("[cuda-" in line for line in fused), done.stdout
    assert len([line for line in found if "test_each_kind_replays" in line]) == 1
    others = {re.sub(r"\[.*", "", line).rpartition("/")[2] for line in found if line not in fused}
    assert others == {f"{file}::{test}" for file, test in alone.items()}


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
