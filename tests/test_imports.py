"""Rung: pure. What must import without torch does; the packages import what the design lets them."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "tpengine",
    "tpengine.config",
    "tpengine.config_toml",
    "tpengine.virtual_ranks",
    "tpengine.local_ranks",
    "tpengine.certify.command",
    "tpengine.presets",
    "tpengine.arguments",
    "tpengine.parameters",
    "tpengine.plan",
    "tpengine.plan.measured",
    "tpengine.plan.measured_costs",
    "tpengine.plan.profile_costs",
    "tpengine.plan.cost_profile",
    "tpengine.plan.chrome_trace",
    "tpengine.step_plan",
    "tpengine.step_bytes",
    "tpengine.step_costs",
    "tpengine.data",
    "tpengine.exits",
    "tpengine.activity",
    "tpengine.watch",
    "tpengine.checkpoint.index",
    "tpengine.checkpoint.directory",
    "tpengine.resume",
    "tpengine.run_dir",
    "tpengine.cli",
    "tpengine.schedule_command",
    "tpengine.schedule_model",
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
