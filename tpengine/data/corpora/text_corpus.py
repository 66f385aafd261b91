"""A text, opened: what is trained on, and the last documents, which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpengine.config import Config
from tpengine.data.corpora.fingerprint import of_files
from tpengine.data.files.content.hash import content_sha256, forget_on_host, note_sha256, noted_sha256, once_per_host
from tpengine.data.files.documents import DocumentTokens
from tpengine.data.files.source import open_text
from tpengine.data.files.source_tokens import DocumentSourceTokens, SourceTokens
from tpengine.data.files.stored_tokens import StoredTokens
from tpengine.data.files.token_file import TextTokens, TokenFile
from tpengine.data.fit.index import FitIndex, first_file, open_index
from tpengine.data.samples.fitted import fitted
from tpengine.data.samples.windows import HasDocuments, Samples
from tpengine.data.text.sources import stdlib_text

_END_TOKENS = 1 << 16
# A file system slower than this is treated as broken.
_LEAST_BYTES_PER_S = 10e6
# Half of a SHA-256 is enough to distinguish texts, and is short enough for a message.
_SHOWN_DIGITS = 32


@dataclass(frozen=True)
class TextCorpus:
    """A text cut into a training part and a held-out part; see Corpus.

    Attributes:
        train, held_out: the parts.
        text: the whole text, with the SHA-256 of its tokens.
        is_noted: whether the next run finds that hash without reading the text.
        reading_seconds: how much longer than this rank a rank of another host may take to open the text, since it may
            have to read all of it; 0 if the header has the hash.
        fit: the index of samples whose documents are fitted; else None.
    """

    train: Samples
    held_out: Samples
    text: TokenFile
    is_noted: bool
    reading_seconds: float
    fit: FitIndex | None = None

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """See Corpus."""
        return (self.text,) if self.fit is None else (self.text, self.fit.file)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it is read from; none of a text in memory."""
        tokens = self.text.tokens
        if isinstance(tokens, SourceTokens):
            return tuple(file.path.resolve() for file in tokens.files)
        return (tokens.file.path.resolve(),) if isinstance(tokens, StoredTokens) else ()

    def viewed(self, config: Config, phase: int) -> TextCorpus:
        """See Corpus."""
        seq_len, ignored, fit = config.train.seq_len, config.data.ignore_token, self.fit
        if fit is not None and fit.seq_len != seq_len:
            fit = open_index(self.text, fit.source, seq_len, len(self.train.tokens), config.data.held_out_fraction)
        train = replace(self.train, seq_len=seq_len, ignore_token=ignored, phase=phase)
        held_out = replace(self.held_out, seq_len=seq_len, ignore_token=ignored)
        if fit is not None:
            train, held_out = fitted(train, fit.train), fitted(held_out, fit.held_out)
        corpus = replace(self, train=train, held_out=held_out, fit=fit)
        check_lengths(corpus.train, corpus.held_out, config)
        return corpus

    def fingerprint(self) -> str:
        """Return what identifies a text: number, dtype and vocabulary of the tokens, and their hash; or each file's."""
        tokens, vocab_size, sha256, about, _ = self.text
        index = "" if self.fit is None else f"SHA-256 {self.fit.sha256[:_SHOWN_DIGITS]}"
        if isinstance(tokens, SourceTokens) and len(tokens.files) > 1:
            lines = {
                str(file.path): f"{len(file.tokens)} {file.tokens.dtype} tokens, SHA-256 "
                f"{file.fingerprint[:_SHOWN_DIGITS]}"
                for file in tokens.files
            }
            return of_files(lines, index)
        documents = "" if about is None else f", documents' SHA-256 {about.starts_sha256[:_SHOWN_DIGITS]}"
        line = f"{len(tokens)} {tokens.dtype} tokens below {vocab_size}, SHA-256 {sha256[:_SHOWN_DIGITS]}{documents}"
        return of_files({str(first_file(self.text)): line}, index) if index else line

    def fingerprint_of_ends(self) -> str:
        """Return what older checkpoints identify a text by: length, dtype and both ends of each part, hashed."""
        digest = hashlib.sha256()
        for part in (self.train.tokens, self.held_out.tokens):
            digest.update(f"{part.dtype} {len(part)}".encode())
            digest.update(part[:_END_TOKENS].tobytes())
            digest.update(part[-_END_TOKENS:].tobytes())
        return digest.hexdigest()

    def padding(self) -> Mapping[str, float]:
        """See Corpus."""
        return {} if self.fit is None else {"": self.fit.train.padding}

    def note_hash(self, run_dir: Path) -> None:
        """Write the hash to the run directory if no note can be written in the text's own directory."""
        if not self.is_noted and isinstance(self.text.tokens, StoredTokens):
            note_sha256(self.text.tokens, self.text.sha256, run_dir)


