"""Rung: pure. Every argument that a docstring names is one of the signature.

Sources are parsed, not imported: benchmarks of rivals need packages that may not be there.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

FOLDERS = [ROOT / "tpengine", ROOT / "kernels" / "tpkernels", ROOT / "benchmarks", ROOT / "tests" / "support"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_NAMES = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(?:\s|$)")


def named_arguments(docstring: str) -> list[str]:
    """The names that the section `Args:` explains; `Args: x: what` has them on the line itself."""
    lines = inspect.cleandoc(docstring).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Args:")), None)
    if start is None:
        return []
    entries = [lines[start].removeprefix("Args:").strip()]
    for line in lines[start + 1 :]:
        if line and not line.startswith(" "):
            break
        # Deeper lines go on with what an entry says.
        if re.match(r" {4}\S", line):
            entries.append(line.strip())
    return [name for entry in entries if (found := _NAMES.match(entry)) for name in found[1].split(", ")]


def parameters_of(function: Function) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return {argument.arg for argument in every}


def signature_of(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str] | None:
    """What a function, or a class when it is made, takes; None if a base from elsewhere decides."""
    if isinstance(node, Function):
        return parameters_of(node)
    assert isinstance(node, ast.ClassDef)
    for inner in node.body:
        if isinstance(inner, Function) and inner.name in ("__init__", "__new__", "forward"):
            return parameters_of(inner)
    fields = {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }
    if fields:
        return fields
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return signature_of(classes[bases[0]], classes) if bases and bases[0] in classes else None


def faults_in(source: str) -> Iterator[str]:
    if "Args:" not in source:
        return
    tree = ast.parse(source)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef):
            continue
        named = named_arguments(ast.get_docstring(node) or "")
        signature = signature_of(node, classes) if named else None
        for name in named:
            if signature is not None and name.lstrip("*") not in signature:
                yield f"line {node.lineno}: {node.name} takes no {name}: it takes {', '.join(sorted(signature))}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_arguments_that_docstrings_name_exist(folder: Path) -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted(folder.rglob("*.py"))
        for fault in faults_in(path.read_text())
    ]
    assert not faults, "\n".join(faults)


MUTATED = '''
class Gate:
    """Open and close.

    Args:
        width, {first}: of the gate.
            colour: not an argument, as it stands deeper.
        *rest: others.

    Attributes:
        height: of it.
    """

    def __init__(self, width: int, depth: int, *rest: int) -> None:
        """Make it."""

    def open(self, wide: bool) -> None:
        """Open it.

        Args: {second}: how far.
        Returns: nothing.
        """
'''


def test_a_name_that_no_signature_has_is_found() -> None:
    assert not list(faults_in(MUTATED.format(first="depth", second="wide")))
    (fault,) = faults_in(MUTATED.format(first="height", second="wide"))
    assert fault == "line 2: Gate takes no height: it takes depth, rest, self, width"
    (fault,) = faults_in(MUTATED.format(first="depth", second="far"))
    assert fault.endswith("open takes no far: it takes self, wide")
