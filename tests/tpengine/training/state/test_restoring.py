"""Rung: gloo ranks. All ranks go on from the same checkpoint, whichever of them finds that a newer one is damaged."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine.checkpoint.resume import checkpoints_of, find_checkpoint, state_of
from tpengine.checkpoint.save import Saver
from tpengine.checkpoint.storage import parts_of
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs import restoring
from tpengine.runs.restoring import restore_newest
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.planned_run import RunError

CPU = torch.device("cpu")
SHARD = "rank-00001-of-00002.safetensors"


def config_in(run_dir: Path) -> Config:
    config = config_of(1, 1, 2, tied=False, kv_heads=1)
    return replace(config, train=replace(config.train, steps=9), run_dir=str(run_dir), resume=True)


def save(config: Config, steps: tuple[int, ...]) -> None:
    """Save a checkpoint after each of these steps: every weight is the step's number."""
    trainer = Trainer(config, open_corpus(config), CPU)
    saver = Saver(checkpoints_of(config.run_dir), keep=9)
    for step in steps:
        mark(trainer, float(step))
        saver.save(step, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), step))
        assert saver.wait() is None


def mark(trainer: Trainer, value: float) -> None:
    for parameter in trainer.state.model.held.values():
        parameter.data.fill_(value)


def values_of(trainer: Trainer) -> set[float]:
    """Return the values of the weights, without the rows that pad the vocabulary."""
    weights = [block for name, block in blocks_of(trainer.state).items() if not name.startswith("optimizer.")]
    return {float(value) for block in weights for part in parts_of(block) for value in part.tensor.unique()}


def restored(config: Config, blind: str) -> tuple[int, set[float], str] | str:
    """What is loaded into this rank, and what is said; or the error.

    Args:
        blind: what rank 1 does not see of the newest checkpoint, a file or all, as another node's stale view of it.
    """
    trainer = Trainer(config, open_corpus(config), CPU)
    mark(trainer, -1.0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), _blind_to(blind if dist.get_rank() == 1 else ""):
        try:
            found = restore_newest(
                trainer.state, trainer.planned, find_checkpoint(config, trainer.state.part.corpus.fingerprint())
            )
        except RunError as error:
            return str(error)
    return -1 if found is None else found.index.step, values_of(trainer), said.getvalue()


