"""Rung: pure. The chain of waits, from ranks' last words; training/test_drills.py shows that a run leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpengine.cli import main
from tpengine.last_words import LastWords, forget_last_words, read_last_words
from tpengine.planner.diagnose.verdict import chain

OVER = "--train.timeout-seconds 300 is over"


def words(
    rank: int, doing: str, waits: dict[str, tuple[int, ...]], seconds: float = 300.0, gone: tuple[int, ...] = ()
) -> LastWords:
    return LastWords(rank, OVER, 7, doing, seconds, waits, gone, 1e9)


def of(*all_words: LastWords) -> dict[int, LastWords]:
    return {one.rank: one for one in all_words}


def test_the_chain_ends_at_the_rank_that_waits_for_nobody() -> None:
    found = chain(
        of(
            words(0, "w[0RECV_B3]", {"pp": (1,)}),
            words(1, "w[1RECV_B3]", {"pp": (2,)}, 300.1),
            words(2, "2F3", {}, 300.2),
            words(3, "w[3RECV_F3]", {"pp": (2,)}),
        )
    )
    assert found == (
        "the run ended in step 7: rank 0 was in w[0RECV_B3] for 300.0 s, waiting for rank 1 (pp), which was in "
        "w[1RECV_B3] for 300.1 s, waiting for rank 2 (pp), which was in 2F3 for 300.2 s, waiting for nobody: "
        "--train.timeout-seconds 300 is over"
    )


def test_the_chain_ends_at_a_rank_that_was_killed() -> None:
    found = chain(
        of(
            words(0, "w[0RECV_B3]", {"pp": (1,)}),
            words(1, "w[r1]", {"dp": (3,)}, 0.0, gone=(3,)),
            words(2, "CLIP", {"pp": (0, 3)}),
        )
    )
    assert "rank 3 (pp), which left no last words: look at its output" in found
    assert found.startswith("the run ended in step 7: rank 2 was in CLIP for 300.0 s")
    alone = chain(of(words(1, "w[r1]", {"dp": (0, 3)}, 0.0, gone=(3,))))
    assert alone.endswith(
        "was in w[r1] for 0.0 s, waiting for rank 3 (dp), whose process had ended: look at its output"
    )


def test_ranks_that_wait_in_a_circle_are_said_to() -> None:
    found = chain(of(words(0, "w[0RECV_B0]", {"pp": (1,)}), words(1, "w[1RECV_F1]", {"pp": (0,)})))
    assert found.endswith("waiting for rank 0 (pp): they wait in a circle")


# Infinity is no rank.
VAST = '{"rank": 1e999, "reason": "", "step": 1, "doing": "", "seconds": 1, "waits": {}, "gone": [], "time": 1}'


def test_last_words_are_kept_forgotten_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = words(1, "w[r1]", {"dp": (0, 3)}, gone=(3,))
    written.write(tmp_path)
    assert read_last_words(tmp_path) == {1: written}
    # Without a profile the end is all that is said.
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().out == chain({1: written}) + "\n"
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"end": chain({1: written})}
    for damage in ("", "[]", "{}", '{"rank": "x"}', "\xff", json.dumps({"rank": 1, "waits": 3}), VAST):
        (tmp_path / "last_words" / "1.json").write_text(damage)
        assert main(["diagnose", str(tmp_path)]) == 2
        assert "last words must be a rank's" in capsys.readouterr().err
    forget_last_words(tmp_path)
    assert read_last_words(tmp_path) == {}
