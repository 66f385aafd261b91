"""Rung: pure. What is asked, and the command that is printed: what it starts is what was worked out."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpengine.checkpoint.run.run_directory import write_config
from tpengine.cli import main
from tpengine.commands.arguments import parse_config
from tpengine.config import Config, ParallelConfig, validate_run
from tpengine.config.presets import preset_config

# What a run was started with that goes on: nothing of it is a default.
KEPT: list[dict[str, Any]] = [
    {"dp": 2, "zero": 3, "residency": "use"},
    {"pp": 2, "schedule": "zbv", "recompute": "block", "gathered": "again"},
    {"pp": 2, "schedule": "interleaved", "chunks_per_rank": 2, "bucket_bytes": 1_000_000, "memory_limit": 10**9},
    {"tp": 2, "tp_comm": "plain"},
]
ASKED = [[], ["--tp", "2"], ["--dp", "2"], ["--pp", "2"], ["--pp", "2", "--schedule", "1f1b", "--recompute", "none"]]


def run_of(directory: Path, parallel: dict[str, Any]) -> Path:
    sizes = ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1} | parallel)
    config = replace(preset_config("tiny"), parallel=sizes, run_dir=str(directory))
    directory.mkdir()
    write_config(validate_run(config, 2), directory, keeps_equal=False)
    return directory


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def started(text: str, world: int) -> Config:
    """What the printed command runs."""
    line = re.search(
        r"^run it: torchrun --nproc-per-node (\d+)(?: --nnodes (\d+))?.* -m tpengine.train (.*)$", text, re.M
    )
    assert line and int(line[1]) * int(line[2] or 1) == world
    return parse_config(shlex.split(line[3]), world)


@pytest.mark.parametrize("parallel", KEPT, ids=str)
def test_a_run_that_goes_on_is_started_as_it_was_worked_out(
    parallel: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of its config.toml stay unless the command says others, so it says all that differ."""
    run = run_of(tmp_path / "run", parallel)
    for asked in ASKED:
        # Sharding what no replica holds is refused by its rule; so asked for without.
        layout = [*asked, "--zero", "0"] if "zero" in parallel and "--dp" not in asked and asked else asked
        text = said(capsys, "plan", "--resume", str(run), "--machine", "cpu", "--ranks", "2", *layout)
        config = started(text, 2)
        words, sizes = text.splitlines()[0], config.parallel
        assert f"tp {sizes.tp} pp {sizes.pp} dp {sizes.dp} " in words, (layout, words)
        assert (f"zero {sizes.zero}" in words) == bool(sizes.zero), (layout, words)
        assert (f"recompute {sizes.recompute}" in words) == (sizes.recompute != "none"), (layout, words)
        assert sizes.schedule == "1f1b" or sizes.schedule in words, (layout, words)
        assert f"b {config.train.micro_batch_size} m {config.train.num_micro_batches}" in words
        if not asked:
            assert replace(sizes, residency="auto") == replace(config.parallel, residency="auto")
            assert all(getattr(sizes, name) == value for name, value in parallel.items())


def test_advice_to_go_on_says_what_it_takes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"dp": 2, "zero": 3, "recompute": "block"})
    fixed = ["--tp", "2", "--recompute", "none", "--micro-batch", "8", "--seconds", "1000"]
    text = said(capsys, "advise", "--resume", str(run), "--machine", "cpu", "--ranks", "2", *fixed)
    parallel = started(text, 2).parallel
    assert (parallel.tp, parallel.zero, parallel.recompute) == (2, 0, "none")


