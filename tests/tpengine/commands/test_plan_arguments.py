"""Rung: pure. What is asked, and the command that is printed: what it starts is what was worked out."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpengine.checkpoint.run_directory import write_config
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


def run_of(directory: Path, parallel: dict[str, Any], base: Config | None = None, world: int = 2) -> Path:
    sizes = ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1} | parallel)
    config = replace(base or preset_config("tiny"), parallel=sizes, run_dir=str(directory))
    directory.mkdir()
    write_config(validate_run(config, world), directory, keeps_equal=False)
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


def check_is_what_was_worked_out(config: Config, sheet: dict[str, Any], kept: ParallelConfig) -> None:
    """All settings of the run are those of the layout in the sheet; what it does not know is as it was kept."""
    layout, parallel = sheet["layout"], config.parallel
    named = ("tp", "pp", "dp", "schedule", "zero", "recompute", "gathered", "tp_comm")
    assert {name: getattr(parallel, name) for name in named} == {name: layout[name] for name in named}
    assert parallel.residency == (layout["residency"] if layout["zero"] == 3 else "auto")
    assert parallel.schedule != "interleaved" or parallel.chunks_per_rank == layout["chunks_per_rank"]
    assert parallel.bucket_bytes == (layout["bucket_bytes"] or kept.bucket_bytes)
    assert parallel.memory_limit == kept.memory_limit
    assert config.train.micro_batch_size == layout["micro_batch_size"]
    assert config.train.num_micro_batches == layout["num_micro_batches"]


@pytest.mark.parametrize("parallel", KEPT, ids=str)
def test_a_run_that_goes_on_is_started_as_it_was_worked_out(
    parallel: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of its config.toml stay unless the command says others, so it says all that differ."""
    run, file = run_of(tmp_path / "run", parallel), tmp_path / "sheet.json"
    kept = replace(ParallelConfig(), **parallel)
    for asked in ASKED:
        plan = ["plan", "--resume", str(run), "--machine", "cpu", "--ranks", "2", "--json", str(file), *asked]
        text = said(capsys, *plan)
        config = started(text, 2)
        assert ("zero 3 with dp 1 is zero 0 in effect" in text) == (kept.zero == 3 and config.parallel.dp == 1)
        check_is_what_was_worked_out(config, json.loads(file.read_text()), kept)
        if not asked:
            assert all(getattr(config.parallel, name) == value for name, value in parallel.items())


def test_advice_to_go_on_says_what_it_takes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"dp": 2, "zero": 3, "recompute": "block"})
    fixed = ["--tp", "2", "--recompute", "none", "--micro-batch", "8", "--seconds", "1000"]
    text = said(capsys, "advise", "--resume", str(run), "--machine", "cpu", "--ranks", "2", *fixed)
    parallel = started(text, 2).parallel
    # The stage of ZeRO stays for when there are replicas again.
    assert (parallel.tp, parallel.zero, parallel.recompute) == (2, 3, "none")
    assert "zero 3 with dp 1 is zero 0 in effect" in text
    parallel = started(said(capsys, "advise", "--resume", str(run), "--ranks", "2", *fixed, "--zero", "0"), 2).parallel
    assert (parallel.zero, parallel.zero_in_effect) == (0, 0)


def test_in_exact_mode_and_with_dropout_micro_batches_keep_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the checkpoint's check has it: what a run's numbers depend on is not advised otherwise."""
    exact = replace(preset_config("tiny").train, reduction="exact")
    for name, base in (("exact", replace(preset_config("tiny"), train=exact)), ("dropout", preset_config("certify"))):
        run, size = run_of(tmp_path / name, {}, base, 1), base.train.micro_batch_size
        plan = ["plan", "--resume", str(run), "--machine", "cpu", "--ranks", "2", "--dp", "2"]
        assert started(said(capsys, *plan), 2).train.micro_batch_size == size
        advise = ["advise", *plan[1:], "--seconds", "1000", "--recompute", "none", "--zero", "0"]
        assert started(said(capsys, *advise), 2).train.micro_batch_size == size
        assert main([*plan, "--micro-batch", "1"]) == 2
        assert f"the run's {size}, asked 1: leave --micro-batch out" in capsys.readouterr().err


def test_a_limit_that_a_run_had_is_not_another_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = replace(preset_config("llama_1b"), train=replace(preset_config("llama_1b").train, micro_batch_size=1))
    run = run_of(tmp_path / "run", {"memory_limit": 140_000_000_000}, large, 1)
    plan = ["plan", "--machine", "h100:8", "--global-batch"]
    batch = str(large.train.num_micro_batches)
    text = said(capsys, *plan, batch, "--resume", str(run), "--dp", "4", "--tp", "2")
    left = re.search(r"fits: (\d+) GB left", text)
    assert left and int(left[1]) < 75
    assert "--parallel.memory-limit" not in said(capsys, *plan, "32", "--model", str(run))


def test_a_run_like_another_has_its_dropout_and_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = preset_config("certify")
    run = run_of(tmp_path / "a run", {}, replace(base, data=replace(base.data, packing="documents")), 1)
    config = started(said(capsys, "plan", "--model", str(run), "--machine", "cpu", "--ranks", "1"), 1)
    assert config.model.attention_dropout == base.model.attention_dropout > 0
    assert config.model.residual_dropout == base.model.residual_dropout and config.data.packing == "documents"


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
        (
            ["advise", "--machine", "cpu", "--ranks", "1", "--chunks", "2"],
            ["no layout has all of these: --chunks 2", "leave one"],
        ),
        (
            ["advise", "--machine", "h200:8x4", "--dp", "30", "--global-batch", "30"],
            ["use --dp of 2"],
        ),
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


def test_a_file_that_names_a_directory_is_a_plan_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As training begins with it: the directory's sizes, the file's other settings."""
    model, file, sheet = tmp_path / "model", tmp_path / "mine.toml", tmp_path / "sheet.json"
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    sizes |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (model / "config.json").write_text(json.dumps(sizes))
    file.write_text(f"[model]\npath = {str(model)!r}\nresidual_dropout = 0.1\n[train]\nseq_len = 32\n")
    argv = ["--machine", "cpu", "--ranks", "2", "--pp", "2", "--tp", "1", "--json", str(sheet)]
    text = said(capsys, "plan", "--model", str(file), *argv)
    config = started(text, 2)
    assert (config.model.architecture, config.model.num_layers, config.model.residual_dropout) == ("qwen2", 2, 0.1)
    weights = [[of_rank["kinds"]["weights"] for of_rank in json.loads(sheet.read_text())["memory"]]]
    said(capsys, "plan", "--model", str(model), "--seq-len", "32", *argv)
    weights += [[of_rank["kinds"]["weights"] for of_rank in json.loads(sheet.read_text())["memory"]]]
    assert weights[0] == weights[1]
    file.write_text("[model]\npath = 'not there'\n")
    assert main(["schedule", "--model", str(file)]) == 2
    assert "model.path must be a directory with a config.json" in capsys.readouterr().err
