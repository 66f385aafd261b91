"""Rung: pure. schedule, plan and advise have one spelling of their options, which mean the same."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from tpengine.cli import main
from tpengine.commands import advise, plan, schedule
from tpengine.commands.parsing import Parser

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"intermediate_size": 128, "vocab_size": 61, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def options_of(command: object) -> dict[str, tuple[str, str]]:
    """The options of a command: what they set, and how it is read."""
    parser = Parser(prog="x")
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return {
        option: (action.dest, getattr(action.type, "__qualname__", str(action.type)))
        for action in parser._actions
        for option in action.option_strings
        if action.help is not argparse.SUPPRESS
    }


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_every_option_of_a_layout_is_spelled_and_read_alike() -> None:
    of_schedule, of_plan, of_advise = (options_of(command) for command in (schedule, plan, advise))
    shared = of_plan.keys() & of_advise.keys()
    assert all(of_plan[option] == of_advise[option] for option in shared)
    # A picture has no answer in JSON; how many ranks it is of follows from its sizes, and no run goes on with it.
    assert shared - of_schedule.keys() == {"--ranks", "--resume", "--tokens", "--json"}
    assert all(of_plan[option] == of_schedule[option] for option in shared & of_schedule.keys())
    assert {"--model", "--dtype", "--seq-len", "--micro-batch", "--global-batch"} <= of_schedule.keys()


@pytest.mark.parametrize(
    "asked",
    [
        ["--dtype", "bf16", "--seq-len", "64", "--micro-batch", "2", "--global-batch", "16"],
        ["--dtype", "fp32", "--seq-len", "256", "--reduction", "exact"],
        ["--zero", "2", "--recompute", "block", "--schedule", "zb-h1", "--bucket-bytes", "4000"],
        ["--pp", "1", "--dp", "1", "--tp", "1", "--zero", "3"],
    ],
    ids=" ".join,
)
def test_a_directory_is_drawn_as_it_is_planned(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES})
    )
    sizes = asked if "--pp" in asked else ["--pp", "2", "--dp", "2", "--tp", "1", *asked]
    argv = ["--model", str(tmp_path), "--machine", "h200:4", *sizes]
    planned, drawn = said(capsys, "plan", *argv), said(capsys, "schedule", *argv)
    makespan = re.search(r"makespan (\S+) s, the whole step", drawn)
    step = re.search(r"^step (\S+) (m?s):", planned, re.MULTILINE)
    assert makespan and step
    assert float(step[1]) * (1e-3 if step[2] == "ms" else 1) == pytest.approx(float(makespan[1]), rel=0.006)
    alone = "zero 3 with dp 1 is zero 0 in effect: replicas share what all hold, and there is one"
    assert (alone in planned.splitlines()) == (alone in drawn.splitlines()) == ("3" in asked)


def test_a_file_of_settings_is_a_model_of_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nnum_layers = 2\n[train]\nseq_len = 64\nglobal_batch = 12\ntokens = "1M"\n')
    layout = ["--machine", "cpu", "--tp", "1", "--pp", "2", "--dp", "1", "--micro-batch", "3"]
    assert "F3" in said(capsys, "schedule", "--model", str(file), *layout)
    text = said(capsys, "plan", "--model", str(file), *layout)
    assert f"--config {file} --train.seq-len 64" in text and "b 3 m 4" in text
    assert "12 sequences of 64" in said(capsys, "advise", "--model", str(file), *layout, "--ranks", "2")


@pytest.mark.parametrize("machine", ["cpu", "h200:2"])
def test_tokens_are_said_per_rank_and_as_days(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    argv = ["--model", "tiny", "--machine", machine, "--ranks", "2", "--tp", "1", "--pp", "1", "--micro-batch", "4"]
    argv += ["--tokens", "2e12", "--json", str(file)]
    for command in ("advise", "plan"):
        text = said(capsys, command, *argv)
        found = re.search(r"([\d,]+) tokens/s, ([\d,]+) per (GPU|rank); 2,000,000,000,000 tokens take (\S+) days", text)
        assert found is not None, text
        rate, of_each, days = (float(number.replace(",", "")) for number in found.group(1, 2, 4))
        assert of_each == pytest.approx(rate / 2, abs=1) and found[3] == ("rank" if machine == "cpu" else "GPU")
        assert days == pytest.approx(2e12 / rate / 86_400, rel=0.01)
        answer = json.loads(file.read_text())
        sheet = answer["rows"][0] if command == "advise" else answer
        assert sheet["tokens_per_s"] == pytest.approx(32 * 128 / sheet["step_seconds"])
    assert main(["advise", *argv[:-4], "--tokens", "2 GB"]) == 2
    assert "number of tokens, at least 1: got '2 GB': use 2000000" in capsys.readouterr().err
