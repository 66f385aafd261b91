"""Rung: pure. What `benchmarks.run data` compares does the same work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.data.corpus import train_tokenizer, write_text
from benchmarks.data.members import Tokenizing


def test_both_sides_make_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "false")
    text = tmp_path / "text.jsonl"
    train_tokenizer(tmp_path, write_text(text, 100_000), 300)
    member = Tokenizing(str(text), str(tmp_path))
    number, _ = member.ours()
    assert number == member.library()[0] > 10_000
