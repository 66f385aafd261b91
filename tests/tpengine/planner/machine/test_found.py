"""Rung: pure. A machine of what microbenchmarks found: points in, rates and links out, through JSON too."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tpengine.planner.machine import Curve, machine_text, read_machine
from tpengine.planner.machine.found import differ, each_of, machine_of_found, mean_of, rising

RATES = {
    "products": {"forward": {8: [(64.0, 1e9), (256.0, 4e9)]}},
    "operators": {"attention": [(8.0, 1e8), (16.0, 3e8), (32.0, 2e8)], "norm": [(64.0, 1e9)]},
}
FOUND: dict[str, Any] = {
    "rates": {"float32": RATES},
    "cached": {"float32": RATES},
    "cold": [(64.0, 0.5), (128.0, 0.25)],
    "copies": [(64.0, 1e9), (1024.0, 2e9)],
    "host": (1e-5, 2e-5, 3e-6),
    "messages": [(1000.0, 1e-3), (11000.0, 3e-3)],
    "sums": {2: [(64.0, 5e8)], 4: [(64.0, 4e8), (1024.0, 7e8)]},
    "fused": {4: [(64.0, 1e9)]},
}


def machine(**others: Any) -> Any:
    return machine_of_found({**FOUND, **others}, name="m", source="s", is_gpu=True, ranks_per_node=4, memory_bytes=8)


def test_links_are_those_of_messages_and_of_the_largest_ring() -> None:
    link = machine().within
    assert link.latency_s == 1e-3 and link.bytes_per_s == pytest.approx(10000 / 2e-3)
    assert link.ring_bytes_per_s == 7e8 and link.measured.keys() == {2, 4} and link.fused.keys() == {4}
    assert machine().between == link


def test_hosts_have_a_link_of_their_own_where_it_was_measured() -> None:
    between = machine(between=[(1000.0, 1e-2), (11000.0, 3e-2)]).between
    assert between.bytes_per_s == between.ring_bytes_per_s == pytest.approx(10000 / 2e-2)
    assert between.latency_s == 1e-2 and not between.measured


def test_a_rank_alone_has_what_copies_attain() -> None:
    link = machine(messages=[], sums={}, fused={}).within
    assert link.bytes_per_s == 1e9 and link.latency_s == 0.0 and not link.fused


def test_rates_are_the_curves_that_were_found() -> None:
    found = machine()
    assert found.flops_per_s == {"float32": 4e9} and found.memory_bytes_per_s == 2e9
    assert found.matmul == Curve(((1024.0, 0.25), (4096.0, 1.0)))
    assert found.attention == Curve.flat(2e8 / 4e9)
    assert found.cold_share == Curve(((64.0, 0.5), (128.0, 0.5), (256.0, 1.0)))
    assert (found.kernel_s, found.host_s_per_operator, found.memory_bytes) == (3e-6, 1e-5, 8)


def test_what_ranks_send_as_json_is_the_same_machine_and_its_file_loads(tmp_path: Path) -> None:
    """JSON makes texts of numbers of rows and ranks."""
    found = machine(**json.loads(json.dumps(FOUND)))
    assert found == machine()
    (tmp_path / "m.toml").write_text(machine_text(found))
    assert read_machine(tmp_path / "m.toml") == found


def test_ranks_are_averaged_and_passes_compared() -> None:
    low, high = ({"a": [(64.0, rate)], "b": (rate,)} for rate in (1.0, 3.0))
    assert mean_of([low, high]) == {"a": [(64.0, 2.0)], "b": (2.0,)}
    assert differ([low]) == "" and differ([low, high]) == ", 2 passes: half of the figures differ by less than 100%"


def test_a_disturbed_pass_changes_no_figure() -> None:
    def of_speed(speed: float, **others: object) -> dict[str, Any]:
        products = {"forward": {64: [(128.0, 8.0 * speed), (256.0, 10.0 * speed)]}}
        host = (1.0 / speed, 2.0 / speed)
        return {"rates": {"float32": {"products": products}}, "copies": [(64.0, 3.0 * speed)], "host": host} | others

    # One pass was slow, and one figure of another was disturbed alone.
    passes = [of_speed(1.0), of_speed(0.5), of_speed(1.02), of_speed(1.0), of_speed(1.01, host=(9, 9))]
    assert each_of(passes, statistics.median) == of_speed(1.0)


def test_what_is_left_of_memorys_cost_never_falls_as_more_is_touched() -> None:
    assert rising([(1.0, 0.2), (2.0, 0.1), (4.0, 0.5)]) == Curve(((1.0, 0.2), (2.0, 0.2), (4.0, 0.5), (8.0, 1.0)))
