"""Rung: gloo ranks. `tpengine import`: a run that has not begun begins as its source does, and gives it back."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures.drawn import CONFIGS
from support.architectures.runs import CPU, beginning, begun, saved, trained_run
from support.architectures.sparse import CONFIG as LLAMA
from support.architectures.sparse import EXPERTS, sparse_model
from support.programs import run_module
from support.ranks.rank_pool import RankPool
from torch import Tensor

from benchmarks.harness.resident_memory import (
    follow_what_lives,
    forget_peak,
    keep_what_is_freed,
    peak_bytes,
    resident_bytes,
)
from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of, find_checkpoint
from tpengine.cli import main
from tpengine.commands import weights
from tpengine.commands.weights import export
from tpengine.config import Config
from tpengine.config.toml import load_toml
from tpengine.data import open_corpus
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.restoring import restore_newest
from tpengine.runs.trainer import Trainer

SETTINGS = (
    *("--train.seq-len", "32", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
    *("--train.steps", "3", "--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--device", "cpu"),
)


def imported(source: Path, run: Path, *settings: str) -> Path:
    assert main(["import", str(source), "--out", str(run), "--train.seq-len", "32", *settings]) == 0
    return run


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_an_import_is_given_back_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Norms in float32 among weights of 16 bits too; companions as they came; the checkpoint in several files."""
    saved(architecture, tmp_path / "theirs", torch.bfloat16)
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        tensors = {name: tensor.float() if tensor.dim() == 1 else tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"version": "1.0"}')
    monkeypatch.setattr(weights, "LARGEST_FILE_BYTES", 20_000)
    run = imported(tmp_path / "theirs", tmp_path / "run")
    assert (run / "tokenizer.json").read_text() == '{"version": "1.0"}'
    index = read_index(checkpoints_of(run).of_step(0))
    assert len(index.files) > 1 and not any(name.startswith("optimizer.") for name in index.tensors)
    assert {entry.dtype for entry in index.tensors.values()} == {"BF16", "F32"}
    export(run, None, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "theirs"))
    assert sorted(os.listdir(tmp_path)) == ["out", "run", "theirs"]


