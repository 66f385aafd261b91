"""Rung: pure. What must import without torch does; the packages import what the design lets them."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "tpengine",
    "tpengine.config",
    "tpengine.config.toml",
    "tpengine.config.exact_sizes",
    "tpengine.distributed.local_ranks",
    "tpengine.commands.certify.command",
    "tpengine.config.presets",
    "tpengine.commands.arguments",
    "tpengine.layout.parameters",
    "tpengine.plan",
    "tpengine.observe.records",
    "tpengine.observe.record_costs",
    "tpengine.simulate.profiles.costs",
    "tpengine.simulate.profiles.file",
    "tpengine.observe.chrome_trace",
    "tpengine.layout.step_plan",
    "tpengine.simulate.modelled.bytes",
    "tpengine.simulate.modelled.costs",
    "tpengine.data",
    "tpengine.last_words",
    "tpengine.files",
    "tpengine.observe.activity",
    "tpengine.observe.watch",
    "tpengine.checkpoint.index",
    "tpengine.checkpoint.directory",
    "tpengine.checkpoint.resume",
    "tpengine.checkpoint.run_directory",
    "tpengine.cli",
    "tpengine.commands.schedule",
    "tpengine.commands.schedule_model",
    "tpkernels",
    "tpkernels.work",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_with_torch_blocked(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; sys.modules['triton'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_random_loads_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import tpkernels.random"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_kernel_names_resolve() -> None:
    import tpkernels

    for name in dir(tpkernels):
        assert getattr(tpkernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        tpkernels.matmull  # noqa: B018
