"""The READMEs as tests read them: commands with their lines joined, snippets, tables."""

from __future__ import annotations

import re
from pathlib import Path

from support import ROOT

_FOLDERS = (ROOT / "tpengine", ROOT / "kernels", ROOT / "benchmarks")
FIRST_NODE = ROOT / "tpengine" / "commands" / "first_node.md"
READMES = (
    ROOT / "README.md",
    *sorted(path for folder in _FOLDERS for path in folder.rglob("README.md")),
    FIRST_NODE,
)


def commands_in(text: str) -> list[str]:
    """Every indented line of a README, without a prompt; a line that ends in a backslash goes on in the next."""
    joined = re.sub(r" *\\\n +", " ", text)
    return [line.strip().removeprefix("$ ") for line in joined.splitlines() if line.startswith("    ")]


def the_command(path: Path, beginning: str) -> str:
    """The one command of a README that begins so."""
    (command,) = [line for line in commands_in(path.read_text()) if line.startswith(beginning)]
    return command


def snippets_in(text: str) -> list[tuple[int, str]]:
    """(number of ranks, source) of every Python snippet."""
    found = re.findall(r"<!-- run: (\d+) ranks? -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count("```python"), "a snippet needs a mark that says on how many ranks it runs"
    return [(int(num_ranks), source) for num_ranks, source in found]
