"""Rung: gloo ranks, as `tpengine generate` starts them. Text on standard output, all else on standard error."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures.runs import saved
from support.architectures.trained_tokenizers import saved_tokenizer

from tpengine.cli import main
from tpengine.config import Config
from tpengine.config.toml import dump_toml
from tpengine.tokenizer import TextTokenizer


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()  # transformers' progress
    code = main(["generate", *argv])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_text_comes_alone_and_ends_where_the_model_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path, "llama3"))
    theirs = saved("qwen3", tmp_path, torch.float32, vocab_size=tokenizer.vocab_size)
    prompt = tokenizer.prompt("import os")
    given = torch.tensor([prompt])
    mask, options = torch.ones_like(given), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    whole = theirs.generate(given, attention_mask=mask, **options)[0].tolist()
    flags = ("--temperature", "0", "--max-tokens", "12")
    code, text, said = said_by(capsys, str(tmp_path), "--prompt", "import os", *flags)
    assert code == 0, said
    assert text == tokenizer.decode(whole) + "\n"
    number = r"[\d,.]+"
    speed = rf"tokens in {number} s, {number} tokens/s"
    assert re.fullmatch(
        rf"tpengine: a cache for 1 x {len(prompt) + 12} tokens, {number} MB per rank\n"
        rf"tpengine: prefill {len(prompt)} {speed}; decode 11 {speed}\n",
        said,
    ), said

    # Two prompts on two ranks, one of them from standard input: it ends where it first has the fourth token.
    end = whole[len(prompt) + 3]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os")))
    code, both, said = said_by(capsys, str(tmp_path), "--prompt", "def", "--prompt-file", "-", "--pp", "2", *flags)
    assert code == 0, said
    first, second = both.split("--- prompt 2\n")
    assert (
        first.startswith("--- prompt 1\n") and second == tokenizer.decode(whole[: whole.index(end, len(prompt))]) + "\n"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--prompt", "a", "--temperature", "-1"],
            "--temperature must be at least 0 and finite: got -1: use 0.8, or 0",
        ),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be above 0 and at most 1: got 0: use 0.9"),
        (
            [],
            "a prompt needs a token where a model has none that begins a text: got an empty one: use --prompt TEXT",
        ),
        (
            ["--prompt", "a", "--max-tokens", "32"],
            "prompt and --max-tokens must have positions: 1 + 32 tokens, the model has 32: use --max-tokens 31",
        ),
        (
            ["--prompt", "a" * 32],
            "prompt and --max-tokens must have positions: 32 + 200 tokens, the model has 32: use a shorter prompt",
        ),
        (["--prompt", "a", "--tp", "3"], "num_heads must be divisible by tp: num_heads 4, tp 3: use tp 1"),
        (["--prompt", "a", "--pp", "5"], "every pipeline stage needs a layer: pp 5, num_layers 4: use pp 4 or fewer"),
        (["--prompt", "a", "--device", "tpu"], "device must be one of auto, cpu, cuda: got 'tpu': use one of these"),
        (["--prompt", "a", "--dtype", "int8"], "argument --dtype: must be one of "),
        (["--prompt", "a", "--max-tokens", "0"], "argument --max-tokens: must be an integer of at least 1: got '0': "),
        (["--prompt-file", "nowhere.txt"], "[Errno 2] No such file or directory: 'nowhere.txt'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    saved("gpt2", tmp_path, torch.float32)
    code, text, line = said_by(capsys, str(tmp_path), *flags)
    assert (code, text) == (2, "") and line.startswith(f"tpengine: error: {said}") and line.count("\n") == 1, line


@pytest.mark.slow
def test_ids_beyond_the_vocabulary_and_models_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    saved("llama", model, torch.float32, vocab_size=100)
    cases: list[tuple[list[Any], str]] = [
        (
            [model, "--prompt", "3 100"],
            "a prompt's tokens must lie in the model's vocabulary: got 100, vocabulary 100: ",
        ),
        (
            [model, "--prompt", "x", "--tokenizer", "bytes"],
            "a prompt's tokens must lie in the model's vocabulary: got 120",
        ),
        ([tmp_path / "no", "--prompt", "3"], "model.path must be a directory with a config.json, or a run: "),
        ([tmp_path, "--prompt", "3"], "a model's directory has a config.json: "),
    ]
    for argv, said in cases:
        code, text, line = said_by(capsys, *map(str, argv))
        assert (code, text) == (2, "") and line.startswith(f"tpengine: error: {said}") and line.count("\n") == 1, line
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump_toml(Config()))
    for name, said in (
        ("run", "a run to begin from must have a whole checkpoint: "),
        ("run@7", "RUN@STEP names a check"),
    ):
        code, text, line = said_by(capsys, str(tmp_path / name), "--prompt", "3")
        assert (code, text) == (2, "") and line.startswith(f"tpengine: error: {said}") and line.count("\n") == 1, line
