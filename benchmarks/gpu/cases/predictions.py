"""Cases that try the planner's predictions on this GPU: its machine's file, then steps of layouts predicted before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.cases.clock import device_here, write
from benchmarks.gpu.tables.machine_file import MACHINE_ROW, machine_in
from benchmarks.gpu.tables.rows import results
from benchmarks.harness.journal import append, read
from benchmarks.planner.blind.command import Options as BlindOptions
from benchmarks.planner.blind.command import proof
from benchmarks.planner.machine.command import Options as MachineOptions
from benchmarks.planner.machine.command import measured_machine
from tpengine.planner.machine import machine_values


def machine(rows: Path, passes: int = 3, tiny: bool = False) -> None:
    """Measure the engine's operators one by one, as `benchmarks.run machine` does.

    Args:
        rows: where the row goes.
        passes: how often everything is measured.
        tiny: tiny sizes, for a rehearsal.
    """
    device = _device()
    dtypes = ("bfloat16",) if device == "cuda" else ("float32",)
    found = measured_machine(MachineOptions(ranks=1, dtypes=dtypes, device=device, passes=passes, tiny=tiny))
    if device == "cuda":
        found = replace(found, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
    write(rows, MACHINE_ROW, {"machine": machine_values(found), "source": found.source})


def layouts(
    rows: Path,
    out: str,
    preset: str,
    seq_len: int,
    minutes: float,
    repeats: int = 2,
    most: int | None = None,
    still: float = 0.3,
) -> int:
    """Predict a step of every layout of one rank, then measure them; return 1 if none was measured.

    Args:
        rows: has the machine's row, or it is measured first; a row for each layout is added.
        out: directory for predictions and journal.
        preset, seq_len: the model.
        minutes: for the steps.
        repeats: rounds over all layouts.
        most: so many layouts; None for all.
        still: a step counts if products are as fast as by the file, up to this share: nobody else is on the GPU, but
            its clock follows its temperature.
    """
    options = BlindOptions(
        dir=Path(out) / "layouts",
        preset=preset,
        ranks=1,
        device=_device(),
        seq_len=seq_len,
        layouts=most,
        repeats=repeats,
        still=still,
        memory=False,
        minutes=minutes,
        drawn=False,
    )
    measured = machine_in(results(read(rows)))
    if measured is None:
        machine(rows)
        measured = machine_in(results(read(rows)))
    assert measured is not None, "its row has been written"
    found = proof(options, measured, MACHINE_ROW)
    for row in found:
        append(rows, row)
    return int(not found)


def _device() -> Literal["cpu", "cuda"]:
    return "cuda" if device_here().type == "cuda" else "cpu"
