"""Rung: gloo ranks. A machine is measured into a file that loads.

Sizes are tiny and no time is asserted. What only a GPU checks: that one is measured.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.ranks.rank_pool import RankPool

from benchmarks.blind.predictions import drawn_model, predicted
from benchmarks.machine.clock import Clock
from benchmarks.machine.command import _calm, _of_each
from benchmarks.machine.exchanges import message_seconds, sum_rates
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


def test_disturbed_passes_change_no_figure_and_whole_passes_are_chosen() -> None:
    def of_speed(speed: float, **others: object) -> dict[str, Any]:
        products = {"forward": {64: [(128.0, 8.0 * speed), (256.0, 10.0 * speed)]}}
        host = (1.0 / speed, 2.0 / speed)
        return {"rates": {"float32": {"products": products}}, "copies": [(64.0, 3.0 * speed)], "host": host} | others

    # Of these the faster half is the first and the last two; one figure of the last was disturbed alone.
    passes = [
        of_speed(1.0),
        *(of_speed(speed) for speed in (0.5, 0.8, 0.6)),
        of_speed(1.02),
        of_speed(1.01, host=(9, 9)),
    ]
    assert _calm(passes) == [passes[4], passes[5], passes[0]]
    found = _of_each(_calm(passes), statistics.median)
    assert found["host"] == (1.0, 2.0) and found["copies"] == [(64.0, 3.0 * 1.01)]
    assert _calm(passes[:1]) == passes[:1] and len(_calm(passes[:3])) == 2


def test_sums_are_timed_cold_and_messages_as_they_come(ranks: RankPool) -> None:
    assert ranks.run(evictions, 2) == [(0, 10), (0, 10)]


def evictions() -> tuple[int, int]:
    """How often caches were emptied for messages, and for the sums of one size: ten rounds."""
    clock, counts = Clock(torch.device("cpu"), 0.0, 4), []
    for measure in (message_seconds, sum_rates):
        with patch.object(Clock, "evict", autospec=True) as evict:
            measure(clock, [64])
        counts.append(evict.call_count)
    return counts[0], counts[1]
