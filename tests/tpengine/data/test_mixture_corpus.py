"""Rung: pure. A mixture, opened: what is held out, how long its sources last, and what tells one from another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.mixtures import APART, mixed_config, write_mixture

from tpengine.config import Config, phases_of, validate_run
from tpengine.data import ReadAhead, SamplePosition, change_of, open_corpora, open_corpus, write_tokens
from tpengine.data.mixture_corpus import MixtureCorpus
from tpengine.data.mixture_samples import evenly
from tpengine.data.source_files import About

# 100 and 40 tokens; held out are the last documents: 20 and 10 tokens.
DOCUMENTS = [[10] * 10, [10] * 4]


@pytest.mark.parametrize("packing", ["cut", "documents"])
def test_a_mixture_read_ahead_has_the_samples_of_one_that_is_not(tmp_path: Path, packing: str) -> None:
    """The same where a run is resumed, with steps of another size, and where samples are left out."""
    path = write_mixture(tmp_path, [[3, 9, 14] * 40, [5, 30] * 20], [0.7, 0.3])
    config = mixed_config(path, 2, seq_len=8, packing=packing)
    position = SamplePosition()
    for begins_with, size, left_out in ((0, 6, ()), (5, 3, ()), (12, 6, ((80, 90), (95, 96)))):
        # A resumed run opens its text anew, and knows nothing but how many samples were read.
        samples = open_corpus(config).train
        ahead = ReadAhead(open_corpus(config).train, needs_tokens=True)
        position = replace(position, consumed=6 * begins_with, left_out=left_out)
        for step in range(6):
            for coming in range(step + ahead.num_asked, step + 3):
                ahead.ask(position.samples(size * coming, size))
            numbers = position.samples(size * step, size)
            found = ahead.take(numbers)
            tokens, labels, starts = samples.read_with_starts(numbers)
            np.testing.assert_array_equal(found.tokens, tokens)
            np.testing.assert_array_equal(found.labels, labels)
            assert [of.tolist() for of in found.starts] == [of.tolist() for of in starts]
            assert bool(starts) == (packing == "documents")
        # Reading ahead has gone farther than the run, and moves nothing.
        end = position.after(6 * size)
        assert samples.progress(end) == open_corpus(config).train.progress(end)
        ahead.close()


def mixture_of(tmp_path: Path, weights: list[float], epochs: tuple[float, ...] = (), **data: object) -> Config:
    path = write_mixture(tmp_path, DOCUMENTS, weights, epochs)
    return mixed_config(path, len(DOCUMENTS), seq_len=4, **data)


def opened(config: Config) -> MixtureCorpus:
    corpus = open_corpus(config)
    assert isinstance(corpus, MixtureCorpus)
    return corpus


def refusal(config: Config) -> str:
    with pytest.raises(ValueError) as error:
        open_corpora(phases_of(config))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_last_documents_of_each_source_are_held_out(tmp_path: Path) -> None:
    corpus = opened(mixture_of(tmp_path, [0.75, 0.25]))
    assert [source.train.num_windows for source in corpus.sources] == [19, 7]
    held_out = corpus.held_out
    # Of 20 and 10 tokens are 4 and 2 windows: 32 samples are asked for, and each counts once.
    assert held_out.counts == (4, 2) and held_out.num_windows == 6
    assert held_out.names == ("s0", "s1") and held_out.shares == (0.75, 0.25)
    sources, numbers = held_out.place(np.arange(8))
    assert sources.tolist() == [0, 0, 0, 0, 1, 1, 0, 0] and numbers.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    tokens = held_out.batch(0, 6)[0]
    assert tokens[:, 0].tolist() == [80, 84, 88, 92, APART + 30, APART + 34]


@pytest.mark.parametrize(
    ("available", "total", "counts"),
    [((9, 9, 9), 9, (3, 3, 3)), ((9, 1, 9), 9, (4, 1, 4)), ((2, 1, 9), 20, (2, 1, 9)), ((9, 9), 5, (2, 3))],
)
def test_held_out_samples_are_shared_evenly(available: tuple[int, ...], total: int, counts: tuple[int, ...]) -> None:
    assert evenly(available, total) == counts


def test_a_source_that_is_used_up_is_refused_with_the_steps_that_it_lasts(tmp_path: Path) -> None:
    config = mixture_of(tmp_path, [3, 1], (2, float("inf")))
    config = replace(config, train=replace(config.train, steps=100, eval_micro_batches=2))
    said = refusal(config)
    lasts = int(said.partition("used up after step ")[2].partition(":")[0])
    assert "source s0 is used up" in said and "epochs 2" in said and f"end after {lasts} steps" in said
    train = opened(config).train
    assert train.mixture.counts(4 * lasts)[0] <= 2 * 19 < train.mixture.counts(4 * (lasts + 1))[0]
    # As many steps as it lasts are not refused for it.
    shorter = replace(config, train=replace(config.train, steps=lasts))
    assert len(open_corpora(phases_of(shorter))) == 1
    # Nobody may read on behind it, as after a rollback.
    with pytest.raises(ValueError, match=r"may be read 2 times at most: s0 of the mixture, .*, is used up"):
        train.read(np.arange(200))
    endless = mixture_of(tmp_path, [3, 1], (float("inf"), float("inf")))
    assert len(open_corpora(phases_of(replace(endless, train=replace(endless.train, steps=10**6))))) == 1


def test_shares_and_epochs_so_far_leave_out_what_was_left_out(tmp_path: Path) -> None:
    train = opened(mixture_of(tmp_path, [3, 1])).train
    sources, _ = train.place(np.arange(3000))
    for position in (
        SamplePosition(0, 40),
        SamplePosition(0, 2100),
        SamplePosition(0, 500, ((10, 30), (450, 1500), (1530, 1531))),
    ):
        counts = np.bincount(sources[replace(position, consumed=0).samples(0, position.consumed)], minlength=2)
        assert train.counts(position) == tuple(counts.tolist())
        assert train.progress(position) == {
            "share/s0": counts[0] / position.consumed,
            "epochs/s0": counts[0] / 19,
            "share/s1": counts[1] / position.consumed,
            "epochs/s1": counts[1] / 7,
        }
    assert set(train.progress(SamplePosition()).values()) == {0.0}


def test_each_source_and_each_phase_has_an_order_of_its_own(tmp_path: Path) -> None:
    # Two sources of one length: with one key their windows would come in one order.
    path = write_mixture(tmp_path, [DOCUMENTS[0]] * 2, [1, 1])
    config = mixed_config(path, 2, seq_len=4)
    corpus = opened(config)
    numbers = np.arange(38)
    first, second = (source.train.batch(0, 38)[0][:, 0] % APART for source in corpus.sources)
    assert first.tolist() != second.tolist() and sorted(first) == sorted(second)
    # Each epoch has another.
    assert first[:19].tolist() != first[19:].tolist()
    phases = tmp_path / "phases.toml"
    phases.write_text(
        "[[phase]]\nuntil = 10\n[[phase]]\ntrain.seq_len = 5\n[[phase]]\ntrain.seq_len = 4\n".replace(
            "[[phase]]\ntrain.seq_len = 5", "[[phase]]\nuntil = 20\ntrain.seq_len = 5"
        )
    )
    config = replace(config, phases=str(phases), train=replace(config.train, steps=30))
    corpora = open_corpora(phases_of(validate_run(config, 1)))
    assert [corpus.train.seq_len for corpus in corpora] == [4, 5, 4]
    np.testing.assert_array_equal(corpora[0].train.read(numbers)[0], corpus.train.read(numbers)[0])
    assert not np.array_equal(corpora[2].train.read(numbers)[0], corpora[0].train.read(numbers)[0])
    assert corpora[2].train.place(numbers)[0].tolist() != corpora[0].train.place(numbers)[0].tolist()


def test_fingerprints_say_what_has_changed(tmp_path: Path) -> None:
    config = mixture_of(tmp_path, [3, 1])
    before = opened(config).fingerprint()
    assert change_of(before, before) is None

    def change(weights: list[float], documents: list[list[int]] = DOCUMENTS) -> tuple[object, ...]:
        path = write_mixture(tmp_path, documents, weights)
        found = change_of(before, opened(mixed_config(path, len(documents), seq_len=4)).fingerprint())
        assert found is not None
        return found

    s1 = tmp_path / "s1.tokens"
    assert change([3, 2]) == (f"the weight of s1 ({s1})", "1.0", "2.0")
    # How often a source may be read changes no sample.
    more = write_mixture(tmp_path, DOCUMENTS, [3, 1], (9, 2))
    assert change_of(before, opened(mixed_config(more, 2, seq_len=4)).fingerprint()) is None
    what, was, now = change([3, 1], [DOCUMENTS[0], [*DOCUMENTS[1], 10]])
    assert what == f"the text of s1 ({s1})" and str(was).startswith("40 uint32") and str(now).startswith("50 uint32")
    assert change([3, 1, 1], [*DOCUMENTS, [10] * 4])[0] == "the sources of the mixture"
    # Where the files are is not what they are.
    moved = tmp_path / "moved"
    moved.mkdir()
    assert change_of(before, opened(mixed_config(write_mixture(moved, DOCUMENTS, [3, 1]), 2, 4)).fingerprint()) is None
    assert change_of(before, "40 uint32 tokens") == ("the text", "a mixture of s0, s1", "40 uint32 tokens")


@pytest.mark.parametrize(
    ("data", "train", "parts"),
    [
        (
            {},
            {"seq_len": 35, "eval_micro_batches": 0, "sample_tokens": 0},
            ["source s1: the training text must hold a window", "seq_len 35"],
        ),
        ({"held_out_fraction": 0.0}, {}, ["source s0: the held-out text must hold a window"]),
        (
            {},
            {"eval_micro_batches": 1, "micro_batch_size": 1},
            ["a sample of each source", "2 sources", "eval_micro_batches 2"],
        ),
    ],
)
def test_sources_that_cannot_be_used_are_one_line(
    tmp_path: Path, data: dict[str, object], train: dict[str, object], parts: list[str]
) -> None:
    config = mixture_of(tmp_path, [3, 1], **data)
    said = refusal(replace(config, train=replace(config.train, **train)))  # type: ignore[arg-type]
    for part in [str(tmp_path / "mix.toml"), *parts]:
        assert part in said


def test_sources_of_different_tokenizers_are_one_line(tmp_path: Path) -> None:
    config = mixture_of(tmp_path, [3, 1])
    for source, name in enumerate("ab"):
        about = About(tokenizer=name, tokenizer_sha256=name * 64)
        tokens = np.arange(sum(DOCUMENTS[source]))
        write_tokens(
            tmp_path / f"s{source}.tokens", tokens, 2000, lengths=partial(list, DOCUMENTS[source]), about=about
        )
    assert "must have one tokenizer: s0 has a (SHA-256 aaaaaaaaaaaaaaaa), s1 has b (bbbbbbbbbbbbbbbb)" in refusal(
        config
    )


def test_a_text_that_two_sources_have_is_one_line(tmp_path: Path) -> None:
    config = mixture_of(tmp_path, [3, 1])
    table = Path(config.data.mixture)
    lines = table.read_text()
    s0, s1 = tmp_path / "s0.tokens", tmp_path / "s1.tokens"
    for path, said in (
        (s1, f"s1 and s2 both have the file {s1}"),
        (f"{s0},{s1}", f"s0 and s2 both have the file {s0}"),
    ):
        table.write_text(f'{lines}s2 = {{ path = "{path}", weight = 1, epochs = inf }}\n')
        assert f"sources of a mixture must be different texts: {said}" in refusal(config)
    # A copy has other names, and is the same text.
    (tmp_path / "copy").write_bytes(s1.read_bytes())
    table.write_text(f'{lines}s2 = {{ path = "{tmp_path / "copy"}", weight = 1, epochs = inf }}\n')
    assert f"s1 and s2 both have the text of {tmp_path / 'copy'}" in refusal(config)


def test_a_source_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    config = mixture_of(tmp_path, [3, 1])
    (tmp_path / "s1.tokens").unlink()
    said = refusal(config)
    assert f"{tmp_path / 'mix.toml'}: source s1: a token file must be readable: {tmp_path / 's1.tokens'}" in said
    (tmp_path / "s1.tokens").touch()
    assert "source s1: a token file must be written by tpengine data" in refusal(config)
