"""Text as tokens: the token file, where the standard text comes from, and which sample is which.

A token file is a 64-byte little-endian header (magic, version, dtype code, vocabulary, count, zeros), then the
tokens as uint8, uint16 or uint32. It is memory-mapped, so opening costs nothing and ranks share its pages.

Nothing here has state: the order of samples is a function of (seed, global sample index) alone, so every layout
of ranks, and every restart, sees the same global batches. Turning arrays into tensors is left to the trainer.

The decision a reader will question: the order comes from a keyed bijection (a small Feistel network) instead of
a stored shuffle. It needs no memory for a text of any length, and any sample can be asked for directly.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.config import Config

Tokens = NDArray[np.unsignedinteger[Any]]
Batch = tuple[NDArray[np.int64], NDArray[np.int64]]

# Label of a target that does not count in the loss.
IGNORED_LABEL = -100

_MAGIC, _VERSION = b"TPTOKENS", 1
_HEADER = struct.Struct("<8sIIQQ")
_HEADER_BYTES = 64
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_BYTE_VALUES = 256
_READ_BYTES = 1 << 24


class TokenFile(NamedTuple):
    """Tokens, read-only, and the number of values they can take."""

    tokens: Tokens
    vocab_size: int


def write_tokens(path: str | Path, tokens: NDArray[Any] | Iterable[NDArray[Any]], vocab_size: int) -> int:
    """Write a token file, atomically: readers see the old file or the whole new one.

    Args:
        path: the file; its directory exists.
        tokens: integers in [0, vocab_size): one array, or its pieces in order, of which one at a time is held.
        vocab_size: decides the dtype: the smallest that holds vocab_size - 1.
    Returns: number of tokens written.
    Raises: ValueError: a token outside the vocabulary, no tokens, a vocabulary beyond uint32, no such directory.
    """
    path = Path(path)
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be at least 1 and at most 2**32: got {vocab_size}: use 256 for bytes")
    if not path.parent.is_dir():
        raise ValueError(f"the token file's directory must exist: {path.parent}: create it first")
    dtype = next(d for code, d in _DTYPES.items() if vocab_size <= 256**code)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(bytes(_HEADER_BYTES))
            count = 0
            for piece in [tokens] if isinstance(tokens, np.ndarray) else tokens:
                _check_tokens(piece, vocab_size, "vocab_size")
                file.write(np.ascontiguousarray(piece, dtype=dtype).data)
                count += piece.size
            if not count:
                raise ValueError(f"a token file must hold at least 1 token: got none for {path}: check the source")
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, vocab_size, count))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
    return count


def open_tokens(path: str | Path) -> TokenFile:
    """Map a token file after checking its header and size.

    Raises: ValueError: no such file, or not a whole token file; one line with path, values and remedy.
    """
    path = Path(path)
    remedy = f"write it with: tpengine data --from DIR --out {path}"
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < _HEADER_BYTES:
        raise ValueError(f"a token file has at least {_HEADER_BYTES} bytes: {path} has {len(header)}: {remedy}")
    magic, version, code, vocab_size, count = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise ValueError(f"a token file starts with {_MAGIC!r}: {path} starts with {magic!r}: {remedy}")
    if version != _VERSION:
        raise ValueError(f"token file version must be {_VERSION}: {path} has {version}: {remedy}")
    if code not in _DTYPES:
        raise ValueError(f"token dtype code must be 1, 2 or 4 (bytes): {path} has {code}: {remedy}")
    if not 1 <= vocab_size <= 256**code:
        raise ValueError(
            f"the vocabulary must be 1 to {256**code} for {code}-byte tokens: {path} has {vocab_size}: {remedy}"
        )
    if not count:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: {remedy}")
    expected = _HEADER_BYTES + count * code
    if size != expected:
        raise ValueError(
            f"a token file of {count} {code}-byte tokens has {expected} bytes: {path} has {size}, "
            f"{'cut short' if size < expected else 'too long'}: {remedy}"
        )
    return TokenFile(np.memmap(path, _DTYPES[code], "r", _HEADER_BYTES, (count,)), vocab_size)


def stdlib_text() -> NDArray[np.uint8]:
    """Read the top-level *.py files of Python's standard library, sorted by name, as bytes (about 4.7 MB).

    Raises: ValueError: this Python has none as files.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(directory.glob("*.py"), key=lambda path: path.name))
    if not text:
        raise ValueError(f"the standard library must be *.py files: none in {directory}: use --data.path FILE")
    return np.frombuffer(text, dtype=np.uint8)


