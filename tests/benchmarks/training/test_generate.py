"""Rung: gloo ranks. The generation benchmark checks that both ways give the same tokens, and tells its rows.

Models are miniatures, and no time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.timing import PASSED
from benchmarks.run import main
from tpengine.distributed.local_ranks import Ranks

SMALL = ("--hidden", "256", "--layers", "2", "--vocabulary", "64", "--prompt", "3", "--tokens", "5", "--rounds", "1")


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [True, False])
def test_both_ways_are_compared_before_they_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    if not is_right:
        call = Ranks.call

        def falsified(ranks: Ranks, method: str) -> list[object]:
            answers = call(ranks, method)
            return [([0], *rest) for _, *rest in answers] if method == "cached" else answers

        monkeypatch.setattr(Ranks, "call", falsified)
    out = tmp_path / "rows.jsonl"
    assert main(["generate", *SMALL, "--tp", "2", "--out", str(out)]) == (not is_right)
    (row,) = map(json.loads, out.read_text().splitlines())
    if not is_right:
        assert row["check"] == "failed: 2 different continuations" and "speedup_median_ratio" not in row
        assert "failed: 2 different continuations" in capsys.readouterr().out
        return
    assert (row["case"], row["check"], row["num_samples"], row["tokens"]) == ("generate/tp2/5", PASSED, 1, 5)
    assert row["cached_median_seconds"] > 0 < row["speedup_median_ratio"] and row["decode_median_tokens_per_second"] > 0
