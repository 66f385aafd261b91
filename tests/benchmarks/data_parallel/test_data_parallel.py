"""Rung: gloo ranks. The data-parallel benchmark's contestants agree with one process, and a wrong one is noticed.

Models are miniatures, and no time is asserted. What only a GPU checks: nothing, the benchmark runs on CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.rank_pool import RankPool

from benchmarks.data_parallel.command import OURS, RIVAL_OF, row_of, table
from benchmarks.data_parallel.options import CHECKED_STEPS, Options
from benchmarks.harness.timing import PASSED, Comparison
from benchmarks.run import main

SMALL = Options(hidden=16, layers=2, tokens=8, sequences=1, micro_batches=2, rounds=2, memory_steps=1)


def wrongs(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """What is wrong with each contestant one step too early, and when it is to be checked."""
    from benchmarks.data_parallel.replica import Member

    found = []
    for name in names:
        member = Member(name, SMALL)
        for _ in range(CHECKED_STEPS - 1):
            member.step()
        early = member.wrong()
        member.step()
        found.append((early, member.wrong()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("sharded", "ddp_zero"),
        pytest.param((*OURS, *RIVAL_OF.values()), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_every_contestant_trains_as_one_process_does(ranks: RankPool, names: tuple[str, ...]) -> None:
    for found in ranks.run(wrongs, 2, names):
        for name, (early, late) in zip(names, found, strict=True):
            assert "is off by" in early and late == "", name


@pytest.mark.filterwarnings("ignore:`torch.jit")  # what torch's own modules cause when they are imported
def test_a_difference_is_named() -> None:
    from benchmarks.data_parallel.replica import difference

    before, after = {"w": torch.zeros(3), "v": torch.zeros(3)}, {"w": torch.ones(3), "v": torch.ones(3)}
    assert difference(after, before, after) == ""
    assert difference(after | {"w": torch.ones(3) * 1.25}, before, after).startswith("w is off by 0.25")
    assert difference(after | {"w": torch.full((3,), float("nan"))}, before, after).startswith("w is off by nan")
    assert difference({"v": torch.ones(3)}, before, after) == "weights are ['w']"
    assert difference(before, before, before).startswith("w is off by 0"), "nothing was trained"


def test_a_row_compares_with_the_rival_and_with_whole_by_round() -> None:
    samples = {"whole": (1.0, 2.0), "sharded": (2.0, 4.0), "ddp": (2.0, 2.0), "ddp_zero": (3.0, 8.0)}
    peaks = {"whole": 8, "sharded": 6, "ddp": 8, "ddp_zero": 12}
    row = row_of("sharded", SMALL, Comparison(PASSED, samples), peaks)
    assert row["against"] == "ddp_zero" and row["speedup_median_ratio"] == 1.75
    assert row["time_over_whole_median_ratio"] == 2.0 and row["peak_over_rival_ratio"] == 0.5
    assert row["ours_median_tokens_per_second"] == 2 * 2 * 8 / 3.0
    red = row_of("sharded", SMALL, Comparison("failed: sharded: w is off by 1"), {})
    assert "speedup_median_ratio" not in red and "ours_peak_bytes" not in red
    assert table([row, red]).row_count == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "got --ranks 1, --hidden 512: use 2 ranks or more"),
        (["--hidden", "12"], "--hidden 12: use 2 ranks or more, and a multiple of 8"),
        (["--rounds", "0"], "--rounds must be at least 1: got 0: use 9"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data_parallel", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_prints_and_stores_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    sizes: dict[str, Any] = {name.replace("_", "-"): getattr(SMALL, name) for name in ("hidden", "layers", "tokens")}
    options = [text for name, value in {**sizes, "rounds": 2, "out": out}.items() for text in (f"--{name}", str(value))]
    assert main(["data_parallel", *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == [f"data_parallel/{name}" for name in OURS]
    for row in rows:
        assert row["check"] == PASSED and row["speedup_median_ratio"] > 0 and row["ours_peak_bytes"] != 0
    assert "ddp_zero" in capsys.readouterr().out
