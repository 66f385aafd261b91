"""The text of each phase of a run, cut into windows as the phase asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tpengine.config import Phase, Phases
from tpengine.data.samples import Corpus, check_lengths, open_corpus


def open_corpora(phases: Phases, say: Callable[[str], None] = lambda _: None) -> tuple[Corpus, ...]:
    """Open the text of each phase; a text that several phases have is opened once.

    Args: phases: of a validated configuration. say: as open_corpus.
    Raises: ValueError: as open_corpus; a text that is too short for a phase's windows.
    """
    opened: dict[object, Corpus] = {}
    found = []
    for phase in phases:
        text = replace(phase.config.data, ignore_token=None)
        if text not in opened:
            opened[text] = open_corpus(phase.config, say)
        found.append(for_phase(opened[text], phase))
    return tuple(found)


def for_phase(corpus: Corpus, phase: Phase) -> Corpus:
    """Return a phase's view of its text: windows of its length in its order, its targets that do not count.

    Raises:
        ValueError: the text is too short.
    """
    seq_len, ignored = phase.config.train.seq_len, phase.config.data.ignore_token
    corpus = replace(
        corpus,
        train=replace(corpus.train, seq_len=seq_len, ignore_token=ignored, phase=phase.order),
        held_out=replace(corpus.held_out, seq_len=seq_len, ignore_token=ignored),
    )
    check_lengths(corpus.train, corpus.held_out, phase.config)
    return corpus
