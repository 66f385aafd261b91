"""Rung: pure. How many kernels a fused call launches and how many copies it makes; what its host time is read from.

Launches are looked at, not made: no time is asserted, and only a GPU's host shows one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from benchmarks.launches.host_time import CALLS, counted
from benchmarks.run import main

WORLDS = (2, 3, 8)


def expected(name: str, world: int) -> tuple[Counter[str], int]:
    """The launches and the copies of a call."""
    call, *how = name.split("/")
    if how == ["plain"]:
        return Counter(), 0
    if call == "matmul_scatter":
        return Counter({"matmul_scatter_kernel": 1}), 0
    if how[0] == "push":
        return Counter({"gather_matmul_kernel": 1}), world if "keep" in how else 0
    peers = world - 1
    launches, copies = Counter({"publish_kernel": 1, "fetch_kernel": 1}), 0
    if how[0] == "engine":
        # A copy engine waits for each peer, copies its rows, and raises the flag; it may also copy the own rows.
        launches, copies = Counter({"publish_kernel": 1, "wait_kernel": peers}), 2 * peers
        copies += call != "gather_matmul" or "keep" in how
    launches["gather_matmul_kernel" if call == "gather_matmul" else "matmul_scatter_kernel"] += 1
    return launches, copies


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_launches_and_copies_no_more_than_it_must(name: str, world: int) -> None:
    assert counted(name, world) == expected(name, world)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--call", "gather"], "--call must be of gather_matmul/kernel, .*: got gather: leave it out for all"),
        (["--ranks", "9"], "--ranks must be 2 to 8, as groups with an arena: got 9: use 8"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["host", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch("benchmarks: error: " + message, line), line


# Compiles a kernel.
@pytest.mark.slow
def test_a_row_per_call_and_number_of_ranks(compilers: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ("--call", "gather_matmul/push", "--ranks", "2", "--calls", "2", "--preset", "", "--out", str(out))
    assert compilers.run(main, 1, ["host", *options]) == [0]
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["case"], row["ranks"], row["launches"], row["copies"]) == ("host/gather_matmul/push", 2, 1, 0)
    assert row["kernels"] == {"gather_matmul_kernel": 1} and row["host_us"] > 0
