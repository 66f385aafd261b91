"""Rung: pure. Files that comments, docstrings and READMEs name are there; a class has a name of its own."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from pathlib import PurePath

import pytest
from support import ROOT

TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
NAMED = re.compile(r"(?<![\w{}*<./-])((?:[a-z_]+/)*[a-z_]+\.py)\b")

# A part of a described model, and the layer that computes it: both are what the field calls them.
NAMED_TWICE = {"Attention", "FeedForward", "Norm"}


def prose_of(name: str) -> str:
    """A README whole, of a module its docstrings and comments."""
    text = (ROOT / name).read_text()
    # Most files name none, in prose or not.
    if name.endswith(".md") or not NAMED.search(text):
        return text
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


# How a tracked file may be named: rooms may be left out from the left.
NAMES = {parts[i:] for parts in (PurePath(tracked).parts for tracked in TRACKED) for i in range(len(parts))}


def is_there(path: str) -> bool:
    return PurePath(path).parts in NAMES


@pytest.mark.parametrize("room", ["benchmarks", "kernels", "tests", "tpengine", "README.md"])
def test_every_file_that_is_named_is_there(room: str) -> None:
    read = [name for name in TRACKED if name.startswith(room) and name.endswith((".py", ".md"))]
    named = {(name, path) for name in read for path in NAMED.findall(prose_of(name))}
    assert named, room
    assert sorted(f"{name} names {path}" for name, path in named if not is_there(path)) == []


def test_a_class_has_a_name_of_its_own() -> None:
    files = defaultdict(list)
    for name in TRACKED:
        if name.startswith("tpengine/") and name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(name)
    assert {name: found for name, found in files.items() if len(found) > 1 and name not in NAMED_TWICE} == {}
    assert all(len(files[name]) == 2 for name in NAMED_TWICE)
