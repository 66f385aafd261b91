"""A mixture, opened: its sources' texts, each cut into what is trained on and what is held out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpengine.config import Config
from tpengine.data.corpora.fingerprint import of_mixture
from tpengine.data.corpora.text_corpus import TextCorpus
from tpengine.data.files.token_file import TokenFile
from tpengine.data.mixtures.samples import HeldOutSamples, MixtureSamples, evenly
from tpengine.data.mixtures.shares import Mixture
from tpengine.data.mixtures.table import SourceEntry, read_table


@dataclass(frozen=True)
class MixtureCorpus:
    """The sources of a mixture; see Corpus.

    Attributes:
        path: the file of the mixture.
        entries: its table.
        sources: the text of each source, with an order of its own.
        train, held_out: of all sources.
    """

    path: str
    entries: tuple[SourceEntry, ...]
    sources: tuple[TextCorpus, ...]
    train: MixtureSamples
    held_out: HeldOutSamples

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """See Corpus."""
        return tuple(text for source in self.sources for text in source.texts)

    @property
    def reading_seconds(self) -> float:
        """See Corpus."""
        return sum(source.reading_seconds for source in self.sources)

    def fingerprint(self) -> str:
        """See Corpus. How often a source may be read is no part of it: the order of samples is the same."""
        return of_mixture(
            {
                entry.name: (entry.path, {"weight": entry.weight}, source.fingerprint())
                for entry, source in zip(self.entries, self.sources, strict=True)
            }
        )

    def fingerprint_of_ends(self) -> str:
        """See Corpus."""
        return ""

    def padding(self) -> Mapping[str, float]:
        """See Corpus."""
        pairs = zip(self.entries, self.sources, strict=True)
        return {entry.name: source.fit.train.padding for entry, source in pairs if source.fit is not None}

    def note_hash(self, run_dir: Path) -> None:
        """See Corpus."""
        for source in self.sources:
            source.note_hash(run_dir)

    def viewed(self, config: Config, phase: int) -> MixtureCorpus:
        """See Corpus."""
        return _mixed(self.path, self.entries, self.sources, config, phase)


def open_mixture(config: Config, open_source: Callable[[Config], TextCorpus], phase: int = 0) -> MixtureCorpus:
    """Open the mixture of a run.

    Args:
        config: validated; data.mixture is set.
        open_source: opens a text, as text_corpus.open_text_corpus does.
        phase: that begins its order.

    Raises:
        ValueError: the file is no table of sources, or a source cannot be used; one line, with the source's name.
    """
    entries, sources = read_table(config.data.mixture), []
    for entry in entries:
        data = replace(config.data, path=entry.path, mixture="")
        try:
            sources.append(open_source(replace(config, data=data)))
        except ValueError as error:
            raise ValueError(f"{config.data.mixture}: source {entry.name}: {error}") from None
    _check_one_tokenizer(config.data.mixture, entries, sources)
    _check_distinct(config.data.mixture, entries, sources)
    return _mixed(config.data.mixture, entries, tuple(sources), config, phase)


def _check_one_tokenizer(path: str, entries: Sequence[SourceEntry], sources: Sequence[TextCorpus]) -> None:
    """Raise ValueError if ids of two sources mean different tokens, as far as their files say what they mean."""
    known = [
        (entry.name, source.text.about.tokenizer, source.text.about.tokenizer_sha256)
        for entry, source in zip(entries, sources, strict=True)
        if source.text.about is not None and source.text.about.tokenizer_sha256
    ]
    for name, tokenizer, sha256 in known:
        if sha256 != known[0][2]:
            raise ValueError(
                f"{path}: sources of a mixture must have one tokenizer: {known[0][0]} has {known[0][1]} (SHA-256 "
                f"{known[0][2][:16]}), {name} has {tokenizer} ({sha256[:16]}): write one of them again with the other's"
            )


def _check_distinct(path: str, entries: Sequence[SourceEntry], sources: Sequence[TextCorpus]) -> None:
    """Raise ValueError if two sources read one file, or the same text: its samples would come twice."""
    seen: dict[str | Path, str] = {}
    for entry, source in zip(entries, sources, strict=True):
        has: list[str | Path] = [*source.paths, source.fingerprint()]
        for what in has:
            first = seen.setdefault(what, entry.name)
            if first != entry.name:
                of = f"the file {what}" if isinstance(what, Path) else f"the text of {entry.path}"
                raise ValueError(
                    f"{path}: sources of a mixture must be different texts: {first} and {entry.name} both have {of}: "
                    "give one of them the weight of both"
                )


def _mixed(
    path: str, entries: tuple[SourceEntry, ...], texts: tuple[TextCorpus, ...], config: Config, phase: int
) -> MixtureCorpus:
    """Return a mixture in windows of a configuration's length, in the order of a phase."""
    sources = []
    for number, (entry, text) in enumerate(zip(entries, texts, strict=True)):
        try:
            text = text.viewed(config, phase)
        except ValueError as error:
            raise ValueError(f"{path}: source {entry.name}: {error}") from None
        sources.append(replace(text, train=replace(text.train, source=number)))
    try:
        mixture = Mixture(tuple(entry.weight for entry in entries), config.train.seed, phase)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    train = MixtureSamples(entries, tuple(source.train for source in sources), mixture)
    held_out = tuple(source.held_out for source in sources)
    counts = evenly([part.num_windows for part in held_out], _num_held_out(path, len(entries), config))
    names, shares = tuple(entry.name for entry in entries), tuple(map(float, mixture.shares))
    return MixtureCorpus(path, entries, tuple(sources), train, HeldOutSamples(names, shares, held_out, counts))


def _num_held_out(path: str, num_sources: int, config: Config) -> int:
    """Return how many samples the held-out loss is of; at least one of each source."""
    train = config.train
    number = train.eval_micro_batches * train.micro_batch_size
    if number and number < num_sources:
        raise ValueError(
            f"{path}: the held-out loss needs a sample of each source: train.eval_micro_batches "
            f"{train.eval_micro_batches} of {train.micro_batch_size} samples, {num_sources} sources: use "
            f"train.eval_micro_batches {-(-num_sources // train.micro_batch_size)} or more, or 0"
        )
    # A sample's prompt comes from there too.
    return number or num_sources
