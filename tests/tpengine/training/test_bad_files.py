"""Rung: the training program as a user starts it. Bad files are one line, and nothing is lost.

The full disk is a small tmpfs, which needs root or a user namespace. More about what is inside a bad token file is in
data/test_token_file.py, about TOML in test_config.py, about a checkpoint's index in checkpoint/test_index.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.programs import run_module
from support.ranks.progress import run_program

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.data import write_tokens

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--device", "cpu"),
    *("--train.seq-len", "32", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
    *("--train.checkpoint-every", "2", "--train.eval-micro-batches", "0", "--train.sample-tokens", "0"),
)
TRAIN = (sys.executable, "-m", "tpengine.train")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("tpengine.train", *arguments)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error of the user's."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tpengine: error: "), line
    return line


def contents(directory: Path) -> dict[str, str]:
    """Every file below a directory, by a hash of what it holds."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints after 2 and 4."""
    run_dir = tmp_path_factory.mktemp("trained") / "out"
    done = run(*SMALL, "--train.steps", "4", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert checkpoints_of(run_dir).steps() == [2, 4]
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def shard_of(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.safetensors"))


def remove_shard(checkpoint: Path) -> Path:
    shard = shard_of(checkpoint)
    shard.unlink()
    return shard


def flip_byte(checkpoint: Path) -> Path:
    raw = bytearray(shard_of(checkpoint).read_bytes())
    raw[len(raw) // 2] ^= 4
    shard_of(checkpoint).write_bytes(raw)
    return shard_of(checkpoint)


def cut_shard(checkpoint: Path) -> Path:
    os.truncate(shard_of(checkpoint), shard_of(checkpoint).stat().st_size - 1)
    return shard_of(checkpoint)


def cut_index(checkpoint: Path) -> Path:
    os.truncate(checkpoint / "index.json", 1000)
    return checkpoint / "index.json"


def remove_index(checkpoint: Path) -> Path:
    (checkpoint / "index.json").unlink()
    return checkpoint / "index.json"


@pytest.mark.by_default("cut_index", "flip_byte")
@pytest.mark.parametrize("damage", [remove_shard, flip_byte, cut_shard, cut_index, remove_index])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_dir: Path, damage: Callable[[Path], Path]) -> None:
    """Said in one line, kept under another name; its step is saved again and the records after it are replaced."""
    newest = checkpoints_of(run_dir).of_step(4)
    damaged = damage(newest)
    kept = contents(newest)
    done = run("--run-dir", str(run_dir), "--resume", "--train.steps", "5")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tpengine: {newest} is damaged, continuing from step-00000002: ")
    assert str(damaged) in line and line.endswith("; it is kept as step-00000004.damaged")
    assert "continuing at step 3" in done.stdout
    assert checkpoints_of(run_dir).steps() == [4, 5]
    assert contents(newest.with_name("step-00000004.damaged")) == kept
    records = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [1, 2, 3, 4, 5]


def test_a_run_without_a_whole_checkpoint_is_one_line(run_dir: Path) -> None:
    """One is found to be damaged before there is a process group, the other when it is loaded."""
    damaged = [damage(checkpoints_of(run_dir).of_step(step)) for step, damage in ((2, flip_byte), (4, cut_index))]
    before = contents(run_dir)
    line = error_of(run("--run-dir", str(run_dir), "--resume", "--train.steps", "5"))
    assert "--resume needs a whole checkpoint" in line and all(str(path) in line for path in damaged)
    assert contents(run_dir) == before, "a run that was refused has changed its directory"


@pytest.mark.by_default("arguments0-must keep model.hidden_size", "arguments4-must keep the text")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.hidden-size", "64"), "must keep model.hidden_size"),
        (("--preset", "bench"), "must keep model."),
        (("--train.seed", "1"), "must keep train.seed"),
        (("--train.num-micro-batches", "8"), "must keep samples per step"),
        (("--data.path", "{tmp}/other.bin"), "must keep the text"),
    ],
)
def test_another_model_or_text_is_refused(run_dir: Path, arguments: tuple[str, str], message: str) -> None:
    write_tokens(run_dir.parent / "other.bin", np.arange(90000) % 200, vocab_size=200)
    before = contents(run_dir)
    flags = [argument.format(tmp=run_dir.parent) for argument in arguments]
    line = error_of(run("--run-dir", str(run_dir), "--resume", "--device", "cpu", *flags))
    assert message in line and str(checkpoints_of(run_dir).of_step(4)) in line
    assert contents(run_dir) == before


HEADER = struct.Struct("<8sIIQQ")


