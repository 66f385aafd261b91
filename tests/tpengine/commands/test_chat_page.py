"""Rung: gloo ranks. A chat model is fine-tuned by the commands of the page, as they stand there, but for sizes."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.architectures.chats import chat_tokenizer, talk
from support.architectures.runs import saved
from support.programs import run_module
from support.readmes import commands_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from tpengine.cli import main

ANSWERS = {"import os": "os it is", "and sys?": "sys too", "what": "that"}
# Of a machine that trains a real model -> of two cores and a drawn one.
SIZES = {"4096": "64", "1e-5": "1e-2", "bfloat16": "float32", "--train.epochs 3": "--train.steps 80"}
SMALL = "--train.micro-batch-size 2 --train.num-micro-batches 1 --train.eval-micro-batches 0 --device cpu"


def page_commands() -> list[list[str]]:
    """The page's commands, with small sizes."""
    text = (ROOT / "tpengine/commands/README.md").read_text().split("## Fine-tune a chat model\n")[1].split("\n## ")[0]
    found = []
    for line in commands_in(text):
        for large, small in SIZES.items():
            line = line.replace(large, small)
        found.append(shlex.split(line.split("#")[0] + (f" {SMALL}" if line.startswith("tpengine import") else "")))
    return found


@pytest.mark.slow
def test_the_page_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(Path("MODEL"), "qwen3"))
    saved("qwen3", Path("MODEL"), torch.float32, vocab_size=len(tokenizer))
    lines = [{"messages": talk(question, answer)} for question, answer in ANSWERS.items()] * 20
    Path("chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = []
    for command in page_commands():
        assert command[0] == "tpengine"
        names.append(command[1])
        if command[1] == "train":
            done = run_module("tpengine.cli", *command[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            continue
        if command[1] == "generate":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os\n")))
            command += ["--temperature", "0"]
        capsys.readouterr()
        assert main(command[1:]) == 0, capsys.readouterr().err
        if command[1] == "generate":
            assert capsys.readouterr().out == "<think>\n\n</think>\n\nos it is\n"
    assert names == ["data", "data", "import", "train", "generate", "export"]
    tuned, template = AutoModelForCausalLM.from_pretrained("TUNED"), AutoTokenizer.from_pretrained("TUNED")
    assert template.chat_template == tokenizer.chat_template
    for question, answer in ANSWERS.items():
        how = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
        given = template.apply_chat_template(talk(question), **how)
        ends = dict(eos_token_id=template.eos_token_id, pad_token_id=0)
        whole = tuned.generate(**given, max_new_tokens=40, do_sample=False, **ends)[0].tolist()
        assert template.decode(whole[given["input_ids"].shape[1] :]) == f"<think>\n\n</think>\n\n{answer}<|im_end|>"
