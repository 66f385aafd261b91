"""Rung: pure. No module pickles or unpickles, and none lets torch do so for it: whoever unpickles runs what was sent.

The one exception is local_ranks.py: a command and the processes that it has started talk over pipes that nobody else
can open, and multiprocessing pickles there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "tpengine").rglob("*.py"), *(ROOT / "kernels" / "tpkernels").rglob("*.py")])
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "torch.distributed.rpc"}
# Its planners tell each other by pickle what they have planned.
MODULES |= {"torch.distributed.checkpoint"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
}
OF_TORCH = {"torch.load", "torch.save", "torch.package", "numpy.load", "np.load"}

# How an attribute ends that is one of these, or in one of them as a module of torch's.
LAST = OBJECT_COLLECTIVES | {name.rpartition(".")[2] for name in MODULES | OF_TORCH}


def pickles(source: str) -> Iterator[str]:
    """What in a module's source pickles, with its lines."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and node.attr in LAST:
            names = [ast.unparse(node)]
        for name in names:
            last = name.rpartition(".")[2]
            in_module = any(name == module or name.startswith(f"{module}.") for module in MODULES | OF_TORCH)
            if in_module or last in OBJECT_COLLECTIVES:
                yield f"line {getattr(node, 'lineno', 0)}: {name}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno}: allow_pickle"


def test_no_module_pickles() -> None:
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): list(pickles(path.read_text())) for path in SOURCES}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "torch.load('x')",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_what_pickles_is_found(source: str) -> None:
    assert list(pickles(source))


def test_what_does_not_pickle_is_left_alone() -> None:
    calls = "json.loads('1')\ndist.all_gather(a, b)\nload(directory)"
    assert not list(pickles(f"from safetensors.torch import save_file\nimport json\n{calls}"))
