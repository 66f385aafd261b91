"""Mixtures for tests: every token of a source is its own number, so that a sample says where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tpengine.config import Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import write_tokens

# Tokens of source k begin with k times this.
APART = 1_000_000


def write_mixture(
    directory: Path,
    documents: Sequence[Sequence[int]],
    weights: Sequence[float],
    epochs: Sequence[float] = (),
    vocab_size: int = 0,
    files: Sequence[int] = (),
) -> Path:
    """Write the token files of each source, and the table that names them s0, s1, ...; return its path.

    Args:
        documents: the lengths of the documents of each source.
        epochs: of each; default without end.
        vocab_size: ids are the numbers of tokens modulo this; 0 for numbers that say their source.
        files: of each source; default one.
    """
    lines = []
    for source, lengths in enumerate(documents):
        tokens = np.arange(sum(lengths), dtype=np.int64) + source * APART
        of_vocab = tokens % vocab_size if vocab_size else tokens
        num_files = min(files[source], len(lengths)) if files else 1
        paths = [directory / f"s{source}.tokens", *(directory / f"s{source}.{more}" for more in range(1, num_files))]
        begin = 0
        for number, path in enumerate(paths):
            own = lengths[number * len(lengths) // num_files : (number + 1) * len(lengths) // num_files]
            held, begin = of_vocab[begin : begin + sum(own)], begin + sum(own)
            write_tokens(path, held, vocab_size or len(documents) * APART, lengths=partial(list, own))
        at_most = epochs[source] if epochs else "inf"
        lines.append(
            f's{source} = {{ path = "{",".join(map(str, paths))}", weight = {weights[source]}, epochs = {at_most} }}\n'
        )
    (directory / "mix.toml").write_text("".join(lines))
    return directory / "mix.toml"


def mixed_config(mixture: Path, num_sources: int, seq_len: int, **data: object) -> Config:
    """A configuration that reads such a mixture."""
    return Config(
        model=ModelConfig(vocab_size=num_sources * APART),
        train=TrainConfig(seq_len=seq_len, micro_batch_size=2, num_micro_batches=2),
        data=replace(DataConfig(mixture=str(mixture), held_out_fraction=0.2), **data),  # type: ignore[arg-type]
    )
