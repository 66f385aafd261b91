"""What is here: GPU, driver, versions, what is missing; found by a process of its own, since looking starts CUDA."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.declared import Case

_LOOK = """
import json
try:
    import torch
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
    if torch.cuda.is_available():
        it = torch.cuda.get_device_properties(0)
        found |= {"gpu": it.name, "processors": it.multi_processor_count, "gpu_memory_bytes": it.total_memory}
        found |= {"num_gpus": torch.cuda.device_count(), "capability": f"{it.major}.{it.minor}"}
except Exception as error:
    found = {"torch": None, "gpu": None, "error": f"{type(error).__name__}: {error}"}
print(json.dumps(found))
"""
_VERSIONS = ("triton", "numpy", "liger_kernel")


def look(cases: Sequence[Case]) -> dict[str, Any]:
    """Return what is here, and which modules that cases need are missing, with the number of cases each costs."""
    found: dict[str, Any] = {"python": platform.python_version()}
    done = _output([sys.executable, "-c", _LOOK])
    found |= json.loads(done.splitlines()[-1]) if done else {"torch": None, "gpu": None}
    found |= {name: _version(name) for name in _VERSIONS}
    found["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or None
    missing: dict[str, int] = {}
    for case in cases:
        for name in case.missing:
            missing[name] = missing.get(name, 0) + 1
    found["missing"] = missing
    return found


def described(found: dict[str, Any]) -> list[str]:
    """Return what was found as lines for a person."""
    memory = found.get("gpu_memory_bytes")
    gpu = found["gpu"] or "none"
    lines = [f"GPU      {gpu}" + (f", {memory / 1e9:.0f} GB, {found['processors']} processors" if memory else "")]
    lines += [
        f"{name:<8} {found.get(name) or 'not found'}" for name in ("driver", "python", "torch", "cuda", *_VERSIONS)
    ]
    lines += [f"missing  {name}: {number} cases are left out" for name, number in found["missing"].items()]
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    """Return what a command prints; empty if it fails, or there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
