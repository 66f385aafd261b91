"""Rung: pure. Which checkpoints there are: only whole ones, the newest kept, whatever a kill has left."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import Index, check_file, hash_file, read_index, write_index

SHARDS = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")


def write(directory: CheckpointDirectory, step: int) -> None:
    """Begin a checkpoint, as two ranks do, and write everything of it."""
    for shard in SHARDS:
        (directory.begin(step) / shard).write_text(f"{shard} of step {step}")
    beside = directory.begin(step)
    files = {shard: hash_file(beside / shard) for shard in SHARDS}
    write_index(beside, Index(step, {}, files, {}))


def save(directory: CheckpointDirectory, step: int, keep: int = 1000) -> None:
    write(directory, step)
    directory.complete(step)
    directory.prune(keep)


def whole_steps(directory: CheckpointDirectory) -> list[int]:
    """The steps there are, after every byte of each has been checked."""
    steps = directory.steps()
    for step in steps:
        index = read_index(directory.of_step(step))
        assert index.step == step
        for name, entry in index.files.items():
            check_file(directory.of_step(step), name, entry)
    return steps


def hidden(directory: CheckpointDirectory) -> list[str]:
    return sorted(entry.name for entry in directory.path.iterdir() if entry.name.startswith("."))


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "absent")
    assert directory.steps() == [] and directory.newest() is None
    directory.prune(1)
    directory.clean()
    directory.abandon(3)
    assert not directory.path.exists()


def test_a_checkpoint_is_there_once_it_is_complete(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    write(directory, 50)
    assert directory.steps() == [] and directory.newest() is None
    directory.complete(50)
    assert directory.newest() == tmp_path / "checkpoints" / "step-00000050" == directory.of_step(50)
    write(directory, 100)
    assert whole_steps(directory) == [50] and hidden(directory) == [".step-00000100.writing"]
    directory.complete(100)
    assert whole_steps(directory) == [50, 100] and not hidden(directory)


def test_the_newest_is_by_number(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (10**8, 9, 10**11, 99_999_999, 0):
        save(directory, step)
    assert whole_steps(directory) == [0, 9, 99_999_999, 10**8, 10**11]
    assert directory.newest() == tmp_path / "step-100000000000"


@pytest.mark.parametrize(
    "name",
    [
        *("step-0000010", "step-000000010", "step-00000010.old", "old-step-00000010", "step-", "step--0000010"),
        *("Step-00000010", ".step-00000010.writing", ".step-00000010.removing", "step-\u0660\u0660\u0660\u0660" * 2),
        *("step-" + "\u0661" * 8, "step-00000010\n"),
    ],
)
def test_other_names_are_nobodys(tmp_path: Path, name: str) -> None:
    """Seen, they would be looked for under the name that their number has."""
    directory = CheckpointDirectory(tmp_path)
    save(directory, 5)
    (tmp_path / name).mkdir()
    (tmp_path / "step-00000020").write_text("a file")
    assert directory.steps() == [5]
    directory.prune(1)
    assert (tmp_path / name).is_dir() and (tmp_path / "step-00000020").is_file()


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    directory = CheckpointDirectory(tmp_path)
    steps = [2, 4, 6, 8, 10]
    for number, step in enumerate(steps, 1):
        save(directory, step, keep)
        assert whole_steps(directory) == steps[:number][-keep:]
    assert not hidden(directory)


def test_some_are_kept_besides_the_newest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in range(2, 22, 2):
        write(directory, step)
        directory.complete(step)
        directory.prune(2, besides=[6, 12])
    assert whole_steps(directory) == [6, 12, 18, 20]
    directory.prune(1)
    assert whole_steps(directory) == [20]


def test_what_could_not_be_completed_is_abandoned(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 2)
    directory.begin(4)
    directory.abandon(4)
    directory.abandon(4)
    assert not hidden(directory) and whole_steps(directory) == [2]
    save(directory, 4)
    assert whole_steps(directory) == [2, 4]


def test_cleaning_leaves_what_is_whole(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 2)
    write(directory, 4)
    (tmp_path / ".step-00000001.removing").mkdir()
    (tmp_path / ".other").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    directory.clean()
    assert hidden(directory) == [".other"] and (tmp_path / "notes.txt").exists() and whole_steps(directory) == [2]


def test_completing_the_same_step_again(tmp_path: Path) -> None:
    """As after a save whose last sync failed: the name is there, and the run saves the step once more."""
    directory = CheckpointDirectory(tmp_path)
    save(directory, 2)
    save(directory, 2)
    assert whole_steps(directory) == [2] and not hidden(directory)


def test_a_damaged_one_is_set_aside_and_its_step_saved_again(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number in (1, 2, 3):
        save(directory, 2)
        save(directory, 4)
        (directory.of_step(4) / SHARDS[0]).write_text(f"damage {number}")
        directory.set_aside(4)
        assert whole_steps(directory) == [2]
    save(directory, 4, keep=1)
    directory.clean()
    assert whole_steps(directory) == [4]
    for number, name in enumerate(("damaged", "damaged-2", "damaged-3"), 1):
        assert (tmp_path / f"step-00000004.{name}" / SHARDS[0]).read_text() == f"damage {number}"


class Killed(BaseException):
    """What stands for a SIGKILL: nothing in the program catches it."""


OPERATIONS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


def killed_before(operation: int, of: Callable[[], None], patch: pytest.MonkeyPatch) -> bool:
    """Call it and stop it before its file operation of that number; return whether there was one."""
    numbers = itertools.count()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) >= operation:
                raise Killed
            return original(*args, **kwargs)

        return call

    with patch.context() as inner:
        for name in OPERATIONS:
            inner.setattr(os, name, counted(name))
        try:
            of()
        except Killed:
            return True
    return False


@pytest.mark.parametrize(
    ("before", "step", "keep", "possible"),
    [
        ([], 2, 2, [[], [2]]),
        ([2, 4], 6, 2, [[2, 4], [2, 4, 6], [4, 6]]),
        ([2, 4, 6], 8, 1, [[2, 4, 6], [2, 4, 6, 8], [4, 6, 8], [6, 8], [8]]),
        ([4], 4, 2, [[4]]),
        ([2, 4], 4, 1, [[2, 4], [4]]),
    ],
)
def test_a_kill_between_any_two_file_operations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: list[int],
    step: int,
    keep: int,
    possible: list[list[int]],
) -> None:
    """What is seen is whole, the newest is never lost, and the next run saves the step as if nothing had been."""
    seen: list[list[int]] = []
    for operation in itertools.count():
        directory = CheckpointDirectory(tmp_path / str(operation))
        for earlier in before:
            save(directory, earlier)
        was_killed = killed_before(operation, lambda: save(directory, step, keep), monkeypatch)  # noqa: B023
        seen.append(whole_steps(directory))
        directory.clean()
        assert whole_steps(directory) == seen[-1]
        save(directory, step, keep)
        assert whole_steps(directory) == possible[-1] and not hidden(directory)
        if not was_killed:
            break
    assert [key for key, _ in itertools.groupby(seen)] == possible
    assert operation > 8, "the operations are no longer those that are counted"
