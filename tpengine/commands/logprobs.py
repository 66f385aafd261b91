"""`tpengine logprobs`: how likely a model finds each token of token files, as a column beside them. No torch.

Ranks are processes of this host, as `generate` starts them. This process reads the text and writes the column; each
call is one pass over the samples of all replicas. The token that begins a document has 0: nothing predicts it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tpengine.commands.generate import FoundModel, GenerateOptions, find_model, num_threads_of
from tpengine.config import IGNORED_LABEL, Config, validate
from tpengine.data import Column, Source, open_source, write_column
from tpengine.data.columns import column_path
from tpengine.data.source_files import SourceFile
from tpengine.data.whole_text import Stretch, stretches_of
from tpengine.distributed.local_ranks import Ranks
from tpengine.files import try_to_write
from tpengine.training.samples import WEIGHTS

_RANK = "tpengine.commands.logprobs_rank:scoring_rank"
# Of a directory, which does not say how long its sequences were.
_SEQ_LEN = 2048
# Tokens of a micro-batch, if a sequence is no longer: enough for full products, and logits of a GB.
_TOKENS_OF_MICRO_BATCH = 4096
# Micro-batches of a pass, for each stage: 4 stages idle for 3 of 19.
_MICRO_BATCHES_PER_STAGE = 4
# Passes whose samples are fitted together: the last one is filled up with samples of padding.
_PASSES = 8


@dataclass(frozen=True)
class LogprobsOptions:
    """What to compute; see the command's help."""

    model: str
    data: str
    out: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    seq_len: int = 0
    dtype: str = ""
    device: str = "auto"
    architecture: str = ""


@dataclass
class _Done:
    """What was computed: tokens that are labels, the sum of their log-probabilities, and since when."""

    num: int = 0
    total: float = 0.0
    began: float = field(default_factory=time.perf_counter)


def write_logprobs(options: LogprobsOptions) -> None:
    """Compute the log-probabilities of all tokens of token files, and write them beside each.

    Raises:
        ValueError: what a user can get wrong, in one line.
        RanksFailed: a rank raised or died.
    """
    column, source = Column(options.out), open_source(options.data)
    found = find_model(
        GenerateOptions(
            options.model,
            tp=options.tp,
            pp=options.pp,
            dtype=options.dtype,
            device=options.device,
            architecture=options.architecture,
        )
    )
    _check(column, source, found.config)
    config = _config_of(found, options, source.num_tokens)
    world = options.tp * options.pp * options.dp
    with Ranks(world, _RANK, config, num_threads_of(world)) as ranks:
        (problem, *_) = ranks.call("prepare")
        if problem:
            raise ValueError(problem)
        for file in source.files:
            done = _Done()
            write_column(file, column, _logprobs(ranks, file, config, done))
            seconds = time.perf_counter() - done.began
            print(
                f"{column_path(file.path, column.name)}: {len(file.tokens):,} tokens, {done.num:,} of them predicted, "
                f"mean {done.total / max(1, done.num):.4f} nats, {len(file.tokens) / seconds:,.0f} tokens/s"
            )


def _check(column: Column, source: Source, config: Config) -> None:
    """Raise ValueError for a column that cannot be written, or tokens that the model does not have."""
    column.check()
    if column.name == WEIGHTS:
        raise ValueError(
            f"--out names a column of log-probabilities: {WEIGHTS} are what a loss is multiplied by: use ref_logprobs"
        )
    vocab_size = config.model.vocab_size
    for file in source.files:
        place = column_path(file.path, column.name)
        if place.exists():
            raise ValueError(
                f"a column must be new: {place} is there, perhaps of a call that was ended: remove it first, or choose "
                "another --out"
            )
        try:
            try_to_write(place)
        except OSError as error:
            raise ValueError(
                f"a column is written beside its tokens: {place}: {error.strerror}: make that possible, or copy the "
                "text to another directory"
            ) from None
        if file.about.largest >= vocab_size:
            raise ValueError(
                f"tokens must be below the model's vocabulary, {vocab_size}: {file.path} has {file.about.largest}: use "
                "a text of the model's tokenizer"
            )


def _config_of(found: FoundModel, options: LogprobsOptions, num_tokens: int) -> Config:
    """Return the configuration of a pass: as many samples as fill the stages, and no more than there are."""
    most = found.config.model.details.max_positions or _SEQ_LEN
    seq_len = options.seq_len or found.trained_on or min(_SEQ_LEN, most)
    num = _MICRO_BATCHES_PER_STAGE * options.pp if options.pp > 1 else 1
    at_most = -(-num_tokens // (seq_len * num * options.dp))
    size = max(1, min(_TOKENS_OF_MICRO_BATCH // seq_len, at_most))
    train = replace(found.config.train, seq_len=seq_len, micro_batch_size=size, num_micro_batches=num)
    parallel = replace(found.config.parallel, dp=options.dp)
    return validate(replace(found.config, train=train, parallel=parallel), options.tp * options.pp * options.dp)


def _logprobs(ranks: Ranks, file: SourceFile, config: Config, done: _Done) -> Iterator[NDArray[np.float32]]:
    """Yield the log-probabilities of a file's tokens, in order."""
    train = config.train
    num_samples = (config.parallel.dp or 1) * train.num_micro_batches * train.micro_batch_size
    # Nothing is before the first token.
    yield np.zeros(1, dtype=np.float32)
    for stretch in stretches_of(file, train.seq_len, _PASSES * num_samples * train.seq_len):
        _check_vocabulary(stretch, file, config.model.vocab_size)
        passes = range(0, len(stretch.tokens), num_samples)
        values = np.concatenate([_pass(ranks, stretch, first, num_samples) for first in passes])
        done.num += int((stretch.labels != IGNORED_LABEL).sum())
        done.total += float(values.sum(dtype=np.float64))
        yield stretch.of_tokens(values)
        _show(file, stretch)


def _pass(ranks: Ranks, stretch: Stretch, first: int, num: int) -> NDArray[np.float32]:
    """Return the log-probabilities of labels of samples first, first + 1, ...; a pass has always as many samples."""
    some = slice(first, first + num)
    tokens, labels, starts = stretch.tokens[some], stretch.labels[some], stretch.starts[some]
    missing = num - len(tokens)
    padded = ((0, missing), (0, 0))
    tokens = np.pad(tokens, padded)
    labels = np.pad(labels, padded, constant_values=IGNORED_LABEL)
    inner = [*starts, *[np.empty(0, np.int64)] * missing] if any(map(len, starts)) else []
    answers = ranks.call("score", tokens.astype(np.int32), labels.astype(np.int32), inner)
    # Ranks are numbered stage by stage, replica by replica within one.
    found = np.concatenate([answer for answer in answers if answer is not None])
    return found[: num - missing]


def _check_vocabulary(stretch: Stretch, file: SourceFile, vocab_size: int) -> None:
    if (largest := max(int(stretch.tokens.max()), int(stretch.labels.max()))) >= vocab_size:
        raise ValueError(
            f"tokens must be below the model's vocabulary, {vocab_size}: {file.path} has {largest} behind token "
            f"{stretch.first - 1}: use a text of the model's tokenizer"
        )


def _show(file: SourceFile, stretch: Stretch) -> None:
    if sys.stderr.isatty():
        end, of_all = stretch.first + stretch.num, len(file.tokens)
        print(f"\rtpengine: {end:,} of {of_all:,} tokens", end="\n" if end >= of_all else "", file=sys.stderr)
