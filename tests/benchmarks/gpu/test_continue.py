"""Rung: pure. What a later start takes over from an earlier one, and what the compiler does ahead of the cases.

Only a GPU shows that what was compiled ahead is what its cases launch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tpkernels.launch import Target
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.tuned import Tile, TunedAttention, TunedGate, path_for, read_tuned

from benchmarks.gpu import command
from benchmarks.gpu.cases.kernels.ahead import Launch, each_share
from benchmarks.gpu.cases.kernels.tiles import save
from benchmarks.gpu.folder import opened
from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import PREFLIGHT
from benchmarks.harness.journal import append, read
from benchmarks.launches.compile import describe

H200, NAME = Target("cuda", 90), "NVIDIA H200"
TILES = [
    Tile(4096, columns, 4096, "bfloat16", True, False, False, MatmulConfig(128, 256, 64, 8, 8, 4), 190.5, 188.0)
    for columns in (512, 1024, 2048)
]


def saved(path: Path, *tiles: Tile, copied: Path | None = None) -> None:
    save(path, NAME, H200, tiles=tiles, copied=copied)


def read_tiles(path: Path) -> list[Tile]:
    return read_tuned(path, NAME, H200)[0]


def test_tiles_of_both_places_are_kept(tmp_path: Path) -> None:
    """A machine that is new has lost one of the two files."""
    path, copied = tmp_path / "tuned" / "h200.json", tmp_path / "h200.json"
    saved(path, TILES[0])
    saved(copied, TILES[1])
    faster = TILES[1]._replace(us=100.0)
    saved(path, TILES[2], faster, copied=copied)
    assert set(read_tiles(path)) == {TILES[0], faster, TILES[2]}
    assert path.read_bytes() == copied.read_bytes()


def test_tiles_and_attentions_are_kept_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    first = TunedAttention(4096, 4, 1, 128, "bfloat16", "cudnn", 310.0, 420.0, "2026-11-23", None)
    saved(path, TILES[0])
    save(path, NAME, H200, attentions=[first, first._replace(seq=8192)])
    later = first._replace(seq=4000, winner="ours", us=400.0, ours_us=400.0)
    save(path, NAME, H200, attentions=[later])
    gate = TunedGate(8192, 8192, 2048, "bfloat16", "silu", TILES[0].config._replace(block_n=128), 800.0, 850.0)
    save(path, NAME, H200, gates=[gate])
    assert read_tuned(path, NAME, H200) == ([TILES[0]], [later, first._replace(seq=8192)], [gate])


def test_an_earlier_run_is_taken_over_and_none_is_overwritten(tmp_path: Path) -> None:
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "tuned"
    old.mkdir()
    append(old / "rows.jsonl", {"case": "one"})
    with opened(old) as before:
        saved(before.work / "h200.json", TILES[0])
    command._take_over(old, new)
    assert [row["case"] for row in read(new / "rows.jsonl")] == ["one"]
    with opened(new) as now:
        command._place_tiles(now.work, folder)
        assert read_tiles(folder / "h200.json") == [TILES[0]]
        # What is there stays.
        saved(now.work / "h200.json", TILES[1])
        command._place_tiles(now.work, folder)
        assert read_tiles(folder / "h200.json") == [TILES[0]]
    with pytest.raises(ValueError, match=r"needs a new --out: .* has rows.jsonl"):
        command._take_over(old, new)


def test_tiles_are_placed_where_the_operators_look() -> None:
    assert command.TUNED == tuned.FOLDER == path_for(NAME).parent


def test_launches_are_dealt_out_to_processes_each_once() -> None:
    every: list[Launch] = []
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    each_share(H200, ops, 0, 1, every.append)
    shares: list[list[Launch]] = [[], [], []]
    for place, share in enumerate(shares):
        each_share(H200, ops, place, len(shares), share.append)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Counter(map(text, every)) == Counter(text(one) for share in shares for one in share)
    assert {one.options["WORLD"] for one in every if "WORLD" in one.options} == {2, 4, 8}
    dtypes = {tensor.dtype for one in every for tensor in one.arguments if isinstance(tensor, torch.Tensor)}
    assert dtypes == {torch.bfloat16}


def text(launch: Launch) -> str:
    # An arena's address differs from call to call.
    multiples = [n % 16 == 0 for n in launch.arguments if isinstance(n, int)]
    return f"{launch.kernel.fn.__name__} {describe(launch.kernel, launch.arguments, launch.options)} {multiples}"


def test_a_rival_that_is_not_installed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (None, "0.6.4"):
        rows = tmp_path / f"{version}.jsonl"
        append(rows, {PREFLIGHT: {"gpu": NAME, "liger_kernel": version}})
        fields = {"ours": "tpkernels", "best_rival": "torch", "speedup_over_best_rival_median_ratio": 1.1}
        append(rows, {"case": "kernels/rope/x", "check": "passed", **fields})
        print_report(rows, None)
        assert ("liger: not installed" in capsys.readouterr().out) == (version is None)
