"""Rung: pure. Documents packed into a micro-batch give the logits and gradients that each gives alone, in float64.

What only a GPU checks: the same through the kernels.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.transformers_models import built, config_json, ours
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.registry import model_of
from tpengine.layers import Attention, Documents
from tpengine.model.transformer import Transformer

SEQ = 14
# Two sequences: documents of 1 token, of a few, and of a whole sequence.
STARTS = [0, 5, 6, 14, 28]
# Which factors of longrope are taken follows from the sequence, and not from its documents: here all are short.
GIVEN = {"phi3": {"original_max_position_embeddings": 64}}


def model_with(architecture: str, seed: int = 1) -> Transformer:
    config = drawn_config(architecture, seed, **GIVEN.get(architecture, {}))
    return ours(model_of(config_json(config)), built(config, seed).state_dict())


def alone(net: Transformer, tokens: Tensor) -> Tensor:
    """Logits of each document by itself."""
    return torch.cat([net(tokens[first:last], last - first) for first, last in pairwise(STARTS)])


def packed(net: Transformer, tokens: Tensor) -> Tensor:
    net.position.documents = Documents.of(STARTS, SEQ)
    y: Tensor = net(tokens, SEQ)
    net.position.documents = None
    return y


def largest_difference(net: Transformer) -> float:
    tokens = torch.randint(0, net.model.vocab_size, (STARTS[-1],), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = alone(net, tokens)
        return float((packed(net, tokens) - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_packed_document_gives_what_it_gives_alone(architecture: str) -> None:
    net, other = model_with(architecture), model_with(architecture)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, net.model.vocab_size, (STARTS[-1],), generator=generator)
    want = alone(net, tokens)
    got = packed(other, tokens)
    assert (got - want).abs().max() <= 1e-10 * want.abs().max()

    weights = torch.randn(want.shape, generator=generator, dtype=want.dtype)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, parameter), other_parameter in zip(net.held.items(), other.held.values(), strict=True):
        assert parameter.grad is not None and other_parameter.grad is not None
        error = (other_parameter.grad - parameter.grad).abs().max()
        assert error <= 1e-10 * max(1.0, float(parameter.grad.abs().max())), name


@pytest.mark.parametrize("mutation", ["places go on", "no border is seen"])
def test_a_mutation_moves_logits(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model_with("llama")
    assert largest_difference(net) <= 1e-10
    places, starts = torch.arange(STARTS[-1]) % SEQ, torch.tensor([0, SEQ, 2 * SEQ], dtype=torch.int32)
    true = Documents.of(STARTS, SEQ)
    broken = true._replace(places=places) if mutation == "places go on" else true._replace(starts=starts)
    monkeypatch.setattr(Documents, "of", lambda *_: broken)
    # Where a document's positions all shift, rotary scores, which depend on differences alone, are as before.
    net = model_with("gpt2") if mutation == "places go on" else net
    assert largest_difference(net) > 1e-3


def test_what_is_no_list_of_documents_is_refused() -> None:
    for starts in ([0, 3, 3, 8], [1, 8], [0], [0, 15, 28], [0, 9, 5, 14]):
        with pytest.raises(ValueError, match="documents begin at 0, ascend, and hold at most a sequence"):
            Documents.of(starts, SEQ)
    layer = Attention(16, 2, 2, Communicator(None))
    with pytest.raises(ValueError, match="documents must be those of all ranks' tokens: 28 in documents, 14"):
        layer(torch.zeros(14, 16), Documents.of(STARTS, SEQ))
