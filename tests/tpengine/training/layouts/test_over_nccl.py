"""Rung: fake ranks, one after the other, and a machine that runs what they call by NCCL's rules (support/nccl).

What only GPUs check: NCCL itself, how many processors its operations take, and which kernel a GPU gives a processor.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import CountMutations
from support.engine.parity import config_of
from support.nccl import mutants
from support.nccl.machine import Machine, NoProgress, WrongMessage
from support.nccl.operations import PLENTY, Holdings, programs_of
from support.nccl.orders import order_cycle
from support.nccl.processors import NUM_SEEDS
from support.nccl.record import Began, Called, HostWaited, Kernel, Record, Section
from support.nccl.recording import record_run
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.layout.parameters import kv_replicas
from tpengine.plan import SCHEDULES

Records = list[Record]


def layout(
    dp: int, tp: int, pp: int, *, schedule: str = "1f1b", num_micro_batches: int = 4, zero: int = 0, **choices: Any
) -> Config:
    """A layout of a small model with tied ends, of a layer for each chunk, that evaluates two micro-batches."""
    num_layers = 2 * pp if schedule in ("interleaved", "zbv") else pp
    config = config_of(
        *(dp, tp, pp),
        tied=True,
        kv_heads=choices.pop("kv_heads", 2),
        num_layers=num_layers,
        schedule=schedule,
        num_micro_batches=num_micro_batches * dp,
        zero=zero,
        **choices,
    )
    return replace(config, train=replace(config.train, dtype="float32", eval_micro_batches=2))


def with_experts(config: Config, ep: int, moe_load: float = 0.0) -> Config:
    """The layout of a model in which every token chooses two of four experts, which ep ranks share.

    Args:
        moe_load: for how many times the mean there are buffers that kernels bring rows to; 0: all-to-all.
    """
    details = ModelDetails(num_experts=4, experts_per_token=2, expert_ffn_size=24, normalizes_scores=True)
    model = replace(config.model, architecture="qwen3_moe", details=details, tie_embeddings=False)
    parallel = replace(config.parallel, ep=ep, moe_load=moe_load)
    assert parallel.tp and parallel.pp and parallel.dp
    return validate(replace(config, model=model, parallel=parallel), parallel.tp * parallel.pp * parallel.dp)


LAYOUTS = {
    "all axes, fused": layout(2, 2, 2, zero=2, num_micro_batches=2),
    "all axes, plain, kv replicas": layout(2, 2, 2, tp_comm="plain", kv_heads=1),
    "four stages": layout(1, 1, 4, schedule="interleaved"),
    "stages of fused ranks, split backward": layout(1, 2, 2, schedule="zb-h1"),
    "experts of tp ranks": with_experts(layout(1, 2, 2, tp_comm="plain"), 2),
    "experts of all ranks of a stage": with_experts(layout(2, 2, 2, tp_comm="plain", zero=1), 4),
    "experts of tp ranks, rows by kernels": with_experts(layout(1, 2, 2), 2, moe_load=1.5),
    "experts of all ranks, rows by kernels": with_experts(layout(2, 2, 2, zero=2, num_micro_batches=2), 4, moe_load=4),
    "slices that come and go": layout(2, 1, 2, schedule="zbv", zero=3, num_micro_batches=2),
}


@pytest.fixture(scope="module")
def recorded(ranks: RankPool) -> Callable[[str], Records]:
    """The records of a layout's ranks."""

    @functools.cache
    def of(name: str) -> Records:
        (records,) = ranks.run(record_run, 1, LAYOUTS[name])
        return records

    return of


def run(records: Records, holdings: Holdings = PLENTY, seed: int = 0) -> float:
    """Run records on a machine."""
    return Machine(programs_of(records, holdings, seed), seed, holdings.total).run()


def engine_holdings(config: Config) -> Holdings:
    """What NCCL may hold by the engine's limits, and fused kernels leave free."""
    assert config.parallel.tp
    return Holdings.as_engine(config.parallel, kv_replicas(config.model, config.parallel.tp))


def problem(records: Records, holdings: Holdings = PLENTY, seeds: Sequence[int] = (0,)) -> str:
    """What is wrong with records; "" if nothing is.

    Args:
        seeds: of durations, and of who gets processors first; of the latter NUM_SEEDS are all ways.
    """
    try:
        for seed in seeds:
            run(records, holdings, seed)
    except (NoProgress, WrongMessage) as error:
        return str(error)
    return order_cycle(programs_of(records))


@pytest.mark.by_default("all axes, fused", "four stages", "slices that come and go")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_ends(recorded: Callable[[str], Records], name: str) -> None:
    records = recorded(name)
    assert problem(records) == ""
    # Kernels that compute come first, or nobody always does.
    assert problem(records, engine_holdings(LAYOUTS[name]), (0, 1, NUM_SEEDS - 1)) == ""


