"""Rung: one process. What scores are made of: how much of a head is rotated, by which frequencies at which length."""

from __future__ import annotations

import pytest
import torch
from tpkernels.ops.rope_tables import LinearScaling, LongRopeScaling, rope_tables

from tpengine.layers.query_scaling import QueryScaling, with_scaled_queries
from tpengine.layers.scaled import scaled
from tpengine.layers.scores import Rotation, rope, tables_of

CPU = torch.device("cpu")


def test_longer_sequences_have_the_longer_scaling() -> None:
    rotation = Rotation(100.0, LinearScaling(2.0), longer=(8, LinearScaling(4.0)))
    for seq, factor in ((8, 2.0), (9, 4.0)):
        want = rope_tables(seq, 4, 100.0, scaling=LinearScaling(factor), dtype=torch.float64, device=CPU)
        got = tables_of(seq, 4, rotation, torch.float64, CPU)
        assert all(map(torch.equal, got, want))


def test_a_part_of_a_head_is_rotated_and_the_rest_stays() -> None:
    x = torch.randn(2, 3, 5, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = tables_of(5, 10, Rotation(size=4), torch.float64, CPU)
    y = rope(x, cos, sin)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[..., :4], rope(x[..., :4], cos, sin))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx[..., 4:], dy[..., 4:])
    assert torch.equal(dx[..., :4], rope(dy[..., :4], cos, -sin))


def test_factors_are_one_of_each_pair() -> None:
    frequencies = torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert LongRopeScaling((2.0, 4.0))(frequencies).tolist() == [0.5, 0.125]
    with pytest.raises(ValueError, match="2 factors, 3 pairs: take those of this head size"):
        LongRopeScaling((2.0, 4.0))(torch.ones(3))
    with pytest.raises(ValueError, match="needs positive factors"):
        LongRopeScaling((2.0, 0.0))


def test_queries_grow_behind_the_length() -> None:
    scaling, like = QueryScaling(0.5, 3), torch.empty(0, dtype=torch.float64)
    assert scaling.factors(3, like) is None
    factors = scaling.factors(7, like)
    assert factors is not None
    grown = 1 + 0.5 * torch.log(torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]))
    assert torch.equal(factors, grown.double())
    # Two sequences of 7; 4 of 6 columns are queries.
    qkv = torch.randn(14, 6, dtype=torch.float64, requires_grad=True)
    y, columns = with_scaled_queries(qkv, 4, factors), factors.repeat(2)[:, None]
    assert torch.equal(y, torch.cat((qkv[:, :4] * columns, qkv[:, 4:]), dim=1))
    (dqkv,) = torch.autograd.grad(y, qkv, torch.ones_like(y))
    assert torch.equal(dqkv, torch.cat((columns.expand(-1, 4), torch.ones(14, 2)), dim=1))


def test_a_scaled_tensor_keeps_nothing() -> None:
    x, kept = torch.randn(3, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda none: none):
        y = scaled(x, 0.22)
    assert torch.equal(y, x * 0.22) and not kept and scaled(x, 1.0) is x
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.full_like(x, 0.22))
