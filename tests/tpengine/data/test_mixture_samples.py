"""Rung: pure. The samples of a mixture, over drawn files, documents, weights and layouts: none twice, none lost.

What every rank of a layout reads is asked of the reader that a trainer has (training/step_batch.py), without its
exchange of reports. That layouts compute the same from it: training/layouts/test_packing.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.draws import over_draws
from support.mixtures import APART, mixed_config, write_mixture
from torch import Tensor

from tpengine.commands.data_check import fit_data
from tpengine.config import IGNORED_LABEL, Config, ParallelConfig, phases_of, validate_run
from tpengine.data import Corpus, SamplePosition, open_corpora
from tpengine.data.mixture import Mixture, read_table
from tpengine.data.mixture_corpus import MixtureCorpus
from tpengine.data.mixture_samples import MixtureSamples
from tpengine.data.samples import Samples
from tpengine.distributed.mesh import Coordinates, Shape
from tpengine.training.samples import PackedBatch
from tpengine.training.step_batch import BatchReader, Report


@dataclass(frozen=True)
class Draw:
    """A mixture, and a run that reads it."""

    documents: list[list[int]]
    files: list[int]
    weights: list[int]
    seq_len: int
    packing: str
    seed: int
    layouts: list[tuple[int, int, int]]  # dp, micro-batches of a replica, samples of a micro-batch
    first_step: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    num_sources, seq_len = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    # Documents of 1 token, of S, of S + 1, of 10 S, and any.
    length = st.sampled_from([1, seq_len, seq_len + 1, 10 * seq_len]) | st.integers(1, 25)
    enough = [4 * seq_len, 4 * seq_len]
    documents = [enough + draw(st.lists(length, min_size=2, max_size=12)) + enough for _ in range(num_sources)]
    batch = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    splits = [
        (dp, of_replica // size, size)
        for dp in range(1, batch + 1)
        if batch % dp == 0
        for of_replica in [batch // dp]
        for size in range(1, of_replica + 1)
        if of_replica % size == 0
    ]
    return Draw(
        documents,
        draw(st.lists(st.integers(1, 4), min_size=num_sources, max_size=num_sources)),
        draw(st.lists(st.integers(1, 20), min_size=num_sources, max_size=num_sources)),
        seq_len,
        draw(st.sampled_from(["cut", "documents", "fit"])),
        draw(st.integers(0, 3)),
        draw(st.lists(st.sampled_from(splits), min_size=3, max_size=3)),
        draw(st.integers(0, 40)),
    )


def opened(drawn: Draw, directory: Path) -> tuple[Config, MixtureCorpus]:
    mixture = write_mixture(directory, drawn.documents, drawn.weights, files=drawn.files)
    config = mixed_config(mixture, len(drawn.documents), drawn.seq_len, packing=drawn.packing)
    train = replace(config.train, seed=drawn.seed, eval_micro_batches=8, steps=10**6)
    config = replace(config, train=train)
    if drawn.packing == "fit":
        for entry in read_table(mixture):
            fit_data(entry.path, str(drawn.seq_len), config.data.held_out_fraction)
    (corpus,) = open_corpora(phases_of(config))
    assert isinstance(corpus, MixtureCorpus)
    return config, corpus


class Alone(BatchReader):
    """The reader of one rank, which does not tell others what it has read."""

    def _gathered(self, mine: Report) -> Tensor:
        shape = self._mesh.shape
        return mine.packed().expand(shape.pp, shape.dp, shape.tp, len(mine))


def step_of(config: Config, corpus: Corpus, layout: tuple[int, int, int], step: int) -> NDArray[np.int64]:
    """Return the tokens and labels of a step, of all replicas, in the order of the global batch; [2, samples, S]."""
    dp, num_micro_batches, size = layout
    train = replace(config.train, num_micro_batches=num_micro_batches, micro_batch_size=size)
    config = validate_run(replace(config, train=train, parallel=ParallelConfig(tp=1, pp=1, dp=dp)), dp)
    phase = phases_of(config)[0]
    found = []
    for replica in range(dp):
        mesh: Any = SimpleNamespace(shape=Shape(1, dp, 1), at=Coordinates(0, replica, 0))
        reader = Alone(
            config,
            corpus.train,
            mesh,
            (0, 0),
            torch.device("cpu"),
            lambda step: SamplePosition(phase.order, phase.samples_before(step)),
        )
        batch = reader.read(step)
        assert not batch.error
        found.append(
            np.stack([part.numpy().reshape(-1, train.seq_len) for part in (batch.given.tokens, batch.given.labels)])
        )
    return np.concatenate(found, axis=1)


def check_layouts(drawn: Draw, directory: Path) -> None:
    """Every layout of one global batch reads the same samples in the same order, killed and resumed in another too."""
    config, corpus = opened(drawn, directory)
    batch = int(np.prod(drawn.layouts[0]))
    for step, layout in zip(itertools.count(drawn.first_step), drawn.layouts, strict=False):
        # The layout changes at each step, as after a kill; the sequence is that of one process.
        first = step * batch
        whole = np.stack(corpus.train.read(np.arange(first, first + batch)))
        np.testing.assert_array_equal(step_of(config, corpus, layout, step), whole)


def check_epochs(drawn: Draw, directory: Path) -> None:
    """Each source's epoch has each of its samples once, over two epochs; labels and borders are those of its text."""
    _, corpus = opened(drawn, directory)
    windows = [source.train.num_windows for source in corpus.sources]
    num_samples = 1
    while any(count < 2 * num for count, num in zip(corpus.train.mixture.counts(num_samples), windows, strict=True)):
        num_samples *= 2
    tokens, labels = corpus.train.read(np.arange(num_samples))
    held_out_from = [int(source.held_out.tokens[:1][0]) - place * APART for place, source in enumerate(corpus.sources)]
    for source, (num, lengths) in enumerate(zip(windows, drawn.documents, strict=True)):
        # Held out are whole documents, and no token of them, nor a label, is read.
        assert held_out_from[source] in np.cumsum(lengths)
        of_source = tokens[tokens[:, 0] // APART == source] - source * APART
        of_labels = labels[tokens[:, 0] // APART == source]
        for epoch in range(2):
            now = of_source[epoch * num : (epoch + 1) * num]
            firsts = sorted(now[:, 0].tolist())
            if drawn.packing == "fit":
                # Which documents they are: test_samples.py.
                assert len(set(firsts)) == num and firsts == sorted(of_source[:num, 0].tolist())
            else:
                assert firsts == [window * drawn.seq_len for window in range(num)]
        assert of_source.max() < held_out_from[source]
        if drawn.packing == "fit":
            continue
        starts = np.cumsum([0, *lengths])
        across = np.isin(of_source + 1, starts) if drawn.packing == "documents" else np.zeros_like(of_source, bool)
        np.testing.assert_array_equal(of_labels, np.where(across, IGNORED_LABEL, of_source + 1 + source * APART))
        assert of_source.max() + 1 < held_out_from[source] + (drawn.packing == "documents")


def check_shares(drawn: Draw, directory: Path) -> None:
    """After whole blocks of 1,024 samples each source's count is its share to one sample, also after 10^9 samples."""
    _, corpus = opened(drawn, directory)
    mixture = corpus.train.mixture
    assert mixture.block == 1024
    for num_blocks in (1, 2, 3, 10**6):
        for count, share in zip(mixture.counts_at(num_blocks), mixture.shares, strict=True):
            assert abs(count - share * num_blocks * 1024) < 1
        block = mixture.place(np.arange((num_blocks - 1) * 1024, num_blocks * 1024))[0]
        before = mixture.counts_at(num_blocks - 1)
        own = np.bincount(block, minlength=len(before))
        assert (own + before).tolist() == list(mixture.counts_at(num_blocks))


CHECKS = [check_layouts, check_epochs, check_shares]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_samples_over_drawn_mixtures(tmp_path: Path, check: Callable[[Draw, Path], None]) -> None:
    over_draws(draws(), check, tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_samples_over_a_thousand_drawn_mixtures(tmp_path: Path, check: Callable[[Draw, Path], None]) -> None:
    over_draws(draws(), check, tmp_path, 1000)


@dataclass(frozen=True)
class Mutation:
    """A fault, what it is put into, and the check that must notice it."""

    name: str
    owner: type
    method: str
    broken: Callable[[Any], Any]
    check: Callable[[Draw, Path], None]


def keeps_labels(original: Any) -> Any:
    def read(self: Samples, samples: NDArray[np.int64]) -> PackedBatch:
        tokens, labels, _ = original(replace(self, packs=False), samples)
        return tokens, labels, self.document_starts(samples)

    return read


def own_share(original: Any) -> Any:
    def first(self: BatchReader) -> int:
        return 0 if self._mesh.at.dp == 0 else original(self) + 1

    return first


def first_epoch_for_ever(original: Any) -> Any:
    def windows(self: Samples, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        # What lies behind the first epoch has the key of the batch that asks, as a counter that a resume forgets.
        behind = (samples + len(samples)) % self.num_windows
        return np.where(samples < self.num_windows, original(self, samples), behind)

    return windows


def drifts(original: Any) -> Any:
    def counts_at(self: Mixture, num_blocks: int) -> tuple[int, ...]:
        of_block = original(self, 1)
        return tuple(count * num_blocks for count in of_block)

    return counts_at


def forgets_its_order(original: Any) -> Any:
    def place(self: MixtureSamples, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        sources, numbers = original(self, samples)
        # Counted from the first sample that is asked for, as an iterator does.
        for source in np.unique(sources):
            now = sources == source
            numbers[now] = np.arange(now.sum())
        return sources, numbers

    return place


MUTATIONS = [
    Mutation("a label across a border counts", Samples, "read_with_starts", keeps_labels, check_epochs),
    Mutation("a rank reads its own share", BatchReader, "_first_in_step", own_share, check_layouts),
    Mutation("the epoch's key is lost on resume", Samples, "_windows", first_epoch_for_ever, check_layouts),
    Mutation("shares drift after 10^6 samples", Mixture, "counts_at", drifts, check_shares),
    Mutation("a source begins anew on resume", MixtureSamples, "place", forgets_its_order, check_layouts),
]


def fixed() -> Iterator[Draw]:
    """Mixtures in which each fault shows."""
    for packing in ("cut", "documents"):
        documents = [[8, 8, 1, 5, 30, 8, 8], [8, 8, 3, 4, 40, 2, 8, 8]]
        yield Draw(documents, [2, 1], [3, 8], 4, packing, 1, [(2, 2, 2), (4, 1, 2), (1, 8, 1)], 30)


def test_faults_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, drawn in enumerate(fixed()):
        for check in CHECKS:
            place = tmp_path / f"whole{number}{check.__name__}"
            place.mkdir()
            check(drawn, place)
    for mutation in MUTATIONS:
        place = tmp_path / mutation.name
        place.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(mutation.owner, mutation.method, mutation.broken(getattr(mutation.owner, mutation.method)))
            *_, packed = fixed()
            with pytest.raises(AssertionError):
                mutation.check(packed, place)
