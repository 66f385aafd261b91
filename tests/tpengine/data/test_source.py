"""Rung: pure. Several files are one text, in whatever formats they are; what does not fit together is one line."""

from __future__ import annotations

import gc
import os
import resource
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.foreign_tokens import write_datatrove, write_megatron, write_plain

from tpengine.config import Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import ContentCheck, open_corpus, open_source, stored_tokens, write_tokens
from tpengine.data import stored_tokens as documents
from tpengine.data.source import files_of, open_text
from tpengine.data.source_files import About, DocumentSourceTokens
from tpengine.data.text_corpus import num_trained_on

FORMATS = ("ours", "megatron", "datatrove", "plain")


def write_one(path: Path, documents: list[list[int]], vocab_size: int = 300, **about: object) -> Path:
    tokens = np.array(list(chain(*documents)))
    said = About(**about)  # type: ignore[arg-type]
    write_tokens(path, tokens, vocab_size, lengths=lambda: [len(one) for one in documents], about=said)
    return path


def write_in(kind: str, directory: Path, name: str, documents: list[list[int]], wide: bool) -> Path:
    if kind == "ours":
        return write_one(directory / f"{name}.tokens", documents, 70_000 if wide else 300)
    if kind == "megatron":
        return write_megatron(directory / f"{name}.bin", [[one] for one in documents], 4 if wide else 8)
    if kind == "datatrove":
        return write_datatrove(directory / f"{name}.ds", documents, 4 if wide else 2)
    return write_plain(directory / f"{name}.u", documents, "uint32" if wide else "uint16")


