"""`--rehearse`: the orchestration without a GPU, with faults put in on purpose; what must be noticed is compared.

Planted are a case that raises, one that dies, one that hangs, one whose result is wrong, one that needs what nobody
has, and a kill of this very command while a case runs, after which it starts again. The other cases are those of a GPU
at tiny sizes: kernels are compiled for sm_90, or interpreted.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.declared import Case
from benchmarks.gpu.folder import REPORT, opened
from benchmarks.gpu.process.run_cases import run_cases, say
from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import HOW, HUNG, ROWS, RUN_CASE, STARTED, Where, outcomes
from benchmarks.harness.journal import read
from benchmarks.harness.revision import source_here

_FAULTS = "benchmarks.gpu.cases.faults"
_HANG_SECONDS = 3.0
# On a busy machine imports alone may take a minute.
_LONGEST_SECONDS = 600.0
_LOOK_SECONDS = 0.05
_ON_HOST = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_INTERPRETED = {**_ON_HOST, "TRITON_INTERPRET": "1"}


def faults(out: Path) -> list[Case]:
    """Return the planted cases, in the order in which they run."""

    def case(name: str, limit_seconds: float = _LONGEST_SECONDS, **arguments: object) -> Case:
        function = f"{_FAULTS}:{name}"
        return Case(f"rehearsal/{name}", "a", 0.0, 1.0, function, arguments, limit_seconds=limit_seconds)

    return [
        case("passes"),
        case("raises"),
        case("dies"),
        case("hangs", limit_seconds=_HANG_SECONDS),
        case("is_wrong"),
        case("is_cut", marker=str(out.absolute() / "was_cut")),
        Case("rehearsal/needs", "a", 0.0, 1.0, f"{_FAULTS}:passes", needs=("a_module_that_nobody_has",)),
        Case("rehearsal/no_time", "i", 1e-9, 1e9, f"{_FAULTS}:passes"),
    ]


EXPECTED = {
    "passes": "passed",
    "raises": "crashed",
    "dies": "crashed",
    "hangs": "hung",
    "is_wrong": "wrong",
    "is_cut": "passed",
    "needs": "left out",
    "no_time": "no time",
}
# Said by the last lines of what failed, and found in the tables.
_SAID = ("illegal memory access", "SIGSEGV", "limit of 3 s", "off by 1", "a_module_that_nobody_has")


def small_cases(work: Path) -> list[Case]:
    """Return the cases of a GPU that a CPU can run, at tiny sizes; those that can share a process do.

    Args:
        work: the folder for files besides rows.
    """
    folder = str(work.absolute())

    def case(name: str, function: str, interpreted: bool, **arguments: object) -> Case:
        environment = _INTERPRETED if interpreted else _ON_HOST
        where = f"benchmarks.gpu.cases.{function}"
        return Case(
            f"small/{name}", "b", 10.0, 5.0, where, arguments, environment=environment, limit_seconds=_LONGEST_SECONDS
        )

    def several(name: str, interpreted: bool, **calls: tuple[str, dict[str, object]]) -> Case:
        return case(name, "faults:several", interpreted, calls=list(calls.values()))

    tiny: dict[str, object] = {"model": "rehearsed", "rounds": 1}
    sizes: dict[str, object] = {"seqs": [24], "rounds": 1, "rivals": ["torch"], "models": ["rehearsed"]}
    sizes["direction"] = ["forward"]
    bars: dict[str, object] = {"depths": [16], "tokens": 6, "hidden": 24, "ranks": 2, "rounds": 1}
    bars["tiles"] = [[16, 16, 16, 2, 4, 1]]
    tiles: dict[str, object] = {"model": "rehearsed", "tokens": [16], "into": folder, "most": 1, "kinds": ["wgrad"]}
    of_step: dict[str, object] = {"preset": "tiny", "steps": 1}
    # Of tiny products nothing says how fast the machine is.
    few: dict[str, object] = {"repeats": 1, "most": 1, "still": 1e9}
    return [
        case("compile_for_sm_90", "kernels.operators:compile_for", False, ops=["adamw"]),
        several(
            "kernels",
            True,
            operators=("kernels.operators:measure", {"ops": ["rope"], **sizes}),
            experts=("kernels.operators:measure", {"ops": ["experts"], "cases": ["grouped_matmul"], **sizes}),
            batches=("kernels.operators:measure", {"ops": ["attention"], "cases": ["attention"], "batch": 2, **sizes}),
            tiles=("kernels.tiles:tune", tiles),
            configs=("kernels.attention_configs:measure", {"seq": 20, "batch": 2, **tiny}),
            gates=("kernels.between:gates", {"tokens": [16], "into": folder, **tiny}),
            norms=("kernels.between:norm_backward", {"tokens": 9, "programs": [256], **tiny}),
            blocks=("kernels.blocks:measure", {"tokens": 9, **tiny}),
            publish=("kernels.fused:publish", {"tokens": [3], "hidden": 8, "rounds": 1}),
            own_bars=("kernels.fused:own_bars", bars),
            launches=("planner:launches", {"calls": 1}),
        ),
        several(
            "on_host",
            False,
            attention=("kernels.attention:choose", {"seqs": [16], "batch": 2, "into": folder, **tiny}),
            block=("block:as_graphs", {"preset": "tiny", "rounds": 1, "calls": 1}),
        ),
        replace(
            case("architectures", "architectures:tiny", True, architectures=["gpt2"], seq=16, batch=1),
            needs=("transformers", "safetensors"),
        ),
        case("compile_ahead", "kernels.ahead:compile_ahead", False, target="sm_90", processes=1, ops=["adamw"]),
        case("pulls", "kernels.protocol:pulls", True, ranks=2, calls=1, late=False),
        case("machine", "predictions:machine", False, passes=1, tiny=True),
        case("layouts", "predictions:layouts", False, out=folder, preset="tiny", seq_len=16, minutes=5.0, **few),
        several(
            "steps",
            False,
            own=("training:own_step", {"attention": "ours", "layers": 1, **of_step}),
            host=("training:host_time", {"depths": [1, 2], "micro_batches": [1, 2], **of_step}),
            against=("training:against_torch", {"layers": 1, "compiles": False, **of_step}),
        ),
    ]


def rehearse(out: Path, small_cases: Callable[[Path], Sequence[Case]], deadline: float) -> int:
    """Run everything, cut in the middle, and print the tables and what was not as planted; return the exit code.

    Args:
        out: the directory of the results.
        small_cases: returns what runs besides the planted cases, from the folder for its files.
        deadline: of time.monotonic.

    Raises:
        ValueError: the directory has the rows of another run.
    """
    if (out / ROWS).exists():
        raise ValueError(f"a rehearsal needs a directory of its own: {out} has {ROWS}: name another --out")
    planted = faults(out)
    _run_and_cut(planted, out, deadline)
    say("killed, as planted: starting again")
    # The archive has what the killed command had packed.
    with opened(out) as folder:
        small = small_cases(folder.work)
        run_cases([*planted, *small], folder, _here(), deadline)
        report = folder.work / REPORT
        print_report(folder.rows, report)
        amiss = differences(out, small, report.read_text())
    for line in amiss:
        say(f"rehearsal: {line}")
    say("rehearsal: every planted fault was noticed, and cost nothing else" if not amiss else "rehearsal: failed")
    return int(bool(amiss))


def differences(out: Path, small: Sequence[Case], report: str) -> list[str]:
    """Return what is not as planted, one line each."""
    rows = read(out / ROWS)
    ended = outcomes(rows)
    want = {f"rehearsal/{name}": how for name, how in EXPECTED.items()}
    want |= {case.name: "left out" if case.missing else "passed" for case in small}
    amiss = [f"{name} must be {how}, is {ended.get(name)}" for name, how in want.items() if ended.get(name) != how]
    starts = Counter(row[RUN_CASE] for row in rows if row.get(HOW) == STARTED)
    for name, how in want.items():
        times = {"rehearsal/is_cut": 2, "rehearsal/hangs": 2}.get(name, 0 if how in ("left out", "no time") else 1)
        if starts[name] != times:
            amiss.append(f"{name} must be started {times} times, was {starts[name]}")
    hangs = sum(row.get(HOW) == HUNG for row in rows)
    if hangs != 2:
        amiss.append(f"a case that hangs must be run in two starts, then no more: hung {hangs} times")
    words = " ".join(report.split())
    return amiss + [f"the tables do not say {text!r}" for text in _SAID if text not in words]


def _here() -> Where:
    return Where(None, source_here().commit)


def _run_and_cut(cases: Sequence[Case], out: Path, deadline: float) -> None:
    """Run cases in a process that is killed while one of them waits for that; it must end by itself then."""
    pid = os.fork()
    if not pid:
        with opened(out) as folder:
            run_cases(cases, folder, _here(), deadline)
        os._exit(0)
    while not (out / "was_cut").exists() and time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(_LOOK_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    case = Path("/proc", (out / "was_cut").read_text()) if (out / "was_cut").exists() else out / "none"
    while case.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
