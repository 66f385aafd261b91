"""Rung: gloo ranks, as `python -m tpengine.train` starts them. Texts that go wrong while a run reads them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support.programs import Running, finish_all, run_module, start_ranks

from tpengine import train
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.data import write_tokens
from tpengine.observe.watch import Watch

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "2"),
    *("--train.seq-len", "32", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.sample-tokens", "5", "--train.checkpoint-every", "100000"),
    *("--model.vocab-size", "200"),
)


def arguments_for(path: Path, steps: int = 1_000) -> tuple[str, ...]:
    lengths = "--train.steps", str(steps), "--run-dir", str(path.parent / "out")
    return (*SMALL, *lengths, "--data.path", str(path))


@pytest.mark.parametrize(("limit", "longer"), [(60, 60.009), (0, 0)])
def test_ranks_wait_longer_for_one_that_may_have_to_read_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, longer: float
) -> None:
    """They assume 10 MB/s; else a slow host's start would be ended again and again. A limit of 0 means no limit."""
    path = tmp_path / "some.tokens"
    write_tokens(path, np.arange(90_000) % 200, 200)
    limits: list[float] = []

    def meet(_: object, __: object, watch: Watch) -> None:
        limits.append(watch.activity.timeout_seconds)
        raise SystemExit

    monkeypatch.setattr(train, "meet", meet)
    for run_dir in ("with a hash", "without"):
        if run_dir == "without":
            content = path.read_bytes()
            path.write_bytes(content[:32] + bytes(32) + content[64:])
        flags = ["--data.path", str(path), "--train.timeout-seconds", str(limit)]
        flags += ["--run-dir", str(tmp_path / run_dir)]
        monkeypatch.setattr(sys, "argv", ["train", *SMALL, *flags])
        with pytest.raises(SystemExit):
            train.main()
    assert limits == [limit, pytest.approx(longer)]


def change(path: Path, place: int, token: int) -> None:
    with path.open("r+b") as file:
        file.seek(64 + place)
        file.write(bytes([token]))


def test_other_content_than_the_hash_says_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    """The header lies in one token, which is never read in the first steps; nothing is saved after it is found."""
    path = tmp_path / "some.tokens"
    write_tokens(path, np.arange(90_000) % 200, 200)
    change(path, 50_000, 1)
    ends = finish_all(*start_ranks(2, "tpengine.train", *arguments_for(path)))
    assert [end.returncode for end in ends] == [2, 2] and not ends[1].stderr
    (line,) = ends[0].stderr.splitlines()
    assert f"must have the content that its hash says: {path} on the host of rank 0 does not have SHA-256" in line
    assert checkpoints_of(tmp_path / "out").newest() is None


def test_a_text_cut_short_under_a_run_is_one_line(tmp_path: Path) -> None:
    """The map of before died of SIGBUS."""
    path = tmp_path / "some.tokens"
    write_tokens(path, np.arange(900_000) % 200, 200)
    running = Running("tpengine.train", *arguments_for(path))
    running.wait_until(lambda running: "\nstep " in running.said(), "the run makes no step")
    os.truncate(path, 100)
    (end,) = finish_all(running)
    errors = end.stderr
    assert end.returncode == 2 and errors.count("\n") == 1, errors
    assert str(path) in errors and "cut short" in errors


def test_ids_beyond_the_models_vocabulary_end_all_ranks_before_they_build(tmp_path: Path) -> None:
    path = tmp_path / "some.tokens"
    write_tokens(path, np.arange(90_000) % 201, 201)
    ends = finish_all(*start_ranks(2, "tpengine.train", *arguments_for(path)))
    assert [end.returncode for end in ends] == [2, 2] and not ends[1].stderr
    (line,) = ends[0].stderr.splitlines()
    assert line == (
        f"tpengine: error: the model's vocabulary must cover the text's: model.vocab_size 200, {path} 201: use "
        "model.vocab_size 201"
    )
    assert not ends[0].stdout and not (tmp_path / "out").exists()


def test_a_bad_token_in_the_held_out_text_is_one_line(tmp_path: Path) -> None:
    """It is the same line as in training. The header's hash is right; only the vocabulary is too small."""
    path = tmp_path / "some.tokens"
    write_tokens(path, np.append(np.arange(85_500) % 200, np.full(4_500, 255)), 256)
    content = bytearray(path.read_bytes())
    content[16:24] = (200).to_bytes(8, "little")
    path.write_bytes(content)
    end = run_module("tpengine.train", *arguments_for(path, steps=1))
    errors = end.stderr
    assert end.returncode == 2 and "step 1/1" in end.stdout, errors
    assert errors.startswith("tpengine: error: tokens must be at least 0 and below model.vocab_size: got 255, ")
    assert errors.count("\n") == 1 and checkpoints_of(tmp_path / "out").newest() is not None
