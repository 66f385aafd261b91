"""Rung: pure. Sums by document, parts of an output, and what is computed once."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Documents
from tpengine.layers.token_values import token_logprobs
from tpengine.training import last_output
from tpengine.training.last_output import LastOutput

T, VOCAB = 12, 5


def logits() -> Tensor:
    return torch.randn(T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def output_of(z: Tensor, documents: Documents | int = 6) -> LastOutput:
    return LastOutput(z, VOCAB, Communicator(None), documents, hidden=z[:, :3])


def test_sums_by_document_and_their_gradient() -> None:
    values = torch.arange(1.0, T + 1, dtype=torch.float64, requires_grad=True)
    starts = [0, 2, 3, 6, 12]
    for documents, ends in ((Documents.of(starts, 6), starts), (6, [0, 6, 12])):
        found = output_of(logits(), documents).sum_by_document(values)
        want = torch.stack([values[first:last].sum() for first, last in pairwise(ends)])
        assert torch.equal(found, want)
        weights = torch.arange(2.0, 2 + len(want), dtype=torch.float64)
        (got,), (wanted,) = (torch.autograd.grad((of * weights).sum(), values) for of in (found, want))
        assert torch.equal(got, wanted)


def test_a_part_is_what_the_whole_has_of_its_tokens() -> None:
    z, rows, labels = logits(), torch.tensor([0, 1, 2, 9, 10, 11]), torch.arange(T) % VOCAB
    whole, part = output_of(z), output_of(z).of_rows(rows, 3)
    assert part.num_tokens == 6
    assert torch.equal(part.token_logprobs(labels[rows]), whole.token_logprobs(labels)[rows])
    for values in ("entropy", "logits", "hidden"):
        assert torch.equal(getattr(part, values)(), getattr(whole, values)()[rows])
    losses = torch.nn.functional.cross_entropy(z[rows, :VOCAB], labels[rows], reduction="none")
    weights = torch.arange(6.0)
    torch.testing.assert_close(part.cross_entropy(labels[rows], weights), (losses * weights).sum())
    assert part.sum_by_document(torch.ones(6)).tolist() == [3, 3]


def test_what_is_asked_for_twice_is_computed_once_but_with_a_gradient_where_one_is_needed() -> None:
    leaf, labels = logits().requires_grad_(), torch.arange(T) % VOCAB
    output = output_of(leaf * 1)
    with patch.object(last_output, "token_logprobs", side_effect=token_logprobs) as compute:
        with torch.no_grad():
            assert not output.token_logprobs(labels).requires_grad
        recorded = output.token_logprobs(labels)
        assert recorded.requires_grad and compute.call_count == 2
        with torch.no_grad():
            output.token_logprobs(labels)
        assert output.token_logprobs(labels) is recorded and compute.call_count == 2
        output.token_logprobs(labels.clone())
        assert compute.call_count == 3


@pytest.mark.parametrize("ask", ["token_logprobs", "sum_by_document", "cross_entropy"])
def test_values_are_of_each_token(ask: str) -> None:
    with pytest.raises(ValueError, match=r"are one of each token of the micro-batch: got \(3,\) for 12 tokens"):
        getattr(output_of(logits()), ask)(torch.zeros(3, dtype=torch.int64))
