"""Rung: pure. A machine's curves, links and groups of ranks by hand; its file, and what is refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tpkernels.work import Work, matmul_work

from tpengine.planner.costs import half_ring_time, ring_time
from tpengine.planner.machine import MACHINES, Curve, Link, Measured, machine_named, machine_text, read_machine


def test_a_curve_is_a_power_between_its_points() -> None:
    curve = Curve(((10.0, 1.0), (1000.0, 4.0)))
    assert [curve.at(size) for size in (1.0, 10.0, 1000.0, 1e6)] == [1.0, 1.0, 4.0, 4.0]
    assert curve.at(100.0) == pytest.approx(2.0)
    assert Curve.flat(0.5).at(7.0) == 0.5


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 0.0),), ((1.0, 1.0), (1.0, 2.0))])
def test_a_curve_that_is_none_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"a curve must be points .* sizes rising"):
        Curve(points)


def test_rings_and_straight_copies() -> None:
    link = Link(bytes_per_s=10.0, latency_s=0.5, ring_bytes_per_s=4.0)
    assert link.message_seconds(20.0) == 2.5
    assert link.gather_seconds(80.0, 4) == half_ring_time(80.0, 4, 4.0, 0.5) == 15.0 + 1.5
    assert link.all_reduce_seconds(80.0, 4) == ring_time(80.0, 4, 4.0, 0.5)
    assert link.exchange_seconds(80.0, 4) == 3 * (2.0 + 0.5)
    assert link.gather_seconds(80.0, 1) == link.exchange_seconds(80.0, 1) == link.gather_seconds(0.0, 4) == 0.0
    # Measured: what a ring of the next larger number attains, with its latency.
    known = replace(link, measured={2: Curve.flat(2.0), 8: Curve.flat(8.0)})
    assert known.gather_seconds(80.0, 2) == 40.0 / 2.0
    assert known.gather_seconds(80.0, 4) == 60.0 / 8.0
    assert known.gather_seconds(160.0, 16) == link.gather_seconds(160.0, 16)


def test_an_operator_takes_the_longer_of_flops_and_bytes() -> None:
    machine = replace(
        MACHINES["cpu"],
        flops_per_s={"float32": 100.0},
        matmul=Curve(((10.0, 0.1), (1000.0, 1.0))),
        attention=Curve.flat(0.5),
        memory_bytes_per_s=50.0,
        memory=Curve.flat(0.5),
        kernel_s=1.0,
    )
    assert machine.matmul_seconds(Work(flops=10), "float32") == pytest.approx(1.0 + 1.0)
    assert machine.matmul_seconds(Work(flops=1000), "float32") == pytest.approx(10.0 + 1.0)
    assert machine.attention_seconds(Work(flops=1000), "float32") == pytest.approx(20.0 + 1.0)
    assert machine.other_seconds(Work(flops=1000, memory_bytes=500), "float32") == pytest.approx(20.0 + 1.0)
    with pytest.raises(ValueError, match=r"cpu has float32: got bfloat16: use --dtype float32, or add the rate"):
        machine.matmul_seconds(Work(flops=10), "bfloat16")


def test_a_matmul_by_tiles_is_rounds_of_processors() -> None:
    machine = replace(
        MACHINES["h200"],
        **{"flops_per_s": {"float32": 4e6}, "num_processors": 4, "tile_share": 0.5, "hides_tiles": True},
        **{"memory_bytes_per_s": 1e30, "kernel_s": 0.0},
    )
    # Four processors of 0.5e6 flops per second; a tile of 256 x 128 and 1000 takes 131 s.
    tile = 2 * 256 * 128 * 1000 / 0.5e6
    assert machine.product_seconds(512, 256, 1000, 4, "float32") == pytest.approx(tile)
    assert machine.product_seconds(1024, 1024, 1000, 4, "float32") == pytest.approx(8 * tile)
    assert machine.product_seconds(512, 256, 1000, 4, "float32", batch=3) == pytest.approx(3 * tile)
    # One tile is cut in four parts, or covered by smaller ones; a little more than a round needs another.
    assert machine.product_seconds(256, 128, 1000, 4, "float32") < tile / 2
    assert tile < machine.product_seconds(512, 257, 1000, 4, "float32") <= 2 * tile
    # What is not hidden is written by all at once: 4 tiles of 256 x 128 x 4 bytes.
    slow = replace(machine, hides_tiles=False, memory_bytes_per_s=1e5, memory=Curve.flat(1e9))
    more = slow.product_seconds(512, 256, 1000, 4, "float32") - tile
    assert 0.0 < more <= 4 * 256 * 128 * 4 / 1e5 + 1e-5
    without = replace(machine, num_processors=0, matmul=Curve.flat(0.25))
    assert without.product_seconds(512, 256, 1000, 4, "float32") == pytest.approx(2 * 512 * 256 * 1000 / 1e6)


def test_rings_over_nodes_have_few_long_steps() -> None:
    machine = replace(MACHINES["h200"], ranks_per_node=8, within=Link(100.0, 1.0, 80.0), between=Link(10.0, 9.0, 9.0))
    assert machine.link(64, 1).latency_s == 1.0 + 8.0 / 8
    assert machine.link(64, 4).latency_s == 1.0 + 8.0 / 2
    assert machine.link(64, 8).latency_s == 9.0


def test_ranks_of_several_nodes_share_what_leads_out() -> None:
    machine = replace(MACHINES["h200"], ranks_per_node=8, within=Link(100.0, 0.0, 80.0), between=Link(10.0, 1.0, 9.0))
    assert machine.link(8, 1) == machine.link(2, 4) == machine.within
    # Eight ranks apart: one member per node. Two apart: four members, whose ways out a ring uses together.
    assert machine.link(2, 8) == machine.link(16, 8) == machine.between
    assert machine.link(16, 2).ring_bytes_per_s == 36.0
    assert machine.link(64, 1).ring_bytes_per_s == 72.0
    assert replace(machine, between=Link(10.0, 1.0, 50.0)).link(64, 1).ring_bytes_per_s == 80.0


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_file_is_read_back_equal(name: str, tmp_path: Path) -> None:
    machine = replace(MACHINES[name], num_nodes=3)
    path = tmp_path / "m.toml"
    path.write_text(machine_text(machine))
    assert read_machine(path) == machine
    assert machine_named(f"{path}:4x2") == replace(machine, ranks_per_node=4, num_nodes=2)


def test_machines_by_name() -> None:
    assert machine_named("cpu") is not None and machine_named("h200") == MACHINES["h200"]
    assert machine_named("h200:8x4") == replace(MACHINES["h200"], ranks_per_node=8, num_nodes=4)
    assert machine_named("b200:4").num_nodes == 1
    for name, machine in MACHINES.items():
        assert name == machine.name and machine.flops_per_s.keys() >= {"float32", "bfloat16"}


@pytest.mark.parametrize("text", ["tpu", "h200:0x2", "h200:8x0", "h200:x", "nosuch.toml", ""])
def test_a_name_of_no_machine_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="--machine") as refused:
        machine_named(text)
    assert "\n" not in str(refused.value)


BROKEN: list[tuple[tuple[str, ...], Any, str]] = [
    (("format",), 2, "must say format = 1"),
    (("kernel_s",), None, "missing key kernel_s"),
    (("speed",), 3, "unknown key speed"),
    (("kernel_s",), -1.0, "kernel_s must be a finite number at least 0"),
    (("memory_bytes_per_s",), 0.0, "memory_bytes_per_s must be a finite number above 0"),
    (("memory_bytes_per_s",), float("nan"), "memory_bytes_per_s must be a finite number"),
    (("memory_bytes_per_s",), "fast", "memory_bytes_per_s must be a finite number"),
    (("ranks_per_node",), 1.5, "ranks_per_node must be a whole number"),
    (("is_asynchronous",), 1, "is_asynchronous must be bool"),
    (("matmul",), [[1.0]], "matmul must be points"),
    (("matmul",), [[2.0, 1.0], [1.0, 1.0]], "sizes rising"),
    (("matmul",), 0.5, "matmul must be points"),
    (("flops_per_s", "float32"), "x", "flops_per_s.float32 must be a finite number"),
    (("within",), 3, "within must be a table"),
    (("within", "width"), 3, "unknown key within.width"),
    (("between", "measured"), {"two": [[1.0, 1.0]]}, "numbers of ranks as keys"),
    (("within", "fused"), 3, "within.fused must be a table"),
    (("flops_per_s",), {}, "flops_per_s must have a dtype at least: got none: add float32"),
    (("flops_per_s", "int9"), 1e9, "flops_per_s of a dtype must be of .* got int9"),
    (("measured",), {"float32": {"operators": {"nrom": [[1.0, 1.0]]}}}, "got nrom: use norm"),
    (("cached",), {"float32": {"products": {"forwards": {"1": [[1.0, 1.0]]}}}}, "got forwards: use forward"),
]


@pytest.mark.parametrize(("key", "value", "message"), BROKEN, ids=str)
def test_a_broken_file_is_one_line(key: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    values = tomllib.loads(machine_text(MACHINES["h200"]))
    place = values
    for name in key[:-1]:
        place = place[name]
    if value is None:
        del place[key[-1]]
    else:
        place[key[-1]] = value
    path = tmp_path / "m.toml"
    path.write_text(tomli_w.dumps(values))
    with pytest.raises(ValueError, match=message) as refused:
        read_machine(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text("name = ")
    with pytest.raises(ValueError, match="--machine needs valid TOML"):
        read_machine(path)


def test_measured_operators_take_the_place_of_shares(tmp_path: Path) -> None:
    products = {"forward": {10: Curve(((100.0, 1e3), (400.0, 4e3))), 1000: Curve.flat(16e3)}}
    measured = Measured(products, {"norm": Curve.flat(50.0), "attention": Curve(((8.0, 10.0), (32.0, 40.0)))})
    link = replace(MACHINES["cpu"].within, fused={2: Curve.flat(5.0)})
    machine = replace(MACHINES["cpu"], measured={"float32": measured}, within=link, reduce_share=1.0)
    path = tmp_path / "m.toml"
    path.write_text(machine_text(machine))
    assert read_machine(path) == machine
    # By rows and elements of the matrix; between two numbers of rows a power.
    flops = 2 * 10 * 10 * 20
    assert machine.product_seconds(10, 10, 20, 4, "float32", kind="forward") == pytest.approx(flops / 2e3)
    assert measured.flops_per_s("forward", 100, 100) == pytest.approx(4e3)
    assert measured.flops_per_s("forward", 5000, 100) == 16e3 and measured.flops_per_s("forward", 1, 400) == 4e3
    assert machine.other_seconds(Work(memory_bytes=100), "float32", "norm") == 2.0
    assert machine.attention_seconds(Work(flops=40), "float32", seq=16, name="attention") == pytest.approx(2.0)
    assert (link.fused_seconds(10.0, 2), link.fused_seconds(10.0, 4)) == (2.0, None)
    # What was not measured takes the general rates.
    plain = MACHINES["cpu"]
    work = Work(flops=10, memory_bytes=1000)
    assert machine.other_seconds(work, "float32", "rope") == plain.other_seconds(work, "float32")
    assert machine.product_seconds(8, 8, 8, 4, "float32", kind="weight_gradient") == plain.product_seconds(
        8, 8, 8, 4, "float32"
    )


def test_few_rows_take_no_less_than_reading_the_matrix() -> None:
    """A rate of the fewest rows that were measured says nothing of fewer: there the matrix is what takes the time."""
    products = {"forward": {64: Curve.flat(1e6)}}
    machine = replace(MACHINES["cpu"], memory_bytes_per_s=1e3, measured={"float32": Measured(products)})
    read = matmul_work(2, 100, 100, 4).memory_bytes / 1e3
    assert machine.product_seconds(2, 100, 100, 4, "float32", kind="forward") == pytest.approx(read)
    assert machine.product_seconds(64, 100, 100, 4, "float32", kind="forward") == pytest.approx(2 * 64 * 1e4 / 1e6)


@pytest.mark.parametrize("kind", ["a100", "v100-32", "h100", "h200", "b200", "mi300x"])
def test_attention_is_slower_backward_than_forward(kind: str) -> None:
    work, machine = Work(flops=10**11, memory_bytes=1), MACHINES[kind]
    forward, backward = (
        machine.attention_seconds(work, "bfloat16", name=name) for name in ("attention", "attention_backward")
    )
    assert 1.5 * forward < backward < 2.5 * forward


def test_the_less_a_rank_touches_the_more_comes_from_its_caches(tmp_path: Path) -> None:
    cold = Measured({"forward": {8: Curve.flat(100.0)}}, {"norm": Curve.flat(10.0), "adamw": Curve.flat(5.0)})
    warm = Measured({"forward": {8: Curve.flat(400.0)}}, {"norm": Curve.flat(8.0)})
    share = Curve(((1e3, 0.25), (1e6, 1.0)))
    machine = replace(MACHINES["cpu"], measured={"float32": cold}, cached={"float32": warm}, cold_share=share)
    path = tmp_path / "m.toml"
    path.write_text(machine_text(machine))
    assert read_machine(path) == machine
    small, large = (machine.touching(num_bytes).measured["float32"] for num_bytes in (0.0, 1e7))
    # A quarter of the time that memory costs more: 1/100 against 1/400 of a second for an operation.
    seconds = 1 / 400 + 0.25 * (1 / 100 - 1 / 400)
    assert small.flops_per_s("forward", 8, 100) == pytest.approx(1 / seconds)
    assert large.flops_per_s("forward", 8, 100) == pytest.approx(100.0)
    # What was slower from caches is as fast from them, and what is known from memory alone stays.
    assert small.operators["norm"].at(1) == pytest.approx(10.0) and small.operators["adamw"] == cold.operators["adamw"]
    assert machine.touching(0.0).touching(1e7) == machine.touching(0.0)
    plain = MACHINES["cpu"]
    assert plain.touching(0.0) is plain


def test_a_step_waits_for_the_slowest_of_all_chips() -> None:
    """Of 1 chip nothing is known, of 8 it is 1.42 standard deviations behind the middle, of 1,024 it is 3.24."""
    machine = replace(MACHINES["cpu"], chip_spread=0.01, is_asynchronous=True)
    peak = machine.peak("float32")
    for num_ranks, deviations in ((1, 0.0), (8, 1.42), (1024, 3.24)):
        slow = machine.slowest_of(num_ranks)
        assert peak / slow.peak("float32") == pytest.approx(1 + 0.01 * deviations, abs=2e-4)
        assert slow.memory_bytes_per_s == machine.memory_bytes_per_s and slow.slowest_of(8) is slow
    # What was measured on one chip is the middle's too: what its power limits, not what its memory does.
    rates = Measured({"forward": {8: Curve.flat(100.0)}}, {"norm": Curve.flat(10.0), "attention": Curve.flat(50.0)})
    slow = replace(machine, measured={"float32": rates}, cached={"float32": rates}).slowest_of(8)
    assert slow.measured == slow.cached
    assert slow.measured["float32"].flops_per_s("forward", 8, 1) == pytest.approx(100.0 / 1.0142, rel=2e-4)
    assert slow.measured["float32"].operators["attention"].at(1) == pytest.approx(50.0 / 1.0142, rel=2e-4)
    assert slow.measured["float32"].operators["norm"] == rates.operators["norm"]
    assert MACHINES["cpu"].slowest_of(8) is MACHINES["cpu"]
    assert all(of.chip_spread > 0 for name, of in MACHINES.items() if name != "cpu")


@pytest.mark.parametrize("shares", [[[1e3, 0.5], [1e6, 0.4]], [[1e3, 0.5], [1e6, 1.5]]])
def test_shares_of_memorys_cost_rise_to_at_most_1(tmp_path: Path, shares: list[list[float]]) -> None:
    path = tmp_path / "m.toml"
    path.write_text(tomli_w.dumps(tomllib.loads(machine_text(MACHINES["cpu"])) | {"cold_share": shares}))
    with pytest.raises(ValueError, match="cold_share must rise to at most 1: got"):
        read_machine(path)
