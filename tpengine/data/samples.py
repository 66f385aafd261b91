"""Which sample is which: windows of a text, the order they are read in, the part held out.

Nothing here has state: the order of samples is a function of (seed, global sample index) alone, so every layout
of ranks, and every restart, sees the same global batches. Turning arrays into tensors is left to the trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL, Config
from tpengine.data.content_hash import content_sha256, forget_on_host, note_sha256, noted_sha256, once_per_host
from tpengine.data.order import permute
from tpengine.data.sources import stdlib_text
from tpengine.data.stored_tokens import StoredTokens, Tokens
from tpengine.data.token_file import TokenFile, check_tokens, open_tokens

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]

_END_TOKENS = 1 << 16
# A file system that is slower than this is broken.
_LEAST_BYTES_PER_S = 10e6
# Half a SHA-256 tells any two texts apart, and fits a line.
_SHOWN_DIGITS = 32


@dataclass(frozen=True)
class Samples:
    """The windows of one part of the text: window w reads tokens [w*S, w*S + S], labels one ahead of inputs.

    Attributes:
        tokens: the part.
        seq_len: S.
        vocab_size: the model's; a token beyond it is an error when its window is read.
        ignore_token: labels equal to it become IGNORED_LABEL.
        seed: key of the order; None takes the windows as they lie. Either way the text repeats without end.
    """

    tokens: StoredTokens | Tokens
    seq_len: int
    vocab_size: int
    ignore_token: int | None = None
    seed: int | None = None

    @property
    def num_windows(self) -> int:
        """Windows that do not overlap; each needs one token more for its last label."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ...

        Returns: tokens[count, S] and labels[count, S], int64, contiguous, writable.
        Raises: ValueError: a token that the model's vocabulary lacks; no whole window; a file that was cut short.
        """
        if not self.num_windows:
            raise ValueError(
                f"a window must fit the text: {len(self.tokens)} tokens, seq_len {self.seq_len} and one more: "
                "use a smaller seq_len or more text"
            )
        starts = self._windows(first_sample_index, count) * self.seq_len
        text = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts.tolist()])
        check_tokens(text, self.vocab_size, "model.vocab_size")
        tokens, labels = text[:, :-1].astype(np.int64), text[:, 1:].astype(np.int64)
        if self.ignore_token is not None:
            labels[labels == self.ignore_token] = IGNORED_LABEL
        return tokens, labels

    def _windows(self, first_sample_index: int, count: int) -> NDArray[np.int64]:
        """The window of each sample: one order of all windows per pass over the text."""
        samples = np.arange(first_sample_index, first_sample_index + count, dtype=np.int64)
        epochs, places = np.divmod(samples, self.num_windows)
        if self.seed is not None:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = permute(places[now], self.num_windows, self.seed, int(epoch))
        return places


@dataclass(frozen=True)
class Corpus:
    """A text cut in two.

    Attributes:
        train, held_out: the parts.
        text: the whole, with the SHA-256 of its tokens.
        is_noted: whether the next run finds that hash without reading the text.
        reading_seconds: how much longer than this rank another host's may take to open the text, which it may have to
            read whole; 0 where the header has the hash.
    """

    train: Samples
    held_out: Samples
    text: TokenFile
    is_noted: bool
    reading_seconds: float

    def fingerprint(self) -> str:
        """Tell texts apart: number, dtype and vocabulary of the tokens, and their hash; nothing is read for it."""
        tokens, vocab_size, sha256 = self.text
        return f"{len(tokens)} {tokens.dtype} tokens below {vocab_size}, SHA-256 {sha256[:_SHOWN_DIGITS]}"

    def fingerprint_of_ends(self) -> str:
        """Tell texts apart as checkpoints of before did: by length, dtype and both ends of each part."""
        digest = hashlib.sha256()
        for part in (self.train.tokens, self.held_out.tokens):
            digest.update(f"{part.dtype} {len(part)}".encode())
            digest.update(part[:_END_TOKENS].tobytes())
            digest.update(part[-_END_TOKENS:].tobytes())
        return digest.hexdigest()

    def note_hash(self, run_dir: Path) -> None:
        """Keep the hash in the run directory if the text's own directory takes no note."""
        if not self.is_noted and isinstance(self.text.tokens, StoredTokens):
            note_sha256(self.text.tokens, self.text.sha256, run_dir)


