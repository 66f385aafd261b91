"""Cases of the rehearsal: some that fail on purpose and must cost themselves alone, and several as one. No torch."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.journal import append


def several(rows: Path, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> int:
    """Run several cases in this process, which spares the others its start; return 1 if one is wrong.

    Args:
        rows: where all write.
        calls: "module:function" of benchmarks.gpu.cases, and arguments.
    """
    is_wrong = False
    for name, arguments in calls:
        print(name, flush=True)
        module, _, function = name.partition(":")
        called = getattr(importlib.import_module(f"benchmarks.gpu.cases.{module}"), function)
        is_wrong |= bool(called(rows, **arguments))
    return int(is_wrong)


def passes(rows: Path) -> None:
    """Write a row."""
    append(rows, {"case": "rehearsal/passes", "check": "passed", "answer_percent": 42.0})


def raises(rows: Path) -> None:
    """Write a row, then raise as a library does after an illegal access."""
    append(rows, {"case": "rehearsal/raises", "check": "passed"})
    raise RuntimeError("CUDA error: an illegal memory access was encountered (planted)")


def dies(rows: Path) -> None:
    """Die without a word."""
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(rows: Path) -> None:
    """Hang, with a process that would go on alone."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


def is_wrong(rows: Path) -> int:
    """Write a row whose check is red."""
    append(rows, {"case": "rehearsal/is_wrong", "check": "failed: planted: off by 1"})
    print("a check was red")
    return 1


def is_cut(rows: Path, marker: str) -> None:
    """The first time, say which process this is and wait to be cut; the second time, pass."""
    if Path(marker).exists():
        return
    beside = Path(f"{marker}.new")
    beside.write_text(str(os.getpid()))
    beside.rename(marker)
    time.sleep(600)
