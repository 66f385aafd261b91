"""Rung: pure. `tpengine data --fit` says what it fitted, and --check what lies beside a text; mistakes are one line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tpengine.cli import main
from tpengine.data import write_tokens
from tpengine.data.fit_index import HEADER, PIECE, open_index
from tpengine.data.source import open_text


def written(path: Path) -> Path:
    lengths = [5, 3, 20, 8, 1, 7, 8, 2, 9, 4, 30, 6, 5]
    write_tokens(path, np.arange(sum(lengths)), 256, lengths=lambda: lengths)
    return path


def test_what_is_fitted_is_said_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t")
    assert main(["data", "--fit", "8", str(path), "--held-out-fraction", "0.2"]) == 0
    assert capsys.readouterr().out.strip() == (
        f"{path}.8.fit: 9 samples of 8 tokens and 6 held out, of 13 documents, 3 of them longer and cut, 10.00% "
        f"padding; train on it with --data.path {path} --data.packing fit --train.seq-len 8"
    )
    assert main(["data", "--check", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"{path}.8.fit: 15 fitted samples of 8 tokens, SHA-256 and samples right" in said
    # A directory, and a glob that takes all, leave the index out.
    assert main(["data", "--check", f"{tmp_path}/*"]) == 0
    place = tmp_path / "t.8.fit"
    whole = bytearray(place.read_bytes())
    whole[140] ^= 1
    place.write_bytes(whole)
    assert main(["data", "--check", str(path)]) == 2
    assert f"{place}: its content does not have the SHA-256 of its header" in capsys.readouterr().err
    write_tokens(path, np.arange(108)[::-1], 256, lengths=lambda: [108])
    assert main(["data", "--check", str(path)]) == 0
    assert f"warning: a fit index must be of the data: {place}" in capsys.readouterr().out


def test_an_index_that_fitting_does_not_give_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its hash is right, and a run can read it: only fitting again shows it."""
    path = written(tmp_path / "t")
    assert main(["data", "--fit", "8", str(path), "--held-out-fraction", "0.2"]) == 0
    place = tmp_path / "t.8.fit"
    whole = place.read_bytes()
    sizes = HEADER.unpack(whole[: HEADER.size])
    pieces = np.frombuffer(whole, PIECE, sizes[5] + sizes[7], HEADER.size)
    lasts = np.flatnonzero(pieces["length"] == 8)
    held_out = sizes[5] + np.argmin(pieces["length"][sizes[5] :])

    def doubled(changed: NDArray[np.void]) -> None:
        changed[lasts[1]] = changed[lasts[0]]

    def goes_on(changed: NDArray[np.void]) -> None:
        changed["goes_on"][lasts[0]] ^= 1

    def of_held_out(changed: NDArray[np.void]) -> None:
        changed["start"][held_out] -= 1

    for change in (doubled, goes_on, of_held_out):
        changed = pieces.copy()
        change(changed)
        content = changed.tobytes() + whole[HEADER.size + pieces.nbytes :]
        place.write_bytes(whole[: HEADER.size - 32] + hashlib.sha256(content).digest() + content)
        capsys.readouterr()
        assert main(["data", "--check", str(path)]) == 2
        assert capsys.readouterr().err == (
            f"tpengine: error: a fit index must hold what fitting gives: {place}: its samples are not those that "
            f"fitting gives: write it again with tpengine data --fit 8 {path}\n"
        )
    # More tokens to train on than there are.
    place.write_bytes(whole[:24] + (10**15).to_bytes(8, "little") + whole[32:])
    assert main(["data", "--check", str(path)]) == 2
    assert main(["data", "--fit", "8", str(path)]) == 0
    assert main(["data", "--check", str(path)]) == 0


def test_an_index_of_something_else_is_replaced_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory and its first file have their indices at one place."""
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    for name in "ab":
        written(Path("c") / name)

    def said(*options: str) -> list[str]:
        assert main(["data", "--fit", "8", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines.pop().startswith("c/a.8.fit: ")
        return lines

    assert said("c") == [] and said("c/*") == [] and said("c/a,c/b") == []
    assert said("c/a") == ["c/a.8.fit: an index of other data was here, of 216 tokens, c/a has 108: it is replaced"]
    assert said("c/a", "--held-out-fraction", "0.2") == [
        "c/a.8.fit: an index of another held-out part was here, with 5 tokens held out, now 41: it is replaced"
    ]
    for source, remedy in (("c", "c"), ("c/*", "'c/*'"), ("c/a,c/b", "c/a,c/b")):
        with pytest.raises(ValueError) as error:
            open_index(open_text(source), source, 8)
        assert str(error.value) == (
            f"a fit index must be of the data: c/a.8.fit was made of 108 tokens, and {source} has 216: write it with "
            f"tpengine data --fit 8 {remedy}"
        )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--fit", "0", "t"], "--fit needs the tokens of a sample, 1 to 16777216: got '0'"),
        (["--fit", "t", "8"], "got 't': use train.seq_len"),
        (["--fit", "8", "t", "--held-out-fraction", "1"], "--held-out-fraction must be 0 to 0.9: got 1.0"),
        (["--fit", "8", "v1"], "--fit needs to know where documents begin: v1 does not say"),
        (["--fit", "8", "none"], "a token file must be readable: none"),
        (["--check", "t", "--held-out-fraction", "0.1"], "--held-out-fraction goes with --fit"),
        (["--fit", "8", "t", "--out", "x"], "--out goes with --from, not with --fit: leave it out"),
        (["--check", "t", "--workers", "2"], "--workers goes with --from, not with --check: leave it out"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "t")
    write_tokens(tmp_path / "v1", np.arange(50), 256)
    before = sorted(tmp_path.iterdir())
    assert main(["data", *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and part in said[0]
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t")
    (tmp_path / "t.8.fit").mkdir()
    assert main(["data", "--fit", "8", str(path)]) == 2
    assert f"a fit index is written beside its text: {path}.8.fit: " in capsys.readouterr().err
