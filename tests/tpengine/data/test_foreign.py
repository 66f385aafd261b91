"""Rung: pure. Files of Megatron and datatrove are read token for token, documents too; damage is one line.

How the files were made is said in tests/support/engine/foreign_tokens.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from support.engine.foreign_tokens import (
    DOCUMENTS,
    LARGE,
    MADE,
    SMALL,
    write_datatrove,
    write_made,
    write_megatron,
    write_plain,
)

from tpengine.data.source import Source, open_file, open_source
from tpengine.data.source_files import SourceFile


def starts_of(documents: list[list[int]]) -> list[int]:
    return [0, *accumulate(len(document) for document in documents)][:-1]


def check_is(file: SourceFile, documents: list[list[int]]) -> None:
    assert file.starts is not None and len(file.starts) == len(documents)
    assert file.tokens[:].tolist() == list(chain(*documents))
    assert file.starts[:].tolist() == starts_of(documents)
    for begin in range(len(file.tokens)):
        for end in range(begin, len(file.tokens) + 1):
            want = [start for start in starts_of(documents) if begin <= start < end]
            assert file.starts.between(begin, end).tolist() == want


@pytest.mark.parametrize("name", MADE)
def test_files_that_others_made_are_read(tmp_path: Path, name: str) -> None:
    file = open_file(write_made(tmp_path, name))
    check_is(file, DOCUMENTS[name])
    assert file.tokens.dtype.itemsize == (2 if "small" in name else 4)
    assert file.about.tokenizer == ("gpt2" if name == "small.ds" else "")


@pytest.mark.parametrize("name", MADE)
def test_our_writers_make_the_same_bytes(tmp_path: Path, name: str) -> None:
    """So that the other tests may write files of their own."""
    documents = DOCUMENTS[name]
    if name.endswith(".bin"):
        cut = [[one] if len(one) < 4 else [one[:2], one[2:]] for one in documents]
        write_megatron(tmp_path / name, cut, 8 if "small" in name else 4)
    else:
        write_datatrove(tmp_path / name, documents, 2 if "small" in name else 4, "gpt2" if "small" in name else None)
    for file, content in MADE[name].items():
        assert (tmp_path / file).read_bytes() == bytes.fromhex(content)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MADE[name])


def test_plain_ids(tmp_path: Path) -> None:
    said = ', "vocab_size": 65500, "end": 2, "tokenizer": "gpt2"'
    file = open_file(write_plain(tmp_path / "a.u16", SMALL, said=said))
    check_is(file, SMALL)
    assert file.vocab_size == 65500 and file.about.end == 2 and file.about.tokenizer == "gpt2"
    check_is(open_file(write_plain(tmp_path / "b.bin", LARGE, "uint32")), LARGE)
    (tmp_path / "b.bin.json").rename(tmp_path / "b.json")
    check_is(open_file(tmp_path / "b.bin"), LARGE)


def test_documents_without_tokens_begin_nothing(tmp_path: Path) -> None:
    """Both formats have them; a place where two begin is one border."""
    documents: list[list[int]] = [[], [1, 2], [], [], [3], []]
    files = [
        open_file(write_megatron(tmp_path / "a.bin", [[one] for one in documents])),
        open_file(write_megatron(tmp_path / "b.bin", [[one] if one else [] for one in documents])),
        open_file(write_datatrove(tmp_path / "c.ds", documents, 2)),
    ]
    source = Source("", files)
    assert source.num_documents == 18 and source.num_tokens == 9
    assert source.document_starts(0, 9).tolist() == [0, 2, 3, 5, 6, 8]


def test_places_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file: five sequences of 2^30 ids, then one of three."""
    long, path = 2**30, tmp_path / "a.bin"
    lengths = np.array([long] * 5 + [3], dtype="<i4")
    write_megatron(path, [[[1]]] * 6)
    index = bytearray(path.with_suffix(".idx").read_bytes()[:34])
    places = np.arange(6, dtype="<i8") * long * 2
    path.with_suffix(".idx").write_bytes(
        index + lengths.tobytes() + places.tobytes() + np.arange(7, dtype="<i8").tobytes()
    )
    with path.open("wb") as file:
        file.seek(5 * long * 2)
        file.write(np.array([7, 8, 9], dtype="<u2").tobytes())
    source = open_source(f"{path},{write_datatrove(tmp_path / 'b.ds', LARGE, 4)}")
    count = 5 * long + 3
    assert source.num_tokens == count + 7 and source.dtype == np.uint32
    assert source.read(count - 3, 5).tolist() == [7, 8, 9, 70000, 1]
    assert source.document_starts(2**32 - 5, count + 7).tolist() == [4 * long, 5 * long, count, count + 2, count + 6]
    assert source.tokens.where(count - 1) == (path, count - 1)


def test_datatrove_beyond_32_bits(tmp_path: Path) -> None:
    path, count = write_datatrove(tmp_path / "a.ds", [[1], [2], [3, 4]], 2), 2**32 + 7
    path.with_name("a.ds.index").write_bytes(np.array([1, count - 2, count], dtype="<u8").tobytes())
    with path.open("r+b") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 2))
        file.write(np.array([3, 4], dtype="<u2").tobytes())
    file_of = open_file(path)
    assert file_of.starts is not None
    assert file_of.starts.between(2**32, count).tolist() == [count - 2]
    assert file_of.tokens[count - 2 : count].tolist() == [3, 4]


