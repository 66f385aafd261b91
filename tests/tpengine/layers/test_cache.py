"""Rung: pure. Tokens that follow on a cache get the logits that they get in a whole sequence, in float64.

What only a GPU checks: the same through the kernels. Over tp and in a pipeline: tests/tpengine/generation.
"""

from __future__ import annotations

import pytest
import torch
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.transformers_models import built, config_json, ours
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.registry import model_of
from tpengine.layers import KeyValueCache
from tpengine.model.exact import Shards
from tpengine.model.parts import ExactParts
from tpengine.model.transformer import Transformer

SEQ = 14


def model_with(architecture: str) -> Transformer:
    config = drawn_config(architecture, 1)
    return ours(model_of(config_json(config)), built(config, 1).state_dict())


def drawn_tokens(net: Transformer, *shape: int) -> Tensor:
    return torch.randint(0, net.model.vocab_size, shape, generator=torch.Generator().manual_seed(3))


def followed(net: Transformer, tokens: Tensor, pieces: list[int], cache: KeyValueCache) -> Tensor:
    """Logits [B, S, V] of tokens [B, S], computed in pieces of so many tokens."""
    found = []
    for piece in tokens.split(pieces, dim=1):
        cache.follow(piece.shape[1])
        y = net(piece.flatten(), cache)
        y = torch.cat(list(y), dim=1) if y.dim() == 3 else y
        found.append(y.unflatten(0, (len(tokens), -1)))
    return torch.cat(found, dim=1)


@torch.no_grad()
def largest_difference(net: Transformer, pieces: list[int]) -> float:
    tokens = drawn_tokens(net, 2, SEQ)
    want = net(tokens.flatten(), SEQ).unflatten(0, (2, SEQ))
    got = followed(net, tokens, pieces, KeyValueCache(SEQ, [SEQ] * 2))
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("pieces", [[1] * SEQ, [5, 1, 1, 7], [13, 1], [SEQ]], ids=str)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_follows_on_a_cache_is_what_stands_in_a_sequence(architecture: str, pieces: list[int]) -> None:
    """Windows of the drawn models are shorter than what is cached, and than a piece."""
    assert largest_difference(model_with(architecture), pieces) <= 1e-12


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
@torch.no_grad()
def test_sequences_of_several_lengths_do_not_see_their_padding(architecture: str) -> None:
    net, lengths = model_with(architecture), [4, 9, 1]
    tokens = drawn_tokens(net, 3, SEQ)
    cache = KeyValueCache(SEQ, lengths)
    got = followed(net, tokens, [9, 1, 1, 3], cache)
    for row, first in enumerate(max(lengths) - length for length in lengths):
        want = net(tokens[row, first:], SEQ - first)
        assert (got[row, first:] - want).abs().max() <= 1e-12 * want.abs().max()


@torch.no_grad()
def test_a_layer_of_exact_mode_has_the_cache_of_each_shard() -> None:
    sizes = dict(n_head=2, n_embd=24, n_inner=32, n_positions=SEQ)
    model = model_of(config_json(drawn_config("gpt2", 1, **sizes)))
    exact = Transformer(ExactParts(model, Shards(Communicator(None), 2), dtype=torch.float64))
    exact.initialise(0)
    tokens = drawn_tokens(exact, 2, SEQ)
    want = torch.cat(list(exact(tokens.flatten(), SEQ)), dim=1).unflatten(0, (2, SEQ))
    got = followed(exact, tokens, [5, 1, 8], KeyValueCache(SEQ, [SEQ] * 2))
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()


def test_a_cache_refuses_more_than_it_has_room_for() -> None:
    cache = KeyValueCache(4, [3])
    cache.follow(3)
    with pytest.raises(ValueError) as refused:
        cache.follow(2)
    assert str(refused.value) == "a cache has room for 4 tokens: 5 are too many: make a larger one"


@pytest.mark.parametrize("mutation", ["positions begin anew", "keys are not kept", "padding is seen"])
def test_a_mutation_moves_logits(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, places = model_with("gpt2"), KeyValueCache.places.fget
    assert places is not None

    def anew(cache: KeyValueCache) -> Tensor:
        return places(cache) - cache.num_held

    def new_alone(cache: KeyValueCache, layer: torch.nn.Module, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(k, v)]

    if mutation == "padding is seen":
        tokens = drawn_tokens(net, 2, SEQ)
        with torch.no_grad():
            want = net(tokens[1, 3:], SEQ - 3)
            got = followed(net, tokens, [9, 5], KeyValueCache(SEQ, [SEQ, SEQ]))[1, 3:]
        difference = float((got - want).abs().max() / want.abs().max())
    else:
        assert largest_difference(net, [5, 9]) <= 1e-12
        begins_anew = mutation == "positions begin anew"
        name, broken = ("places", property(anew)) if begins_anew else ("extend", new_alone)
        monkeypatch.setattr(KeyValueCache, name, broken)
        difference = largest_difference(net, [5, 9])
    assert difference > 1e-3
