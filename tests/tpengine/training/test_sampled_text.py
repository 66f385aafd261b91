"""Rung: gloo ranks, one process, as `python -m tpengine.train` starts it. The sample at a run's end is read as text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.architectures.runs import saved
from support.architectures.trained_tokenizers import saved_tokenizer
from support.programs import run_module
from tokenizers import Tokenizer

from tpengine.cli import main
from tpengine.tokenizer import TextTokenizer

SMALL = (
    *("--train.seq-len", "32", "--train.micro-batch-size", "1", "--train.num-micro-batches", "1", "--device", "cpu"),
    *("--train.steps", "1", "--train.eval-micro-batches", "1", "--train.sample-tokens", "40"),
)


def sample_of(output: str) -> str:
    """What stands behind the held-out loss: prompt and sample."""
    return output.split("sample, continuing ")[1].split("\nsaved in ")[0]


@pytest.mark.by_default("llama3")
@pytest.mark.parametrize("kind", ["llama3", "unigram"])
def test_a_sample_is_decoded_by_the_tokenizer_of_the_weights(tmp_path: Path, kind: str) -> None:
    """The model has ids that the tokenizer lacks, as padded vocabularies do, and what it says is drawn."""
    model, run = tmp_path / "model", tmp_path / "run"
    tokenizer = TextTokenizer(saved_tokenizer(model, kind))
    saved("qwen3", model, torch.float32, vocab_size=tokenizer.vocab_size + 3)
    text = Path(torch.__file__).read_text(encoding="utf-8")[:100_000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokens = tmp_path / "tokens"
    argv = ["--from", str(tmp_path / "text.txt"), "--tokenizer", str(model), "--out", str(tokens)]
    assert main(["data", *argv]) == 0
    flags = [*SMALL, "--model.path", str(model), "--data.path", str(tokens), "--run-dir", str(run)]
    done = run_module("tpengine.train", *flags)
    assert done.returncode == 0, done.stderr
    shown = sample_of(done.stdout)

    # The same sample again, as ids.
    (run / "tokenizer.json").write_text("{")
    again = run_module("tpengine.train", "--config", str(run / "config.toml"), "--run-dir", str(run), "--resume")
    assert again.returncode == 0, again.stderr
    assert f"the sample is shown as ids: tokenizer.json must be a tokenizer's: {run}/tokenizer.json: " in again.stdout
    lines = sample_of(again.stdout).splitlines()
    prompt, sampled = ([int(word) for word in line.strip("':").split()] for line in lines)
    assert len(prompt) == 16 and len(sampled) == 40

    library = Tokenizer.from_file(str(model / "tokenizer.json"))
    begun, whole = (text_of(library, ids) for ids in (prompt, prompt + sampled))
    assert whole.startswith(begun) and shown == f"{begun!r}:\n{whole[len(begun) :]}".rstrip("\n")


def text_of(library: Tokenizer, ids: list[int]) -> str:
    """The text of ids: of each run of those that the tokenizer has, and a sign for each other one."""
    runs: list[list[int]] = [[]]
    for number in ids:
        if library.id_to_token(number) is None:
            runs.append([])
        else:
            runs[-1].append(number)
    text = "\ufffd".join(library.decode(run, skip_special_tokens=False) for run in runs)
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