def test_one_processor_left_free_is_not_enough_beside_sums(recorded: Callable[[str], Records]) -> None:
    """The copies that a product waits for find no place, and the sum waits for a rank whose product waits too."""
    found = problem(recorded("all axes, fused"), Holdings(), (1,))
    assert re.search(r"gather_matmul_kernel has begun on \d+ processors.* of dp.*; .*fetch_kernel has 0 of 1 ", found)


def test_the_record_has_what_the_machine_is_about(recorded: Callable[[str], Records]) -> None:
    entries = [entry for record in recorded("all axes, fused") for entry in record]
    names = {entry.name for entry in entries if isinstance(entry, Called)}
    assert {"pp", "dp", "tp", "dp_tp", "ends"} <= names
    kernels = {entry.name for entry in entries if isinstance(entry, Kernel)}
    assert kernels == {"publish_kernel", "fetch_kernel", "gather_matmul_kernel", "matmul_scatter_kernel"}


def waits_in_steps(record: Record) -> dict[str, int]:
    """How often the host waits for the device in the forwards and backwards of the steps, by the kind of action."""
    waits: dict[str, int] = {}
    section, action = "", ""
    for entry in record:
        if isinstance(entry, Section):
            section, action = entry.name, ""
        elif isinstance(entry, Began):
            action = entry.action
        elif isinstance(entry, HostWaited) and section.startswith("step"):
            for kind in re.findall(r"^\d+([FBIW])\d", action):
                waits[kind] = waits.get(kind, 0) + 1
    return waits


@pytest.mark.slow
def test_with_buffers_the_host_waits_for_no_rows(recorded: Callable[[str], Records]) -> None:
    for record in recorded("experts of tp ranks"):
        # For each layer and micro-batch, in two steps; numbers that are on the host already are counted too.
        assert waits_in_steps(record)["F"] >= 8
    for record in recorded("experts of tp ranks, rows by kernels"):
        assert waits_in_steps(record) == {}
        assert {"counts_kernel", "take_kernel", "return_kernel"} <= {
            entry.name for entry in record if isinstance(entry, Kernel)
        }


def broken(name: str, records: Records) -> str:
    """What the machine says of a mutant."""
    last = len(records) - 1
    match name:
        case "receives late":
            return problem([mutants.late(record) for record in records])
        case "a send and a receive swapped":
            return problem(mutants.of_one(records, last, mutants.swapped))
        case "two receives swapped":
            return problem(mutants.of_one(records, last, mutants.misnumbered))
        case "a sum before a send":
            return problem(mutants.of_one(records, 0, mutants.sums_first))
        case "a rank does not connect dp":
            return problem(mutants.of_one(records, 1, mutants.unconnected("dp")))
        case "a rank does not connect pp":
            return problem(mutants.of_one(records, 1, mutants.unconnected("pp")))
        case "kernels take every processor":
            return problem(records, Holdings(of_fused=Holdings.total))
        case "a rank evaluates a step earlier":
            return problem(mutants.of_one(records, 1, mutants.early_evaluation))
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "of", "said"),
    [
        ("receives late", "four stages", r"no progress:\nrank 0: .*SEND_F\d: send to rank 1 over pp has begun"),
        ("a send and a receive swapped", "all axes, fused", r"SEND_F1 .* = rank 7's 1RECV_F1"),
        ("two receives swapped", "all axes, fused", r"rank 7: 1RECV_F1, receive from rank 3 over pp, gets 1RECV_F0"),
        ("a sum before a send", "all axes, fused", r"rank 0's .* \(_reduce_scatter_base_ of dp\)"),
        ("a rank does not connect dp", "all axes, fused", "no progress:\nrank 0: .* of dp"),
        ("a rank does not connect pp", "all axes, fused", "no progress:\nrank 0: .*"),
        ("kernels take every processor", "all axes, fused", r"fetch_kernel has 0 of 1 processors, 0 are free"),
        ("a rank evaluates a step earlier", "all axes, fused", r"no progress:\nrank 0: "),
    ],
)
def test_a_mutant_is_noticed(
    recorded: Callable[[str], Records], name: str, of: str, said: str, count_mutations: CountMutations
) -> None:
    found = broken(name, recorded(of))
    count_mutations("what ranks call over NCCL (machine)", int(bool(found)), 1)
    assert re.search(said, found), found


SIZES = [
    (dp, tp, pp, tp_comm, zero)
    for dp, tp, pp, zero in itertools.product((1, 2), (1, 2), (2, 4), (0, 1, 2, 3))
    for tp_comm in (("fused", "plain") if tp > 1 else ("plain",))
    if dp * tp * pp <= 8 and (dp > 1 or not zero)
]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_run_ends(ranks: RankPool, schedule: str, sizes: tuple[int, int, int, str, int]) -> None:
    dp, tp, pp, tp_comm, zero = sizes
    for num_micro_batches in (pp, 2 * pp):
        config = layout(dp, tp, pp, schedule=schedule, num_micro_batches=num_micro_batches, zero=zero, tp_comm=tp_comm)
        (records,) = ranks.run(record_run, 1, config)
        assert problem(records) == ""
        assert problem(records, engine_holdings(config), range(NUM_SEEDS)) == ""