def test_what_is_not_said_is_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    """Of micro-batches the largest that divides; a schedule is said where there is no pipeline too."""
    plan = ["plan", "--model", "tiny", "--machine", "cpu"]
    assert " b 8 m 4\n" in said(capsys, *plan, "--ranks", "2", "--tp", "2")
    assert " b 2 m 1\n" in said(capsys, *plan, "--ranks", "16", "--dp", "16")
    text = said(capsys, *plan, "--ranks", "1", "--schedule", "zbv")
    assert "tp 1 pp 1 dp 1 zbv b 8" in text and started(text, 1).parallel.schedule == "zbv"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["plan", "--machine", "h200:8x4", "--ranks", "30", "--pp", "5"],
            ["as many on each node", "use --ranks 24 or 32"],
        ),
        (
            ["advise", "--machine", "h200:8x2", "--ranks", "33"],
            ["at most what the machine has", "use --machine h200:8x5"],
        ),
        (["plan", "--machine", "h200:2x1", "--ranks", "3"], ["2 on each of 1 node:", "h200:2x2, or h200:3x1"]),
        (
            ["plan", "--machine", "v100-16:8", "--memory-limit", "500000000000"],
            ["v100-16 has 16,000,000,000", "leave it"],
        ),
        (["plan", "--machine", "cpu", "--ranks", "3", "--tp", "3"], ["4 heads, tp 3: use --tp 2"]),
        (
            ["plan", "--machine", "cpu", "--ranks", "2", "--pp", "2", "--chunks", "7"],
            ["7 of 1f1b, which has 1", "interleaved"],
        ),
        (["plan", "--machine", "cpu", "--ranks", "2", "--residency", "use"], ["use at zero 0", "use --zero 3"]),
        (["plan", "--machine", "cpu", "--memory-limit", "80GB"], ["without a unit: got '80GB'"]),
        (["advise", "--machine", "cpu", "--ranks", "100000"], ["no layout divides", "use --ranks 512"]),
        (["advise", "--machine", "cpu", "--ranks", "8", "--pp", "8"], ["pp 8", "use --pp of 1,2,4"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argv[0], "--model", "tiny", *argv[1:]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


def test_a_limit_is_said_in_the_command_and_what_does_not_fit_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama_1b", "--machine", "h200:8"]
    text = said(capsys, *plan, "--memory-limit", "90000000000")
    assert started(text, 8).parallel.memory_limit == 90_000_000_000
    text = said(capsys, *plan, "--memory-limit", "1000000000")
    assert "does not fit" in text and "run it" not in text


def test_the_sheet_in_json_says_of_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sheet.json"
    plan = ["plan", "--model", "llama_1b", "--machine", "h200:8", "--json", str(file)]
    text = said(capsys, *plan)
    sheet = json.loads(file.read_text())
    assert (sheet["model"], sheet["machine"], sheet["ranks"], sheet["fits"]) == ("llama_1b", "h200", 8, True)
    assert f"run it: {sheet['run']}\n" in text and sheet["layout"]["dp"] == 8 and sheet["memory_limit_bytes"] > 1e11
    said(capsys, *plan, "--memory-limit", "1000000000")
    sheet = json.loads(file.read_text())
    assert (sheet["fits"], sheet["run"]) == (False, None)


def test_a_file_of_a_schedule_is_one_of_the_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks and micro-batches are its own; layouts of other sizes are none of a run."""
    file = tmp_path / "mine.txt"
    file.write_text("rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1F1 1F2 1B0 1B1 1B2\n")
    advise = ["advise", "--model", "tiny", "--machine", "cpu", "--ranks", "2", "--schedule", str(file)]
    text = said(capsys, *advise, "--global-batch", "3", "--pp", "2", "--micro-batch", "1", "--seconds", "1000")
    assert started(text, 2).parallel.schedule == str(file)


def test_a_configuration_alone_is_said_to_lack_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command begins with the weights of its directory; a blank in its path is quoted."""
    model = tmp_path / "my model"
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes})
    )
    argv = ["plan", "--model", str(model), "--machine", "cpu", "--ranks", "1"]
    text = said(capsys, *argv)
    assert f"--model.path '{model}'" in text and f"the command needs weights: {model} has a config.json alone" in text
    (model / "model.safetensors").write_bytes(b"")
    assert "needs weights" not in said(capsys, *argv)
