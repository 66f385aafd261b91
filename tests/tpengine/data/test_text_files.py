"""Rung: pure. Which files are read, in which order; which are refused.

What looks like text, and what is said of files that do not.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tpengine.cli import main
from tpengine.data import write_tokens
from tpengine.data.text_files import HEAD_BYTES, find_files, why_no_text

PICTURE = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR"


def written(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def names(directory: Path, pattern: str = "**/*", out: str = "") -> list[str]:
    paths = find_files([directory], pattern, directory / out if out else None, lambda path: path.name == out)
    return [str(path.relative_to(directory)) for path in paths]


def test_a_directory_is_read_sorted_and_without_the_output(tmp_path: Path) -> None:
    written(tmp_path, "b.txt", "a/z.txt", "a.txt", "out", "a/out", ".out.0123abcd", ".out.txt", "a/.out.0123abcd")
    assert names(tmp_path, out="out") == [".out.txt", "a.txt", "a/.out.0123abcd", "a/out", "a/z.txt", "b.txt"]
    assert names(tmp_path, "*.txt") == [".out.txt", "a.txt", "b.txt"]
    assert names(tmp_path, "**/z*") == ["a/z.txt"]


def test_sources_keep_their_order_and_a_file_needs_no_pattern(tmp_path: Path) -> None:
    written(tmp_path, "z/2.txt", "z/1.txt", "a/3.txt", "one.jsonl")
    sources = [tmp_path / "z", tmp_path / "one.jsonl", tmp_path / "a"]
    assert [path.name for path in find_files(sources, "*.txt")] == ["1.txt", "2.txt", "one.jsonl", "3.txt"]


@pytest.mark.parametrize(
    ("pattern", "parts"), [("*.none", ["not empty", "0 files match '*.none'"]), ("/abs", ["relative glob", "'/abs'"])]
)
def test_directories_without_text_are_refused(tmp_path: Path, pattern: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        find_files([tmp_path], pattern)
    for part in parts:
        assert part in str(error.value)
    with pytest.raises(ValueError, match="must be directories or files"):
        find_files([tmp_path, tmp_path / "nowhere"])


def test_a_file_that_comes_twice_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "a/one.txt", "b/two.txt")
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a" / "one.txt")
    with pytest.raises(ValueError) as error:
        find_files([tmp_path / "a", tmp_path / "b"])
    again, first = tmp_path / "b" / "link.txt", tmp_path / "a" / "one.txt"
    assert str(error.value) == f"--from must name a file once: {again} is {first} again: leave one out"


@pytest.mark.parametrize("name", ["a.json.gz", "a.zst", "a.txt.gz", "a.tar.gz", "a.jsonl.GZ"])
def test_a_compressed_file_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path, "b.jsonl.gz", "b.jsonl.zst", "c.txt")
    assert len(names(tmp_path)) == 3
    written(tmp_path, name)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError) as error:
            find_files([source])
        kind = Path(name).suffix.lower()
        assert str(error.value) == (
            f"a compressed file must be of JSON lines: {tmp_path / name} is not by its name: unpack it, or name it "
            f"a.jsonl{kind} if it is, or leave it out with --pattern"
        )
    assert names(tmp_path, "b.*") == ["b.jsonl.gz", "b.jsonl.zst"]


@pytest.mark.parametrize(
    ("source", "out", "said"),
    [
        ("a.txt", "a.txt", "--from a.txt is --out a.txt: choose another, as a.txt.tokens"),
        ("a.txt", "d/../a.txt", "--from a.txt is --out d/../a.txt: choose another"),
        ("link.txt", "a.txt", "--from link.txt is --out a.txt"),
        ("a.txt", "link.txt", "--from a.txt is --out link.txt"),
        ("d", "d", "--from d is --out d: choose another, as d/text.tokens"),
        ("d", "dlink", "--from d is --out dlink"),
        ("d/b.txt", "d", "--from d/b.txt is in --out d: choose another"),
        ("d", "d/b.txt", "d/b.txt is a text of --from: choose another than d/b.txt"),
        ("d", "dlink/b.txt", "d/b.txt is a text of --from"),
        ("d", "d/sub", "d/sub/c.txt is a text of --from: choose another than d/sub"),
    ],
)
def test_an_output_that_is_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str, said: str
) -> None:
    """Before, the first were said to have no file that is not empty, and the last were to be removed."""
    monkeypatch.chdir(tmp_path)
    written(Path(), "a.txt", "d/b.txt", "d/sub/c.txt")
    Path("link.txt").symlink_to("a.txt")
    Path("dlink").symlink_to("d")
    with pytest.raises(ValueError) as error:
        find_files([Path(source)], out=Path(out))
    assert str(error.value).startswith(f"--out must not be what is read: {said}")
    # A new file in the directory is no text of it.
    assert [str(path) for path in find_files([Path("d")], out=Path("d/new"))] == ["d/b.txt", "d/sub/c.txt"]


def test_a_hard_link_of_a_text_is_no_output(tmp_path: Path) -> None:
    text, out = tmp_path / "hard.txt", tmp_path / "x.txt"
    text.write_text("text")
    out.hardlink_to(text)
    with pytest.raises(ValueError, match=f"--out must not be what is read: {text} is a text of --from: choose another"):
        find_files([text], out=out)


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
