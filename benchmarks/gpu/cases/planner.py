"""Cases for the planner: how fast this GPU multiplies, copies and launches, by size, as plain rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.norm.kernel import launch_norm

from benchmarks.gpu.cases.clock import device_here, host_seconds, medians, settle, write


def matmul_rates(rows: Path, sizes: Sequence[int], rounds: int = 10) -> None:
    """Measure products of all sizes of rows, columns and depth, by torch and by our kernel."""
    device = device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for m in sizes:
        for n in sizes:
            for k in sizes:
                a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
                calls: dict[str, Callable[[], object]] = {
                    "torch": functools.partial(torch.mm, a, b.T),
                    "ours": functools.partial(launch_matmul, a, b.T),
                }
                times = medians(calls, device, rounds)
                speeds = {f"{name}_flops_per_second": 2 * m * n * k / s.median for name, s in times.items()}
                write(rows, f"planner/matmul/{m}x{n}x{k}", {"m": m, "n": n, "k": k, **speeds})


def copies(rows: Path, sizes_bytes: Sequence[int], rounds: int = 10) -> None:
    """Measure copies within the GPU's memory, and between it and pinned memory of the host."""
    device = device_here()
    for num_bytes in sizes_bytes:
        here, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        calls: dict[str, Callable[[], object]] = {
            "within": functools.partial(there.copy_, here),
            "to_host": functools.partial(host.copy_, here, non_blocking=True),
            "from_host": functools.partial(here.copy_, host, non_blocking=True),
        }
        times = medians(calls, device, rounds)
        speeds = {f"{name}_bytes_per_second": num_bytes / s.median for name, s in times.items()}
        write(rows, f"planner/copy/{num_bytes}", {"num_bytes": num_bytes, **speeds})


def launches(rows: Path, calls: int = 200) -> None:
    """Measure the host's time per launch, of torch's smallest operator, ours, and a replayed graph of ours."""
    device = device_here()
    x = torch.randn(16, 64, device=device)
    every: dict[str, Callable[[], object]] = {
        "torch_add_": functools.partial(x.add_, 0),
        "triton_norm": lambda: launch_norm(x, x[0], None, None, 1e-5, False),
        "triton_matmul": lambda: launch_matmul(x, x.T),
    }
    for name, call in every.items():
        write(rows, f"planner/launch/{name}", {"host_us": 1e6 * host_seconds(call, device, calls)})
    if device.type != "cuda":
        return
    replay = _captured(every["triton_norm"], device)
    write(rows, "planner/launch/graph_of_norm", {"host_us": 1e6 * host_seconds(replay, device, calls)})


def _captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a call that has been made before."""
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
