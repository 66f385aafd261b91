"""Rung: pure. What looks like text, and what is said of files that do not."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tpengine.cli import main
from tpengine.data import write_tokens
from tpengine.data.text.looks import HEAD_BYTES, why_no_text

PICTURE = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"a",
        b"\tint main() {\r\n}\f\n",
        "Gr\u00fc\u00dfe, \u4f60\u597d, \U0001f600".encode(),
        "Gr\u00fc\u00dfe aus K\u00f6ln".encode("latin-1"),
        # A character that the end of what is looked at cuts.
        "\u4f60".encode() * HEAD_BYTES,
        b"a" * HEAD_BYTES + bytes(9),
    ],
)
def test_text_is_text(text: bytes) -> None:
    assert why_no_text(text) == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PICTURE, "byte 8 is zero"),
        (b"text, then" + bytes(1), "byte 10 is zero"),
        ("text".encode("utf-16"), "UTF-16"),
        (zlib.compress(bytes(range(1, 256)) * 9)[2:].replace(bytes(1), b"x"), "are no text"),
        (b"\x01\x02\x03abc", "3 of its first 6 bytes are no text"),
    ],
)
def test_what_is_none_is_said(content: bytes, reason: str) -> None:
    assert reason in why_no_text(content)


def test_the_command_warns_of_files_that_do_not_look_like_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    argv = ["data", "--from", str(tmp_path / "in"), "--out"]
    assert main([*argv, str(tmp_path / "1")]) == 0
    assert "warning" not in capsys.readouterr().out
    for number in range(5):
        (tmp_path / "in" / f"{number}.png").write_bytes(PICTURE)
    assert main([*argv, str(tmp_path / "2")]) == 0
    *warnings, last, _ = capsys.readouterr().out.splitlines()
    assert len(warnings) == 3 and warnings[0] == (
        f"warning: {tmp_path}/in/0.png does not look like text: byte 8 is zero: if it is none, stop, and leave it out "
        "with --pattern"
    )
    assert last == "warning: 5 files do not look like text: leave them out with --pattern"
    # A token file is certainly none.
    write_tokens(tmp_path / "in" / "t.tokens", np.arange(9), 256)
    assert main([*argv, str(tmp_path / "3")]) == 2
    assert capsys.readouterr().err == (
        f"tpengine: error: a text must not be a token file: {tmp_path}/in/t.tokens is one already: train on it with "
        f"--data.path {tmp_path}/in/t.tokens, or leave it out with --pattern\n"
    )
