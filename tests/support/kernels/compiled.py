"""Kernels compiled without a GPU: one pool of processes, one cache, so that nothing is compiled twice.

The functions here run in the processes of the fixture `compilers`, which never launch anything: for as long as they
live, triton compiles for whatever it was last told to. What it compiled is kept by what it was compiled from: for a
session, or, if TPENGINE_TEST_CACHE names a directory, for all sessions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Tells the processes where; set by the fixture.
CACHE_VARIABLE = "TPENGINE_COMPILED"


def pretend(target_name: str) -> Any:
    """Have triton compile for a target that need not be here; return the target."""
    from benchmarks.launches import compile as benchmark

    target = benchmark.TARGETS[target_name]
    benchmark.pretend(target, _cache() / "triton")
    return target


def codes_of(target_name: str, launch: Callable[[], object]) -> list[str]:
    """The code of all kernels that a function would launch, in order."""
    from tpkernels.launch import observed

    codes: list[str] = []

    def look(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        codes.append(code_of(kernel, arguments, {"grid": grid, **options}))

    with observed(pretend(target_name), look):
        launch()
    return codes


def code_of(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The code of one kernel, for the target pretended."""
    asm = kernel.warmup(*arguments, **options).asm
    return str(asm["ptx"] if "ptx" in asm else asm["amdgcn"])


def modules_of(sources: Mapping[str, str]) -> dict[str, ModuleType]:
    """Import sources by name, in this order; `{name}` in one stands for the module's name of another.

    Modules are named after what they hold, since triton's cache knows a kernel by the name of its module too.
    """
    digest = hashlib.sha256("\0".join(sources.values()).encode()).hexdigest()[:16]
    directory = _cache() / "sources"
    directory.mkdir(parents=True, exist_ok=True)
    names = {name: f"{name}_{digest}" for name in sources}
    for name, source in sources.items():
        path = directory / f"{names[name]}.py"
        for other, module_name in names.items():
            source = source.replace(f"{{{other}}}", module_name)
        # In one piece: another process may want the same.
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(source)
        whole.rename(path)
        if names[name] not in sys.modules:
            spec = importlib.util.spec_from_file_location(names[name], path)
            assert spec is not None and spec.loader is not None
            sys.modules[names[name]] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[names[name]])
    return {name: sys.modules[names[name]] for name in sources}


def _cache() -> Path:
    return Path(os.environ[CACHE_VARIABLE])
