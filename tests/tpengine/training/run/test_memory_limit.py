"""Rung: pure. What a run would hold is known before it starts, and too much is refused with what would fit.

What only GPUs check: the memory that a card has.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parity import config_of

from tpengine.config import Config, validate
from tpengine.config.presets import preset_config
from tpengine.distributed.launch import Launch
from tpengine.layout.decided import Decided, rows_memory_bytes
from tpengine.layout.state_bytes import state_bytes
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Residency
from tpengine.planner.machine import CPU_CORE
from tpengine.planner.modelled.memory import (
    ALLOCATOR_SHARE,
    USUAL_ROW_LOAD,
    decided_residency,
    decided_row_load,
    decided_that_fits,
    memory_of,
    most_load,
    smaller_settings,
)
from tpengine.runs.memory_limit import decided_by_memory, kernels_move_rows, memory_limit
from tpengine.runs.opening import said_of_balance, said_of_experts

CPU = torch.device("cpu")


def limited(config: Config, limit: int) -> Config:
    return replace(config, parallel=replace(config.parallel, memory_limit=limit))


def peaks_of(config: Config, residency: Residency | None = None) -> list[int]:
    layout = layout_of(config, residency)
    return [rank.peak for rank in memory_of(config, layout, training_plan(config, layout))]


def test_the_kinds_are_those_of_the_stage() -> None:
    config = config_of(2, 1, 2, tied=False, kv_heads=2, zero=3)
    layout = layout_of(config)
    for rank, memory in enumerate(memory_of(config, layout, training_plan(config, layout))):
        assert memory.state == state_bytes(config, layout, rank)
        # Every bucket of the stage is whole at some time, and every gradient of a backward pass.
        assert memory.gathered == 2 * memory.state.weights and memory.unsummed == 2 * memory.state.gradients
        assert {"gathered weights", "gradients not summed yet", "moments", "receive slots"} <= memory.kinds().keys()
        assert max(memory.kinds().values()) < memory.peak <= sum(memory.kinds().values())
    alone = config_of(1, 1, 1, tied=False, kv_heads=2)
    (memory,) = memory_of(alone, layout_of(alone), training_plan(alone, layout_of(alone)))
    assert memory.gathered == memory.unsummed == memory.slots == 0


# Of the stage that holds most: what is proposed must fit on all.
@pytest.mark.parametrize("rank", [0, 1])
def test_too_little_is_refused_with_the_nearest_setting_that_fits(rank: int) -> None:
    config = config_of(2, 1, 2, tied=False, kv_heads=2)
    launch, stage = Launch(rank, 4, rank, 4), rank // 2
    need = peaks_of(config)[stage]
    assert decided_by_memory(limited(config, need), launch, CPU) == Decided(Residency.STEP)
    with pytest.raises(ValueError) as error:
        decided_by_memory(limited(config, need - 1), launch, CPU)
    message = str(error.value)
    assert message.endswith(f", or allow it with --parallel.memory-limit {need}")
    assert re.search(rf"rank {rank} would hold .* MB in \S+, .* more than --parallel.memory-limit", message)
    found = re.search(r"MB: use (.*), or allow", message)
    assert found is not None
    smaller = dict(smaller_settings(config))[found[1]]
    # What is proposed fits on every stage, and is accepted.
    assert max(peaks_of(smaller)) < need
    decided_by_memory(limited(smaller, need - 1), launch, CPU)


def test_what_nothing_saves_needs_more_ranks() -> None:
    config = limited(config_of(1, 1, 1, tied=False, kv_heads=2), 1)
    with pytest.raises(ValueError, match=r"use more ranks, or a smaller --train\.micro-batch-size, or"):
        decided_by_memory(config, Launch(0, 1, 0, 1), CPU)


def test_gathered_weights_stay_while_they_fit() -> None:
    # A model whose weights outweigh what a micro-batch keeps.
    base = preset_config("bench")
    config = replace(
        base,
        parallel=replace(base.parallel, tp=1, pp=1, dp=2, zero=3, schedule="interleaved", chunks_per_rank=4),
        train=replace(base.train, seq_len=16, micro_batch_size=1),
    )
    config = validate(config, 2)
    (whole,), (used,) = (peaks_of(config, residency) for residency in Residency)
    assert used < whole
    assert decided_residency(config, 0) is decided_residency(config, whole) is Residency.STEP
    assert decided_residency(config, whole - 1) is Residency.USE
    # What was asked for stays.
    asked = replace(config, parallel=replace(config.parallel, residency="use"))
    assert decided_residency(asked, 0) is Residency.USE
    assert layout_of(config, Residency.USE).residency is Residency.USE


def test_without_a_limit_a_host_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpengine.runs.memory_limit.available_bytes", lambda: 1000)
    config = config_of(2, 1, 2, tied=False, kv_heads=2)
    assert memory_limit(config, Launch(0, 4, 0, 4), CPU) == 250
    assert memory_limit(limited(config, 7), Launch(0, 4, 0, 4), CPU) == 7
    with pytest.raises(ValueError, match="more than what there is"):
        decided_by_memory(config, Launch(0, 4, 0, 4), CPU)
    # Unknown: nothing is refused.
    monkeypatch.setattr("tpengine.runs.memory_limit.available_bytes", lambda: 0)
    assert decided_by_memory(config, Launch(0, 4, 0, 4), CPU) == Decided(Residency.STEP)


def shared_config(limit: int = 0) -> Config:
    """Four ranks that share 8 experts."""
    base = preset_config("tiny_moe")
    parallel = replace(base.parallel, tp=1, pp=1, dp=4, ep=4, memory_limit=limit)
    return validate(replace(base, parallel=parallel), 4)


def test_a_plan_says_at_which_load_of_experts_it_fits() -> None:
    config = shared_config()
    layout = layout_of(config)
    plan = training_plan(config, layout)

    def peak(load: float) -> int:
        return max(rank.peak for rank in memory_of(config, layout, plan, load=load))

    assert most_load(config, layout, plan, 0) == most_load(config, layout, plan, peak(4.0)) == 4.0
    found = most_load(config, layout, plan, peak(1.7))
    assert 1.69 <= found <= 1.71 and peak(found) <= peak(1.7) < peak(found + 0.02)
    even, uneven = (said_of_experts(config, layout, load)[0] for load in (4.0, found))
    assert "is enough at every load" in even and f"is enough up to a load of {found:.2f} (rows of" in uneven
    # What is refused at the start is refused at an even load, and says so.
    with pytest.raises(ValueError, match="by the plan with experts used evenly rank 0 would hold"):
        decided_by_memory(shared_config(peak(1.0) - 1), Launch(0, 4, 0, 4), CPU)


def test_a_run_with_biases_says_at_its_start_that_no_file_has_a_place_for_them() -> None:
    base = preset_config("tiny_moe")
    for balance, number in (("bias", 1), ("loss", 0)):
        config = validate(replace(base, train=replace(base.train, balance=balance)), 1)  # type: ignore[arg-type]
        said = said_of_experts(config, layout_of(config), 1.0)
        assert len(said) == number and all("files of qwen3_moe have no place for the biases" in line for line in said)


def test_a_run_that_goes_on_without_balance_bias_says_what_becomes_of_the_biases() -> None:
    base = validate(preset_config("tiny_moe"), 1)
    biased = validate(replace(base, train=replace(base.train, balance="bias")), 1)
    kept = replace(biased, train=replace(biased.train, balance="loss"))
    assert said_of_balance("bias", kept) == [
        "routers' biases stay as they are: choices follow them, and no step moves them any more"
    ]
    assert not said_of_balance("bias", biased) and not said_of_balance("none", base) and not said_of_balance(None, kept)


def test_buffers_of_rows_are_as_large_as_memory_allows() -> None:
    config = shared_config(1)
    layout = layout_of(config)
    planned = [(config, layout, training_plan(config, layout))]

    def peak(load: float) -> int:
        (of,) = planned
        return max(rank.peak for rank in memory_of(of[0], replace(layout, row_load=load), of[2]))

    # Room for all rows; else for twice the mean; else none.
    assert decided_row_load(planned, 0, CPU_CORE) == decided_row_load(planned, peak(4.0), CPU_CORE) == 4.0
    assert decided_row_load(planned, peak(4.0) - 1, CPU_CORE) == USUAL_ROW_LOAD
    assert decided_row_load(planned, peak(USUAL_ROW_LOAD) - 1, CPU_CORE) == 0.0
    # Nobody has said how much is for this run: then libraries and the allocator keep their share.
    unasked = [(limited(config, 0), *planned[0][1:])]
    assert decided_row_load(unasked, peak(4.0), CPU_CORE) == USUAL_ROW_LOAD
    assert decided_row_load(unasked, int(peak(4.0) / (1 - ALLOCATOR_SHARE)) + 1, CPU_CORE) == 4.0
    # What they take is in the sheet: the rows themselves, and the memory that they move through.
    (even,), (full,) = (memory_of(*planned[0]), memory_of(config, replace(layout, row_load=4.0), planned[0][2]))
    assert even.rows == 0 < full.rows == rows_memory_bytes(config, replace(layout, row_load=4.0))
    assert full.kinds()["experts' rows on their way"] == full.rows
    assert full.activations > even.activations and full.peak - even.peak > full.rows
    # As asked: then it must fit.
    asked = replace(config, parallel=replace(config.parallel, moe_load=3.0, memory_limit=peak(3.0)))
    assert decided_that_fits(asked, peak(3.0), 0, "cpu", moves_rows=True) == Decided(Residency.STEP, 3.0)
    too_many = r"with buffers for 3 times the mean of experts' rows rank 0 would hold .*: use --parallel\.moe-load 0,"
    with pytest.raises(ValueError, match=too_many):
        decided_that_fits(asked, peak(3.0) - 1, 0, "cpu", moves_rows=True)
    # What would not fit without them either is not their fault.
    with pytest.raises(ValueError, match=r"with experts used evenly rank 0 .*: use --parallel\.zero 1"):
        decided_that_fits(asked, peak(0.0) - 1, 0, "cpu", moves_rows=True)
    assert (
        "memory by the plan is that of buffers for 3 times the mean of rows, and is enough at every load"
        in (said_of_experts(config, replace(layout, row_load=3.0), 4.0)[0])
    )


def test_kernels_bring_rows_between_gpus_of_one_host() -> None:
    config, cuda, launch = shared_config(), torch.device("cuda"), Launch(0, 4, 0, 4)

    def asking(**parallel: Any) -> Config:
        return replace(config, parallel=replace(config.parallel, **parallel))

    exact = replace(config, train=replace(config.train, reduction="exact"))
    wide = replace(config, train=replace(config.train, dtype="float64"))
    assert kernels_move_rows(config, launch, cuda)
    assert not kernels_move_rows(config, launch, CPU)
    assert not kernels_move_rows(config, Launch(0, 4, 0, 2), cuda)
    # Symmetric memory is for 8 ranks.
    assert not kernels_move_rows(asking(dp=16, ep=16), Launch(0, 16, 0, 16), cuda)
    others = (asking(tp_comm="plain"), asking(ep=1), exact, wide)
    assert [kernels_move_rows(other, launch, cuda) for other in others] == [False] * 4
    # Where they do not, no memory is set aside for them, and a load that was asked for is told to have no effect.
    asked = asking(moe_load=2.0)
    assert not kernels_move_rows(asked, launch, CPU)
    assert "--parallel.moe-load sizes no buffers here" in said_of_experts(asked, layout_of(asked), 4.0)[1]
    assert decided_by_memory(config, launch, CPU) == Decided(Residency.STEP, 0.0)
