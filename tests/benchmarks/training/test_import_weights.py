"""Rung: gloo ranks. The import benchmark's contestants hold what the files say, a wrong one is noticed, rows are told.

Models are miniatures, and no time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.rank_pool import RankPool

from benchmarks.harness.resident_memory import keep_what_is_freed
from benchmarks.harness.timing import PASSED
from benchmarks.run import main
from benchmarks.training.import_rank import Member
from benchmarks.training.import_weights import Options, _row, _Times, table, write_model
from tpengine.hugging_face.read import BoxReader

SMALL = Options(hidden=256, layers=2, vocabulary=256, rounds=2)


def loaded(name: str, directory: str, tp: int, pp: int) -> tuple[str, str, int, int]:
    """What is wrong with a rank; what, if a bit of it is another; its elements; and the bytes from a warm disk."""
    fill_all = BoxReader.fill_all

    def falsified(reader: BoxReader, boxes: Any, num_threads: int = 1) -> None:
        fill_all(reader, boxes, num_threads)
        boxes[-1][2].detach().view(-1).view(torch.uint8)[-4] ^= 1

    member = Member(name, directory, tp, pp, 1)
    try:
        found = member.wrong()
        returned, ready, _ = member.load()
        assert 0 < returned <= ready
        member.drop_pages()
        num_elements = member.num_elements()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoxReader, "fill_all", falsified)
            falsely = member.wrong()
        member.release()
    finally:
        keep_what_is_freed()
    return found, falsely, num_elements, member._threads


@pytest.mark.by_default("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contestants_hold_what_the_files_say(ranks: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    num_bytes = write_model(tmp_path, SMALL, dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    num_elements = num_bytes // dtype.itemsize
    (rival,) = ranks.run(loaded, 1, "transformers", str(tmp_path), 1, 1)
    assert rival[0] == "" and rival[2] == num_elements
    for tp, pp in ((1, 1), (2, 2)):
        ours = ranks.run(loaded, tp * pp, "ours", str(tmp_path), tp, pp)
        assert [found for found, *_ in ours] == [""] * (tp * pp)
        assert all("differs from the file" in falsely for _, falsely, *_ in ours)
        held = sum(elements for *_, elements, _ in ours)
        # Norms are on both ranks of tp.
        assert num_elements <= held <= 1.05 * num_elements and (held == num_elements) == (tp == 1)


def test_rows_and_the_table_say_what_was_measured() -> None:
    times = {
        "4_ranks": _Times((1.0, 2.0, 1.0), (0.9, 1.8, 0.9), (0, 0, 5)),
        "transformers": _Times((2.0, 2.0, 4.0), (0.1, 0.2, 0.2), (7, 7, 7)),
    }
    row = _row("4_ranks", "float32", 100, "warm", PASSED, times, SMALL)
    assert row["case"] == "import/float32/4_ranks/warm" and (row["tp"], row["pp"]) == (2, 2)
    assert row["speedup_median_ratio"] == 2.0 and row["speedup_over_returned_median_ratio"] == pytest.approx(0.1)
    assert (row["ours_disk_bytes"], row["rival_disk_bytes"], row["num_samples"]) == (0, 7, 3)
    assert len(table([row]).rows) == 1
    red = _row("4_ranks", "float32", 100, "warm", "failed: ours: rank 1: x", {}, SMALL)
    assert "speedup_median_ratio" not in red and len(table([red]).rows) == 1


def test_a_model_with_odd_heads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--hidden", "100"]) == 2
    assert "use a multiple of 256" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_leaves_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = "--hidden", "256", "--layers", "2", "--vocabulary", "256"
    assert main(["import", *sizes, "--rounds", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8 and {row["check"] for row in rows} == {PASSED}
