"""How many lines are reached by imports: `PYTHONPATH=tests python -m support.reach [MODULE ...]`.

The reach of a module is every module of ours that can be imported because it was: those that it names, also inside
functions, and so on from them; with the packages around them, whose __init__ runs first. What is imported for type
checkers alone (`if TYPE_CHECKING`) is not. Sources are parsed and never imported. Modules that a string names
(importlib) are not seen, but for the table of tpengine/__init__.py, which is left out on purpose: nobody walks it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

FOLDERS = {"tpengine": ROOT / "tpengine", "tpkernels": ROOT / "kernels" / "tpkernels"}


@functools.cache
def path_of(module: str) -> Path | None:
    """Return the file of one of our modules; None if there is no such module."""
    package, *parts = module.split(".")
    if package not in FOLDERS:
        return None
    path = FOLDERS[package].joinpath(*parts)
    found = path / "__init__.py" if path.is_dir() else path.parent / f"{path.name}.py"
    return found if found.is_file() else None


def imports_of(node: ast.AST) -> Iterator[str]:
    """Yield each name that is imported under a node, inside functions too; of `from a import b` both a and a.b."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in children:
        yield from imports_of(child)


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    """Return the modules of ours that a module imports, and the packages around them."""
    path = path_of(module)
    assert path is not None, module
    found = [name for name in imports_of(ast.parse(path.read_text())) if path_of(name)]
    return frozenset(around for name in found for around in _around(name))


def _around(module: str) -> list[str]:
    """Return a module and the packages that it is in."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def reach(*modules: str) -> set[str]:
    """Return the modules that one of these reaches, these included."""
    found: set[str] = set()
    left = [around for module in modules for around in _around(module)]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imported_by(module)
    return found


def num_lines(modules: set[str], package: str = "tpengine") -> int:
    """Return how many lines the modules of one of our packages have together."""
    paths = [path_of(module) for module in modules if module.split(".")[0] == package]
    return sum(len(path.read_text().splitlines()) for path in paths if path is not None)


def rooms() -> dict[str, tuple[str, ...]]:
    """Return the modules of each room: a folder of tpengine."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDERS["tpengine"].rglob("*.py")):
        parts = path.relative_to(FOLDERS["tpengine"].parent).with_suffix("").parts
        if len(parts) > 2:
            module = ".".join(parts).removesuffix(".__init__")
            found.setdefault(f"tpengine.{parts[1]}", []).append(module)
    return {room: tuple(modules) for room, modules in found.items()}


def main() -> None:
    """Print the reach of modules; by default of train, the trainer and every room."""
    asked: dict[str, tuple[str, ...]] = {name: (name,) for name in sys.argv[1:]}
    for name, modules in (asked or {n: (n,) for n in ("tpengine.train", "tpengine.runs.trainer")} | rooms()).items():
        found = reach(*modules)
        num_files = sum(module.split(".")[0] == "tpengine" for module in found)
        kernels = num_lines(found, "tpkernels")
        print(f"{name:28} {num_lines(found):6,} lines of tpengine in {num_files:3} files, {kernels:6,} of tpkernels")


if __name__ == "__main__":
    main()
