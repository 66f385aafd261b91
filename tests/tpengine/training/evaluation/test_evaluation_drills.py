"""Rung: gloo ranks that are started by themselves. A signal comes while a run is being evaluated."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.programs import finish_all, start_ranks

from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of

# Steps are short, evaluations are long.
SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--model.num-layers", "2", "--train.seq-len", "16", "--train.micro-batch-size", "2", "--device", "cpu"),
    *("--train.num-micro-batches", "2", "--train.eval-micro-batches", "80", "--train.eval-every", "2"),
    *("--train.sample-tokens", "0", "--train.reduction", "exact", "--parallel.pp", "2", "--optim.decay-steps", "8"),
)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_evaluated_now(run_dir: Path) -> bool:
    """The row of a step that is due stands there, and its held-out loss does not."""
    rows = rows_of(run_dir)
    return len(rows) >= 4 and len(rows) % 2 == 0 and "held_out_loss" not in rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_an_evaluation_saves_and_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    """One rank hears it. The step is saved with its held-out loss; resumed, the losses are the undisturbed run's."""
    out = tmp_path / "out"
    flags = ("tpengine.train", *SMALL, "--run-dir", str(out))
    ranks = start_ranks(2, *flags, "--train.steps", "100000")
    ranks[0].wait_until(lambda _: is_evaluated_now(out), "no step was seen in its evaluation")
    ranks[1].send_signal(number)
    ends = finish_all(*ranks)
    assert [end.returncode for end in ends] == [128 + number] * 2, ends
    newest, rows = checkpoints_of(out).newest(), rows_of(out)
    assert newest is not None
    index = read_index(newest)
    assert index.step == len(rows) and index.state.get("held_out_loss") == rows[-1].get("held_out_loss")
    steps = str(len(rows) + 2)
    again = finish_all(*start_ranks(2, *flags, "--train.steps", steps, "--resume"))
    assert [end.returncode for end in again] == [0, 0], again
    alone = tmp_path / "alone"
    undisturbed = finish_all(*start_ranks(2, *flags[:-1], str(alone), "--train.steps", steps))
    assert [end.returncode for end in undisturbed] == [0, 0], undisturbed
    got, want = ([(row["step"], row["loss"], row.get("held_out_loss")) for row in rows_of(run)] for run in (out, alone))
    assert got == want and sum(loss is not None for *_, loss in want) == len(want) // 2
