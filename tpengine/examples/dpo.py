"""Direct preference optimisation: answers that people chose become likelier than those they rejected.

    loss = sum over pairs of -log sigmoid(beta * ((p - r)[chosen] - (p - r)[rejected]))
    p, r[document] = sum over its answer's tokens of log-probabilities: the model's, and those of where it began

A sample is a pair: two documents of half a sequence each, the chosen one first, padded. `write` makes such a file, with
the answers' tokens as column `weights`. The second command below adds the column `reference`; that of r is computed
once. Source: Rafailov et al., arXiv 2305.18290, equation 7.

    python -c 'from tpengine.examples.dpo import write; write("pairs.tokens", 64, 32, my_pairs)'
    tpengine logprobs RUN pairs.tokens --out reference
    torchrun --nproc-per-node 2 -m tpengine.examples.dpo --model.path RUN --data.path pairs.tokens --train.seq-len 64
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import tpengine
from tpengine import Column, LastOutput, MicroBatch, TokenWriter

BETA = 0.1
Answer = tuple[Sequence[int], Sequence[int]]


def write(path: str | Path, vocab_size: int, half: int, pairs: Iterable[tuple[Answer, Answer]]) -> None:
    """Write pairs of (prompt, answer), the chosen one first, in documents of `half` tokens; longer answers are cut."""
    with TokenWriter(path, vocab_size, [Column("weights", "uint8")]) as writer:
        for pair in pairs:
            for prompt, answer in pair:
                if not 0 < len(prompt) < half:
                    raise ValueError(f"a prompt must leave room for its answer: {len(prompt)} of {half} tokens: cut it")
                tokens, weights = [*prompt, *answer][:half], ([0] * len(prompt) + [1] * len(answer))[:half]
                rest = [0] * (half - len(tokens))
                writer.add(tokens + rest, weights=weights + rest)


def margins(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return beta * ((p - r)[chosen] - (p - r)[rejected]) of each pair."""
    gained = output.token_logprobs(batch.labels) - batch.columns["reference"]
    assert batch.weights is not None, "`count` refuses such a text"
    chosen, rejected = output.sum_by_document(batch.weights * gained).view(-1, 2).unbind(1)
    return BETA * (chosen - rejected)


def loss(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return the sum over pairs."""
    return -torch.nn.functional.logsigmoid(margins(output, batch)).sum()


def preferred(output: LastOutput, batch: MicroBatch) -> Tensor:
    """Return how many chosen answers have gained more than those rejected."""
    return (margins(output, batch) > 0).sum()


def count(batch: MicroBatch) -> float:
    """Return the number of pairs: samples; ValueError where one is not two halves."""
    starts = [] if batch.documents is None else batch.documents.starts.tolist()
    if batch.weights is None or starts != [*range(0, len(batch.tokens) + 1, max(1, batch.seq // 2))]:
        raise ValueError(
            f"a sample must be a pair, two documents of {batch.seq // 2} tokens with weights: got documents at "
            f"{starts[:4]}, {'without' if batch.weights is None else 'with'} weights: write the text with `write`, and "
            "set train.seq_len to twice its half"
        )
    return len(batch.tokens) / batch.seq


data = {"packing": "documents", "columns": "reference", "held_out_fraction": 0.0}
train = {"eval_micro_batches": 0, "sample_tokens": 0}
if __name__ == "__main__":
    metrics = {"preferred": preferred, "margin": lambda output, batch: margins(output, batch).sum()}
    tpengine.run(sys.argv[1:], loss=loss, count=count, metrics=metrics, train=train, data=data)
