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

from benchmarks.host_time import CALLS, counted
from benchmarks.run import main

WORLDS = (2, 3, 8)


def expected(name: str, world: int) -> tuple[Counter[str], int]:
    """The launches and the copies of a call: each one costs the host about 10 us."""
    peers = world - 1
    # The copy engine waits for each peer, copies its rows, and raises the flag; it also gathers the own rows.
    gathers, gather_copies = {"publish_kernel": 1, "wait_kernel": peers}, 2 * peers + 1
    multiplies, scatters = {"gather_matmul_kernel": 1}, {"matmul_scatter_kernel": 1}
    if name.startswith("gather_matmul/push"):
        return Counter(multiplies), world if name.endswith("keep") else 0
    if name.startswith("gather_matmul"):
        return Counter(gathers) + Counter(multiplies), gather_copies - (not name.endswith("keep"))
    if name == "matmul_scatter":
        return Counter(scatters), 0
    if name == "matmul_then_gather":
        return Counter(scatters) + Counter(gathers), gather_copies
    # A gather that runs beside a scatter waits for its peers once more, and ends in a meeting.
    return Counter(scatters) + Counter(gathers) + Counter({"wait_kernel": 1, "meet_kernel": 1}), gather_copies


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_launches_and_copies_no_more_than_it_must(name: str, world: int) -> None:
    assert counted(name, world) == expected(name, world)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--call", "gather"], "--call must be of gather_matmul/fused, .*: got gather: leave it out for all"),
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
    options = ("--call", "gather_matmul/push", "--ranks", "2", "--calls", "2", "--rounds", "1", "--out", str(out))
    assert compilers.run(main, 1, ["host", *options]) == [0]
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["case"], row["ranks"], row["launches"], row["copies"]) == ("host/gather_matmul/push", 2, 1, 0)
    assert row["kernels"] == {"gather_matmul_kernel": 1} and row["host_us"] > 0
