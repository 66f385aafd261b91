"""Rung: gloo ranks. A machine is measured into a file that loads.

Sizes are tiny and no time is asserted. What only a GPU checks: that one is measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.blind.predictions import drawn_model, predicted
from benchmarks.machine.command import _OF_PASSES, _of_each
from benchmarks.run import main
from tpengine.config.presets import preset_config
from tpengine.simulate.machine import read_machine
from tpengine.simulate.machine.measured import OPERATORS, PRODUCTS


def test_a_measured_machine_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    assert main(f"machine --tiny --passes 2 --out {path}".split()) == 0
    machine = read_machine(path)
    rates = machine.measured["float32"]
    assert rates.products.keys() == set(PRODUCTS) and set(OPERATORS) <= rates.operators.keys()
    assert machine.within.fused.keys() == machine.within.measured.keys() == {2}
    assert "2 passes: half of the figures differ by less than" in machine.source
    assert machine.host_s_per_operator > 0 and machine.host_s_per_action > 0 and machine.reduce_share == 1.0
    # And steps are predicted with it: the drawn model's too.
    tiny = preset_config("tiny")
    models = {"tiny": tiny, "drawn": replace(tiny, model=drawn_model(1))}
    found = list(predicted(machine, models, 2, 16, most=3))
    assert len(found) == 6 and all(of.seconds > 0 and min(of.peak_bytes) > 0 for of in found)


def test_a_pass_that_was_disturbed_changes_no_figure() -> None:
    """Rates of the disturbed half are half as large, times twice as long; a lone pass is taken as it is."""
    calm = {"rates": {"float32": {"forward": [(64, 8.0), (128, 10.0)]}}, "host": (1.0, 2.0)}
    disturbed = {"rates": {"float32": {"forward": [(64, 4.0), (128, 5.0)]}}, "host": (2.0, 4.0)}
    for passes in ([calm, disturbed] * 3, [calm]):
        found = {name: _of_each([of[name] for of in passes], _OF_PASSES[name]) for name in calm}
        assert found == calm
