"""`python -m benchmarks.run machine --out m.toml`: measure this machine for `tpengine plan` and `tpengine advise`.

As many processes as ranks measure at the same time, since ranks share memory, caches and power: what they attain
together is what a step attains. Each figure is the mean over them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from tpengine.distributed.local_ranks import Ranks
from tpengine.doctor.measure.sizes import TINY, sizes_of
from tpengine.files import write_beside
from tpengine.planner.machine import Machine, machine_text
from tpengine.planner.machine.found import differ, each_of, machine_of_found, mean_of


@dataclass(frozen=True)
class Options:
    """Measure a machine by microbenchmarks, and write its file."""

    out: Path | None = None
    """The machine's file (TOML); without it the file is printed."""
    ranks: int = 2
    """Processes that measure at the same time, one core each; on a GPU one."""
    dtypes: tuple[str, ...] = ("float32",)
    """Dtypes of activations."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure. On cuda one process does, and exchanges are copies within its memory."""
    passes: int = 6
    """How often everything is measured; the middle figures count."""
    tiny: bool = False
    """Tiny sizes: the file is valid and tells nothing."""


def main(options: Options) -> int:
    """Measure, and write the file; return 0."""
    begin = time.monotonic()
    if options.out is not None and options.out.is_dir():
        raise ValueError(f"--out must be a file: {options.out} is a directory: name a file in it, as m.toml")
    machine = measured_machine(options)
    text = machine_text(machine)
    if options.out is None:
        print(text, end="")
        return 0
    write_beside(options.out, text.encode())
    Console().print(f"{options.out}: {machine.source}; {time.monotonic() - begin:.0f} s", soft_wrap=True)
    return 0


def measured_machine(options: Options) -> Machine:
    """Return this machine, measured.

    Raises:
        ValueError: an unknown dtype.
    """
    unknown = set(options.dtypes) - {"float32", "float64", "bfloat16", "float16"}
    if unknown:
        raise ValueError(f"--dtypes must be of float32, float64, bfloat16, float16: got {min(unknown)}: use float32")
    is_gpu = options.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a GPU: torch {torch.__version__} sees none: use --device cpu")
    sizes = TINY if options.tiny else sizes_of(options.device)
    num_ranks = 1 if is_gpu else options.ranks
    with Ranks(num_ranks, "tpengine.doctor.measure.member:Member", options.device, sizes) as ranks:
        passes = [_measured(ranks, options.dtypes) for _ in range(options.passes)]
    found = each_of(passes, statistics.median)
    processes = f"{num_ranks} process{'es' if num_ranks > 1 else ''}"
    sizes_told = "tiny sizes, which tell nothing: " if options.tiny else ""
    return machine_of_found(
        found,
        name=f"this {'GPU' if is_gpu else 'CPU'}",
        source=f"{sizes_told}microbenchmarks by {processes} at once{differ(passes)}",
        is_gpu=is_gpu,
        ranks_per_node=num_ranks,
    )


def _measured(ranks: Ranks, dtypes: Sequence[str]) -> dict[str, Any]:
    """Return one pass: the means over the processes."""
    answers = ranks.call("exchanges")
    exchanges = mean_of(answers)
    return {
        "rates": {dtype: mean_of(ranks.call("rates", dtype)) for dtype in dtypes},
        "cached": {dtype: mean_of(ranks.call("cached_rates", dtype)) for dtype in dtypes},
        "cold": mean_of(ranks.call("cold_shares", dtypes[0])),
        "copies": mean_of(ranks.call("copies")),
        "host": mean_of(ranks.call("host")),
        "messages": exchanges.get("messages", []),
        **{name: {len(answers): exchanges[name]} if exchanges else {} for name in ("sums", "fused")},
    }
