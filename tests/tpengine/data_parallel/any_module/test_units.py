"""Rung: pure. Which modules are gathered together, and which parameters lie with the model itself."""

from __future__ import annotations

import torch
from support.engine.stacked_module import stacked
from torch import nn

from tpengine.data_parallel.any_module.units import choose_units, lay_out


def names_of(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in choose_units(model, None)]


def test_units_are_layers_of_stacks_and_children_beside_them() -> None:
    transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    layers = [f"{half}.layers.{i}" for half in ("encoder", "decoder") for i in range(2)]
    assert names_of(transformer) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "encoder.norm",
        *layers[2:],
        "decoder.norm",
    ]
    # A module may read the weights of its children without calling them.
    assert names_of(nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})) == ["attention"]
    assert names_of(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))) == ["0.0", "1"]
    # What is tiny is not worth a collective.
    assert names_of(nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(2))) == ["0"]


def test_what_no_unit_holds_alone_lies_with_the_model() -> None:
    model = stacked(0)
    units, layouts = lay_out(model, choose_units(model, None), 10**6, with_frozen=True)
    names = {unit.name: (unit.trained, unit.frozen) for unit in units}
    assert list(names) == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "unused", "branch", "head", ""]
    assert [layouts[index].names for index in names[""][0]] == [("rare", "embed.weight")]
    assert names["embed"] == names["head"] == ((), ())
    assert names["layers.1"][0] == () and len(names["layers.1"][1]) == 1
    held = [name for layout in layouts.values() for name in layout.names]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_a_bucket_holds_one_dtype_and_closes_when_it_is_full() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[1].to(torch.bfloat16)
    units, layouts = lay_out(model, [], 64, with_frozen=False)
    assert [unit.name for unit in units] == [""]
    assert [layout.names for layout in layouts.values()] == [("0.weight",), ("2.weight",), ("1.weight",)]
