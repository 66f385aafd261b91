"""Rung: pure. `tpengine plan` of one layout: the sheet agrees with `schedule` and with its own formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tpengine.cli import main

LAYOUT = ["--tp", "2", "--pp", "2", "--dp", "2"]
PLAN = ["plan", "--model", "llama_1b", "--machine", "h200", "--global-batch", "32", "--micro-batch", "4", *LAYOUT]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def checked_formulas(text: str) -> set[str]:
    """The names of the lines whose formula is what it says it is."""
    checked: set[str] = set()
    for line in text.splitlines():
        found = re.fullmatch(r"  (\S.*?)  +(?:.* = )?([\d,]+(?: x [\d,]+)*)(?: / dp (\d+))? +([\d,]+)", line)
        if found is None:
            continue
        product = 1
        for number in found[2].split(" x "):
            product *= int(number.replace(",", ""))
        num_bytes = int(found[4].replace(",", ""))
        # Slices are padded.
        assert num_bytes == pytest.approx(product / int(found[3] or 1), rel=1e-3), line
        checked.add(found[1])
    return checked


def test_a_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sheet.json"
    text = said(capsys, *PLAN, "--zero", "1", "--explain-memory", "--json", str(file))
    sheet = json.loads(file.read_text())
    assert sum(sheet["parts"].values()) == pytest.approx(sheet["step_seconds"], rel=1e-6)
    assert text.startswith("llama_1b, 8 x h200, 32 x 2,048 tokens: tp 2 pp 2 dp 2 1f1b zero 1 b 4 m 4\nstep ")
    assert "--parallel.zero 1" in text and "fits: " in text
    assert len(checked_formulas(text)) >= 10


@pytest.mark.parametrize(
    ("model", "argv"),
    [
        ("certify", ["--reduction", "exact", "--dp", "2", "--ranks", "2"]),
        ("certify", ["--reduction", "exact", "--dp", "2", "--ranks", "2", "--zero", "2"]),
        ("bench", ["--tp", "2", "--ranks", "2"]),
        ("llama_1b", ["--tp", "2", "--dtype", "bfloat16", "--ranks", "2"]),
    ],
    ids=str,
)
def test_formulas_of_other_modes(model: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", "--model", model, "--machine", "cpu", *argv, "--explain-memory")
    names = {"gate, up, product", "its input"} | (set() if "--zero" in argv else {"weights", "moments"})
    names |= {"gradients"} if model != "certify" else set()
    # With dropout attention's are no product.
    assert names | ({"attention", "its log-sum-exp"} if model != "certify" else set()) <= checked_formulas(text), text


def test_plan_and_schedule_print_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    plan = said(capsys, *PLAN)
    schedule = said(capsys, "schedule", *PLAN[1:])
    step = re.search(r"makespan (\S+) s, the whole step", schedule)
    found = re.search(r"^step (\S+) (m?s):", plan, re.MULTILINE)
    assert step and found
    assert float(found[1]) * (1e-3 if found[2] == "ms" else 1) == pytest.approx(float(step[1]), rel=0.006)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--global-batch", "33"], ["must be divisible by dp", "use --global-batch 32"]),
        (["--ranks", "16"], ["tp*pp*dp must equal the number of ranks", "use --ranks 8"]),
        (["--schedule", "zbv", "--recompute", "full", "--pp", "16", "--ranks", "64"], ["every chunk of a schedule"]),
        (["--table", "x.csv", "--out", "y.csv"], ["use python -m benchmarks.run published --table FILE --predictions"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