def token_file(path: Path, *, magic: bytes = b"TPTOKENS", code: int = 1, count: int = 90000, token: int = 7) -> None:
    tokens = np.full(90000, token, dtype=np.uint8).tobytes()
    path.write_bytes(HEADER.pack(magic, 1, code, 200, count).ljust(64, b"\0") + tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 90001}, "has 90064, cut short"),
        ({"magic": b"NUMPYARR"}, "must be written by tpengine data, or have what others write beside it"),
        ({"code": 3}, "token dtype code must be 1, 2 or 4 (bytes)"),
        ({"token": 201}, ""),
    ],
)
def test_a_bad_token_file_is_one_line(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    """A token beyond the vocabulary that the header promises is found when its window is read."""
    path = tmp_path / "tokens.bin"
    token_file(path, **fields)  # type: ignore[arg-type]
    arguments = (*SMALL, "--run-dir", str(tmp_path / "out"), "--data.path", str(path), "--model.vocab-size", "200")
    line = error_of(run(*arguments))
    assert message in line
    if "token" in fields:
        assert "tokens must be at least 0 and below model.vocab_size: got 201, model.vocab_size 200" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[train]\nsteps = "many"\n', "train.steps must be of type int: got 'many'"),
        ("[train]\nstepz = 3\n", "unknown key train.stepz: did you mean train.steps?"),
        ("[train\n", "needs valid TOML"),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    line = error_of(run("--config", str(tmp_path / "run.toml")))
    assert message in line and "run.toml" in line


def test_a_damaged_configuration_of_the_run_is_one_line(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text("[model]\nhidden_size = 'wide'\n")
    line = error_of(run("--run-dir", str(run_dir), "--resume"))
    assert "config.toml: model.hidden_size must be of type int: got 'wide'" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "got no --run-dir: use --run-dir DIR"),
        (("--run-dir", "{tmp}/empty"), "/empty has no config.toml: check --run-dir"),
    ],
)
def test_resuming_nothing_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    line = error_of(run("--resume", *(argument.format(tmp=tmp_path) for argument in arguments)))
    assert "--resume needs the directory of a run" in line and message in line
    assert not list((tmp_path / "empty").iterdir())


# Runs in a mount namespace of its own, so that nothing stays mounted whatever happens.
DISK = """
set -eu
mount -t tmpfs -o size=1400k tmpfs "$1"; shift
train() { "$@" && echo "exit 0" || echo "exit $?"; }
train "$@" --train.steps 6
ls -A "$DISK/out/checkpoints"
mount -o remount,size=9m "$DISK"
train "$PYTHON" -m tpengine.train --run-dir "$DISK/out" --resume --train.steps 7
ls -A "$DISK/out/checkpoints"
"""


@pytest.fixture
def namespace() -> Iterator[tuple[str, ...]]:
    """How to start a program that may mount: as root, or as root of a user namespace."""
    for flags in (("--mount",), ("--map-root-user", "--mount")):
        command = ("unshare", *flags)
        if subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0:
            yield command
            return
    raise AssertionError("this test fills a small disk: it needs root, or user namespaces, to mount a tmpfs")


@pytest.mark.slow  # state/test_checkpoints.py plants the same error in a writer
def test_a_full_disk_while_saving_loses_no_checkpoint(tmp_path: Path, namespace: tuple[str, ...]) -> None:
    """Two checkpoints fit and a third does not: it is said, training ends, the one before loads once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = (*TRAIN, *SMALL, "--run-dir", str(disk / "out"))
    variables = ("env", f"DISK={disk}", f"PYTHON={sys.executable}")
    done = run_program(
        [*namespace, *variables, "sh", "-c", DISK, "sh", str(disk), *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    first, second = done.stdout.split("exit 2")
    assert "step 6/6" in first, "training did not go on"
    listing, resumed = second.split("\nmodel", 1)
    assert listing.split() == ["step-00000002", "step-00000004"]
    warning, error = done.stderr.splitlines()
    failed = f"{disk}/out/checkpoints/step-00000006"
    assert warning.startswith(f"tpengine: a checkpoint could not be written: {failed}: ")
    assert error.startswith(f"tpengine: error: the last checkpoint must be written: {failed}: ")
    for line in (warning, error):
        assert "No space left on device" in line
        assert line.endswith(
            f": saved in {disk}/out/checkpoints/step-00000004; continue with --run-dir {disk}/out --resume"
        )
    assert "continuing at step 5" in resumed and "exit 0" in resumed
    assert resumed.split("exit 0")[1].split() == ["step-00000006", "step-00000007"]
