"""Rung: gloo ranks that are started by themselves. A signal comes while a run is evaluated, or draws a sample."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs import finish_all, start_ranks

from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--model.num-layers", "2", "--train.seq-len", "16", "--train.micro-batch-size", "2", "--device", "cpu"),
    *("--train.num-micro-batches", "2", "--train.eval-every", "2"),
    *("--train.reduction", "exact", "--parallel.pp", "2", "--optim.decay-steps", "8"),
)
# Steps are short; evaluations or samples are long.
EVALUATES = ("--train.eval-micro-batches", "80", "--train.sample-tokens", "0")
SAMPLES = ("--train.eval-micro-batches", "2", "--train.sample-every", "2", "--train.sample-tokens", "80")


def rows_of(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_evaluated_now(run_dir: Path) -> bool:
    """The row of a step that is due stands there, and its held-out loss does not."""
    rows = rows_of(run_dir)
    return len(rows) >= 4 and len(rows) % 2 == 0 and "held_out_loss" not in rows[-1]


def samples_now(run_dir: Path) -> bool:
    """The row of a step that is due is complete, and its sample is not there."""
    rows = rows_of(run_dir)
    due = len(rows) >= 4 and len(rows) % 2 == 0 and "held_out_loss" in rows[-1]
    return due and len(rows_of(run_dir, "samples.jsonl")) < len(rows) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "long", "is_now"),
    [
        (signal.SIGUSR1, EVALUATES, is_evaluated_now),
        (signal.SIGTERM, EVALUATES, is_evaluated_now),
        (signal.SIGTERM, SAMPLES, samples_now),
    ],
)
def test_a_signal_between_steps_saves_and_the_run_goes_on(
    tmp_path: Path, number: signal.Signals, long: tuple[str, ...], is_now: Callable[[Path], bool]
) -> None:
    """One rank hears it. The step is saved with its held-out loss; resumed, the losses are the undisturbed run's."""
    out = tmp_path / "out"
    flags = ("tpengine.train", *SMALL, *long, "--run-dir", str(out))
    ranks = start_ranks(2, *flags, "--train.steps", "100000")
    ranks[0].wait_until(lambda _: is_now(out), "no step was seen in its evaluation or sample")
    ranks[1].send_signal(number)
    ends = finish_all(*ranks)
    assert [end.returncode for end in ends] == [128 + number] * 2, ends
    newest, rows, samples = checkpoints_of(out).newest(), rows_of(out), rows_of(out, "samples.jsonl")
    assert newest is not None
    index = read_index(newest)
    assert index.step == len(rows) and index.state.get("held_out_loss") == rows[-1].get("held_out_loss")
    assert long is EVALUATES or [sample["step"] for sample in samples] == list(range(2, len(rows) + 1, 2))
    steps = str(len(rows) + 2)
    again = finish_all(*start_ranks(2, *flags, "--train.steps", steps, "--resume"))
    assert [end.returncode for end in again] == [0, 0], again
    alone = tmp_path / "alone"
    undisturbed = finish_all(*start_ranks(2, *flags[:-1], str(alone), "--train.steps", steps))
    assert [end.returncode for end in undisturbed] == [0, 0], undisturbed
    got, want = ([(row["step"], row["loss"], row.get("held_out_loss")) for row in rows_of(run)] for run in (out, alone))
    assert got == want and sum(loss is not None for *_, loss in want) == len(want) // 2
    assert rows_of(out, "samples.jsonl") == rows_of(alone, "samples.jsonl")
