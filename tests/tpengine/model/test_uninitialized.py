"""Rung: pure. What is built uninitialized has the shapes of what is drawn; nothing that holds a value is left out."""

from __future__ import annotations

import torch
from torch import nn
from tpkernels.exchange.communicator import Communicator

from tpengine.config import ModelConfig
from tpengine.model.meta_modules import Uninitialized
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer


def test_only_what_is_drawn_and_joins_of_it_are_left_out() -> None:
    ones = torch.ones(2, 3)
    with Uninitialized():
        drawn, other = (nn.Parameter(torch.full((n, 3), 7.0)) for n in (2, 4))
        nn.init.normal_(drawn)
        nn.init.normal_(other)
        assert (drawn == 7).all()
        joined = torch.cat([drawn.detach(), other.detach()])
        mixed = torch.cat([drawn.detach(), ones])
        again = torch.cat([joined, drawn.detach()])
        assert joined.shape == (6, 3) and again.shape == (8, 3) and mixed[2:].equal(ones)
        assert torch.cat([ones, ones]).equal(torch.ones(4, 3))
        # Along another dim the values are joined: no layer asks for that.
        assert (torch.cat([drawn.detach(), drawn.detach()], dim=1) == 7).all()
    before = torch.cat([drawn.detach(), other.detach()])
    assert (before == 7).all()
    assert not (nn.init.normal_(drawn) == 7).any()


def test_a_model_that_is_built_uninitialized_and_filled_is_the_model() -> None:
    model = ModelConfig(num_layers=2)
    drawn = Transformer(FastParts(model, Communicator(None)))
    with Uninitialized():
        filled = Transformer(FastParts(model, Communicator(None)))
    assert filled.held.keys() == drawn.held.keys()
    for net in (drawn, filled):
        net.initialise(3)
    tokens = torch.arange(64)
    assert torch.equal(filled(tokens, 64), drawn(tokens, 64))
