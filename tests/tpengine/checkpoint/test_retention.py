"""Rung: pure. Which checkpoints stay besides the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpengine.checkpoint.directory import CheckpointDirectory, Retention
from tpengine.checkpoint.index import Index, write_index


def save(directory: CheckpointDirectory, step: int, loss: float | None = None, order: int = 0) -> None:
    state: dict[str, Any] = {"data": {"order": order}}
    if loss is not None:
        state["held_out_loss"] = loss
    write_index(directory.begin(step), Index(step, {}, {}, state))
    directory.complete(step)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([3.0, 2.0, 2.5], [4]), ([None, 2.0, 2.0], [4]), ([None] * 3, []), ([1.0, None, 2.0], [2])],
)
def test_the_best_is_the_first_of_the_lowest_loss(tmp_path: Path, losses: list[float | None], best: list[int]) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number, loss in enumerate(losses, 1):
        save(directory, 2 * number, loss)
    assert sorted(Retention(best=True)(directory)) == best == Retention().best_of(directory)


def test_each_text_has_its_best(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step, loss, order in ((2, 1.0, 0), (4, 1.5, 0), (6, 9.0, 1), (8, 8.0, 1)):
        save(directory, step, loss, order)
    assert Retention(best=True)(directory) == {2, 8}


def test_a_run_keeps_the_best_beside_the_newest_while_it_saves(tmp_path: Path) -> None:
    directory, besides = CheckpointDirectory(tmp_path), Retention(best=True)
    seen = []
    for step, loss in ((2, 3.0), (4, 2.0), (6, 2.5), (8, 2.2), (10, 1.5), (12, 1.6)):
        save(directory, step, loss)
        directory.prune(1, besides(directory))
        seen.append(directory.steps())
    assert seen == [[2], [4], [4, 6], [4, 8], [10], [10, 12]]
    # A run that goes back saves a step anew.
    directory.remove_after(8)
    assert besides(directory) == set()
    save(directory, 10, 7.0)
    assert besides(directory) == {10}


def test_a_damaged_index_is_not_the_best(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 2, 1.0)
    save(directory, 4, 2.0)
    (directory.of_step(2) / "index.json").write_text("{}")
    assert Retention(best=True)(directory) == {4}


def test_what_a_rollback_may_need_stays(tmp_path: Path) -> None:
    """The newest that is a window older than the newest of all, and all behind it, each of which will be that one."""
    directory = CheckpointDirectory(tmp_path)
    seen = []
    for step in range(10, 70, 10):
        save(directory, step)
        directory.prune(1, Retention(window=25)(directory))
        seen.append(directory.steps())
    assert seen[1:] == [[10, 20], [10, 20, 30], [10, 20, 30, 40], [20, 30, 40, 50], [30, 40, 50, 60]]


def test_multiples_stay(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in range(2, 22, 2):
        save(directory, step)
    assert Retention(every=6)(directory) == {6, 12, 18}
