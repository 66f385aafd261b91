"""Rung: pure. `tpengine advise` as people use it: its rows add up, its command runs, mistakes are one line."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tpengine.cli import main
from tpengine.commands.advise import nothing_fits
from tpengine.commands.arguments import parse_config
from tpengine.config import validate
from tpengine.config.presets import preset_config
from tpengine.planner.advice.question import Question
from tpengine.planner.advice.search import search
from tpengine.planner.advice.sheets import Sheet, StepParts
from tpengine.planner.advice.words import differences
from tpengine.planner.machine import MACHINES

QUESTION = ["advise", "--model", "llama_1b", "--machine", "h200:4x2", "--global-batch", "64", "--seconds", "1000"]
FEWER = ["--micro-batch", "4", "--schedule", "1f1b", "--zero", "1"]


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*QUESTION, *argv]) == 0
    return capsys.readouterr().out


def test_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "advice.json"
    argv = (
        "--micro-batch",
        "4",
        "--zero",
        "1",
        "--top",
        "3",
        "--explain",
        "2",
        "--json",
        str(file),
        "--draw",
        str(tmp_path / "pictures"),
    )
    text = answer(capsys, *argv)
    said: dict[str, Any] = json.loads(file.read_text())
    rows = said["rows"]
    assert len(rows) == 3 and said["ranks"] == 8 and said["layouts"] > said["simulated"] > 3
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)
    for row in rows:
        parts = row["parts"]
        assert sum(parts.values()) == pytest.approx(row["step_seconds"], rel=1e-6)
        # What a row loses by adds up to what it loses.
        lost = sum(parts[name] - rows[0]["parts"][name] for name in parts)
        assert lost == pytest.approx(row["step_seconds"] - rows[0]["step_seconds"], rel=0.01, abs=1e-9)
        assert row["peak_bytes"] == max(rank["peak_bytes"] for rank in row["memory"]) <= said["memory_limit_bytes"]
        flags = row["run"].split("tpengine.train ")[1].split()
        layout, config = row["layout"], parse_config(flags, 8)
        assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (
            layout["tp"],
            layout["pp"],
            layout["dp"],
        )
        assert layout["dp"] * layout["micro_batch_size"] * layout["num_micro_batches"] == 64
    lines = text.splitlines()
    assert lines[0].startswith("llama_1b, 8 x h200, 64 sequences of 2,048: ")
    assert re.match(r"  1  tp \d+ pp \d+ dp \d+ .* compute \d+ %", lines[2])
    assert re.match(r"  2  .* \+\S+ m?s .* lost by: ", lines[3])
    assert any(line.startswith("would change it: ") for line in lines)
    assert f"run it: {rows[0]['run']}" in lines
    assert "\nrow 2: " in text and "against row 1: " in text
    picture = (tmp_path / "pictures" / "advice.svg").read_text()
    assert all(row["run"] and picture.count("<svg") for row in rows)
    assert picture.count(" ms") or picture.count(" s")
    # Each rank's memory has the limit above it.
    num_ranks = sum(row["layout"]["pp"] for row in rows)
    assert picture.count('class="limit"') == num_ranks == picture.count(">limit 133 GB<")


def test_the_same_question_has_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        re.sub(r", [\d.]+ s$", "", answer(capsys, "--top", "2", *FEWER), flags=re.MULTILINE) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["advice is for one model", "--model llama_1b"]),
        (["--model", "llama_1b", "--resume", "runs/x"], ["advice is for one model", "one of the two"]),
        (["--model", "nosuch"], ["--model must be one of", "'nosuch'", "check the path"]),
        (["--resume", "runs/nosuch"], ["--resume needs the directory of a run", "check the path"]),
        (["--model", "tiny", "--machine", "tpu:8"], ["--machine must be one of", "'tpu:8'"]),
        (["--model", "tiny"], ["needs a number of ranks", "--machine cpu", "use --ranks 8"]),
        (["--model", "tiny", "--ranks", "6", "--dp", "4"], ["no layout divides", "dp 4"]),
        (
            ["--model", "tiny", "--ranks", "4", "--dp", "4", "--global-batch", "9"],
            ["divisible by dp", "--global-batch 8"],
        ),
        (["--model", "tiny", "--ranks", "2", "--tp", "3"], ["no layout divides", "tp 3", "use --tp of 1,2"]),
        (
            ["--model", "llama_1b", "--machine", "h200:1", "--memory-limit", "1000000"],
            ["no layout fits", "nearest: tp 1", "too many on rank 0 at", "it fits with", "--memory-limit"],
        ),
        (["--model", "tiny", "--ranks", "2", "--tp", "9..1000"], ["tp 9,10,11,12,13,14,15,16,... (992 values)"]),
        (
            # Before a list of a million micro-batches is made, which no run accepts.
            ["--model", "tiny", "--ranks", "2", "--global-batch", "1048576", "--micro-batch", "1"],
            ["no layout divides", "at most 16,384 micro-batches", "micro_batch_size 1"],
        ),
        (["--model", "tiny", "--ranks", "2", "--draw", __file__], ["--draw must be a directory", "name another"]),
        (["--model", "tiny", "--ranks", "2", "--schedule", "fast"], ["schedule must be one of"]),
        (["--model", "tiny", "--ranks", "1", "--explain", "9"], ["--explain must name a row", "got 9 of 5", "--top 9"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


def test_a_search_without_time_says_how_to_give_it_more() -> None:
    machine = MACHINES["h200"]
    question = Question(preset_config("llama_1b"), machine, 4, 16)
    found = search(question, limit_seconds=-1.0)
    assert not found.rows and found.gap is not None
    line = nothing_fits(question, found, 1.0)
    assert "no layout was found in" in line and "use --seconds" in line


def test_a_limit_that_was_asked_for_has_no_slack(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--model", "tiny", "--machine", "h200:1", "--micro-batch", "1", "--recompute", "none"]
    assert main(asked) == 0 and "left to the allocator" in capsys.readouterr().out
    assert main([*asked, "--memory-limit", "90000000000"]) == 0
    assert "left to the allocator" not in capsys.readouterr().out


def test_a_run_goes_on_with_its_own_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[parallel]\ndp = 2\n[train]\nmicro_batch_size = 4\nnum_micro_batches = 6\n")
    assert main(["advise", "--resume", str(run), "--ranks", "3"]) == 0
    text = capsys.readouterr().out
    assert "48 sequences of 128" in text and f"--resume --run-dir {run}" in text
    assert main(["advise", "--resume", str(run), "--ranks", "3", "--global-batch", "64"]) == 2
    assert "keeps its batch" in capsys.readouterr().err
    assert main(["advise", "--resume", str(run), "--ranks", "3", "--dtype", "bfloat16"]) == 2
    assert "keeps its numbers: train.dtype float32, asked bfloat16" in capsys.readouterr().err


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("says", "argv", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, [], "bfloat16"),
        ({"dtype": "torch.float16"}, [], "float16"),
        ({"torch_dtype": "bfloat16"}, ["--dtype", "float32"], "float32"),
        ({}, [], "float32"),
    ],
    ids=str,
)
def test_a_models_own_dtype(
    says: dict[str, str], argv: list[str], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | says))
    question = ["--model", str(file), "--machine", "h200:2", "--global-batch", "4", "--seq-len", "128", *argv]
    assert main(["advise", *question, "--top", "1", "--micro-batch", "1"]) == 0
    text = capsys.readouterr().out
    assert f"--train.dtype {dtype}" in text and f"simulated in {dtype} at" in text


def test_advise_plan_and_schedule_say_the_same_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advised, planned = tmp_path / "advice.json", tmp_path / "plan.json"
    answer(capsys, "--top", "1", *FEWER, "--pp", "2", "--json", str(advised))
    row = json.loads(advised.read_text())["rows"][0]
    layout = row["layout"]
    same = [f"--{axis}={layout[axis]}" for axis in ("tp", "pp", "dp", "recompute", "gathered")]
    same.append(f"--tp-comm={layout['tp_comm']}")
    question = ["--model", "llama_1b", "--machine", "h200:4x2", "--global-batch", "64"]
    assert main(["plan", *question, *FEWER, *same, "--json", str(planned)]) == 0
    said = json.loads(planned.read_text())
    assert said["step_seconds"] == row["step_seconds"] and said["peak_bytes"] == row["peak_bytes"]


def test_what_a_row_loses_by_adds_up_though_small_parts_have_no_name() -> None:
    names = [field.name for field in fields(StepParts)]
    best = StepParts(**dict.fromkeys(names, 1.0))
    more = dict(zip(names, (0.5, 0.008, -0.2, 0.008, 0.008, 0.008, 0.0, 0.0, 0.0), strict=True))
    told = differences(replace(best, **{name: 1.0 + seconds for name, seconds in more.items()}), best)
    numbers = [float(part.split()[-2]) * (1e-3 if part.endswith(" ms") else 1.0) for part in told.split(", ")]
    assert "others" in told and sum(numbers) == pytest.approx(sum(more.values()), abs=1e-3)
    assert "others" not in differences(replace(best, compute=1.5), best)


def test_replicas_sums_take_the_core_that_computes() -> None:
    """By the sheet of a CPU, at any stage of ZeRO: gloo's sums are made by the rank's own core."""
    base = preset_config("bench")
    for zero in (0, 1):
        parallel = replace(base.parallel, tp=1, pp=1, dp=2, zero=zero)
        train = replace(base.train, micro_batch_size=8, num_micro_batches=1)
        sheet = Sheet.of(validate(replace(base, parallel=parallel, train=train, device="cpu"), 2), MACHINES["cpu"])
        num_bytes = 4 * sum(bucket.layout.numel for bucket in sheet.layout.buckets.values())
        assert sheet.parts.dp == pytest.approx(MACHINES["cpu"].within.all_reduce_seconds(num_bytes, 2), rel=0.2)