def open_text_corpus(config: Config, say: Callable[[str], None] = lambda _: None) -> TextCorpus:
    """Open the text of a run: the first part for training, the rest held out.

    Args:
        config: validated; data.path, data.held_out_fraction, data.ignore_token, train.seq_len, train.seed and run_dir
            are used.
        say: is called if the text has to be read completely, because neither its header nor a note has its hash; and if
            files of others are not hashed at all.

    Returns: training samples in shuffled order, held-out samples in the order of the text.
    Raises: ValueError: an unreadable or damaged token file, a vocabulary larger than the model's, too little text.
    """
    data, train, vocab_size = config.data, config.train, config.model.vocab_size
    text = _open_text(config, say)
    num_train = num_trained_on(text.tokens, data.held_out_fraction)
    train_tokens, held_out_tokens = _cut(text.tokens, num_train)
    packs = data.packing != "cut"
    if packs and not isinstance(text.tokens, HasDocuments):
        where = data.path
        if isinstance(text.tokens, SourceTokens):
            where = str(next(file.path for file in text.tokens.files if file.starts is None))
        raise ValueError(
            f"--data.packing {data.packing} needs to know where documents begin: {where} does not say: write it again "
            "with tpengine data, or use --data.packing cut"
        )
    train_samples = Samples(train_tokens, train.seq_len, vocab_size, data.ignore_token, train.seed, packs=packs)
    held_out_samples = Samples(held_out_tokens, train.seq_len, vocab_size, data.ignore_token, packs=packs)
    fit = None
    if data.packing == "fit":
        fit = open_index(text, data.path, train.seq_len, num_train, data.held_out_fraction)
        train_samples, held_out_samples = fitted(train_samples, fit.train), fitted(held_out_samples, fit.held_out)
    check_lengths(train_samples, held_out_samples, config)
    num_bytes = 0 if text.sha256 else len(text.tokens) * text.tokens.dtype.itemsize
    text, is_noted = _with_hash(text, config.run_dir, say)
    return TextCorpus(train_samples, held_out_samples, text, is_noted, num_bytes / _LEAST_BYTES_PER_S, fit)


def num_trained_on(tokens: TextTokens, held_out_fraction: float) -> int:
    """Return how many of a text's tokens are trained on: what is held out are its last documents, whole."""
    num_train = len(tokens) - int(len(tokens) * held_out_fraction)
    if isinstance(tokens, DocumentTokens | DocumentSourceTokens):
        return _whole_documents(tokens, num_train)
    return num_train


def _open_text(config: Config, say: Callable[[str], None]) -> TokenFile:
    """Open the text of a run, whose vocabulary is at most the model's."""
    path, vocab_size = config.data.path, config.model.vocab_size
    text = _stdlib_tokens() if path == "stdlib" else open_text(path)
    files = text.tokens.files if isinstance(text.tokens, SourceTokens) else ()
    if text.vocab_size > vocab_size:
        remedy = f"use model.vocab_size {text.vocab_size}"
        if config.model.path:
            remedy = f"write the text with the model's tokenizer, tpengine data --tokenizer {config.model.path}"
        where = next((file.path for file in files if file.vocab_size == text.vocab_size), path)
        raise ValueError(
            f"the model's vocabulary must cover the text's: model.vocab_size {vocab_size}, {where} {text.vocab_size}: "
            f"{remedy}"
        )
    unhashed = sum(not file.sha256 for file in files)
    if unhashed:
        say(
            f"{unhashed:,} of the {len(files):,} files of {path} have no hash of their content: they are known by "
            "their sizes and pieces of what is in them, both ends among these"
        )
    return text


def _stdlib_tokens() -> TokenFile:
    """The standard text; its vocabulary ends at the largest byte in it, since UTF-8 does not use the highest ones."""
    text = stdlib_text()
    return TokenFile(text, int(text.max()) + 1, hashlib.sha256(text.tobytes()).hexdigest())


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


def _with_hash(text: TokenFile, run_dir: str, say: Callable[[str], None]) -> tuple[TokenFile, bool]:
    """Return the text with its hash: from the header, from an earlier run's note, or computed now and noted.

    Returns: the text; whether the next run finds the hash.
    """
    tokens = text.tokens
    if text.sha256 or not isinstance(tokens, StoredTokens):
        return text, True
    path = tokens.file.path
    places = [path.parent, *([Path(run_dir)] if run_dir else [])]
    noted = noted_sha256(tokens, places)
    if noted:
        return text._replace(sha256=noted), True
    identity = tokens.file.identity()
    say(f"{path} was written without a hash of its content: reading its {identity.size / 1e6:,.0f} MB once to make one")

    def check_unchanged() -> None:
        if tokens.file.identity() != identity:
            raise ValueError(
                f"a token file must not change while it is read: {path}: wait until it is written, then start again"
            )

    def make() -> str:
        # Since this rank looked, another may have made the hash, noted it, and removed its temporary file.
        made = noted_sha256(tokens, places) or content_sha256(tokens)
        check_unchanged()
        return made

    sha256 = once_per_host(tokens, make)
    check_unchanged()
    is_noted = any(note_sha256(tokens, sha256, place) for place in places)
    if is_noted:
        forget_on_host(tokens)
    return text._replace(sha256=sha256), is_noted


def check_lengths(train: Samples, held_out: Samples, config: Config) -> None:
    """Raise ValueError if a part of a text has no window that a run needs."""
    _check_length("training", train, config)
    if config.train.eval_micro_batches > 0 or config.train.sample_tokens > 0:
        _check_length("held-out", held_out, config)


def _check_length(part: str, samples: Samples, config: Config) -> None:
    if samples.num_windows:
        return
    remedy = f"use seq_len {len(samples.tokens) - 1}" if len(samples.tokens) > 1 else "use more text"
    if part == "held-out":
        remedy += ", a larger held_out_fraction, or eval_micro_batches 0 and sample_tokens 0"
    raise ValueError(
        f"the {part} text must hold a window of seq_len + 1 tokens: {len(samples.tokens)} tokens, seq_len "
        f"{config.train.seq_len}, held_out_fraction {config.data.held_out_fraction}: {remedy}"
    )