def put(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little", signed=True)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("name", "damage", "part"),
    [
        ("small.bin", lambda p: p.with_suffix(".idx").write_bytes(b"MMID"), "starts with b'MMIDIDX"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 0, b"X"), "starts with b'MMIDIDX"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 9, b"\2"), "must be of version 1"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 17, b"\7"), "code 7"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 18, number(2**62)), "cut short"),
        (
            "small.bin",
            lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-1]),
            "cut short",
        ),
        ("small.bin", lambda p: p.with_suffix(".idx").open("ab").write(bytes(5)), "whether it is a picture"),
        ("small.bin", lambda p: p.with_suffix(".idx").open("ab").write(bytes(6)), "damaged"),
        ("small.bin", shorten, "ids are cut short"),
        ("small.bin", lambda p: p.open("ab").write(b"xx"), "of other files"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 34, number(4, 4)), "sequence 0 of 4 ids"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 54 + 16, number(2**40)), "sequences must follow each other"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 94 + 8, number(3)), "document 1 begins with sequence 3"),
        ("small.bin", lambda p: put(p.with_suffix(".idx"), 94, number(1)), "must be all of its 5 sequences"),
        ("small.ds", lambda p: p.with_name("small.ds.index").unlink(), "datatrove's index must be readable"),
        ("small.ds", lambda p: p.with_name("small.ds.index").write_bytes(bytes(7)), "8 bytes per document"),
        ("small.ds", lambda p: put(p.with_name("small.ds.index"), 8, number(1)), "document 1 begins at token 3"),
        ("small.ds", lambda p: put(p.with_name("small.ds.index"), 24, number(12)), "12 and 11 ids"),
        ("small.ds", lambda p: p.write_bytes(p.read_bytes()[:-2]), "have 22 bytes: "),
        ("small.ds", lambda p: p.with_name("small.ds.metadata").write_text("gpt2|3\n11\n"), "NAME|2 or NAME|4"),
        ("small.ds", lambda p: p.with_name("small.ds.metadata").write_text(""), "NAME|2 or NAME|4"),
        ("small.ds", lambda p: p.with_name("small.ds.loss").write_bytes(bytes(11)), "small.ds.loss says which are"),
        ("large.ds", lambda p: p.open("ab").write(b"x"), "14 or 28 bytes: "),
        ("plain.bin", lambda p: p.with_name("plain.bin.json").write_text("{"), "must be JSON"),
        ("plain.bin", lambda p: p.with_name("plain.bin.json").write_text("[]"), "is no object"),
        ("plain.bin", lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "int8"}'), "has dtype 'int8'"),
        (
            "plain.bin",
            lambda p: p.with_name("plain.bin.json").write_text('{"dtype": ["uint16"]}'),
            "has dtype ['uint16']",
        ),
        ("plain.bin", lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "uint16", "x": 1}'), "has 'x'"),
        (
            "plain.bin",
            lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "uint16", "vocab_size": 70000}'),
            "has vocab_size 70000",
        ),
        (
            "plain.bin",
            lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "uint8", "end": true}'),
            "end 'True'",
        ),
        (
            "plain.bin",
            lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "uint16", "documents": "../x"}'),
            "is no file beside it",
        ),
        (
            "plain.bin",
            lambda p: p.with_name("plain.bin.json").write_text('{"dtype": "uint16", "tokens": 12}'),
            "12 of 2 bytes, must be the whole file",
        ),
        ("plain.bin", lambda p: p.open("ab").write(b"x"), "must be the whole file"),
        ("plain.bin", lambda p: p.write_bytes(b""), "must be the whole file"),
        ("plain.bin", lambda p: put(p, 0, b"\x93NUMPY"), "begins with numpy's header"),
        ("plain.bin", lambda p: put(p.with_suffix(".starts"), 8, number(5)), "document 1 begins at token 5"),
        ("plain.bin", lambda p: put(p.with_suffix(".starts"), 24, number(11)), "0 to 11"),
    ],
)
def test_damage_is_one_line_at_the_start(tmp_path: Path, name: str, damage: Damage, part: str) -> None:
    path = write_plain(tmp_path / name, SMALL) if name == "plain.bin" else write_made(tmp_path, name)
    damage(path)
    with pytest.raises(ValueError) as error:
        open_source(str(path))
    message = str(error.value)
    assert part in message and str(tmp_path / name.split(".")[0]) in message and "\n" not in message


@pytest.mark.parametrize("number", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*MADE, "plain.bin"])
def test_no_damage_is_a_crash_or_goes_unnoticed(tmp_path: Path, name: str, number: int) -> None:
    """Bytes drawn in, cut off or added: one line, or other files by their fingerprint with tokens and documents."""
    path = write_plain(tmp_path / name, SMALL) if name == "plain.bin" else write_made(tmp_path, name)
    rng, whole = random.Random(5), open_file(path)
    files = {file: file.read_bytes() for file in tmp_path.iterdir() if not file.name.endswith((".metadata", ".json"))}
    num_refused = 0
    for _ in range(number):
        file = rng.choice(list(files))
        content = bytearray(files[file])
        if rng.random() < 0.8:
            at = rng.randrange(len(content))
            content[at : at + rng.choice([1, 8])] = rng.choice([bytes(8), b"\xff" * 8, rng.randbytes(8)])[
                : rng.choice([1, 8])
            ]
        else:
            content = content[: rng.randrange(len(content))]
        if content == files[file]:
            continue
        file.write_bytes(content)
        try:
            other = open_file(path)
            assert other.starts is not None
            found = other.starts.between(0, len(other.tokens))
            assert found[0] == 0 and (np.diff(found) > 0).all() and found[-1] < len(other.tokens)
            assert len(other.tokens[:]) == len(other.tokens)
            assert other.fingerprint != whole.fingerprint
        except ValueError as error:
            num_refused += 1
            assert "\n" not in str(error) and str(tmp_path) in str(error)
        file.write_bytes(files[file])
    assert num_refused > number // 4
