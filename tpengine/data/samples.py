"""Samples: windows of a text, the order in which they are read, and the part that is held out.

Nothing here has state: the order of samples is a function of (seed, global sample index) alone, so every layout of
ranks, and every restart, reads the same global batches. The trainer turns the arrays into tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL, Config
from tpengine.data.corpus import Batch, PackedBatch
from tpengine.data.files.content.hash import content_sha256, forget_on_host, note_sha256, noted_sha256, once_per_host
from tpengine.data.files.documents import DocumentTokens
from tpengine.data.files.source import open_text
from tpengine.data.files.source_tokens import DocumentSourceTokens, SourceTokens
from tpengine.data.files.stored_tokens import StoredTokens
from tpengine.data.files.token_file import TextTokens, TokenFile
from tpengine.data.fingerprint import of_files
from tpengine.data.order import permute, permute_one
from tpengine.data.position import Position
from tpengine.data.text.sources import stdlib_text


@runtime_checkable
class HasDocuments(Protocol):
    """Tokens that know where documents begin in them."""

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first tokens of all documents that begin in [begin, end), ascending."""


_END_TOKENS = 1 << 16
# So many numbers are permuted one by one: 6 us each, all together 90 us.
_FEW = 8
# A file system slower than this is treated as broken.
_LEAST_BYTES_PER_S = 10e6
# Half of a SHA-256 is enough to distinguish texts, and is short enough for a message.
_SHOWN_DIGITS = 32


