"""Rung: pure, gloo ranks. How a run begins: what is timed, and files that cannot be written."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine import train
from tpengine.checkpoint import storage
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.distributed.hosts import Hosts
from tpengine.observe.console import console_for
from tpengine.observe.metrics import MetricsWriter
from tpengine.runs import loop as run
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError
from tpengine.training.train_state import TrainState

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
)


def test_building_has_a_time_limit_and_a_disk_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for another while groups are made would wait for ever."""
    timed: dict[str, bool] = {}

    class Seen(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            now = self.state.rank.activity.now
            timed[str(now.what)] = now.timed

    def restore(state: TrainState, *_: object) -> None:
        timed[str(state.rank.activity.now.what)] = state.rank.activity.now.timed
        raise RunError("enough")

    monkeypatch.setattr(run, "Trainer", Seen)
    monkeypatch.setattr(run, "restore_newest", restore)
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, "--run-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        train.main()
    assert timed == {"building the model and its groups": True, "reading the checkpoint": False}


def test_others_hear_that_the_last_checkpoint_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights & Biases showed a run as finished whose last state nobody has."""
    codes: list[int] = []
    close = MetricsWriter.close

    def heard(writer: MetricsWriter, exit_code: int = 0) -> None:
        codes.append(exit_code)
        close(writer, exit_code)

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsWriter, "close", heard)
    monkeypatch.setattr(storage, "save_file", refused)
    arguments = ["--train.steps", "1", "--train.eval-micro-batches", "1", "--train.sample-tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, *arguments, "--run-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert (end.value.code, codes) == (2, [2])
    said, errors = capsys.readouterr()
    assert "held-out loss" in said and "the last checkpoint must be written" in errors


def begun(config: Config, run_dir: str) -> str:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    rank = dist.get_rank()
    job: Any = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        run_dir=Path(run_dir) if rank == 0 else None,
        shared_cores=0,
        checkpoint=None,
        beginning=None,
        wings=train.wings(),
        hosts=Hosts(),
    )
    with (
        pytest.raises(RunError) as error,
        run.open_writer(trainer.planned, trainer.state, job, console_for(rank), None),
    ):
        pass
    return str(error.value)


def test_a_run_directory_that_takes_no_files_is_one_line_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """The others would lose their connection to rank 0."""
    (tmp_path / "config.toml").mkdir()
    config = config_of(1, 1, 2, tied=False, kv_heads=1)
    config = replace(config, train=replace(config.train, eval_micro_batches=0))
    first, second = ranks.run(begun, 2, config, str(tmp_path))
    assert first == second and "\n" not in first
    assert first.startswith("the run directory must take the run's files: [Errno 21] Is a directory")


def begun_unheard(config: Config, run_dir: Path) -> list[str]:
    """What becomes of a start whose output's disk is full, and of one whose errors nobody reads."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    job: Any = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        run_dir=run_dir,
        shared_cores=0,
        checkpoint=None,
        beginning=None,
        wings=train.wings(),
        hosts=Hosts(),
    )
    reader, pipe = os.pipe()
    os.close(reader)
    found = []
    with Path("/dev/full").open("wb", buffering=0) as full, os.fdopen(pipe, "wb", buffering=0) as unread:
        output, errors = (io.TextIOWrapper(file, write_through=True) for file in (full, unread))
        for console, stderr in ((Console(file=output), sys.stderr), (console_for(0), errors)):
            (run_dir / "metrics.jsonl").touch()
            try:
                with (
                    patch.object(sys, "stderr", stderr),
                    run.open_writer(trainer.planned, trainer.state, job, console, None),
                ):
                    found.append("begun")
            except (OSError, RunError) as error:
                found.append(repr(error))
        for text in (output, errors):
            text.detach()
    return found


def test_output_that_goes_nowhere_is_not_blamed_on_the_run_directory(ranks: RankPool, tmp_path: Path) -> None:
    config = config_of(1, 1, 1, tied=False, kv_heads=1)
    config = replace(config, train=replace(config.train, eval_micro_batches=0))
    assert ranks.run(begun_unheard, 1, config, tmp_path) == [["OSError(28, 'No space left on device')", "begun"]]