def state_of_run(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """Begin, or resume; the losses of three steps, and the weights and masters before them."""
    if config.resume:
        corpus = open_corpus(config)
        trainer = Trainer(config, corpus, CPU)
        found = restore_newest(trainer.state, trainer.planned, find_checkpoint(config, corpus.fingerprint()))
        assert found is not None and found.index.step == 0 and trainer.state.num_updates == 0
    else:
        trainer = begun(config)
    before = {}
    for name, weight in trainer.state.weights.items():
        for kind, tensor in {"weight": weight, **trainer.state.optimizer.state_of(name)}.items():
            before[f"{name} {kind}"] = tensor.detach().clone()
    return [trainer.step.run(step).loss for step in range(3)], before


@pytest.mark.by_default("model.path-qwen3")
@pytest.mark.parametrize(
    ("resumes", "architecture", "dtype", "zero"),
    [
        pytest.param(False, "qwen3", "bfloat16", 0, id="model.path-qwen3"),
        pytest.param(True, "gpt2", "float32", 3, id="resume-gpt2"),
        pytest.param(False, "gpt2", "float32", 3, id="model.path-gpt2", marks=pytest.mark.slow),
        pytest.param(True, "qwen3", "bfloat16", 0, id="resume-qwen3", marks=pytest.mark.slow),
    ],
)
def test_it_begins_as_its_source_does(
    ranks: RankPool, tmp_path: Path, architecture: str, dtype: str, zero: int, resumes: bool
) -> None:
    """Bit by bit: weights, wider copies, zero moments, losses; of float64 files, at tp 2 and pp 2 or dp 2."""
    saved(architecture, tmp_path / "theirs")
    run = imported(tmp_path / "theirs", tmp_path / "run")
    layout = (2, 2, 1) if zero else (1, 2, 2)
    want = beginning(tmp_path / "theirs", layout, zero, dtype=dtype, steps=3)
    got = replace(beginning(run, layout, zero, dtype=dtype, steps=3), run_dir=str(run), resume=resumes)
    for (losses, state), (their_losses, their_state) in zip(
        ranks.run(state_of_run, 4, got), ranks.run(state_of_run, 4, want), strict=True
    ):
        assert losses == their_losses
        assert_same(state, their_state)


def test_a_damaged_checkpoint_gives_way_to_the_import(ranks: RankPool, tmp_path: Path) -> None:
    """What it has filled before the damage was found, moments and all, is as at the beginning again."""
    saved("qwen3", tmp_path / "theirs")
    run = imported(tmp_path / "theirs", tmp_path / "run")
    config = replace(beginning(run, checkpoint_every=1, steps=1), run_dir=str(run))
    assert ranks.run(moments_after_damage, 1, config) == [0.0]


def moments_after_damage(config: Config) -> float:
    trainer = begun(config)
    trainer.step.run(0)
    with RunCheckpoints(trainer.state, trainer.planned, Path(config.run_dir)) as checkpoints:
        checkpoints.after_step(1)
        checkpoints.wait()
    moments = [trainer.state.optimizer.state_of(name)["exp_avg_sq"] for name in trainer.state.weights]
    assert all(float(moment.max()) > 0 for moment in moments)
    (file,) = checkpoints_of(config.run_dir).of_step(1).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = replace(config, resume=True)
    corpus = open_corpus(config)
    loaded = restore_newest(
        trainer.state, replace(trainer.planned, config=resumed), find_checkpoint(resumed, corpus.fingerprint())
    )
    assert loaded is not None and loaded.index.step == 0 and list(loaded.damaged) == [1]
    return max(float(moment.abs().max()) for moment in moments)


def metrics(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_program_begins_where_the_import_is(tmp_path: Path) -> None:
    """From its config.toml, or by --resume in a directory that was moved; neither hides nor loses a trained step."""
    saved("qwen3", tmp_path / "theirs")
    run = imported(tmp_path / "theirs", tmp_path / "run", *SETTINGS, "--train.steps", "2")
    shutil.copytree(run, tmp_path / "moved")
    for arguments in (
        ("--model.path", "theirs", "--run-dir", "direct", *SETTINGS),
        ("--config", "run/config.toml", "--train.steps", "3"),
        ("--run-dir", "moved", "--resume", "--train.steps", "3"),
    ):
        done = run_module("tpengine.train", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    want = metrics(tmp_path / "direct")
    assert len(want) == 3
    assert metrics(run) == metrics(tmp_path / "moved") == want
    # The rate's schedule is as long as the run that begins, not as the import said.
    assert load_toml(tmp_path / "moved" / "config.toml", Config()).optim.decay_steps == 3
    done = run_module("tpengine.train", "--config", "run/config.toml", "--train.steps", "3", cwd=tmp_path)
    assert done.returncode == 2 and "must not hide the checkpoints of another" in done.stderr
    done = run_module("tpengine.train", *SETTINGS, "--run-dir", "other", "--model.path", "run@0", cwd=tmp_path)
    assert done.returncode == 0 and metrics(tmp_path / "other") == want


def test_drawn_weights_do_not_hide_an_import(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "theirs")
    imported(tmp_path / "theirs", tmp_path / "run")
    done = run_module("tpengine.train", *SETTINGS, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 2 and "run has step-00000000: continue it with --resume" in done.stderr
    done = run_module("tpengine.train", *SETTINGS, "--preset", "tiny", "--run-dir", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "a resumed run must keep model." in done.stderr


@pytest.mark.slow
def test_a_run_is_imported_with_its_wider_weights(ranks: RankPool, tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "theirs")
    (tmp_path / "first").mkdir()
    config = beginning(tmp_path / "theirs", (1, 2, 1), dtype="bfloat16", checkpoint_every=1, steps=1)
    ranks.run(trained_run, 2, replace(config, run_dir=str(tmp_path / "first")))
    imported(tmp_path / "first", tmp_path / "run")
    export(tmp_path / "first", None, tmp_path / "a", "float32")
    export(tmp_path / "run", None, tmp_path / "b", "float32")
    assert_same(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "a"))
    assert any((tensor != tensor.bfloat16()).any() for tensor in tensors_of(tmp_path / "b").values())


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process")
@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_1_gb_passes_through_64_mib(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "theirs").mkdir()
    assert sparse_model(tmp_path / "theirs", "F32", config) > 1e9
    follow_what_lives()
    try:
        forget_peak()
        before = resident_bytes()
        run = imported(tmp_path / "theirs", tmp_path / "run")
        growth = peak_bytes() - before
    finally:
        keep_what_is_freed()
    files = read_index(checkpoints_of(run).of_step(0)).files
    assert len(files) >= 2 and sum(entry.num_bytes for entry in files.values()) > 1e9
    assert growth <= 64 * 2**20


def test_what_cannot_be_imported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    saved("qwen3", theirs)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    capsys.readouterr()
    for arguments, said in (
        ((str(theirs), "--out", str(tmp_path / "full")), "a run's directory must be empty"),
        ((str(tmp_path / "none"), "--out", str(out)), "model.path must be a directory with a config.json, or a run"),
        ((str(theirs), "--out", str(out), "--run-dir", "x"), "got --run-dir: leave it out"),
        ((str(theirs), "--out", str(out), "--model.path=x"), "got --model.path: leave it out"),
        ((str(theirs), "--out", str(out), "--resume"), "got --resume: leave it out"),
        ((str(theirs), "--out", str(out), "--model.num-layers", "3"), "model.num_layers must be what model.path says"),
        ((str(theirs), "--out", str(out), "--parallel.tp", "3"), "must be divisible by tp"),
        ((str(theirs), "--out", str(out), "--train.stepz", "3"), "perhaps you meant --train.steps"),
    ):
        assert main(["import", *arguments]) == 2
        captured = capsys.readouterr().err
        assert said in captured and captured.count("\n") == 1
    file = min(theirs.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    assert main(["import", str(theirs), "--out", str(out)]) == 2
    assert "must be whole" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["full", "theirs"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    saved("qwen3", tmp_path / "theirs")
    capsys.readouterr()
    seen: list[str] = []

    def stopped(path: Path) -> Any:
        """A signal comes when the weights have been written, and their hash is due."""
        seen.extend(os.listdir(tmp_path))
        signal.raise_signal(number)
        pytest.fail("the signal was ignored")

    monkeypatch.setattr(weights, "hash_file", stopped)
    # As a program has it; training in this process, as other tests do, leaves its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]) == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 2 and os.listdir(tmp_path) == ["theirs"]
    assert capsys.readouterr().err == "tpengine: interrupted; no process and no unfinished file is left\n"
