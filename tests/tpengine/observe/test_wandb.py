"""Rung: pure, and programs. Without the library it is refused; what the real one takes, offline, is what was measured.

By default the library is not there. When slow it is installed into a directory of its own, and a run reports to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks.progress import finish, run_program, wait_until

from tpengine.observe.wandb_run import check_wandb

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "1", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.eval-every", "3", "--train.sample-tokens", "0"),
    *("--train.checkpoint-every", "3", "--train.wandb", "a project", "--optim.decay-steps", "9"),
)
UNREACHED = "connection broken by"
# Prints the history of runs, as JSON: records of protocol buffers, in blocks of 32 KiB as LevelDB's log has them.
READER = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
for path in sys.argv[1:]:
    content, at, record, rows, names, codes = open(path, "rb").read(), 7, b"", [], set(), []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found = Record.FromString(record)
            record = b""
            if found.WhichOneof("record_type") == "run":
                names.add(found.run.run_id)
            if found.WhichOneof("record_type") == "exit":
                codes.append(found.exit.exit_code)
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    print(json.dumps([sorted(names), rows, codes]))
"""


def test_without_the_library_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run of the library has left a folder of that name."""
    check_wandb("")
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError) as error:
        check_wandb("mine")
    assert str(error.value) == (
        "train.wandb mine needs a library: wandb is not installed: pip install 'tpengine[wandb]', or leave train.wandb "
        "out"
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that has the library, behind our own packages."""
    place = str(tmp_path_factory.mktemp("wandb"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", place, "wandb>=0.19"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and UNREACHED in done.stderr:
        pytest.skip(f"pip reaches no package index: {done.stderr.splitlines()[-1]}")
    assert not done.returncode, done.stderr
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    paths = [entry for entry in sys.path if entry] + [place]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HOME": place, "CUDA_VISIBLE_DEVICES": ""}
    return {**inherited, **own}


def train(environment: dict[str, str], run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tpengine.train", *SMALL, "--run-dir", str(run_dir), *arguments]


def history(environment: dict[str, str], run_dir: Path) -> Iterator[tuple[list[str], list[dict[str, Any]], list[int]]]:
    """Name, rows and exit code of each of the library's files of a run, oldest first."""
    files = sorted(map(str, run_dir.glob("wandb/offline-run-*/*.wandb")), key=os.path.getmtime)
    read = run_program([sys.executable, "-c", READER, *files], capture_output=True, text=True, env=environment)
    assert not read.returncode, read.stderr
    for line in read.stdout.splitlines():
        yield tuple(json.loads(line))


@pytest.mark.slow
def test_the_library_takes_what_was_measured(tmp_path: Path, environment: dict[str, str]) -> None:
    """A run that is stopped, then resumed: one run there too, whose rows are those of metrics.jsonl."""
    offline = {**environment, "WANDB_MODE": "offline"}
    command = train(environment, tmp_path, "--train.steps", "100000")
    process = subprocess.Popen(command, env=offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4, process, "no rows")
    process.send_signal(signal.SIGTERM)
    _, errors = finish(process)
    assert process.returncode == 128 + signal.SIGTERM, errors
    stopped = metrics.read_text().count("\n")
    again = train(environment, tmp_path, "--train.steps", str(stopped + 4), "--resume")
    done = run_program(again, capture_output=True, text=True, env=offline)
    assert done.returncode == 0, done.stderr
    (first_names, first, first_codes), (second_names, second, second_codes) = history(environment, tmp_path)
    assert first_codes == [128 + signal.SIGTERM] and second_codes == [0]
    assert first_names == second_names == [(tmp_path / "wandb_id.txt").read_text().strip()]
    taken: dict[int, dict[str, Any]] = {}
    for row in first + second:
        own = {name: value for name, value in row.items() if not name.startswith("_")}
        taken[row["step"]] = taken.get(row["step"], {}) | own
    rows = {row["step"]: row for row in map(json.loads, metrics.read_text().splitlines())}
    assert len(rows) == stopped + 4 and taken == rows
    assert any("held_out_loss" in row for row in taken.values())


@pytest.mark.slow
def test_nobody_who_has_not_logged_in_begins(tmp_path: Path, environment: dict[str, str]) -> None:
    command = train(environment, tmp_path, "--train.steps", "2")
    done = run_program(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("tpengine")]
    assert line.startswith("tpengine: error: --train.wandb must be able to begin: ")
    assert line.endswith(": log in with `wandb login`, set WANDB_MODE=offline, or leave it out")
