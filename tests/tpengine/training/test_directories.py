"""Rung: programs. The run's directory is a file system of its own that is full for a while, or read-only: real ones.

They are mounted in a namespace of the program's own; where that is not allowed the tests are skipped. That training
does not wait for a slow one is shown by order in state/test_checkpoints.py and observe/test_background.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks.progress import run_program

from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of

TRAIN = (
    *(sys.executable, "-m", "tpengine.train", "--run-dir", "disk/out", "--device", "cpu", "--model.hidden-size", "32"),
    *("--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48", "--train.micro-batch-size", "2"),
    *("--train.seq-len", "16", "--train.num-micro-batches", "2", "--train.eval-micro-batches", "0"),
    *("--train.sample-tokens", "0", "--train.checkpoint-every", "2", "--train.keep-checkpoints", "1"),
)
# A checkpoint has 0.6 MB. Room for two, until what fills it is removed after the first complaint.
FILLED = """
mount -t tmpfs -o size=4m none disk
"$@" 2> errors & run=$!
until [ -d disk/out/checkpoints/step-00000002 ]; do sleep 0.02; done
dd if=/dev/zero of=disk/filler bs=64k 2> /dev/null
until grep -q "could not be written" errors; do sleep 0.02; done
newest=$(ls disk/out/checkpoints | tail -n 1)
cp -r "disk/out/checkpoints/$newest" kept
rm disk/filler
wait "$run"; code=$?
cp -r disk/out out
exit "$code"
"""


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """A command's beginning: it may mount what it likes, and nobody else sees it."""
    command = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
    probe = [*command, "mount -t tmpfs none /mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    return command


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_and_the_next_is_tried(
    tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    (tmp_path / "disk").mkdir()
    command = [*namespace, FILLED, "bash", *TRAIN, "--train.steps", "200"]
    done = run_program(command, capture_output=True, text=True, cwd=tmp_path)
    errors = (tmp_path / "errors").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + errors
    failed = re.findall(r"^tpengine: a checkpoint could not be written: .*step-(\d+): (.*)$", errors, re.MULTILINE)
    assert failed and all("No space left on device" in why and "saved in" in why for _, why in failed), errors
    # What was there while the disk was full is whole, and is from before.
    index = read_index(tmp_path / "kept")
    assert index.step < int(failed[0][0])
    assert checkpoints_of(tmp_path / "out").steps() == [200]
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 200


@pytest.mark.slow
def test_a_directory_that_is_read_only_is_one_line_before_anything_starts(
    tmp_path: Path, namespace: tuple[str, ...]
) -> None:
    (tmp_path / "disk").mkdir()
    read_only = 'mount -t tmpfs -o ro none disk; exec "$@"'
    done = run_program([*namespace, read_only, "bash", *TRAIN], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("tpengine: error: --run-dir must be a directory that can be written to: disk/out: Read-only")
