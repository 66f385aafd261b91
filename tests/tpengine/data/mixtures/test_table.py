"""Rung: pure. The file of a mixture: what it says, and one line for each mistake in it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tpengine.data.mixtures.table import SourceEntry, read_table


def table(tmp_path: Path, text: str) -> tuple[SourceEntry, ...]:
    (tmp_path / "mix.toml").write_text(text)
    return read_table(tmp_path / "mix.toml")


def test_a_table_of_sources(tmp_path: Path) -> None:
    text = """
    web = { path = "web/*.tokens", weight = 0.7 }
    [code-2]
    path = "code.tokens"
    weight = 1
    epochs = inf
    [seldom]
    path = "stdlib"
    weight = 0
    epochs = 2.5
    """
    assert table(tmp_path, text) == (
        SourceEntry("web", "web/*.tokens", 0.7, 1.0),
        SourceEntry("code-2", "code.tokens", 1.0, math.inf),
        SourceEntry("seldom", "stdlib", 0.0, 2.5),
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('web = { path = "a", wieght = 1 }', ["unknown key web.wieght: did you mean web.weight?"]),
        ('web = { path = "a", weight = -1 }', ["at least 0", "web.weight is -1"]),
        ('web = { path = "a", weight = nan }', ["web.weight is nan"]),
        ('web = { path = "a", weight = inf }', ["web.weight is inf"]),
        ('web = { path = "a", weight = "1" }', ["weight must be a number", "'1'"]),
        ('web = { path = "a", weight = true }', ["weight must be a number", "True"]),
        ('web = { path = "a" }', ["web.weight is None"]),
        ('a = { path = "a", weight = 0 }\nb = { path = "b", weight = 0.0 }', ["must not all be 0", "a, b"]),
        ('web = { path = "a", weight = 1, epochs = 0 }', ["web.epochs is 0", "inf", "weight = 0"]),
        ('web = { path = "a", weight = 1, epochs = -2 }', ["web.epochs is -2"]),
        ("web = { weight = 1 }", ["web.path is None", 'path = "web.tokens"']),
        ("web = { path = 3, weight = 1 }", ["web.path is 3"]),
        ("web = 3", ["web is 3", "must be a table"]),
        ("[[source]]\nweight = 1", ["source is [{'weight': 1}]", "must be a table"]),
        ('"a b" = { path = "a", weight = 1 }', ["'a b'", "rename"]),
        ("", ["got 0", "write a line for each"]),
        ("web = {", ["valid TOML"]),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        table(tmp_path, text)
    for part in [str(tmp_path / "mix.toml"), *parts]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data.mixture needs a readable file: .*absent.toml: No such file"):
        read_table(tmp_path / "absent.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="in UTF-8"):
        read_table(tmp_path / "bytes")
    many = "".join(f'a{number} = {{ path = "a", weight = 1 }}\n' for number in range(257))
    with pytest.raises(ValueError, match="1 to 256 sources: got 257"):
        table(tmp_path, many)
