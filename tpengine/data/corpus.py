"""What a run and each of its phases read, as training sees it: a text or a mixture, in windows as a phase asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tpengine.config import Config, Phase, Phases
from tpengine.data.mixture_corpus import MixtureCorpus, open_mixture
from tpengine.data.own_data import open_own, view_of_own
from tpengine.data.text_corpus import TextCorpus, check_apart, open_text_corpus
from tpengine.data.token_file import TokenFile
from tpengine.training.samples import Corpus


class OpenedCorpus(Corpus, Protocol):
    """A corpus whose files are open.

    Attributes:
        texts: all texts, with the SHA-256 of their tokens, and the indices of fitted samples, with that of theirs.
        reading_seconds: how much longer than this rank a rank of another host may take to open it, since it may have to
            read all of it; 0 if the headers have the hashes.
    """

    @property
    def texts(self) -> tuple[TokenFile, ...]: ...

    @property
    def reading_seconds(self) -> float: ...

    def note_hash(self, run_dir: Path) -> None:
        """Write hashes to the run directory if no note can be written beside the texts."""


def open_corpus(config: Config, say: Callable[[str], None] = lambda _: None, own: object = None) -> OpenedCorpus:
    """Open what a run without phases reads: the user's own data if there are some, data.mixture, or else data.path.

    Args:
        config: validated; data, train.seq_len, train.seed and run_dir are used.
        say: called if a text has to be read completely, because neither its header nor a note has its hash.
        own: data of the user's own (own_data.py); None for none.

    Returns: training samples in shuffled order, held-out samples in the order of the text.
    Raises: ValueError: as open_text_corpus, open_mixture and open_own.
    """
    if own is not None:
        return open_own(own, config, say)

    def open_source(of: Config) -> TextCorpus:
        return open_text_corpus(of, say)

    corpus = open_mixture(config, open_source, say=say) if config.data.mixture else open_source(config)
    _check_apart([corpus])
    return corpus


def open_corpora(
    phases: Phases, say: Callable[[str], None] = lambda _: None, own: object = None
) -> tuple[OpenedCorpus, ...]:
    """Open what each phase reads; a text that several phases or sources have is opened once.

    Args: phases: of a validated configuration. say, own: as open_corpus; own data are those of all phases.
    Raises: ValueError: as open_corpus; a text that is too short for a phase's windows; a source of a mixture that is
        used up before the phase ends; a held-out text that a phase, whichever, trains on.
    """
    if own is not None:
        corpus = open_own(own, phases[0].config, say)
        return tuple(view_of_own(corpus, phase.config, phase.order) for phase in phases)
    opened: dict[object, TextCorpus] = {}

    def open_source(config: Config) -> TextCorpus:
        text = replace(config.data, ignore_token=None)
        if text not in opened:
            opened[text] = open_text_corpus(config, say)
        return opened[text]

    found: list[MixtureCorpus | TextCorpus] = []
    for phase in phases:
        config = phase.config
        if config.data.mixture:
            mixture = open_mixture(config, open_source, phase.order, say)
            _check_lasts(mixture, phase)
            found.append(mixture)
        else:
            found.append(open_source(config).viewed(config, phase.order))
    _check_apart(found)
    return tuple(found)


def for_phase(corpus: Corpus, phase: Phase) -> Corpus:
    """Return a phase's view of what it reads: windows of its length in its order, its targets that do not count.

    Raises:
        ValueError: a text is too short.
    """
    return corpus.viewed(phase.config, phase.order)


def _check_apart(corpora: Sequence[MixtureCorpus | TextCorpus]) -> None:
    """Raise ValueError if a text that is held out as a whole is trained on, by whichever phase or source."""
    trained_on = {text.path: text for corpus in corpora for text in corpus.trained_on}
    never = {text.path: text for corpus in corpora for text in corpus.never_trained_on}
    for trained, held_out in itertools.product(trained_on.values(), never.values()):
        check_apart(trained, held_out)


def _check_lasts(corpus: MixtureCorpus, phase: Phase) -> None:
    """Raise ValueError if a phase needs more of a source than it may give, all epochs together."""
    samples = corpus.train
    needed = samples.mixture.counts(phase.samples_before(phase.end_step))
    for place, (entry, limit, need) in enumerate(zip(corpus.entries, samples.limits, needed, strict=True)):
        if need <= limit:
            continue
        windows = samples.sources[place].num_windows
        # The steps that it lasts: a bisection.
        low, high = phase.first_step, phase.end_step
        while high - low > 1:
            middle = (low + high) // 2
            lasts = samples.mixture.counts(phase.samples_before(middle))[place] <= limit
            low, high = (middle, high) if lasts else (low, middle)
        raise ValueError(
            f"{corpus.path}: source {entry.name} is used up after step {low}: {entry.path} has {windows} samples of "
            f"{samples.seq_len} tokens, epochs {entry.epochs:g}, and {phase.end_step} steps read {need}: end after "
            f"{low} steps, use epochs = {math.ceil(need / windows)} for it, or a smaller weight"
        )