def config_of(path: object, vocab_size: int = 70_000, **data: object) -> Config:
    return Config(
        model=ModelConfig(vocab_size=vocab_size),
        train=TrainConfig(seq_len=8),
        data=DataConfig(path=str(path), **data),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("most_kept", [0, 1 << 14], ids=["searched on disk", "kept"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(
        st.tuples(st.sampled_from(FORMATS), st.lists(st.integers(1, 30), min_size=1, max_size=9), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    share=st.floats(0.05, 0.9),
)
def test_files_are_read_as_one(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    most_kept: int,
    files: list[tuple[str, list[int], bool]],
    cut: tuple[float, float],
    share: float,
) -> None:
    monkeypatch.setattr(documents, "_MOST_KEPT", most_kept)
    directory, whole, starts = tmp_path_factory.mktemp("source"), list[int](), list[int]()
    for number, (kind, lengths, wide) in enumerate(files):
        texts = [[(len(whole) + place) % 299 for place in range(length)] for length in lengths]
        write_in(kind, directory, f"{number}", texts, wide)
        starts += [len(whole) + start for start in accumulate(lengths, initial=0)][:-1]
        whole += list(chain(*texts))
    source = open_source(str(directory))
    assert source.num_tokens == len(whole) and source.num_documents == len(starts)
    assert source.dtype.itemsize == (4 if any(wide for _, _, wide in files) else 2)
    begin, end = sorted(int(part * len(whole)) for part in cut)
    assert source.read(begin, end - begin).tolist() == whole[begin:end]
    inside = [start for start in starts if begin <= start < end]
    assert source.document_starts(begin, end).tolist() == inside
    part = source.tokens.part(begin, len(whole)).part(0, end - begin)
    assert isinstance(part, DocumentSourceTokens) and part[:].tolist() == whole[begin:end]
    assert part.document_starts(0, end - begin).tolist() == [start - begin for start in inside]
    assert [source.tokens.starts.first_at_or_after(token) for token in (begin, end)] == [  # type: ignore[attr-defined]
        sum(start < token for start in starts) for token in (begin, end)
    ]
    # The held-out text begins with the document that its share begins in, or the next where that is the first.
    if len(starts) > 1 and len(whole) > 40:
        place = len(whole) - int(len(whole) * share)
        want = max((start for start in starts if start <= place and start), default=starts[1])
        config = config_of(directory, held_out_fraction=share)
        try:
            corpus = open_corpus(config)
        except ValueError as error:
            assert "text must hold a window" in str(error)
        else:
            assert len(corpus.train.tokens) == want
            assert corpus.held_out.tokens[:5].tolist() == whole[want : want + 5]


@pytest.mark.parametrize(
    ("lengths", "want"), [([0, 0, 30, 0], 24), ([10, 20, 0], 10), ([0, 30, 0, 0], 24), ([0, 10, 0, 20, 0], 10)], ids=str
)
def test_empty_documents_at_the_end_are_not_what_is_held_out(tmp_path: Path, lengths: list[int], want: int) -> None:
    """They begin where the text ends: a part from there on has nothing."""
    write_megatron(tmp_path / "a.bin", [[[1] * length] if length else [] for length in lengths])
    tokens = open_source(str(tmp_path)).tokens
    assert num_trained_on(tokens, 0.2) == want and num_trained_on(tokens, 0.0) == 30


def test_what_a_path_names(tmp_path: Path) -> None:
    """Companions are no files of their own, and the order is that of the names."""
    for number, kind in enumerate(FORMATS):
        write_in(kind, tmp_path, f"{9 - number}", [[1, 2]], wide=False)
    (tmp_path / "README.md").write_text("no tokens")
    (tmp_path / ".hidden.tokens").write_bytes((tmp_path / "9.tokens").read_bytes())
    (tmp_path / "inner").mkdir()
    names = ["6.u", "7.ds", "8.bin", "9.tokens"]
    assert [path.name for path in files_of(str(tmp_path))] == names
    assert [path.name for path in files_of(f"{tmp_path}/[6-9].*") if path.suffix != ".starts"] == names
    (tmp_path / "6.u.json").rename(tmp_path / "6.json")
    assert [path.name for path in files_of(str(tmp_path))] == names
    assert [path.name for path in files_of(f"{tmp_path}/[6-9].*")] == names
    listed = f"{tmp_path}/9.tokens, {tmp_path}/*.bin"
    assert [path.name for path in files_of(listed)] == ["9.tokens", "8.bin"]
    # An index of fitted samples whose text was removed, and a file that only has such a name.
    (tmp_path / "7.z.8.fit").write_bytes(b"TPFITIDX and more")
    write_one(tmp_path / "6.z.8.fit", [[1]])
    with_it = ["6.u", "6.z.8.fit", "7.ds", "8.bin", "9.tokens"]
    assert [path.name for path in files_of(str(tmp_path))] == with_it
    assert [path.name for path in files_of(f"{tmp_path}/[6-9].*")] == with_it
    odd = write_one(tmp_path / "inner" / "a,b[1].tokens", [[1]])
    assert files_of(str(odd)) == [odd]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("none", "No such file"),
        ("empty", "must have a token file: none in"),
        ("*.none", "must match one: none is"),
        ("a.tokens,,a.tokens", "a name between its commas"),
        ("a.tokens,*.tokens", "a.tokens is"),
        ("text.txt", "starts with neither b'TPTOKENS' nor is text.idx or text.txt.json there"),
        ("pipe", "must be a regular file: pipe is a device or pipe"),
        ("bare.bin", "nor is bare.idx or bare.bin.json there"),
    ],
)
def test_paths_that_name_nothing_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_one(Path("a.tokens"), [[1, 2]])
    (tmp_path / "empty").mkdir()
    Path("text.txt").write_text("hello")
    Path("bare.bin").write_bytes(bytes(10))
    os.mkfifo("pipe")
    with pytest.raises(ValueError) as error:
        open_text(path)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_neighbours_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_one(tmp_path / "a", [[1, 2]], tokenizer="one", tokenizer_sha256="ab" * 32, end=2)
    for name, about, part in (
        ("hash", {"tokenizer": "one", "tokenizer_sha256": "cd" * 32, "end": 2}, "one tokenizer (SHA-256)"),
        ("end", {"tokenizer": "one", "tokenizer_sha256": "ab" * 32, "end": 3}, "one end of documents"),
        ("bytes", {"end": 2}, "one kind of tokens"),
    ):
        other = write_one(tmp_path / name, [[1, 2]], **about)
        with pytest.raises(ValueError) as error:
            open_source(f"{tmp_path / 'a'},{other}")
        assert (
            part in str(error.value) and f"{tmp_path / 'a'} has" in str(error.value) and str(other) in str(error.value)
        )
    for name, tokenizer in (("a", "gpt2"), ("b", "llama"), ("c", "Unknown Tokenizer|2")):
        write_datatrove(tmp_path / f"{name}.ds", [[1, 2]], 2, tokenizer)
    with pytest.raises(ValueError, match=r"one tokenizer: .*a\.ds has gpt2, .*b\.ds llama"):
        open_source(f"{tmp_path}/*.ds")
    assert open_source(f"{tmp_path}/a.ds,{tmp_path}/c.ds").about.tokenizer == "gpt2"


def test_ids_beyond_the_vocabulary_have_a_place(tmp_path: Path) -> None:
    """Known at the start where a header says it, when its window is read where none does."""
    write_one(tmp_path / "a.tokens", [[1] * 50])
    write_megatron(tmp_path / "b.bin", [[[1] * 7 + [400, 2, 500]], [[1] * 60], [[1] * 60]])
    with pytest.raises(ValueError, match=r"model.vocab_size 200, .*/a\.tokens 300: use model.vocab_size 300"):
        open_corpus(config_of(tmp_path, 200))
    samples = open_corpus(config_of(tmp_path, 300)).train
    with pytest.raises(ValueError) as error:
        samples.batch(0, samples.num_windows)
    assert str(error.value) == (
        "tokens must be at least 0 and below model.vocab_size: got 500, model.vocab_size 300; the first beyond it, "
        f"400, is token 7 of {tmp_path / 'b.bin'}: use model.vocab_size 501 or other text"
    )


def test_packing_names_the_file_without_documents(tmp_path: Path) -> None:
    write_one(tmp_path / "a.tokens", [[1] * 90])
    write_tokens(tmp_path / "b.tokens", np.arange(200), 300)
    assert open_source(str(tmp_path)).num_documents is None
    with pytest.raises(ValueError, match=r"needs to know where documents begin: .*b\.tokens does not say"):
        open_corpus(config_of(tmp_path, packing="documents"))


def test_a_fingerprint_tells_what_changed(tmp_path: Path) -> None:
    write_one(tmp_path / "a.tokens", [[1] * 50])
    path = write_megatron(tmp_path / "b.bin", [[[1] * 200_000]])
    before, moved = open_source(str(tmp_path)), tmp_path / "elsewhere"
    said: list[str] = []
    corpus = open_corpus(config_of(tmp_path), said.append).fingerprint()
    assert len(said) == 1 and f"1 of the 2 files of {tmp_path} have no hash of their content" in said[0]
    content = bytearray(path.read_bytes())
    content[-1] = 1
    path.write_bytes(content)
    after = open_source(str(tmp_path))
    assert [one == other for one, other in zip(before.fingerprints, after.fingerprints, strict=True)] == [True, False]
    assert before.fingerprint != after.fingerprint and corpus != open_corpus(config_of(tmp_path)).fingerprint()
    moved.mkdir()
    for file in files_of(str(tmp_path)):
        os.rename(file, moved / file.name)
    os.rename(path.with_suffix(".idx"), moved / "b.idx")
    assert open_source(str(moved)).fingerprint == after.fingerprint


@pytest.fixture
def many(tmp_path: Path) -> Path:
    for number in range(600):
        write_one(tmp_path / f"{number:04}.tokens", [[number % 250] * 20, [7] * 3])
    return tmp_path


def test_many_files_stay_open_where_the_system_allows_it(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers below 1,024 are left to others, but for some; the process raises its own limit only then."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 4096:
        pytest.skip(f"this system allows a process {most} files")
    opened: list[str] = []

    def counted(path: Any, flags: int) -> int:
        opened.append(str(path))
        return os_open(path, flags)

    os_open = os.open
    stored_tokens._most_open.cache_clear()
    gc.collect()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
        before = {int(number) for number in os.listdir("/proc/self/fd")}
        open_source(str(many / "0000.tokens"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        source = open_source(str(many))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
        new = {int(number) for number in os.listdir("/proc/self/fd")} - before
        assert len(new) == 600 and sum(number < 1024 for number in new) <= 257
        monkeypatch.setattr(os, "open", counted)
        for start in range(0, source.num_tokens, 23 * 7):
            assert source.read(start, 23).tolist() == [start // 23 % 250] * 20 + [7] * 3
        assert not opened
    finally:
        del source
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
        stored_tokens._most_open.cache_clear()


def test_many_files_need_few_descriptors(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may not have more."""
    monkeypatch.setattr(stored_tokens, "_most_open", lambda: 256)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    source = open_source(str(many))
    for start in (0, 23 * 599, 23 * 300, 23 * 5):
        assert source.read(start, 23).tolist() == [start // 23 % 250] * 20 + [7] * 3
    assert source.document_starts(0, source.num_tokens).tolist() == [
        start for number in range(600) for start in (23 * number, 23 * number + 20)
    ]
    assert len(os.listdir("/proc/self/fd")) <= before + 256
    # One that is closed now and was replaced meanwhile is named; what is still open is read on.
    os.replace(many / "0001.tokens", many / "0000.tokens")
    with pytest.raises(ValueError, match=r"0000\.tokens: .*replaced by another file"):
        source.read(0, 23)
    assert source.read(23 * 599, 23).tolist() == [99] * 20 + [7] * 3
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_check_names_the_file_that_changed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_one(tmp_path / f"{name}.tokens", [[1] * 100])
    text = open_text(str(tmp_path))
    assert len(text.parts) == 3
    content = bytearray((tmp_path / "b.tokens").read_bytes())
    content[-20] ^= 1
    (tmp_path / "b.tokens").write_bytes(content)
    check = ContentCheck(text, 3, reads=True, share=1.0)
    with check:
        for _ in range(6000):
            if check.flag:
                break
            check._ending.wait(0.01)
    assert f"{tmp_path / 'b.tokens'} on the host of rank 3 does not have SHA-256" in check.explain(check.flag)
