"""Train a classifier of documents: the first ids of the vocabulary are its classes, and the model's head tells them.

The token file has a column `grade`: at each document's last token its class + 1, elsewhere 0. No logits are gathered.

    python -c 'from tpengine.examples.classify import write; write("graded.tokens", 4000)'
    torchrun --nproc-per-node 2 -m tpengine.examples.classify --data.path graded.tokens
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import tpengine
from tpengine import Column, LastOutput, MicroBatch, TokenWriter

CLASSES, VOCAB, SEQ = 3, 64, 32


def write(path: str | Path, num_documents: int, seed: int = 0) -> None:
    """Documents of random tokens; the class is which third of the vocabulary most of them are of."""
    generator = np.random.default_rng(seed)
    with TokenWriter(path, VOCAB, [Column("grade", "uint8")]) as writer:
        for _ in range(num_documents):
            grade, length = int(generator.integers(CLASSES)), int(generator.integers(8, SEQ))
            often, seldom = grade + CLASSES * generator.integers(1, 20, (2, length))
            tokens = np.where(generator.random(length) < 0.7, often, (seldom + 1) % VOCAB)
            writer.add(tokens, grade=[0] * (length - 1) + [grade + 1])


def of_classes(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return log-probabilities among the classes, [T, classes]."""
    each = [output.token_logprobs(torch.full_like(batch.labels, of_class)) for of_class in range(CLASSES)]
    return torch.stack(each, 1).log_softmax(1)


def loss(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return -log p[class] at the place in front of each document's last token."""
    grades = batch.columns["grade"].long()
    logprobs = of_classes(output, batch).gather(1, (grades - 1).clamp_min(0)[:, None])[:, 0]
    return -(logprobs * (grades > 0)).sum()


def right(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return how many documents are told right."""
    return (of_classes(output, batch).argmax(1) == batch.columns["grade"].long() - 1).sum()


def count(batch: MicroBatch) -> float:
    """Return the number of documents that end here; ValueError for a class that there is not."""
    grades = batch.columns["grade"]
    if (largest := int(grades.max())) > CLASSES:
        raise ValueError(
            f"a grade must be 0, or a class + 1, at most {CLASSES}: got {largest}: correct the column, or CLASSES"
        )
    return float((grades > 0).sum())


model = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 96, "num_layers": 1, "vocab_size": VOCAB}
train = {"seq_len": SEQ, "micro_batch_size": 8, "steps": 60, "sample_tokens": 0}
if __name__ == "__main__":
    data = {"packing": "documents", "columns": "grade"}
    tpengine.run(sys.argv[1:], loss=loss, count=count, metrics={"right": right}, model=model, train=train, data=data)
