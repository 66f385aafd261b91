"""A mixture, opened: its sources' texts, each cut into what is trained on and what is held out of it.

A source may have a held-out text of its own (held_out in the table), and so may the mixture (data.held_out): then no
source holds anything out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpengine.checkpoint.fingerprint import of_mixture, with_held_out
from tpengine.config import Config, num_evaluated
from tpengine.data.columns import Column
from tpengine.data.mixture import Mixture, SourceEntry, read_table
from tpengine.data.mixture_samples import HeldOutSamples, MixtureSamples, evenly
from tpengine.data.opened_text import OpenedText
from tpengine.data.text_corpus import HeldOutText, TextCorpus, open_held_out
from tpengine.data.token_file import TokenFile
from tpengine.training.samples import HeldOut


@dataclass(frozen=True)
class MixtureCorpus:
    """The sources of a mixture; see Corpus.

    Attributes:
        path: the file of the mixture.
        entries: its table.
        sources: the text of each source, with an order of its own.
        train, held_out: of all sources.
        own: the text that is held out for all of them; None where each has its own part or text.
    """

    path: str
    entries: tuple[SourceEntry, ...]
    sources: tuple[TextCorpus, ...]
    train: MixtureSamples
    held_out: HeldOut
    own: HeldOutText | None = None

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """See Corpus."""
        of_sources = tuple(text for source in self.sources for text in source.texts)
        return of_sources + (() if self.own is None else self.own.texts)

    @property
    def trained_on(self) -> tuple[OpenedText, ...]:
        """The texts whose samples are trained on."""
        pairs = zip(self.entries, self.sources, strict=True)
        return tuple(source.opened for entry, source in pairs if entry.weight)

    @property
    def never_trained_on(self) -> tuple[OpenedText, ...]:
        """The texts that are held out as a whole."""
        owned = (self.own, *(source.own for source in self.sources))
        return tuple(own.opened for own in owned if own is not None)

    @property
    def reading_seconds(self) -> float:
        """See Corpus."""
        of_sources = sum(source.reading_seconds for source in self.sources)
        return of_sources + (0.0 if self.own is None else self.own.opened.reading_seconds)

    def fingerprint(self) -> str:
        """See Corpus. How often a source may be read is no part of it: the order of samples is the same."""
        trained = of_mixture(
            {
                entry.name: (entry.path, {"weight": entry.weight}, source.fingerprint())
                for entry, source in zip(self.entries, self.sources, strict=True)
            }
        )
        return with_held_out(trained, None if self.own is None else self.own.identity())

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
        if self.own is not None:
            self.own.opened.note_hash(run_dir)

    def viewed(self, config: Config, phase: int) -> MixtureCorpus:
        """See Corpus."""
        own = None if self.own is None else self.own.viewed(config)
        return _mixed(self.path, self.entries, self.sources, own, config, phase)


def open_mixture(
    config: Config,
    open_source: Callable[[Config], TextCorpus],
    phase: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> MixtureCorpus:
    """Open the mixture of a run.

    Args:
        config: validated; data.mixture is set.
        open_source: opens a text, as text_corpus.open_text_corpus does.
        phase: that begins its order.
        say: as for open_text_corpus, of a held-out text of the whole mixture.

    Raises:
        ValueError: the file is no table of sources, or a source cannot be used; one line, with the source's name.
    """
    entries, sources = read_table(config.data.mixture), []
    _check_held_out(config, entries)
    for entry in entries:
        try:
            sources.append(open_source(_config_of(entry, config)))
        except ValueError as error:
            raise ValueError(f"{config.data.mixture}: source {entry.name}: {error}") from None
    _check_one_tokenizer(config.data.mixture, entries, sources)
    _check_distinct(config.data.mixture, entries, sources)
    _check_columns(config.data.mixture, entries, sources)
    own = open_held_out(config, say) if config.data.held_out else None
    if own is not None:
        own = replace(own, opened=own.opened.hashed(config.run_dir, say))
    return _mixed(config.data.mixture, entries, tuple(sources), own, config, phase)


def _config_of(entry: SourceEntry, config: Config) -> Config:
    """Return the configuration by which a source's text is opened and viewed."""
    data, train = replace(config.data, path=entry.path, mixture="", held_out=entry.held_out), config.train
    if entry.held_out:
        data = replace(data, held_out_fraction=None)
    if config.data.held_out:
        # The mixture's held-out text is evaluated, so that the source needs no held-out part.
        data, train = replace(data, held_out_fraction=0.0), replace(train, eval_micro_batches=0, sample_tokens=0)
    return replace(config, data=data, train=train)


