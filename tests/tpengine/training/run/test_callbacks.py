"""Rung: gloo ranks. What a run tells callbacks, in which order, and how one that fails ends it on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.mixtures import write_mixture
from support.programs import finish_all, run_ranks, start_ranks

import tpengine

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.sample-tokens", "0", "--train.steps", "4"),
    *("--train.checkpoint-every", "2", "--train.eval-every", "2"),
)
PROGRAM = "support.engine.own_program"


class Told(tpengine.Callback):
    def __init__(self) -> None:
        self.all: list[tuple[str, Any]] = []

    def after_step(self, numbers: Mapping[str, Any]) -> None:
        self.all.append(("after_step", dict(numbers)))

    def after_evaluation(self, numbers: Mapping[str, Any]) -> None:
        self.all.append(("after_evaluation", dict(numbers)))

    def before_checkpoint(self, path: Path, step: int) -> None:
        assert not path.exists()
        self.all.append(("before_checkpoint", step))

    def after_checkpoint(self, path: Path, step: int) -> None:
        assert (path / "index.json").is_file()
        self.all.append(("after_checkpoint", step))


class ChangesNumbers(tpengine.Callback):
    def after_step(self, numbers: Any) -> None:
        numbers.clear()


def test_a_callback_is_told_of_all_in_order_with_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    told = Told()
    result = tpengine.run(SMALL, callbacks=[ChangesNumbers(), told], run_dir=tmp_path / "out")
    # A checkpoint is on disk in a later step than its own, at the latest before the next.
    names = [name for name, _ in told.all if name != "after_checkpoint"]
    step = ["after_step"]
    assert names == [*step, *step, "after_evaluation", "before_checkpoint"] * 2
    saved = [(name, number) for name, number in told.all if "checkpoint" in name]
    assert saved == [(f"{when}_checkpoint", number) for number in (2, 4) for when in ("before", "after")]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [numbers for name, numbers in told.all if name == "after_step"]
    assert [{**row, **numbers} for row, numbers in zip(rows, steps, strict=True)] == rows
    evaluated = [numbers for name, numbers in told.all if name == "after_evaluation"]
    assert [numbers["step"] for numbers in evaluated] == [2, 4]
    assert evaluated[-1]["held_out_loss"] == rows[-1]["held_out_loss"] == result.held_out_loss
    assert (result.step, result.loss) == (4, rows[-1]["loss"])
    assert (result.run_dir, result.checkpoint) == (tmp_path / "out", tmp_path / "out/checkpoints/step-00000004")


def told_by(directory: Path, rank: int) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in (directory / f"told-{rank}.txt").read_text().splitlines()]


@pytest.mark.by_default("after_step-1-3")
@pytest.mark.parametrize(
    ("method", "rank", "step"),
    [
        ("after_step", 1, 3),
        *(
            pytest.param(*planned, marks=pytest.mark.slow)
            for planned in (
                ("after_step", 0, 4),
                ("after_evaluation", 1, 2),
                ("before_checkpoint", 0, 2),
                ("after_checkpoint", 1, 4),
            )
        ),
    ],
)
def test_one_that_fails_on_one_rank_ends_all_by_name_and_the_run_goes_on(
    tmp_path: Path, method: str, rank: int, step: int
) -> None:
    ends = finish_all(
        *start_ranks(2, PROGRAM, *SMALL, "--run-dir", "out", cwd=tmp_path, FAIL=f"{method}:{rank}:{step}")
    )
    assert [end.returncode for end in ends] == [2, 2], [end.stderr for end in ends]
    said = [line for end in ends for line in end.stderr.splitlines() if line.startswith("tpengine: error: ")]
    assert said == [
        f"tpengine: error: callback Mine.{method} failed on rank {rank}: KeyError: 'planned': saved in "
        f"out/checkpoints/step-{step:08}; continue with --run-dir out --resume"
    ]
    # The traceback is that rank's, and no other's.
    assert ["raise KeyError" in end.stderr for end in ends] == [of == rank for of in range(2)]
    assert told_by(tmp_path, rank)[-1] == f"{method} {step}"
    ends = run_ranks(2, PROGRAM, "--run-dir", "out", "--resume", cwd=tmp_path)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    results = [[line for line in end.stdout.splitlines() if line.startswith("result 4 ")] for end in ends]
    assert results[0] == results[1] and len(results[0]) == 1
    steps = [int(line.split()[1]) for line in told_by(tmp_path, 0) if line.startswith("after_step ")]
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_callbacks_that_are_not_the_same_on_all_ranks_are_refused(tmp_path: Path) -> None:
    ends = finish_all(*start_ranks(2, PROGRAM, *SMALL, "--run-dir", "out", cwd=tmp_path, ALIKE="no"))
    assert [end.returncode for end in ends] == [2, 2]
    assert "all ranks must be given the same loss, metrics, optimizer and callbacks: ranks [1] differ" in ends[0].stderr


@pytest.mark.slow
def test_all_ranks_are_told_how_a_mixture_is_mixed(tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path, [[400] * 3, [400] * 3], [1.0, 2.0], vocab_size=256)
    mixed = "--data.mixture", str(mixture), "--model.vocab-size", "256", "--train.checkpoint-every", "0"
    ends = run_ranks(2, PROGRAM, *SMALL, *mixed, "--run-dir", "out", cwd=tmp_path)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    named = [(tmp_path / f"named-{rank}.txt").read_text().split() for rank in range(2)]
    assert named[0] == named[1] and {"share/s0", "epochs/s1"} <= set(named[1])


def test_the_first_rank_alone_is_told_where_a_callback_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tpengine.observe.activity import Activity
    from tpengine.runs.callbacks import Callbacks

    class OnFirst(Told):
        on_first_rank_only = True

    for rank in range(2):
        given = Told(), OnFirst()
        Callbacks(given, rank, Activity(), torch.device("cpu")).after_step({"step": 1})
        assert [len(each.all) for each in given] == [1, 1 - rank]
