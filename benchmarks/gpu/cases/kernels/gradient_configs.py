"""The case that times configurations of attention's two gradient kernels, which were found by compiling alone.

The whole gradient is timed, with another configuration of one kernel at a time. So a row also tells what a choice costs
around the kernel: parts of dk and dv per head, and their sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tpkernels.ops.attention import attention
from tpkernels.ops.attention.configs import KEY_GRADIENT, QUERY_GRADIENT, Config, config_of
from tpkernels.ops.attention.gradient import backward
from tpkernels.ops.attention.problem import Options, Sides, Tables

from benchmarks.gpu.cases.clock import agreement, device_here, medians, write
from benchmarks.gpu.cases.kernels.tiles import MODELS_BY_NAME
from benchmarks.harness.shapes import Model
from benchmarks.harness.timing import PASSED

# Queries and keys of a tile, warps, stages.
CANDIDATES: Mapping[str, tuple[Config, ...]] = {
    "query_gradient": (
        Config(128, 64, 8, 2),
        Config(128, 64, 8, 3),
        Config(128, 64, 4, 2),
        Config(128, 128, 8, 2),
        Config(64, 64, 4, 3),
        Config(64, 128, 4, 2),
    ),
    "key_gradient": (
        Config(64, 128, 8, 2),
        Config(64, 128, 8, 3),
        Config(64, 128, 4, 2),
        Config(128, 128, 8, 2),
        Config(64, 64, 4, 3),
        Config(32, 128, 8, 3),
    ),
}
SMALL_CANDIDATES: Mapping[str, tuple[Config, ...]] = {name: (Config(16, 16, 4, 1),) for name in CANDIDATES}
_TABLES = {"query_gradient": QUERY_GRADIENT, "key_gradient": KEY_GRADIENT}


def measure(rows: Path, model: str, seq: int, batch: int, rounds: int = 10) -> int:
    """Time the gradient with each candidate for each kernel; return 1 if a result is another one.

    Args:
        rows: a row for each candidate, and one for each kernel: the fastest, and its gain over the present one.
        model: of which one rank's heads are taken.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch.
        rounds: samples.
    """
    device, sizes = device_here(), MODELS_BY_NAME[model]
    gradient = _gradient(sizes, seq, batch, device)
    want = gradient()
    is_wrong = False
    for kernel, candidates in (CANDIDATES if device.type == "cuda" else SMALL_CANDIDATES).items():
        case = f"gradient_configs/{kernel}/{model}/seq_{seq}/batch_{batch}"
        calls: dict[str, Callable[[], object]] = {"present": gradient}
        for config in candidates:
            name, call = "x".join(map(str, config)), functools.partial(_with, kernel, config, gradient)
            try:
                check = agreement(want, call())
            except AssertionError:
                raise
            except Exception as raised:  # a candidate that does not compile or fit costs itself alone
                text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
                write(rows, f"{case}/{name}", {"left_out": text})
                continue
            if check == PASSED:
                calls[name] = call
            else:
                write(rows, f"{case}/{name}", {}, check)
                is_wrong = True
        times = {name: 1e6 * spread.median for name, spread in medians(calls, device, rounds).items()}
        for name, time_us in times.items():
            write(rows, f"{case}/{name}", {"gradient_us": time_us, "num_samples": rounds})
        best = min(times, key=lambda name: times[name])
        gain = times["present"] / times[best]
        write(rows, case, {"winner": best, "gain_over_present_ratio": gain, "num_samples": rounds})
    return int(is_wrong)


def _gradient(model: Model, seq: int, batch: int, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of attention's gradient alone; its forward has been run."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, seq, heads, model.head_size, generator=generator, device=device).to(dtype)

    leaves = [normal(heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads)]
    y, dy = attention(*leaves), normal(model.heads)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def launch_candidates(model: Model) -> None:
    """Launch every candidate on tensors without memory: for use where launches are observed."""

    def empty(heads: int) -> Tensor:
        return torch.empty(1, 4096, heads, model.head_size, dtype=torch.bfloat16, device="meta")

    q, k, v = (empty(heads) for heads in (model.heads, model.kv_heads, model.kv_heads))
    lse = torch.empty(1, model.heads, 4096, device="meta")
    problem = (Tables(None, None), Sides(None, None), Options(True, 0, model.head_size**-0.5, False, 0.0, ()))

    def gradient() -> tuple[Tensor, ...]:
        backward.launch_attention_backward(q, q, k, v, q, lse, (q, k, v), *problem)
        return ()

    for kernel, candidates in CANDIDATES.items():
        for config in candidates:
            _with(kernel, config, gradient)


def _with(kernel: str, config: Config, gradient: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Compute the gradient with another configuration of a kernel."""
    asked = set[int]()

    def chosen(table: Any, *kind: Any) -> dict[str, int]:
        asked.add(id(table))
        return config.options if table is _TABLES[kernel] else config_of(table, *kind)

    with patch.object(backward, "config_of", chosen):
        found = gradient()
    assert id(_TABLES[kernel]) in asked, f"nobody has asked for the configuration of {kernel}"
    return found
