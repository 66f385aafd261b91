"""Rung: gloo ranks, as `python -m tpengine.train` starts them. A run whose held-out text is a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import run_module

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.data import write_tokens

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--model.vocab-size", "64", "--train.seq-len", "16", "--device", "cpu", "--run-dir", "out"),
    *("--train.micro-batch-size", "4", "--train.num-micro-batches", "2", "--train.eval-micro-batches", "3"),
    *("--train.eval-every", "2", "--train.checkpoint-every", "2", "--train.keep-checkpoints", "1"),
    *("--train.sample-tokens", "0", "--train.keep-best", "--optim.warmup-steps", "1", "--optim.lr", "0.03"),
)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_best_checkpoint_is_the_held_out_texts(tmp_path: Path) -> None:
    """What is learned of one text is wrong in the other: while the loss falls, the held-out loss rises.

    Resumed with half the micro-batches' size, the run says that it keeps the number of held-out samples.
    """
    places = np.arange(4000)
    write_tokens(tmp_path / "t", places % 8, 64)
    write_tokens(tmp_path / "v", 63 - places % 8, 64)
    done = run_module(
        "tpengine.train", *SMALL, "--data.path", "t", "--data.held-out", "v", "--train.steps", "8", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path)
    held_out = [row["held_out_loss"] for row in found if "held_out_loss" in row]
    assert found[-1]["loss"] < found[1]["loss"] and held_out == sorted(held_out) and held_out[-1] > held_out[0] + 0.5
    assert checkpoints_of(tmp_path / "out").steps() == [2, 8]
    resume = "tpengine.train", "--resume", "--run-dir", "out", "--train.steps", "10", "--train.micro-batch-size", "2"
    done = run_module(*resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "changed since the checkpoint: train.eval_samples from 0 to 12" in done.stdout
    assert checkpoints_of(tmp_path / "out").steps() == [2, 10]
    # Another held-out text has another loss: it is no longer the best of one text.
    write_tokens(tmp_path / "v", 62 - places % 8, 64)
    done = run_module(*resume[:-2], "--train.steps", "12", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "a resumed run must keep the held-out text (v): " in line and "--phases" in line


@pytest.mark.slow
def test_training_is_that_of_a_run_without_a_held_out_text(tmp_path: Path) -> None:
    """All of the text is trained on, in the same order, to the same bits; the other text moves none."""
    write_tokens(tmp_path / "t", np.arange(4000) % 50, 64)
    write_tokens(tmp_path / "v", np.arange(400) % 60, 64)
    without = "--data.held-out-fraction", "0", "--train.eval-micro-batches", "0", "--train.eval-every", "0"
    losses = []
    for flags in (("--data.held-out", "v"), (*without, "--train.no-keep-best")):
        done = run_module("tpengine.train", *SMALL, "--data.path", "t", *flags, "--train.steps", "4", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in rows(tmp_path)])
        (tmp_path / "out").rename(tmp_path / f"out{len(losses)}")
    assert losses[0] == losses[1]
