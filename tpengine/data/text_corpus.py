"""A text cut in two: what is trained on, and the last documents, which are held out, or a text of its own instead.

Of a held-out text of its own (data.held_out, or held_out of a source) all is evaluated, none is trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpengine.checkpoint.fingerprint import with_held_out
from tpengine.config import Config
from tpengine.data.fit_index import FitIndex, open_index
from tpengine.data.opened_text import OpenedText, open_text
from tpengine.data.samples import Samples, fitted
from tpengine.data.source_files import DocumentSourceTokens, SourceTokens
from tpengine.data.stored_tokens import DocumentTokens, StoredTokens
from tpengine.data.token_file import TextTokens, TokenFile

_END_TOKENS = 1 << 16


@dataclass(frozen=True)
class HeldOutText:
    """A text that is held out as a whole.

    Attributes:
        opened: the text.
        samples: all its windows, in its order.
        fit: the index of samples whose documents are fitted; else None.
    """

    opened: OpenedText
    samples: Samples
    fit: FitIndex | None = None

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """The text, the index of its fitted samples and its columns, with the SHA-256 of their contents."""
        index = () if self.fit is None else (self.fit.file,)
        return (self.opened.file, *index, *self.opened.files_of_columns)

    def identity(self) -> tuple[str, str]:
        """Return where it is, and what identifies it."""
        return self.opened.path, self.opened.fingerprint(self.fit)

    def viewed(self, config: Config) -> HeldOutText:
        """Return it in windows of a configuration's length, its targets that do not count.

        Raises:
            ValueError: it is too short, or has no index of that length.
        """
        opened, data, seq_len = self.opened, config.data, config.train.seq_len
        packs = data.packing != "cut"
        vocab_size, columns = config.model.vocab_size, opened.columns
        samples = Samples(opened.tokens, seq_len, vocab_size, data.ignore_token, packs=packs, columns=columns)
        fit = None
        if data.packing == "fit":
            # Its index has all samples in the part that is trained on: that of a text of which nothing is held out.
            fit = open_index(opened.file, opened.path, seq_len, len(opened.tokens), 0.0)
            samples = fitted(samples, fit.train)
        check_length("held-out", opened.path, samples, config)
        return replace(self, samples=samples, fit=fit)


def open_held_out(config: Config, say: Callable[[str], None] = lambda _: None) -> HeldOutText:
    """Open the text that data.held_out names, without its hash.

    Args: config: as for open_text_corpus. say: as for open_text.
    Raises: ValueError: as open_text, and as `viewed`.
    """
    opened = open_text(config.data.held_out, config, say)
    return HeldOutText(opened, Samples(opened.tokens, 1, 1)).viewed(config)


def check_apart(trained: OpenedText, held_out: OpenedText) -> None:
    """Raise ValueError unless a held-out text has one tokenizer with what is trained on, and no file of it.

    Args: trained, held_out: both with their hashes.
    """
    said = [(of.path, of.file.about) for of in (trained, held_out)]
    named = [f"{path} has {about.tokenizer}" for path, about in said if about is not None]
    hashes = [about.tokenizer_sha256 for _, about in said if about is not None and about.tokenizer_sha256]
    if len(set(hashes)) > 1:
        each = ", ".join(f"{name} (SHA-256 {sha256[:16]})" for name, sha256 in zip(named, hashes, strict=True))
        raise ValueError(
            f"a held-out text must have the tokenizer of the text that is trained on: {each}: write one of them again "
            "with the other's"
        )
    remedy = "leave it out of one of them, or hold out a share of the text (data.held_out_fraction) instead"
    both = [path for path in held_out.paths if path in set(trained.paths)]
    if both:
        raise ValueError(
            f"a held-out text must not be trained on: {both[0]} is in {trained.path} and in {held_out.path}: {remedy}"
        )
    alike = [key for key in held_out.contents if key in trained.contents]
    if alike:
        raise ValueError(
            f"a held-out text must not be trained on: {held_out.contents[alike[0]]} has the content of "
            f"{trained.contents[alike[0]]}: {remedy}"
        )


def check_length(part: str, path: str, samples: Samples, config: Config) -> None:
    """Raise ValueError if a part of a text has no window that a run needs.

    Args: part: what it is, training or held-out. path: of its text. samples: of the part.
    """
    if samples.num_windows:
        return
    remedy = f"use seq_len {len(samples.tokens) - 1}" if len(samples.tokens) > 1 else "use more text"
    share = config.data.held_out_share
    if part == "held-out" and not config.data.held_out:
        remedy += ", a larger held_out_fraction, or eval_micro_batches 0 and sample_tokens 0"
    of = path if config.data.held_out else f"held_out_fraction {share}"
    raise ValueError(
        f"the {part} text must hold a window of seq_len + 1 tokens: {len(samples.tokens)} tokens, seq_len "
        f"{config.train.seq_len}, {of}: {remedy}"
    )


@dataclass(frozen=True)
class TextCorpus:
    """A text cut into a training part and a held-out part; see Corpus.

    Attributes:
        train: the first part, in shuffled order.
        rest: the last part, which is held out, in the order of the text; without a token where a text of its own is.
        opened: the whole text.
        fit: the index of samples whose documents are fitted; else None.
        own: the text that is held out instead; None for none.
    """

    train: Samples
    rest: Samples
    opened: OpenedText
    fit: FitIndex | None = None
    own: HeldOutText | None = None

    @property
    def held_out(self) -> Samples:
        """See Corpus."""
        return self.rest if self.own is None else self.own.samples

    @property
    def text(self) -> TokenFile:
        """The whole text, with the SHA-256 of its tokens."""
        return self.opened.file

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """See Corpus."""
        index = () if self.fit is None else (self.fit.file,)
        own = () if self.own is None else self.own.texts
        return (self.text, *index, *self.opened.files_of_columns, *own)

    @property
    def trained_on(self) -> tuple[OpenedText, ...]:
        """The text, of which a part is trained on."""
        return (self.opened,)

    @property
    def never_trained_on(self) -> tuple[OpenedText, ...]:
        """The text that is held out as a whole, if there is one."""
        return () if self.own is None else (self.own.opened,)

    @property
    def reading_seconds(self) -> float:
        """See Corpus."""
        return self.opened.reading_seconds + (0.0 if self.own is None else self.own.opened.reading_seconds)

    def viewed(self, config: Config, phase: int) -> TextCorpus:
        """See Corpus."""
        seq_len, ignored, fit = config.train.seq_len, config.data.ignore_token, self.fit
        if fit is not None and fit.seq_len != seq_len:
            fit = open_index(self.text, fit.source, seq_len, len(self.train.tokens), config.data.held_out_share)
        train = replace(self.train, seq_len=seq_len, ignore_token=ignored, phase=phase)
        rest = replace(self.rest, seq_len=seq_len, ignore_token=ignored)
        if fit is not None:
            train, rest = fitted(train, fit.train), fitted(rest, fit.held_out)
        own = None if self.own is None else self.own.viewed(config)
        corpus = replace(self, train=train, rest=rest, fit=fit, own=own)
        corpus.check_lengths(config)
        return corpus

    def check_lengths(self, config: Config) -> None:
        """Raise ValueError if a part has no window that a run needs."""
        check_length("training", self.opened.path, self.train, config)
        if self.own is None and (config.train.eval_micro_batches > 0 or config.train.sample_tokens > 0):
            check_length("held-out", self.opened.path, self.rest, config)

    def fingerprint(self) -> str:
        """See Corpus."""
        return with_held_out(self.opened.fingerprint(self.fit), None if self.own is None else self.own.identity())

    def fingerprint_of_ends(self) -> str:
        """Return what older checkpoints identify a text by: length, dtype and both ends of each part, hashed."""
        digest = hashlib.sha256()
        for part in (self.train.tokens, self.rest.tokens):
            digest.update(f"{part.dtype} {len(part)}".encode())
            digest.update(part[:_END_TOKENS].tobytes())
            digest.update(part[-_END_TOKENS:].tobytes())
        return digest.hexdigest()

    def padding(self) -> Mapping[str, float]:
        """See Corpus."""
        return {} if self.fit is None else {"": self.fit.train.padding}

    def note_hash(self, run_dir: Path) -> None:
        """See Corpus."""
        self.opened.note_hash(run_dir)
        if self.own is not None:
            self.own.opened.note_hash(run_dir)


def open_text_corpus(config: Config, say: Callable[[str], None] = lambda _: None) -> TextCorpus:
    """Open the text of a run: the first part for training, the rest held out, or a text of its own instead.

    Args:
        config: validated; data without its mixture, train.seq_len, train.seed and run_dir are used.
        say: is called if a text has to be read completely, because neither its header nor a note has its hash; and if
            files of others are not hashed at all.

    Returns: training samples in shuffled order, held-out samples in the order of the text.
    Raises: ValueError: an unreadable or damaged token file, a vocabulary larger than the model's, too little text.
    """
    return corpus_of(open_text(config.data.path, config, say), config, say)


def corpus_of(opened: OpenedText, config: Config, say: Callable[[str], None]) -> TextCorpus:
    """Return a text that is open, cut in two; as open_text_corpus."""
    data, train, vocab_size = config.data, config.train, config.model.vocab_size
    num_train = num_trained_on(opened.tokens, data.held_out_share)
    train_tokens, held_out_tokens = _cut(opened.tokens, num_train)
    packs = data.packing != "cut"
    rest = Samples(held_out_tokens, train.seq_len, vocab_size, data.ignore_token, packs=packs, columns=opened.columns)
    samples = replace(rest, tokens=train_tokens, seed=train.seed)
    fit = None
    if data.packing == "fit":
        fit = open_index(opened.file, opened.path, train.seq_len, num_train, data.held_out_share)
        samples, rest = fitted(samples, fit.train), fitted(rest, fit.held_out)
    own = open_held_out(config, say) if data.held_out else None
    corpus = TextCorpus(samples, rest, opened, fit, own)
    corpus.check_lengths(config)
    # All of a text is read only where nothing else is wrong.
    corpus = replace(corpus, opened=opened.hashed(config.run_dir, say))
    if own is not None:
        corpus = replace(corpus, own=replace(own, opened=own.opened.hashed(config.run_dir, say)))
    return corpus


def num_trained_on(tokens: TextTokens, held_out_fraction: float) -> int:
    """Return how many of a text's tokens are trained on: what is held out are its last documents, whole."""
    num_train = len(tokens) - int(len(tokens) * held_out_fraction)
    if isinstance(tokens, DocumentTokens | DocumentSourceTokens):
        return _whole_documents(tokens, num_train)
    return num_train


def _whole_documents(tokens: DocumentTokens | DocumentSourceTokens, num_train: int) -> int:
    """Return where the held-out text begins: with the last document that begins at or before token `num_train`.

    Where that is the first, the first one behind it; a file of one document is cut inside it. Documents without tokens
    that begin at the text's end do not count: nothing would be held out.
    """
    if num_train == len(tokens):
        return num_train
    number = tokens.starts.first_at_or_after(num_train + 1)
    before, after = tokens.starts[max(0, number - 1) : number], tokens.starts[number : number + 1]
    return next((int(start[0]) for start in (before, after) if len(start) and 0 < start[0] < len(tokens)), num_train)


def _cut(tokens: TextTokens, place: int) -> tuple[TextTokens, TextTokens]:
    if isinstance(tokens, StoredTokens | SourceTokens):
        return tokens.part(0, place), tokens.part(place, len(tokens))
    return tokens[:place], tokens[place:]