@dataclass(frozen=True)
class Samples:
    """The windows of one part of the text: window w has tokens [w*S, w*S + S]; labels are one token ahead of inputs.

    Attributes:
        tokens: of this part.
        seq_len: S.
        vocab_size: of the model; a larger token is an error when its window is read.
        ignore_token: labels equal to it become IGNORED_LABEL.
        seed: key of the order; None for the order of the text. Either way the text is repeated without end.
        phase: the phase of a run whose order this is, key of it besides.
        packs: whether a window is documents that do not see each other: the label that would be the first token of the
            next document becomes IGNORED_LABEL.
        source: place of the text in the table of a mixture, key of the order besides; None for a text by itself.
    """

    tokens: TextTokens
    seq_len: int
    vocab_size: int
    ignore_token: int | None = None
    seed: int | None = None
    phase: int = 0
    packs: bool = False
    source: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of sources: a text is one without a name."""
        return ("",)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of sources."""
        return (1.0,)

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in it."""
        return np.zeros_like(samples), samples

    def progress(self, position: Position) -> dict[str, float]:
        """Return what a row of metrics says of sources: nothing of one text."""
        return {}

    @property
    def num_windows(self) -> int:
        """The number of windows; they do not overlap, and each needs one more token for its last label."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ...; as `read`."""
        return self.read(np.arange(first_sample_index, first_sample_index + count, dtype=np.int64))

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Read samples by their numbers in the order.

        Returns: tokens[count, S] and labels[count, S], int64, contiguous, writable.
        Raises: ValueError: a token outside the model's vocabulary; not one whole window; a file that was cut short.
        """
        return self.read_with_starts(samples)[:2]

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """Read samples, and where documents begin in them, with one search.

        Returns: as `read`, and as `document_starts`; an empty list where the samples are not packed.
        Raises: ValueError: as `read` and `document_starts`.
        """
        if not self.num_windows:
            raise ValueError(
                f"a window must fit the text: {len(self.tokens)} tokens, seq_len {self.seq_len} and one more: "
                "use a smaller seq_len or more text"
            )
        firsts = [window * self.seq_len for window in self._windows(samples)]
        tokens = np.empty((len(firsts), self.seq_len), dtype=np.int64)
        labels = np.empty_like(tokens)
        for row, first in enumerate(firsts):
            text = self.tokens[first : first + self.seq_len + 1]
            if text.max() >= self.vocab_size:
                raise ValueError(self._beyond(firsts))
            tokens[row], labels[row] = text[:-1], text[1:]
        if self.ignore_token is not None:
            labels[labels == self.ignore_token] = IGNORED_LABEL
        if not self.packs:
            return tokens, labels, []
        starts = self._document_starts(firsts)
        for of_sample, starts_in in zip(labels, starts, strict=True):
            of_sample[starts_in - 1] = IGNORED_LABEL
        return tokens, labels, [self._inside(of) for of in starts]

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return, for samples of the order, where documents begin in each, after its first token.

        Returns: ascending places above 0 and below S; none where the samples are not packed.
        Raises: ValueError: the file cannot be read.
        """
        if not self.packs:
            return [np.empty(0, dtype=np.int64)] * len(samples)
        firsts = [window * self.seq_len for window in self._windows(samples)]
        return [self._inside(starts) for starts in self._document_starts(firsts)]

    def _document_starts(self, firsts: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return where documents begin in windows and right behind them, after the first token of each."""
        assert isinstance(self.tokens, HasDocuments), "packed samples have documents"
        return [self.tokens.document_starts(first + 1, first + self.seq_len + 1) - first for first in firsts]

    def _inside(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leave out the document that begins right behind a window."""
        return starts[:-1] if len(starts) and starts[-1] == self.seq_len else starts

    def _beyond(self, firsts: Sequence[int]) -> str:
        """Say which token of windows is beyond the vocabulary, and where the first one is."""
        text = np.stack([self.tokens[first : first + self.seq_len + 1] for first in firsts])
        rows, columns = np.nonzero(text >= self.vocab_size)
        first, largest = int(text[rows[0], columns[0]]), int(text.max())
        place = int(firsts[rows[0]] + columns[0])
        where = f"token {place} of the text"
        if not isinstance(self.tokens, np.ndarray):
            path, number = self.tokens.where(place)
            where = f"token {number} of {path}"
        return (
            f"tokens must be at least 0 and below model.vocab_size: got {largest}, model.vocab_size {self.vocab_size}; "
            f"the first beyond it, {first}, is {where}: use model.vocab_size {largest + 1} or other text"
        )

    def _windows(self, samples: NDArray[np.int64]) -> list[int]:
        """The window of each sample; each pass over the text has an order of its own over all windows."""
        num = self.num_windows
        if self.seed is None:
            return (samples % num).tolist()
        # A run of one phase and one text has the order that it had before there were phases and mixtures.
        what = "sample order" if self.source is None else f"sample order of source {self.source}"
        what += f" of phase {self.phase}" if self.phase else ""
        if len(samples) <= _FEW:
            return [permute_one(sample % num, num, self.seed, sample // num, what) for sample in samples.tolist()]
        epochs, places = np.divmod(samples, num)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            places[now] = permute(places[now], num, self.seed, epoch, what)
        return places.tolist()


@dataclass(frozen=True)
class TextCorpus:
    """A text cut into a training part and a held-out part; see Corpus.

    Attributes:
        train, held_out: the parts.
        text: the whole text, with the SHA-256 of its tokens.
        is_noted: whether the next run finds that hash without reading the text.
        reading_seconds: how much longer than this rank a rank of another host may take to open the text, since it may
            have to read all of it; 0 if the header has the hash.
    """

    train: Samples
    held_out: Samples
    text: TokenFile
    is_noted: bool
    reading_seconds: float

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """See Corpus."""
        return (self.text,)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it is read from; none of a text in memory."""
        tokens = self.text.tokens
        if isinstance(tokens, SourceTokens):
            return tuple(file.path.resolve() for file in tokens.files)
        return (tokens.file.path.resolve(),) if isinstance(tokens, StoredTokens) else ()

    def viewed(self, config: Config, phase: int) -> TextCorpus:
        """See Corpus."""
        seq_len, ignored = config.train.seq_len, config.data.ignore_token
        corpus = replace(
            self,
            train=replace(self.train, seq_len=seq_len, ignore_token=ignored, phase=phase),
            held_out=replace(self.held_out, seq_len=seq_len, ignore_token=ignored),
        )
        check_lengths(corpus.train, corpus.held_out, config)
        return corpus

    def fingerprint(self) -> str:
        """Return what identifies a text: number, dtype and vocabulary of the tokens, and their hash; or each file's."""
        tokens, vocab_size, sha256, about, _ = self.text
        if isinstance(tokens, SourceTokens) and len(tokens.files) > 1:
            return of_files(
                {
                    str(file.path): f"{len(file.tokens)} {file.tokens.dtype} tokens, SHA-256 "
                    f"{file.fingerprint[:_SHOWN_DIGITS]}"
                    for file in tokens.files
                }
            )
        documents = "" if about is None else f", documents' SHA-256 {about.starts_sha256[:_SHOWN_DIGITS]}"
        return f"{len(tokens)} {tokens.dtype} tokens below {vocab_size}, SHA-256 {sha256[:_SHOWN_DIGITS]}{documents}"

    def fingerprint_of_ends(self) -> str:
        """Return what older checkpoints identify a text by: length, dtype and both ends of each part, hashed."""
        digest = hashlib.sha256()
        for part in (self.train.tokens, self.held_out.tokens):
            digest.update(f"{part.dtype} {len(part)}".encode())
            digest.update(part[:_END_TOKENS].tobytes())
            digest.update(part[-_END_TOKENS:].tobytes())
        return digest.hexdigest()

    def note_hash(self, run_dir: Path) -> None:
        """Write the hash to the run directory if no note can be written in the text's own directory."""
        if not self.is_noted and isinstance(self.text.tokens, StoredTokens):
            note_sha256(self.text.tokens, self.text.sha256, run_dir)


def batch_digest(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], document_starts: Sequence[NDArray[np.int64]] = ()
) -> int:
    """Hash the windows of a batch, so that ranks that must have read the same batch can compare one number.

    Hashed are the tokens and the last label of each sample: all other labels are tokens too.

    Args:
        tokens, labels: int64 [count, S], as `Samples.read` returns them.
        document_starts: of each sample, as `Samples.document_starts` returns them; of packed samples alone.
    Returns: at least 0 and below 2**63; equal batches have equal numbers on every machine, different ones with
        probability 2**-63.
    Cost: one pass over 4 bytes per token, 10 us for 2,048 tokens and 8 ms for a million on an AMD EPYC.
    """
    digest = hashlib.sha256(repr(tokens.shape).encode())
    for part in (tokens, labels[:, -1]):
        digest.update(part.astype("<u4").tobytes())
    for starts in document_starts:
        digest.update(len(starts).to_bytes(8, "little") + starts.astype("<i8").tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


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
    num_train = len(text.tokens) - int(len(text.tokens) * data.held_out_fraction)
    if isinstance(text.tokens, DocumentTokens | DocumentSourceTokens):
        num_train = _whole_documents(text.tokens, num_train)
    train_tokens, held_out_tokens = _cut(text.tokens, num_train)
    packs = data.packing == "documents"
    if packs and not isinstance(text.tokens, HasDocuments):
        where = data.path
        if isinstance(text.tokens, SourceTokens):
            where = str(next(file.path for file in text.tokens.files if file.starts is None))
        raise ValueError(
            f"--data.packing documents needs to know where documents begin: {where} does not say: write it again "
            "with tpengine data, or use --data.packing cut"
        )
    train_samples = Samples(train_tokens, train.seq_len, vocab_size, data.ignore_token, train.seed, packs=packs)
    held_out_samples = Samples(held_out_tokens, train.seq_len, vocab_size, data.ignore_token, packs=packs)
    check_lengths(train_samples, held_out_samples, config)
    num_bytes = 0 if text.sha256 else len(text.tokens) * text.tokens.dtype.itemsize
    text, is_noted = _with_hash(text, config.run_dir, say)
    return TextCorpus(train_samples, held_out_samples, text, is_noted, num_bytes / _LEAST_BYTES_PER_S)


def first_sample_index(
    step: int, dp_rank: int, dp: int, micro_batch: int, *, num_micro_batches: int, micro_batch_size: int
) -> int:
    """Return the global index of the first sample of a micro-batch.

        global micro-batch g = dp_rank * num_micro_batches + micro_batch      (one contiguous block per replica)
        index = (step * dp * num_micro_batches + g) * micro_batch_size

    so one process with dp * num_micro_batches micro-batches reads the same global batch.

    Args:
        step: optimizer step.
        dp_rank, dp: number of this replica, and how many there are.
        micro_batch: number of the micro-batch, of the replica's num_micro_batches.
        micro_batch_size: samples per micro-batch.
    """
    global_micro_batch = dp_rank * num_micro_batches + micro_batch
    return (step * dp * num_micro_batches + global_micro_batch) * micro_batch_size


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

    Where that is the first, the first one behind it; a file of one document is cut inside it.
    """
    if num_train == len(tokens):
        return num_train
    number = tokens.starts.first_at_or_after(num_train + 1)
    before, after = tokens.starts[max(0, number - 1) : number], tokens.starts[number : number + 1]
    return next((int(start[0]) for start in (before, after) if len(start) and start[0]), num_train)


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