@contextlib.contextmanager
def _blind_to(name: str) -> Iterator[None]:
    lstat, is_dir = Path.lstat, Path.is_dir

    def seen(path: Path) -> os.stat_result:
        if path.parent.name == "step-00000006" and path.name == name:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return lstat(path)

    Path.lstat = seen  # type: ignore[method-assign]
    if name == "step-00000006":
        Path.is_dir = lambda path: path.name != name and is_dir(path)  # type: ignore
    try:
        yield
    finally:
        Path.lstat, Path.is_dir = lstat, is_dir  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def saved_once(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    ranks.run(save, 2, config_in(run_dir), (2, 4, 6))
    return run_dir


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Config:
    """A run with checkpoints after steps 2, 4 and 6."""
    shutil.copytree(saved_once, tmp_path / "out")
    return config_in(tmp_path / "out")


def test_the_newest_is_loaded_where_it_is_whole(ranks: RankPool, saved: Config) -> None:
    assert ranks.run(restored, 2, saved, "") == [(6, {6.0}, "")] * 2
    assert checkpoints_of(saved.run_dir).steps() == [2, 4, 6]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damage_that_one_rank_finds_while_loading_moves_all(ranks: RankPool, saved: Config) -> None:
    """Each file is hashed by one rank: here rank 1 finds out about step 6, and rank 0 about step 4."""
    place = Path(saved.run_dir) / "checkpoints"
    flip_byte(place / "step-00000006" / SHARD)
    flip_byte(place / "step-00000004" / SHARD.replace("1-", "0-"))
    first, second = ranks.run(restored, 2, saved, "")
    assert first[:2] == second[:2] == (2, {2.0})
    lines = first[2].splitlines()
    assert second[2] == "" and len(lines) == 2
    for line, step in zip(lines, (6, 4), strict=True):
        assert line.startswith(f"tpengine: {place}/step-0000000{step} is damaged, continuing from step-00000002: ")
        assert "must match their hashes" in line and line.endswith(f"it is kept as step-0000000{step}.damaged")
    assert sorted(path.name for path in place.iterdir()) == [
        "step-00000002",
        "step-00000004.damaged",
        "step-00000006.damaged",
    ]


def test_damage_that_one_rank_sees_before_it_meets_the_others_moves_all(ranks: RankPool, saved: Config) -> None:
    """Rank 0 finds step 6 whole, and step 4 damaged only when it is told to look there."""
    (Path(saved.run_dir) / "checkpoints/step-00000004/index.json").unlink()
    first, second = ranks.run(restored, 2, saved, SHARD)
    assert first[:2] == second[:2] == (2, {2.0})
    assert "No such file" in first[2].splitlines()[0] and second[2] == ""
    assert checkpoints_of(saved.run_dir).steps() == [2]


def test_no_whole_checkpoint_is_the_same_line_on_all_ranks(ranks: RankPool, saved: Config) -> None:
    place = Path(saved.run_dir) / "checkpoints"
    for step in (2, 4, 6):
        flip_byte(place / f"step-0000000{step}" / SHARD)
    messages = ranks.run(restored, 2, saved, "")
    assert messages[0] == messages[1] and messages[0].startswith("--resume needs a whole checkpoint: ")
    assert all(f"step-0000000{step}/{SHARD}: altered" in messages[0] for step in (2, 4, 6))
    assert checkpoints_of(saved.run_dir).steps() == [2, 4, 6], "nothing is renamed where nothing is loaded"


def test_ranks_that_see_different_directories_stop(ranks: RankPool, saved: Config) -> None:
    for message in ranks.run(restored, 2, saved, "step-00000006"):
        assert "all ranks must resume from the same checkpoint: ranks [1] have found another than rank 0" in message


def restored_without_text(config: Config) -> object:
    """Rank 1 has to read the ends of its text for an older checkpoint, and cannot."""

    def refused(*_: object, **__: object) -> None:
        raise ValueError("a token file must not be cut short")

    find = restoring.find_checkpoint
    trainer = Trainer(config, open_corpus(config), CPU)
    found = find_checkpoint(config, trainer.state.part.corpus.fingerprint())
    restoring.find_checkpoint = refused if dist.get_rank() == 1 else find  # type: ignore[assignment]
    try:
        restore_newest(trainer.state, trainer.planned, found)
    except RunError as error:
        return str(error)
    finally:
        restoring.find_checkpoint = find
    return "no error"


def test_a_text_that_one_rank_cannot_read_for_an_older_checkpoint_ends_all(ranks: RankPool, saved: Config) -> None:
    flip_byte(Path(saved.run_dir) / "checkpoints/step-00000006" / SHARD)
    assert ranks.run(restored_without_text, 2, saved) == ["a token file must not be cut short"] * 2


def test_a_damaged_checkpoint_that_cannot_be_renamed_ends_all_ranks(ranks: RankPool, saved: Config) -> None:
    """Its step could not be saved again."""
    flip_byte(Path(saved.run_dir) / "checkpoints/step-00000006" / SHARD)
    for message in ranks.run(restored_without_renaming, 2, saved):
        assert "step-00000006 cannot be renamed, Read-only file system: move it away" in message


def restored_without_renaming(config: Config) -> object:
    rename = Path.rename

    def refused(path: Path, _: Path) -> Path:
        raise OSError(30, "Read-only file system", str(path))

    Path.rename = refused  # type: ignore
    try:
        return restored(config, "")
    finally:
        Path.rename = rename  # type: ignore[method-assign]