def batch_digest(tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    """Hash the windows of a batch, so that ranks that must have read the same can compare one number.

    The windows are the tokens and the last label of each sample: the other labels are tokens too.

    Args: tokens, labels: int64 [count, S], as `Samples.batch` returns them.
    Returns: at least 0 and below 2**63; equal batches have equal numbers on every machine, and others by a chance of
        2**-63.
    Cost: one pass over 4 bytes a token, 10 us for 2,048 tokens and 8 ms for a million on an AMD EPYC.
    """
    digest = hashlib.sha256(repr(tokens.shape).encode())
    for part in (tokens, labels[:, -1]):
        digest.update(part.astype("<u4").tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def open_corpus(config: Config, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Open the text of a run: the first share for training, the last held out.

    Args:
        config: validated; data.path, data.held_out_fraction, data.ignore_token, train.seq_len, train.seed and run_dir
            are used.
        say: is told if the text has to be read whole, because neither its header nor a note has its hash.

    Returns: training samples in shuffled order, held-out samples as they lie.
    Raises: ValueError: an unreadable or damaged token file, a vocabulary larger than the model's, too little text.
    """
    data, train, vocab_size = config.data, config.train, config.model.vocab_size
    text = _stdlib_tokens() if data.path == "stdlib" else open_tokens(data.path)
    if text.vocab_size > vocab_size:
        raise ValueError(
            f"the model's vocabulary must cover the text's: model.vocab_size {vocab_size}, {data.path} "
            f"{text.vocab_size}: use model.vocab_size {text.vocab_size}"
        )
    num_train = len(text.tokens) - int(len(text.tokens) * data.held_out_fraction)
    train_tokens, held_out_tokens = _cut(text.tokens, num_train)
    train_samples = Samples(train_tokens, train.seq_len, vocab_size, data.ignore_token, train.seed)
    held_out_samples = Samples(held_out_tokens, train.seq_len, vocab_size, data.ignore_token)
    needs_held_out = train.eval_micro_batches > 0 or train.sample_tokens > 0
    _check_length("training", train_samples, config)
    if needs_held_out:
        _check_length("held-out", held_out_samples, config)
    num_bytes = 0 if text.sha256 else len(text.tokens) * text.tokens.dtype.itemsize
    text, is_noted = _with_hash(text, config.run_dir, say)
    return Corpus(train_samples, held_out_samples, text, is_noted, num_bytes / _LEAST_BYTES_PER_S)


def first_sample_index(
    step: int, dp_rank: int, dp: int, micro_batch: int, *, num_micro_batches: int, micro_batch_size: int
) -> int:
    """Global index of the first sample of a micro-batch.

        global micro-batch g = dp_rank * num_micro_batches + micro_batch      (a contiguous block per replica)
        index = (step * dp * num_micro_batches + g) * micro_batch_size

    so that one process with dp * num_micro_batches micro-batches sees the same global batch.

    Args:
        step: optimizer step.
        dp_rank, dp: this replica and their number.
        micro_batch: which of the replica's num_micro_batches.
        micro_batch_size: samples of one.
    """
    global_micro_batch = dp_rank * num_micro_batches + micro_batch
    return (step * dp * num_micro_batches + global_micro_batch) * micro_batch_size


def _stdlib_tokens() -> TokenFile:
    """The standard text; its vocabulary ends at the largest byte in it, since UTF-8 never uses the last few."""
    text = stdlib_text()
    return TokenFile(text, int(text.max()) + 1, hashlib.sha256(text.tobytes()).hexdigest())


def _cut(tokens: StoredTokens | Tokens, place: int) -> tuple[StoredTokens | Tokens, StoredTokens | Tokens]:
    if isinstance(tokens, StoredTokens):
        return tokens.part(0, place), tokens.part(place, len(tokens))
    return tokens[:place], tokens[place:]


def _with_hash(text: TokenFile, run_dir: str, say: Callable[[str], None]) -> tuple[TokenFile, bool]:
    """The text with its hash: the header's, the one that an earlier run has noted, or computed now and noted.

    Returns: that; whether the next run finds it.
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
        # Who has made it may have noted it, and forgotten it, since this rank looked.
        made = noted_sha256(tokens, places) or content_sha256(tokens)
        check_unchanged()
        return made

    sha256 = once_per_host(tokens, make)
    check_unchanged()
    is_noted = any(note_sha256(tokens, sha256, place) for place in places)
    if is_noted:
        forget_on_host(tokens)
    return text._replace(sha256=sha256), is_noted


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
