"""Rung: pure. What tells the data of one run from another's: the first difference, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.mixtures import mixed_config, write_mixture

from tpengine.checkpoint.fingerprint import of_files, of_mixture
from tpengine.data import change_of, open_corpus, write_tokens

A, B, C = "100 uint8 tokens", "200 uint8 tokens", "300 uint8 tokens"


def test_files_are_told_apart_by_what_they_hold() -> None:
    files = of_files({"x/a": A, "x/b": B})
    assert change_of(files, of_files({"y/1": A, "y/2": B})) is None
    assert change_of(files, of_files({"x/a": A, "x/b": C})) == ("the file 2 (x/b)", B, C)
    assert change_of(files, of_files({"x/b": B, "x/a": A})) == ("the file 1 (x/b)", A, B)
    assert change_of(files, of_files({"x/a": A, "x/b": B, "x/c": C})) == ("the file 3 (x/c)", None, C)
    assert change_of(files, of_files({"x/a": A})) == ("the file 2 (x/b)", B, None)
    assert change_of(files, A) == ("the text", "2 files", A)
    assert change_of(A, A) is None and change_of(A, B) == ("the text", A, B)


def test_the_files_of_a_source_are_told_apart() -> None:
    def mixture(text: str, weight: float = 0.5) -> str:
        return of_mixture({"web": ("x/*", {"weight": weight}, text), "code": ("c", {"weight": 0.5}, C)})

    two = of_files({"x/a": A, "x/b": B})
    assert change_of(mixture(two), mixture(of_files({"z/a": A, "z/b": B}))) is None
    assert change_of(mixture(two), mixture(of_files({"x/a": A, "x/b": C}))) == ("the file 2 of web (x/b)", B, C)
    assert change_of(mixture(two), mixture(two, 0.4)) == ("the weight of web (x/*)", "0.5", "0.4")
    assert change_of(mixture(two), mixture(A)) == ("the file 1 of web (x/a)", A, None)
    assert change_of(mixture(two), two) == ("the text", "a mixture of web, code", "2 files")


def test_a_directory_that_has_grown_is_seen(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    for name in ("a", "b"):
        write_tokens(tmp_path / "web" / name, np.arange(100), 200, lengths=lambda: [50, 50])
    config = mixed_config(write_mixture(tmp_path, [[10] * 9], [1]), 1, seq_len=4)
    table = Path(config.data.mixture)
    table.write_text(f'{table.read_text()}web = {{ path = "{tmp_path / "web"}", weight = 1, epochs = inf }}\n')
    before = open_corpus(config).fingerprint()
    write_tokens(tmp_path / "web/c", np.arange(100), 200, lengths=lambda: [40, 60])
    change = change_of(before, open_corpus(config).fingerprint())
    assert change is not None and change.before is None
    assert change.what == f"the file 3 of web ({tmp_path / 'web/c'})" and str(change.now).startswith("100 uint8 tokens")