def bytes_of_directory(
    directory: str | Path, pattern: str = "**/*", skip: Path | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Read the regular files under a directory, sorted by relative path, as arrays of bytes.

    Args:
        directory: where to look; links to directories are not followed.
        pattern: glob relative to it; ** stands for any depth.
        skip: a file to leave out, such as the output of an earlier call.
    Returns: pieces of at most 16 MiB, read one at a time; which files they come from is settled before.
    Raises: ValueError: no such directory, a malformed pattern, nothing but empty files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"--from must be a directory: got {directory}: check the path")
    try:
        found = [path for path in directory.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError):
        raise ValueError(f"--pattern must be a relative glob: got {pattern!r}: use '**/*'") from None
    paths = sorted((p for p in found if skip is None or p.resolve() != skip.resolve()), key=Path.as_posix)
    if not any(path.stat().st_size for path in paths):
        raise ValueError(
            f"--from must have a file that is not empty: {len(paths)} files match {pattern!r} in {directory}, "
            "0 bytes: use '**/*' or another directory"
        )
    return _read_pieces(paths)


def _read_pieces(paths: Iterable[Path]) -> Iterator[NDArray[np.uint8]]:
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                yield np.frombuffer(piece, dtype=np.uint8)


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

    tokens: Tokens
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
        Raises: ValueError: a token that the model's vocabulary lacks; no whole window.
        """
        if not self.num_windows:
            raise ValueError(
                f"a window must fit the text: {len(self.tokens)} tokens, seq_len {self.seq_len} and one more: "
                "use a smaller seq_len or more text"
            )
        starts = self._windows(first_sample_index, count) * self.seq_len
        text = np.asarray(self.tokens[starts[:, None] + np.arange(self.seq_len + 1)])
        _check_tokens(text, self.vocab_size, "model.vocab_size")
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


class Corpus(NamedTuple):
    """A text cut in two."""

    train: Samples
    held_out: Samples


def open_corpus(config: Config) -> Corpus:
    """Open the text of a run: the first share for training, the last held out.

    Args: config: validated; data.path, data.held_out_fraction, data.ignore_token, train.seq_len and train.seed
        are used.
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
    parts = text.tokens[:num_train], text.tokens[num_train:]
    corpus = Corpus(
        Samples(parts[0], train.seq_len, vocab_size, data.ignore_token, train.seed),
        Samples(parts[1], train.seq_len, vocab_size, data.ignore_token),
    )
    needs_held_out = train.eval_micro_batches > 0 or train.sample_tokens > 0
    _check_length("training", corpus.train, config)
    if needs_held_out:
        _check_length("held-out", corpus.held_out, config)
    return corpus


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


def permute(places: NDArray[np.int64], num: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map places in [0, num) to places in [0, num), one to one, in an order drawn by (seed, epoch).

    A balanced Feistel network permutes the smallest power of four that holds num; a place it sends outside is
    sent on until it lands inside (cycle walking), fewer than four times on average.

    Args: places: int64, any shape. num: at least 1. seed, epoch: key.
    Returns: int64, same shape.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3 and 4; the round
        function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"sample order {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    result = _feistel(places.astype(np.uint64), keys, half_bits)
    while (outside := result >= num).any():
        result[outside] = _feistel(result[outside], keys, half_bits)
    return result.astype(np.int64)


_NUM_ROUNDS = 6


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << shift | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; products wrap modulo 2**64."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def _stdlib_tokens() -> TokenFile:
    """The standard text; its vocabulary ends at the largest byte in it, since UTF-8 never uses the last few."""
    text = stdlib_text()
    return TokenFile(text, int(text.max()) + 1)


def _check_tokens(tokens: NDArray[Any], vocab_size: int, name: str) -> None:
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers: got dtype {tokens.dtype}: use uint8, uint16 or uint32")
    for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"tokens must be at least 0 and below {name}: got {token}, {name} {vocab_size}: "
                f"use {name} {max(token, 0) + 1} or other text"
            )


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