def _check_held_out(config: Config, entries: Sequence[SourceEntry]) -> None:
    """Raise ValueError if the table and the settings say different things of what is held out."""
    data, named = config.data, [entry.name for entry in entries if entry.held_out]
    if data.held_out and named:
        raise ValueError(
            f"{data.mixture}: a mixture has one held-out text or its sources have theirs: data.held_out is "
            f"{data.held_out}, and {', '.join(named)} of the table {'has' if len(named) == 1 else 'have'} held_out: "
            "leave one out"
        )
    if data.held_out_fraction and len(named) == len(entries):
        raise ValueError(
            f"{data.mixture}: a share is held out of sources that have no held-out text: data.held_out_fraction is "
            f"{data.held_out_fraction}, and all sources have held_out: leave one out"
        )


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
        has: list[str | Path] = [*source.opened.paths, source.opened.fingerprint(source.fit)]
        for what in has:
            first = seen.setdefault(what, entry.name)
            if first != entry.name:
                of = f"the file {what}" if isinstance(what, Path) else f"the text of {entry.path}"
                raise ValueError(
                    f"{path}: sources of a mixture must be different texts: {first} and {entry.name} both have {of}: "
                    "give one of them the weight of both"
                )


def _check_columns(path: str, entries: Sequence[SourceEntry], sources: Sequence[TextCorpus]) -> None:
    """Raise ValueError if a column has another dtype or width in one source than in another."""
    seen: dict[str, tuple[str, Column]] = {}
    for entry, source in zip(entries, sources, strict=True):
        for column in source.opened.columns:
            first, had = seen.setdefault(column.name, (entry.name, column))
            if had != column:
                raise ValueError(
                    f"{path}: a column must have one dtype and width in all sources: {column.name} is {had.width} x "
                    f"{had.dtype} in {first} and {column.width} x {column.dtype} in {entry.name}: write one of them "
                    "again"
                )


def _mixed(
    path: str,
    entries: tuple[SourceEntry, ...],
    texts: tuple[TextCorpus, ...],
    own: HeldOutText | None,
    config: Config,
    phase: int,
) -> MixtureCorpus:
    """Return a mixture in windows of a configuration's length, in the order of a phase."""
    sources = []
    for number, (entry, text) in enumerate(zip(entries, texts, strict=True)):
        try:
            text = text.viewed(_config_of(entry, config), phase)
        except ValueError as error:
            raise ValueError(f"{path}: source {entry.name}: {error}") from None
        sources.append(replace(text, train=replace(text.train, source=number)))
    try:
        mixture = Mixture(tuple(entry.weight for entry in entries), config.train.seed, phase)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    train = MixtureSamples(entries, tuple(source.train for source in sources), mixture)
    if own is not None:
        return MixtureCorpus(path, entries, tuple(sources), train, own.samples, own)
    held_out = tuple(source.held_out for source in sources)
    counts = evenly([part.num_windows for part in held_out], _num_held_out(path, len(entries), config))
    names, shares = tuple(entry.name for entry in entries), tuple(map(float, mixture.shares))
    return MixtureCorpus(path, entries, tuple(sources), train, HeldOutSamples(names, shares, held_out, counts))


def _num_held_out(path: str, num_sources: int, config: Config) -> int:
    """Return how many samples the held-out loss is of; at least one of each source."""
    train, number = config.train, num_evaluated(config.train)
    if number and number < num_sources:
        remedy = f"train.eval_micro_batches {-(-num_sources // train.micro_batch_size)}"
        if train.eval_samples:
            remedy = f"train.eval_samples {num_sources}"
        raise ValueError(
            f"{path}: the held-out loss needs a sample of each source: it is of {number} samples, {num_sources} "
            f"sources: use {remedy} or more, or train.eval_micro_batches 0"
        )
    # A sample's prompt comes from there too.
    return number or num_sources
