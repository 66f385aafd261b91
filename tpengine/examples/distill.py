"""Distillation: a student learns the likeliest next tokens of a teacher, which a token file has as columns.

    loss = sum over valid t, k < K of q[t, k] * (log q[t, k] - log p[t, ids[t, k]])
    q = exp(top_logprobs), what the teacher had of its K likeliest ids; p the student's

`write` takes tokens[n], ids[n, K] and logprobs[n, K] of documents, row t said of token t by what is before it: columns
are handed out where their token is the label. Source: Hinton et al., arXiv 1503.02531; here of the stored ids alone.

    torchrun --nproc-per-node 2 -m tpengine.examples.distill --data.path teacher.tokens
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

import tpengine
from tpengine import IGNORED_LABEL, Column, LastOutput, MicroBatch, TokenWriter

Document = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def write(path: str | Path, vocab_size: int, width: int, documents: Iterable[Document]) -> None:
    """Write (tokens, ids, logprobs) of documents, `width` of both for each token."""
    columns = [Column("top_ids", "int32", width), Column("top_logprobs", "float32", width)]
    with TokenWriter(path, vocab_size, columns) as writer:
        for tokens, ids, logprobs in documents:
            writer.add(tokens, top_ids=ids, top_logprobs=logprobs)


def loss(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return the divergence of the student from the teacher over valid tokens."""
    teacher = batch.columns["top_logprobs"]
    ids = batch.columns["top_ids"].long().masked_fill((batch.labels == IGNORED_LABEL)[:, None], IGNORED_LABEL)
    # One id of each token at a time: each gathers 4 numbers of a token, and no logits.
    student = torch.stack([output.token_logprobs(of_rank) for of_rank in ids.unbind(1)], 1)
    return (teacher.exp() * (teacher - student) * (ids != IGNORED_LABEL)).sum()


def agreed(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return the student's probability of the teacher's first id."""
    valid = batch.labels != IGNORED_LABEL
    return (output.token_logprobs(batch.columns["top_ids"][:, 0].long()).exp() * valid).sum()


data = {"packing": "documents", "columns": "top_ids,top_logprobs"}
if __name__ == "__main__":
    tpengine.run(sys.argv[1:], loss=loss, metrics={"agreed": agreed}, data=data)
