"""Rung: pure. A held-out text of its own is evaluated and never trained on, by phases and sources too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpengine.commands.data_check import fit_data
from tpengine.config import Config, DataConfig, ModelConfig, TrainConfig, phases_of, validate_run
from tpengine.data import Corpus, change_of, open_corpora, open_corpus, write_tokens
from tpengine.data.mixture_corpus import MixtureCorpus
from tpengine.data.source_files import About

# Ids say where a token is from: below 100 what is trained on, from 100 on what is held out.
TRAINED, HELD_OUT, OTHER = 0, 100, 200
# 61 tokens: 15 windows of 4, and the label of the last one.
LENGTHS = [10] * 5 + [11]


def written(path: Path, first: int, lengths: Sequence[int] = LENGTHS, tokenizer: str = "") -> Path:
    about = About(tokenizer=tokenizer, tokenizer_sha256=tokenizer * 64)
    tokens = first + np.arange(sum(lengths)) % 90
    write_tokens(path, tokens, 300, lengths=lambda: lengths, about=about if tokenizer else None)
    return path


def config_of(path: Path | str, held_out: Path | str = "", **data: object) -> Config:
    return Config(
        model=ModelConfig(vocab_size=300),
        train=TrainConfig(seq_len=4, micro_batch_size=2, num_micro_batches=2, steps=8),
        data=DataConfig(path=str(path), held_out=str(held_out), **data),  # type: ignore[arg-type]
    )


def ids(samples: object, count: int) -> set[int]:
    tokens, labels = samples.read(np.arange(count))  # type: ignore[attr-defined]
    return set(np.concatenate([tokens, labels], axis=None).tolist()) - {-100}


def refusal(config: Config) -> str:
    with pytest.raises(ValueError) as error:
        open_corpora(phases_of(validate_run(config, 1)))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("packing", ["cut", "documents", "fit"])
def test_all_of_one_text_is_trained_on_and_all_of_the_other_evaluated(tmp_path: Path, packing: str) -> None:
    path, held_out = written(tmp_path / "t", TRAINED), written(tmp_path / "v", HELD_OUT)
    if packing == "fit":
        for each in (path, held_out):
            fit_data(str(each), "4", 0.0)
    corpus = open_corpus(config_of(path, held_out, packing=packing))
    # Several epochs.
    trained, evaluated = (ids(part, 3 * part.num_windows) for part in (corpus.train, corpus.held_out))
    assert trained == set(range(TRAINED, TRAINED + 61))
    # Of fitted samples what is free is filled with 0.
    assert evaluated - {0} == set(range(HELD_OUT, HELD_OUT + 61)) and (0 in evaluated) == (packing == "fit")
    assert corpus.held_out.read(np.arange(1))[0][0].tolist() == [HELD_OUT + number for number in range(4)]
    assert len(corpus.texts) == (4 if packing == "fit" else 2)


def test_a_text_of_several_files_may_be_held_out_in_a_view_of_another_length(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    for number in range(2):
        written(tmp_path / "val" / f"{number}.tokens", HELD_OUT + 30 * number, [10, 20 + number])
    config = config_of(written(tmp_path / "t", TRAINED), tmp_path / "val")
    corpus = open_corpus(config)
    assert corpus.held_out.num_windows == 15
    viewed = corpus.viewed(replace(config, train=replace(config.train, seq_len=8)), 0)
    assert viewed.held_out.num_windows == 7 and ids(viewed.held_out, 7) == set(range(HELD_OUT, HELD_OUT + 57))
    short = written(tmp_path / "short", HELD_OUT, [3])
    assert refusal(config_of(tmp_path / "t", short)) == (
        f"the held-out text must hold a window of seq_len + 1 tokens: 3 tokens, seq_len 4, {short}: use seq_len 2"
    )
    assert refusal(config_of(short, tmp_path / "t")) == (
        f"the training text must hold a window of seq_len + 1 tokens: 3 tokens, seq_len 4, {short}: use seq_len 2"
    )


def test_what_is_held_out_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    path, held_out = written(tmp_path / "t", TRAINED), written(tmp_path / "v", HELD_OUT)
    without, with_it = (open_corpus(config_of(path, name)).fingerprint() for name in ("", held_out))
    name = f"the held-out text ({held_out})"
    line = f"61 uint16 tokens below 300, SHA-256 {open_corpus(config_of(held_out)).fingerprint().partition('256 ')[2]}"
    assert change_of(without, with_it) == (name, None, line)
    assert change_of(with_it, without) == (name, line, None)
    assert change_of(with_it, with_it) is None
    # Where it is does not count, what it is does.
    moved = tmp_path / "moved"
    held_out.rename(moved)
    assert change_of(with_it, open_corpus(config_of(path, moved)).fingerprint()) is None
    written(moved, OTHER)
    change = change_of(with_it, open_corpus(config_of(path, moved)).fingerprint())
    assert change is not None and change.what == f"the held-out text ({moved})" and change.before == line
    # Of several files the one that differs is named; another training text is said first.
    two = f"{moved},{written(tmp_path / 'v', HELD_OUT)}"
    of_two = open_corpus(config_of(path, two)).fingerprint()
    written(tmp_path / "v", HELD_OUT, [5, 5])
    change = change_of(of_two, open_corpus(config_of(path, two)).fingerprint())
    assert change is not None and change.what == f"the file 2 ({tmp_path / 'v'}) of the held-out text"
    written(path, TRAINED, [5, 5])
    change = change_of(with_it, open_corpus(config_of(path, moved)).fingerprint())
    assert change is not None and change.what == "the text"


def test_a_held_out_text_that_is_trained_on_is_one_line(tmp_path: Path) -> None:
    path, held_out = written(tmp_path / "t", TRAINED), written(tmp_path / "v", HELD_OUT)
    remedy = "leave it out of one of them, or hold out a share of the text (data.held_out_fraction) instead"
    assert refusal(config_of(path, path)) == (
        f"a held-out text must not be trained on: {path} is in {path} and in {path}: {remedy}"
    )
    # A directory that has it, a link to it, and a copy of it.
    assert f"{held_out} is in {tmp_path}/* and in {held_out}" in refusal(config_of(f"{tmp_path}/*", held_out))
    (tmp_path / "link").symlink_to(held_out)
    assert f"{held_out} is in {path},{held_out} and in" in refusal(config_of(f"{path},{held_out}", tmp_path / "link"))
    (tmp_path / "copy").write_bytes(held_out.read_bytes())
    assert f"{tmp_path / 'copy'} has the content of {held_out}" in refusal(
        config_of(f"{path},{held_out}", tmp_path / "copy")
    )
    assert "stdlib has the content of stdlib" in refusal(config_of("stdlib", "stdlib"))


def test_a_held_out_text_that_does_not_suit_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t", TRAINED, tokenizer="a")
    other = written(tmp_path / "o", HELD_OUT, tokenizer="b")
    said = f"t has a (SHA-256 {'a' * 16}), {other} has b (SHA-256 {'b' * 16}): write one of them again"
    assert said in refusal(config_of(path, other))
    assert f"{tmp_path / 'no'}: No such file" in refusal(config_of(path, tmp_path / "no"))
    write_tokens(tmp_path / "w", np.arange(60) + 900, 1000)
    assert f"must cover the text's: model.vocab_size 300, {tmp_path / 'w'} 1000" in refusal(
        config_of(path, tmp_path / "w")
    )
    write_tokens(tmp_path / "w", np.arange(60), 300)
    assert f"needs to know where documents begin: {tmp_path / 'w'} does not say" in refusal(
        config_of(path, tmp_path / "w", packing="documents")
    )
    held_out = written(tmp_path / "v", HELD_OUT)
    fit_data(str(path), "4", 0.0)
    fit_data(str(held_out), "4", 0.2)
    remedy = f"write it with tpengine data --fit 4 {held_out} --held-out-fraction 0"
    assert f"this run holds out 0: {remedy}" in refusal(config_of(path, held_out, packing="fit"))
    assert refusal(config_of(path, held_out, held_out_fraction=0.1)) == (
        f"a run holds out a text or a share of its own: got data.held_out {held_out} and data.held_out_fraction 0.1: "
        "use data.held_out_fraction 0, or leave one out"
    )


def mixed(tmp_path: Path, *lines: str, **data: object) -> Config:
    (tmp_path / "mix.toml").write_text("\n".join(lines))
    return config_of("stdlib", mixture=str(tmp_path / "mix.toml"), **data)


def test_a_source_may_have_a_held_out_text_and_the_others_their_share(tmp_path: Path) -> None:
    a, b, held_out = (written(tmp_path / name, first) for name, first in (("a", 0), ("b", OTHER), ("v", HELD_OUT)))
    line = f's0 = {{ path = "{a}", weight = 3, epochs = inf, held_out = "{held_out}" }}'
    config = mixed(tmp_path, line, f's1 = {{ path = "{b}", weight = 1, epochs = inf }}', held_out_fraction=0.2)
    corpus = open_corpus(config)
    assert isinstance(corpus, MixtureCorpus)
    # Of s1 the last 21 of 61 tokens are held out, which are two documents.
    assert ids(corpus.train, 300) == {*range(61), *range(OTHER, OTHER + 37)}
    sources, _ = corpus.held_out.place(np.arange(corpus.held_out.num_windows))
    assert ids(corpus.held_out, corpus.held_out.num_windows) == {*range(HELD_OUT, HELD_OUT + 61), *range(240, 261)}
    assert set(sources.tolist()) == {0, 1} and corpus.held_out.names == ("s0", "s1")
    before = corpus.fingerprint()
    written(held_out, HELD_OUT, [20, 20])
    change = change_of(before, open_corpus(config).fingerprint())
    assert change is not None and change.what == f"the held-out text of s0 ({held_out})"
    # A text that is evaluated alone may say so, since nothing of it is trained on.
    seen = f's1 = {{ path = "{held_out}", weight = 0, held_out = "{held_out}" }}'
    assert ids(open_corpus(mixed(tmp_path, line, seen)).train, 99) == set(range(61))
    # Another source trains on it.
    both = f's1 = {{ path = "{held_out}", weight = 1, epochs = inf }}'
    assert f"{held_out} is in {held_out} and in {held_out}" in refusal(mixed(tmp_path, line, both))
    all_own = mixed(tmp_path, line, held_out_fraction=0.1)
    assert "data.held_out_fraction is 0.1, and all sources have held_out: leave one out" in refusal(all_own)
    assert "s0.held_out is 3: give held_out" in refusal(mixed(tmp_path, line.replace(f'"{held_out}"', "3")))


def test_a_mixture_may_have_one_held_out_text(tmp_path: Path) -> None:
    a, b, held_out = (written(tmp_path / name, first) for name, first in (("a", 0), ("b", OTHER), ("v", HELD_OUT)))
    lines = [f's{n} = {{ path = "{path}", weight = 1, epochs = inf }}' for n, path in enumerate((a, b))]
    config = mixed(tmp_path, *lines, held_out=str(held_out))
    corpus = open_corpus(config)
    assert ids(corpus.train, 300) == {*range(61), *range(OTHER, OTHER + 61)}
    assert ids(corpus.held_out, 15) == set(range(HELD_OUT, HELD_OUT + 61)) and corpus.held_out.names == ("",)
    assert corpus.viewed(config, 0).fingerprint() == corpus.fingerprint() and len(corpus.texts) == 3
    change = change_of(open_corpus(mixed(tmp_path, *lines)).fingerprint(), corpus.fingerprint())
    assert change is not None and change.what == f"the held-out text ({held_out})" and change.before is None
    assert "held-out text must not be trained on" in refusal(mixed(tmp_path, *lines, held_out=str(b)))
    own = lines[0].replace(" }", f', held_out = "{b}" }}')
    assert f"data.held_out is {held_out}, and s0 of the table has held_out: leave one out" in refusal(
        mixed(tmp_path, own, held_out=str(held_out))
    )


def phased(tmp_path: Path, config: Config, text: str) -> Config:
    (tmp_path / "p.toml").write_text(text)
    return replace(config, phases=str(tmp_path / "p.toml"))


def test_phases_keep_the_held_out_text_or_name_another(tmp_path: Path) -> None:
    a, b, v, w = (written(tmp_path / name, first) for name, first in zip("abvw", (0, 200, 100, 120), strict=True))
    text = f'[[phase]]\nuntil = 2\n[[phase]]\nuntil = 4\ndata.path = "{b}"\n[[phase]]\ndata.held_out = "{w}"\n'

    def opened(config: Config) -> tuple[Corpus, ...]:
        return open_corpora(phases_of(validate_run(phased(tmp_path, config, text), 1)))

    evaluated = [ids(corpus.held_out, corpus.held_out.num_windows) for corpus in opened(config_of(a, v))]
    assert evaluated == [set(range(100, 161)), set(range(100, 161)), set(range(120, 181))]
    # A phase that names one no longer holds out the run's share.
    first, _, last = opened(config_of(a, held_out_fraction=0.5))
    assert len(ids(first.train, 99)) == 29 and len(ids(last.train, 99)) == 61
    # What any phase trains on is never evaluated.
    text = f'[[phase]]\nuntil = 2\n[[phase]]\ndata.path = "{v}"\ndata.held_out = "{w}"\n'
    assert f"{v} is in {v} and in {v}" in refusal(phased(tmp_path, config_of(a, v), text))


def test_the_planner_packs_what_the_run_trains_on(tmp_path: Path) -> None:
    """With a held-out text the documents at the end are trained on, and measured."""
    from tpengine.commands.schedule_packing import packed_documents

    path, held_out = written(tmp_path / "t", TRAINED, [4] * 30), written(tmp_path / "v", HELD_OUT)
    config = config_of(path, held_out, packing="documents")
    assert sum(map(sum, packed_documents(config).lengths)) == 28 * 4
    less = replace(config, data=replace(config.data, held_out="", held_out_fraction=0.5))
    assert sum(map(sum, packed_documents(less).lengths)) == 14 * 4
