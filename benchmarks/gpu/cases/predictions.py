"""Cases that try the planner's predictions on this GPU: its machine's file, then steps of layouts predicted before."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from benchmarks.gpu.cases.clock import device_here, write
from benchmarks.gpu.tables.machine_file import MACHINE_ROW, machine_in
from benchmarks.gpu.tables.rows import results
from benchmarks.harness.journal import append, read
from benchmarks.planner.blind.command import Options as BlindOptions
from benchmarks.planner.blind.command import proof
from benchmarks.planner.machine.command import Options as MachineOptions
from benchmarks.planner.machine.command import measured_machine
from tpengine.simulate.machine import machine_text

_ROW_OF_LAYOUTS = "planner/layouts"


def machine(rows: Path, passes: int, tiny: bool = False) -> None:
    """Measure the engine's operators one by one, as `benchmarks.run machine` does; the row holds the file's text.

    Args:
        rows: where the row goes.
        passes: how often everything is measured.
        tiny: tiny sizes, for a rehearsal.
    """
    device = _device()
    dtypes = ("bfloat16",) if device == "cuda" else ("float32",)
    options = MachineOptions(ranks=1, dtypes=dtypes, device=device, passes=passes, tiny=tiny)
    found = measured_machine(options)
    write(rows, MACHINE_ROW, {"text": machine_text(found), "source": found.source})


def layouts(
    rows: Path,
    copy: str,
    preset: str,
    seq_len: int,
    minutes: float,
    repeats: int = 2,
    most: int | None = None,
    still: float = 0.15,
) -> int:
    """Predict a step of every layout of one rank by that file, then measure them; return 1 if none was measured.

    Args:
        rows: has the machine's row; a row for each layout is added.
        copy: directory for predictions and journal.
        preset, seq_len: the model.
        minutes: for the steps.
        repeats: rounds over all layouts.
        most: so many layouts; None for all.
        still: a step counts if the GPU is as fast as by its file, up to this share: clocks follow its temperature.
    """
    measured = machine_in(results(read(rows)))
    assert measured is not None, f"{_ROW_OF_LAYOUTS} predicts by the row of {MACHINE_ROW}, which is missing"
    options = BlindOptions(
        dir=Path(copy) / "layouts",
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
    found = proof(options, measured, MACHINE_ROW)
    for row in found:
        append(rows, row)
    return int(not found)


def _device() -> Literal["cpu", "cuda"]:
    return "cuda" if device_here().type == "cuda" else "cpu"
