"""Rung: gloo ranks. When a run saves, and that training goes on meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

import tpengine.checkpoint.storage as storage
import tpengine.runs.checkpoints as run_checkpoints
from tpengine.checkpoint.index import FileEntry
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError

CPU = torch.device("cpu")


def config_saving(every: int, run_dir: Path, *, steps: int = 5, keep: int = 2, resume: bool = False) -> Config:
    config = config_of(1, 1, 2, tied=False, kv_heads=1, num_layers=2)
    train = replace(config.train, steps=steps, checkpoint_every=every, keep_checkpoints=keep)
    return replace(config, train=train, run_dir=str(run_dir), resume=resume)


def prepared(config: Config) -> tuple[Trainer, RunCheckpoints]:
    trainer = Trainer(config, open_corpus(config), CPU)
    return trainer, RunCheckpoints(
        trainer.state, trainer.planned, Path(config.run_dir) if trainer.state.rank.mesh.at.pp == 0 else None
    )


def run_steps(config: Config) -> list[list[int]]:
    """Train all steps; return what is on disk after each, once it is written."""
    trainer, checkpoints = prepared(config)
    seen = []
    with checkpoints:
        for step in range(config.train.steps):
            trainer.step.run(step)
            checkpoints.after_step(step + 1)
            checkpoints.wait()
            seen.append(checkpoints_of(config.run_dir).steps())
    return seen


def test_every_so_many_steps_and_the_last_and_the_newest_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    for seen in ranks.run(run_steps, 2, config_saving(2, tmp_path)):
        assert seen == [[], [2], [2], [2, 4], [4, 5]]
    (tmp_path / "other").mkdir()
    for seen in ranks.run(run_steps, 2, config_saving(2, tmp_path / "other", keep=1)):
        assert seen == [[], [2], [2], [4], [5]]
    (tmp_path / "every").mkdir()
    config = config_saving(1, tmp_path / "every", keep=1)
    for seen in ranks.run(run_steps, 2, replace(config, train=replace(config.train, keep_every=2))):
        assert seen == [[1], [2], [2, 3], [2, 4], [2, 4, 5]]


def test_zero_saves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(run_steps, 2, config_saving(0, tmp_path))[0][-1] == []
    assert not list(tmp_path.iterdir())


def steps_while_writing(config: Config) -> list[str]:
    """Hold back every write until the next step is done; return what happened in which order."""
    trainer, checkpoints = prepared(config)
    events: list[str] = []
    gate = threading.Event()
    save_file = storage.save_file

    def slow(blocks: Any, path: str) -> FileEntry:
        events.append("write begins")
        assert gate.wait(60), "training did not go on while a checkpoint was written"
        entry = save_file(blocks, path)
        events.append("write ends")
        return entry

    storage.save_file = slow
    try:
        with checkpoints:
            for step in range(3):
                trainer.step.run(step)
                events.append(f"step {step + 1}")
                if step == 1:
                    gate.set()
                checkpoints.after_step(step + 1)
    finally:
        storage.save_file = save_file
    return events


def test_training_goes_on_while_a_checkpoint_is_written(ranks: RankPool, tmp_path: Path) -> None:
    """Proved by order: a step ends between the beginning and the end of a write that waits for it."""
    for events in ranks.run(steps_while_writing, 2, config_saving(1, tmp_path, steps=3)):
        assert events.index("step 1") < events.index("step 2") < events.index("write ends")
        assert events.count("write ends") == 3


def steps_on_slow_storage(config: Config, seconds: float) -> tuple[list[str], list[int]]:
    """Hold back writes until step 4 is done or somebody waits for them; return what happened in which order.

    Args: seconds: for how long training may wait for storage.
    """
    trainer, checkpoints = prepared(config)
    events: list[str] = []
    gate = threading.Event()
    save_file = storage.save_file

    def slow(blocks: Any, path: str) -> FileEntry:
        events.append("write begins")
        while not gate.wait(0.01):
            if seconds and trainer.state.rank.activity.now.what == "waiting for the checkpoint before":
                gate.set()
        entry = save_file(blocks, path)
        events.append("write ends")
        return entry

    storage.save_file = slow
    with (
        patch.object(run_checkpoints, "_MOST_WAITING_SECONDS", seconds),
        patch.object(run_checkpoints, "_MOST_WAITING_SHARE", 0.0),
        checkpoints,
    ):
        for step in range(config.train.steps):
            result = trainer.step.run(step, lambda: [float(checkpoints.is_writing)])
            events.append(f"step {step + 1}")
            if step == 3 and not seconds:
                gate.set()
                checkpoints.wait()
            checkpoints.after_step(step + 1, is_writing=bool(result.largest[0]))
    storage.save_file = save_file
    return events, checkpoints_of(config.run_dir).steps()


def test_training_does_not_wait_for_slow_storage(ranks: RankPool, tmp_path: Path) -> None:
    """Checkpoints that are due while the first is being written are left out; the last never is. Proved by order."""
    for events, steps in ranks.run(steps_on_slow_storage, 2, config_saving(1, tmp_path, keep=9), 0.0):
        assert events[0] == "step 1" and events.index("write begins") < events.index("step 4")
        assert events.index("step 4") < events.index("write ends")
        assert steps == [1, 4, 5]


def test_a_checkpoint_that_is_nearly_written_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    """Storage is ready in the moment in which the second is due, and no checkpoint is left out."""
    for events, steps in ranks.run(steps_on_slow_storage, 2, config_saving(1, tmp_path, keep=9), 60.0):
        assert events.index("step 2") < events.index("write ends")
        assert steps == [1, 2, 3, 4, 5]


def stop_now(config: Config) -> list[str]:
    trainer, checkpoints = prepared(config)
    with checkpoints:
        for step in range(3):
            trainer.step.run(step)
            checkpoints.after_step(step + 1)
        return [checkpoints.save_and_say(3, 2), checkpoints.save_and_say(3, 15)]


def test_a_stop_saves_and_says_how_to_go_on(ranks: RankPool, tmp_path: Path) -> None:
    where = f"saved in {tmp_path}/checkpoints/step-00000003; continue with --run-dir {tmp_path} --resume"
    said = ranks.run(stop_now, 2, config_saving(2, tmp_path))[0]
    assert said == [f"interrupted after step 3 of 5: {where}", f"terminated after step 3 of 5: {where}"]
    assert ranks.run(stop_now, 2, config_saving(0, tmp_path))[0][0] == (
        "interrupted after step 3 of 5: nothing is saved, as --train.checkpoint-every 0 says"
    )


def directory_of_one_rank(config: Config) -> str:
    """Rank 1 has a directory of its own under the same name: it does not see what rank 0 puts there."""
    exists = Path.exists
    try:
        if torch.distributed.get_rank() == 1:
            Path.exists = lambda path: not path.name.startswith(".seen-") and exists(path)  # type: ignore
        prepared(config)
    except RunError as error:
        return str(error)
    finally:
        Path.exists = exists  # type: ignore[method-assign]
    return "no error"


def refused_directory(config: Config) -> str:
    with pytest.raises(RunError) as error:
        prepared(config)
    return str(error.value)


def test_a_directory_that_rank_0_cannot_make_is_one_line_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    first, second = ranks.run(refused_directory, 2, config_saving(2, tmp_path))
    assert first == second and "\n" not in first
    assert first.startswith(f"the directory of checkpoints must take files: {tmp_path}/checkpoints: ")


def test_a_directory_that_not_all_ranks_see_is_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(directory_of_one_rank, 2, config_saving(2, tmp_path)):
        assert "ranks [1] do not see" in message and "--train.checkpoint-every 0" in message


def shard_on_another_disk(config: Config) -> tuple[str, list[int]]:
    """What rank 1 has written for step 4 is not where rank 0 looks for it; return the error at the end."""
    trainer, checkpoints = prepared(config)
    write, directory = storage.Writer.write, checkpoints_of(config.run_dir)

    def elsewhere(self: storage.Writer, *args: Any) -> Any:
        results = write(self, *args)
        if directory.steps() == [2] and trainer.state.rank.mesh.at.pp == 1:
            for path in directory.begin(4).glob("rank-00001-*"):
                path.unlink()
        return results

    storage.Writer.write = elsewhere  # type: ignore[method-assign]
    try:
        with checkpoints:
            for step in range(4):
                trainer.step.run(step)
                checkpoints.after_step(step + 1)
            checkpoints.wait()
            with pytest.raises(RunError) as error:
                checkpoints.raise_if_the_last_is_missing()
            return str(error.value), directory.steps()
    finally:
        storage.Writer.write = write  # type: ignore[method-assign]


def test_a_checkpoint_that_lacks_a_shard_never_gets_its_name(ranks: RankPool, tmp_path: Path) -> None:
    for failure, steps in ranks.run(shard_on_another_disk, 2, config_saving(2, tmp_path)):
        assert "rank-00001-of-00002.safetensors" in failure
        assert steps == [2], "the good checkpoint is gone"


def run_that_cannot_save(config: Config, broken: tuple[int, ...]) -> tuple[str, list[int]]:
    """Writing fails at these saves (by number); return the error at the end and what is on disk."""
    trainer, checkpoints = prepared(config)
    save_file = storage.save_file
    saves = 0

    def failing(blocks: Any, path: str) -> FileEntry:
        nonlocal saves
        saves += 1
        if saves in broken and trainer.state.rank.mesh.at.pp == 1:
            raise OSError(28, "No space left on device")
        return save_file(blocks, path)

    storage.save_file = failing
    try:
        with checkpoints:
            for step in range(config.train.steps):
                trainer.step.run(step)
                checkpoints.after_step(step + 1)
        checkpoints.raise_if_the_last_is_missing()
    except RunError as error:
        return str(error), checkpoints_of(config.run_dir).steps()
    finally:
        storage.save_file = save_file
    return "no error", checkpoints_of(config.run_dir).steps()


@pytest.mark.by_default("broken0-steps0")
@pytest.mark.parametrize(("broken", "steps"), [((2,), [2, 5]), ((1, 2), [5]), ((), [4, 5])])
def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(
    ranks: RankPool, tmp_path: Path, broken: tuple[int, ...], steps: list[int]
) -> None:
    for message, on_disk in ranks.run(run_that_cannot_save, 2, config_saving(2, tmp_path), broken):
        assert (message, on_disk) == ("no error", steps)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for message, on_disk in ranks.run(run_that_cannot_save, 2, config_saving(2, tmp_path), (3,)):
        assert on_disk == [2, 4]
        assert "the last checkpoint must be written" in message and "No space left on device" in message
        assert "step-00000004; continue with" in message and "\n" not in message
