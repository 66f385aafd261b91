"""Rung: pure. Measuring a model leaves it as it was; cuts follow costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpengine.modules.cut import cut_by_cost, cut_by_hand, profile


def test_shapes_and_dtypes_at_every_boundary() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), nn.Dropout()
    )
    outputs = [module.output for module in profile(model, torch.randn(2, 3, 8, 8))]
    assert [output.shape for output in outputs] == [(2, 4, 6, 6), (2, 4, 6, 6), (2, 4, 3, 3), (2, 36), (2, 5), (2, 5)]
    assert {output.dtype for output in outputs} == {"float32"}
    tokens = profile(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.tensor([[1, 2, 6]]))
    assert [module.output.shape for module in tokens] == [(1, 3, 4), (1, 3, 7)]


def test_a_module_of_integers_is_told_apart() -> None:
    class Round(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.round().long() % 5

    model = nn.Sequential(nn.Linear(3, 3), Round(), nn.Embedding(5, 2))
    assert [module.differentiable for module in profile(model, torch.rand(4, 3))] == [True, False, True]


def test_nothing_of_the_measurement_stays() -> None:
    """Gradients, running statistics, generators and weights are as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sample = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    copy = sample.clone()
    profile(model, sample)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(sample, copy)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0)) and model[3].weight.grad is None


def test_a_failing_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        profile(model, torch.randn(5, 4))
    assert model[0].num_batches_tracked.item() == 0


def test_costs_are_measured() -> None:
    """A module with a thousand times the work of another costs more, whatever else the machine does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 8))
    seconds = [module.cost for module in profile(model, torch.randn(64, 8), measured=True)]
    assert seconds[2] > 5 * seconds[0]
    assert cut_by_cost(seconds, range(3)) == ((0, 2), (2, 3), (3, 4))


def test_an_expensive_module_stands_alone() -> None:
    assert cut_by_cost([1, 1, 10, 1, 1], range(3)) == ((0, 2), (2, 3), (3, 5))
    assert cut_by_cost([10, 1, 1, 1, 1, 1], range(2)) == ((0, 1), (1, 6))
    with pytest.raises(ValueError, match="every chunk needs a layer"):
        cut_by_cost([1, 1], range(3))


def test_a_cut_by_hand() -> None:
    assert cut_by_hand([1, 3, 2], 6, 3) == ((0, 1), (1, 4), (4, 6))
    for sizes in ([1, 2], [1, 2, 4], [0, 3, 3], [6]):
        with pytest.raises(ValueError, match="balanced by cost"):
            cut_by_hand(sizes, 6, 3)
