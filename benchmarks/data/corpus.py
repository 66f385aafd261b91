"""What the data path is measured with: many files of documents, and a text with a tokenizer trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tpengine.data import stdlib_text, write_tokens
from tpengine.files import write_beside

_VOCABULARY = 256


def write_files(directory: Path, num_files: int, num_documents: int) -> int:
    """Write token files of equally many documents of 16 to 112 drawn ids; return the number of tokens.

    Args:
        directory: exists, and is empty.
        num_documents: of all files.
    """
    generator = np.random.default_rng(0)
    total = 0
    for number in range(num_files):
        lengths = generator.integers(16, 113, num_documents // num_files)
        tokens = generator.integers(0, _VOCABULARY, int(lengths.sum()), dtype=np.uint8)
        path = directory / f"part-{number:05}.tokens"
        total += write_tokens(path, tokens, _VOCABULARY, lengths=lengths.tolist)
    return total


def write_text(path: Path, num_bytes: int) -> list[str]:
    """Write the standard library's text as JSON lines of some 4,000 characters, over and over; return the documents."""
    text = stdlib_text().tobytes().decode("utf-8", "ignore")
    pieces = [text[first : first + 4000] for first in range(0, len(text), 4000)]
    documents: list[str] = []
    size = 0
    while size < num_bytes:
        documents.append(pieces[len(documents) % len(pieces)])
        size += len(documents[-1])
    write_beside(path, "".join(json.dumps({"text": text}) + "\n" for text in documents).encode())
    return documents


def train_tokenizer(directory: Path, documents: list[str], vocab_size: int) -> None:
    """Write a tokenizer.json of byte pairs with GPT-2's words, trained on a part of the documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents[:500], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
