"""Rung: pure. The page of a mixture of experts: its commands are understood as they stand, its layout fits."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.architectures.runs import saved
from support.readmes import commands_in

from tpengine.cli import main
from tpengine.commands.arguments import parse_config


def test_the_page_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drawn model of 8 experts in the place of MODEL."""
    monkeypatch.chdir(tmp_path)
    saved("qwen3_moe", Path("MODEL"), torch.float32, num_experts=8)
    page = (ROOT / "tpengine/commands/README.md").read_text().split("## Fine-tune a mixture of experts\n")[1]
    commands = [shlex.split(line) for line in commands_in(page.split("\n## ")[0])]
    assert [name for _, name, *_ in commands] == ["data", "plan", "train", "watch", "export"]
    _, plan, train, _, export = (command[1:] for command in commands)
    assert main(plan) == 0
    assert "tp 4 pp 1 dp 2 ep 8 zero 1 recompute block" in capsys.readouterr().out
    # The model that the page is about fits.
    length = [train[train.index("--train.seq-len") + 1]]
    assert main([*(word.replace("MODEL", "qwen3_30b_a3b") for word in plan), "--seq-len", *length]) == 0
    assert "\nfits: " in capsys.readouterr().out
    assert train[1:3] == ["--nproc", "8"]
    config = parse_config(train[3:], 8)
    layout = config.parallel
    assert (layout.tp, layout.pp, layout.dp, layout.ep, layout.zero) == (4, 1, 2, 8, 1)
    assert (config.train.balance, config.model.path, config.model.architecture) == ("loss", "MODEL", "qwen3_moe")
    assert export == ["export", config.run_dir, "--out", "TUNED"]
