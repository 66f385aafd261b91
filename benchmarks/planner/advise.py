"""`python -m benchmarks.run advise`: CPU seconds that `tpengine advise` takes, start-up and all, on one core.

Each question is asked in a process of its own, as a user asks it. A row says how many layouts there are, how many were
simulated, whether the search ended by its bounds (`is_complete`) or because time was up, and how many rows it found.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED

_QUESTIONS = {
    "llama_1b/8": "--model llama_1b --machine h200:8x1 --global-batch 64",
    "llama_70b/32": "--model llama_70b --machine h200:8x4 --global-batch 256 --seq-len 8192",
    "llama_70b/1024": "--model llama_70b --machine h200:8x128 --global-batch 2048 --seq-len 8192",
}


@dataclass(frozen=True)
class Options:
    """Ask for advice on 8, 32 and 1,024 GPUs."""

    seconds: int = 10
    """As --seconds of tpengine advise."""
    out: Path | None = None
    """Append JSON lines to this file; results to keep go to benchmarks/results."""


def main(options: Options) -> int:
    """Ask, print and store.

    Returns: 0.
    """
    rows, table = [], Table(box=box.SIMPLE)
    for name in ("question", "layouts", "simulated", "rows", "complete", "CPU s"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for name, question in _QUESTIONS.items():
        fields = asked([*question.split(), "--dtype", "bfloat16", "--seconds", str(options.seconds)])
        rows.append(make_row(f"advise/{name}", threads_per_rank=1, fields=fields | {"check": PASSED}))
        table.add_row(name, *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in fields.values()))
    Console(width=120).print(table)
    return stored(rows, options.out)


def asked(arguments: list[str]) -> dict[str, Any]:
    """Ask one question in a process of its own.

    Args: arguments: of `tpengine advise`.
    Returns: layouts, simulated ones, rows, whether the search ended by its bounds, CPU seconds of the process.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "advice.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "tpengine.cli", "advise", *arguments, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = json.loads(file.read_text())
    return {
        "num_layouts": said["layouts"],
        "num_simulated": said["simulated"],
        "num_rows": len(said["rows"]),
        "is_complete": said["unseen_take_at_least"] is None,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
