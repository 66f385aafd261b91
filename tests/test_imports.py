"""Rung: pure. What must import without torch does; the packages import what the design lets them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from support import ROOT

import tpengine
import tpengine.layers

TORCH_FREE = [
    "tpengine",
    "tpengine.config",
    "tpengine.config.toml",
    "tpengine.config.exact_sizes",
    "tpengine.distributed.local_ranks",
    "tpengine.commands.certify",
    "tpengine.config.presets",
    "tpengine.commands.arguments",
    "tpengine.commands.flags",
    "tpengine.layout.parameters",
    "tpengine.plan",
    "tpengine.observe.records",
    "tpengine.planner.profiles.record_costs",
    "tpengine.planner.profiles.costs",
    "tpengine.planner.profiles.file",
    "tpengine.observe.chrome_trace",
    "tpengine.layout.step_plan",
    "tpengine.architectures.part",
    "tpengine.planner.modelled.activations",
    "tpengine.planner.modelled.costs",
    "tpengine.data",
    "tpengine.training.samples",
    "tpengine.last_words",
    "tpengine.dtypes",
    "tpengine.files",
    "tpengine.journal",
    "tpengine.tensor_file",
    "tpengine.spelling",
    "tpengine.observe.activity",
    "tpengine.observe.watch",
    "tpengine.checkpoint.index",
    "tpengine.checkpoint.directory",
    "tpengine.checkpoint.resume",
    "tpengine.checkpoint.run_directory",
    "tpengine.cli",
    "tpengine.commands.checkpoint",
    "tpengine.commands.doctor",
    "tpengine.commands.data_write",
    "tpengine.commands.schedule",
    "tpengine.commands.schedule_model",
    "tpkernels",
    "tpkernels.work",
    "tpkernels.work_experts",
]


# Each module in a process of its own, forked from one that has what they need of others: no torch either way.
IMPORT_EACH = """
import importlib, os, sys
sys.modules["torch"] = sys.modules["triton"] = None
import numpy, rich.progress, tyro
failed = []
for name in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        importlib.import_module(name)
        sys.exit()
    if os.waitpid(pid, 0)[1]:
        failed.append(name)
print(*failed)
"""


@pytest.mark.slow
def test_imports_with_torch_blocked(tmp_path: Path) -> None:
    # What one has compiled the others read.
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, *TORCH_FREE], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr


def test_public_kernel_names_resolve() -> None:
    import tpkernels

    for name in dir(tpkernels):
        assert getattr(tpkernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        tpkernels.matmull  # noqa: B018


NAMES_WITHOUT_TORCH = """
import sys, tpengine
assert "torch" not in sys.modules and not any(name.startswith("tpengine.") for name in sys.modules)
tpengine.Config, tpengine.make_schedule, tpengine.__version__
assert "torch" not in sys.modules
"""


def test_the_engine_loads_what_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES_WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_of_the_engine_resolve_and_type_checkers_see_them() -> None:
    for name in dir(tpengine):
        assert getattr(tpengine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Attentoin'"):
        tpengine.Attentoin  # noqa: B018
    # What type checkers read is what is loaded.
    (block,) = (node for node in ast.parse(Path(tpengine.__file__).read_text()).body if isinstance(node, ast.If))
    read = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert read == {name: f"tpengine.{module}" for name, module in tpengine._HOME.items()}
    assert sorted(tpengine.__all__) == sorted(read) and set(tpengine.layers.__all__) < set(read)


# Why each of them does is said in pyproject.toml, beside the contracts.
IMPORT_LATE = {
    "tpengine/commands/options.py",
    "tpengine/commands/checkpoint.py",
    "tpengine/commands/doctor.py",
    "tpengine/commands/schedule_model.py",
    "tpengine/cli.py",
    "tpengine/runs/memory_limit.py",
    "tpengine/train.py",
    "tpengine/distributed/local_ranks.py",
    "benchmarks/kernels/side.py",
    "benchmarks/kernels/cases/attention.py",
    "benchmarks/kernels/cases/experts.py",
    "benchmarks/kernels/cases/matmul.py",
    "benchmarks/kernels/cases/operators.py",
}
IMPORT_BY_NAME = {
    "tpengine/__init__.py",
    "tpengine/distributed/rank_process.py",
    "kernels/tpkernels/__init__.py",
    "benchmarks/gpu/process/case.py",
    "benchmarks/gpu/cases/faults.py",
    "benchmarks/launches/traffic.py",
    "benchmarks/harness/registry.py",
    "benchmarks/kernels/cases/cases.py",
}
OURS = ("tpengine", "tpkernels", "benchmarks")


def imports_in_functions(tree: ast.Module) -> Iterator[str]:
    """What of ours is imported inside functions."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] in OURS)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
                yield node.module


def modules() -> dict[str, Path]:
    """Our modules by name."""
    found = {}
    for root, package in ((ROOT, "tpengine"), (ROOT / "kernels", "tpkernels"), (ROOT, "benchmarks")):
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(path: Path, names: Collection[str]) -> set[str]:
    """Which of our modules a file names in its imports: late ones, and those for types alone, are among them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # A module of a package, or what a module defines.
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & set(names) or {node.module}
    return found & set(names)


def circles(imports: Mapping[str, Collection[str]]) -> set[tuple[str, ...]]:
    """Modules that reach each other, in groups: peel off what imports nothing that is left, and what nobody imports."""
    left = {name: set(of) - {name} for name, of in imports.items()}
    while True:
        reached = set().union(*left.values())
        ends = {name for name, of in left.items() if not of or name not in reached}
        if not ends:
            break
        left = {name: of - ends for name, of in left.items() if name not in ends}
    ways = {start: reachable(left, start) for start in left}
    return {tuple(sorted(other for other in of if name in ways[other])) for name, of in ways.items() if name in of}


def reachable(imports: Mapping[str, Collection[str]], start: str) -> set[str]:
    """What a module imports, and what that does."""
    found: set[str] = set()
    ahead = list(imports[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += imports[name]
    return found


def test_no_modules_import_each_other() -> None:
    files = modules()
    assert circles({name: imported_by(path, files) for name, path in files.items()}) == set()


def test_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e", "f"}, "f": {"g"}, "g": {"e"}}
    assert circles(imports) == {("b", "c"), ("e", "f", "g")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_our_modules_are_imported_at_the_top_but_for_the_named() -> None:
    late, by_name = set(), set()
    folders = [ROOT / "tpengine", ROOT / "kernels" / "tpkernels", ROOT / "benchmarks"]
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        # Most files have no import that is indented, in a function or not: they need not be parsed.
        if re.search(r"^\s+(import|from) ", text, re.MULTILINE) and any(imports_in_functions(ast.parse(text))):
            late.add(name)
        if "import_module(" in text or "__import__(" in text:
            by_name.add(name)
    assert late == IMPORT_LATE
    assert by_name == IMPORT_BY_NAME
