"""Rows of results: one JSON object per line, with where, when and from which source it was measured.

Host and user names are left out, because rows are published. The name of every number with a fraction ends in its unit.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.journal import append
from benchmarks.harness.revision import source_here
from benchmarks.harness.timing import PASSED
from tpengine.distributed.launch import num_cores
from tpengine.doctor.nvml import clocks

_UNITS = (
    "_seconds",
    "_us",
    "_bytes",
    "_bytes_per_second",
    "_tokens_per_second",
    "_flops_per_second",
    "_ratio",
    "_percent",
)


def make_row(case: str, *, threads_per_rank: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row.

    Args:
        case: what was measured; a file may have many.
        threads_per_rank: threads that torch uses.
        fields: the numbers, and what they depend on.

    Returns:
        `case`, the fields, then date, versions, machine and source.

    Raises:
        ValueError: a float whose name does not end in a unit, or a field that the environment has too.
    """
    nameless = [name for name, value in fields.items() if isinstance(value, float) and not name.endswith(_UNITS)]
    if nameless:
        raise ValueError(f"a float's name must end in a unit: {', '.join(nameless)}: add one of {', '.join(_UNITS)}")
    where = environment() | {"threads_per_rank": threads_per_rank}
    twice = sorted(({"case"} | where.keys()) & fields.keys())
    if twice:
        raise ValueError(f"a field must not hide the environment's: {', '.join(twice)}: rename it")
    return {"case": case, **fields, **where}


def environment() -> dict[str, Any]:
    """Return date, versions, machine with its clocks now, and the commit with whether the tree differs from it."""
    source, clock = source_here(), clocks()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": source.commit,
        "dirty": source.dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tpengine": _version("tpengine"),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_clock_mhz": clock.processors_mhz,
        "gpu_memory_clock_mhz": clock.memory_mhz,
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, with family and model, since virtual machines shorten the name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    name = values.get("model name", platform.machine())
    family, model = values.get("cpu family"), values.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def stored(rows: Sequence[Mapping[str, Any]], out: Path | None) -> int:
    """Append rows to a file, if one is given; return the exit code, 1 if a check was red."""
    if out is not None:
        for row in rows:
            append(out, row)
    return int(any(row["check"] != PASSED for row in rows))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
