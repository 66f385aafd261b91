"""The cases that run first: what decides the next work, in the order of what it decides, as plain data. No torch.

Each has the seconds that it is expected to take on a GPU that has compiled nothing yet; no GPU has run them. Together
they fit into the nine minutes of a run: where there is less time, what no longer fits waits for the next start.

    steps, host                         whether anything else matters
    products, attention                 what training takes by default on this kind of GPU
    a block as graphs                   what graphs would bring
    norms, gates, blocks                what kernels between the products take, and by which configurations
    tests                               whether what won may be switched on: in the dtype of training, 16 bits
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.declared import FIRST_PHASE, Case

CASES = "benchmarks.gpu.cases"
# What every test imports, and what the trainer does; neither needs what the command line does.
TESTS = ("pytest", "hypothesis", "xdist")
TRAINING = ("numpy",)
# Tests of operators, and those of operators that read rows and are launched in every step.
OPS = "tests/kernels/ops"
ROWS = [*(f"{OPS}/test_{name}.py" for name in ("norm", "adamw", "clip", "rope", "activation")), f"{OPS}/cross_entropy"]
# What a micro-batch of llama_1b has.
_BATCH = 4
_BACKENDS = ["sdpa_flash", "sdpa_flash_deterministic", "sdpa_cudnn"]


def decisive(out: Path) -> list[Case]:
    """Return the cases.

    Args:
        out: where files besides rows are written.
    """
    return [
        _families(),
        *_steps(),
        _tiles("llama_1b", ["wgrad", "alone"], 35, out),
        *_attention(out),
        _case("graph/block", 20, "block:as_graphs", preset="llama_1b", needs=TRAINING),
        _tiles("llama3_8b", ["forward"], 15, out),
        _case("norm_backward/llama_1b", 15, "kernels.between:norm_backward", model="llama_1b", tokens=8192),
        _gates(out),
        _case("blocks", 15, "kernels.blocks:measure", model="llama_1b", tokens=8192),
        *_tests(),
    ]


def _case(
    name: str,
    seconds: float,
    function: str,
    needs: tuple[str, ...] = (),
    limit_seconds: float | None = None,
    **arguments: Any,
) -> Case:
    # Its place says what it is worth.
    return Case(name, FIRST_PHASE, 0.0, seconds, f"{CASES}.{function}", arguments, needs, limit_seconds=limit_seconds)


def _families() -> Case:
    """Every family of kernels once, small, in one process: what is wrong here need not be timed."""
    families = {
        "rms_norm": "norm",
        "swiglu": "activation",
        "rope": "rope",
        "dropout": "dropout",
        "embedding": "embedding",
        "adamw": "adamw",
        "matmul_qkv": "matmul",
        "wgrad_accumulated": "matmul",
        "attention": "attention",
        "attention_qkv": "attention",
        "cross_entropy": "cross_entropy",
        "linear_cross_entropy": "linear_cross_entropy",
    }
    return _case("smoke/families", 25, "kernels.operators:smoke", families=families, model="llama3_8b", seq=512)


def _steps() -> list[Case]:
    def step(name: str, seconds: float, function: str, **arguments: Any) -> Case:
        return _case(f"train/{name}", seconds, f"training:{function}", TRAINING, preset="llama_1b", **arguments)

    return [
        # The first one may wait for the compiler.
        step("own_step/ours", 25, "own_step", limit_seconds=150, steps=8, attention="ours"),
        step("own_step/torch", 25, "own_step", limit_seconds=150, steps=8, attention="torch"),
        step("against_torch", 75, "against_torch", steps=8),
        step("host_time", 25, "host_time", steps=10, depths=[1, 3], micro_batches=[1, 2]),
    ]


def _tiles(model: str, kinds: Sequence[str], seconds: float, out: Path) -> Case:
    """Tiles of the products as training launches them, beside cuBLAS."""
    arguments: dict[str, Any] = {"model": model, "tokens": [8192], "kinds": kinds, "copy": str(out)}
    return _case(f"tiles/{model}/8192/{'_'.join(kinds)}", seconds, "kernels.tiles:tune", **arguments)


def _gates(out: Path) -> Case:
    """Gate, up and their activation in one kernel, beside torch.mm and a kernel behind it."""
    arguments: dict[str, Any] = {
        "model": "llama_1b",
        "tokens": [8192],
        "kinds": ["silu", "gelu_tanh"],
        "copy": str(out),
    }
    return _case("gates/llama_1b", 15, "kernels.between:gates", **arguments)


def _attention(out: Path) -> list[Case]:
    """Attention at a micro-batch's number of sequences, and configurations of our two kernels."""
    sizes = {"llama_1b": (2048,), "llama3_8b": (4096, 8192)}

    def against(model: str, seconds: float) -> Case:
        how: dict[str, Any] = {"ops": ["attention"], "cases": ["attention"], "rivals": _BACKENDS, "rounds": 10}
        how |= {"direction": ["forward", "backward"], "models": [model], "seqs": sizes[model], "batch": _BATCH}
        return _case(f"attention/micro_batch/{model}", seconds, "kernels.operators:measure", **how)

    def choice(model: str, seconds: float) -> Case:
        how: dict[str, Any] = {"model": model, "seqs": sizes[model], "batch": _BATCH, "copy": str(out)}
        return _case(f"attention_choice/{model}", seconds, "kernels.attention:choose", TRAINING, **how)

    def configs(model: str, seq: int) -> Case:
        how: dict[str, Any] = {"model": model, "seq": seq, "batch": _BATCH}
        return _case(f"attention_configs/{model}", 20, "kernels.attention_configs:measure", **how)

    return [
        choice("llama_1b", 10),
        against("llama_1b", 8),
        choice("llama3_8b", 10),
        against("llama3_8b", 12),
        configs("llama_1b", 2048),
        configs("llama3_8b", 4096),
    ]


def _tests() -> list[Case]:
    """The tests of what may be switched on; each fused kind once, in graphs. Other dtypes and operators: plan.py."""

    def tests(name: str, seconds: float, chosen: str, *paths: str, needs: tuple[str, ...] = ()) -> Case:
        return _case(f"tests/{name}", seconds, "tests:run", (*TESTS, *needs), paths=paths, chosen=chosen)

    in_bfloat16 = "([gpu and not [gpu-float)"
    attention = [f"{OPS}/attention", "tests/tpengine/layers/test_torch_attention.py"]
    matmul = [f"{OPS}/test_{name}.py" for name in ("matmul", "tuned", "wgrad_choice")]
    return [
        tests("attention", 40, f"{in_bfloat16} or on_a_gpu", *attention, needs=TRAINING),
        tests("matmul", 35, f"{in_bfloat16} or tuned_tile or a_gpu_adds", *matmul),
        tests("rows", 35, in_bfloat16, *ROWS),
        tests("fused_kinds", 40, "each_kind and cuda-2", "tests/kernels/fused/test_cuda_calls.py"),
    ]
