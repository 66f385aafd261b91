"""Rung: pure. Which cases the GPU command runs in the minutes that it has, and that all of them exist."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from support import ROOT
from support.ranks.progress import run_program
from support.readmes import the_command

from benchmarks.gpu.decisive import decisive
from benchmarks.gpu.declared import FIRST_PHASE, PHASES, Case, chosen
from benchmarks.gpu.plan import cases_for
from benchmarks.gpu.rehearsal import small_cases
from benchmarks.harness.shapes import MODELS, REHEARSED, WHOLE_MODELS
from benchmarks.kernels.cases.cases import CASES, RIVALS, Shape, cases_of
from tpengine.config.presets import PRESETS

FAULTS = "benchmarks.gpu.cases.faults"


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
