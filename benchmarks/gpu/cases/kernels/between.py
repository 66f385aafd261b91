"""Cases of what lies between the products: where a gate is multiplied in, and how a norm's backward reads its rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tpkernels.launch import target_of
from tpkernels.ops.activation import activation_forward, activation_reference
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.swiglu_kernel import launch_matmul_swiglu
from tpkernels.ops.matmul.tuned import TunedGate, is_allowed, path_for
from tpkernels.ops.norm.kernel import BackwardConfig, backward_config, launch_norm, launch_norm_backward
from tpkernels.work import norm_backward_work

from benchmarks.gpu.cases.clock import device_here, medians, write
from benchmarks.gpu.cases.kernels.tiles import MODELS_BY_NAME, save
from benchmarks.harness.shapes import Model

# Columns of a tile are twice as many sums. The table's, and its neighbours.
_GATED = tuple(
    MatmulConfig(*numbers)
    for numbers in ((128, 128, 64, 4, 8, 3), (128, 128, 64, 8, 8, 4), (128, 64, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4))
)
_SMALL_GATED = (MatmulConfig(16, 16, 16, 2, 4, 1),)
_NORM_BYTES, _NORM_STAGES, _NORM_PROGRAMS = (4096, 8192, 16384), (1, 2, 3, 4), (256, 512)


def gates(
    rows: Path,
    model: str,
    tokens: Sequence[int],
    kinds: Sequence[str] = ("silu",),
    copy: str | None = None,
    into: str | None = None,
    rounds: int = 10,
) -> int:
    """Time a gated projection in one kernel and in two, and write what the layer reads; return 1 if a tile is wrong.

    Two kernels are torch.mm and the activation's, as the layer has them. Both ways keep the product for backward, which
    is the same for both.

    Args:
        rows: a row for each number of tokens and kind: the fastest tile, and its speed over two kernels.
        model: of which one rank's projection is timed.
        tokens: numbers of rows.
        kinds: of activations.
        copy: a directory that gets a copy of the file.
        into: the directory of the file; default where the layer looks.
        rounds: samples of each.
    """
    device = device_here()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    path = path_for(gpu) if into is None else Path(into) / path_for(gpu).name
    copied = None if copy is None else Path(copy) / path.name
    target, is_wrong = target_of(torch.empty(0, device=device)), False
    for num_tokens, kind in itertools.product(tokens, kinds):
        case = f"gates/{model}/tokens_{num_tokens}/{kind}"
        x, weight = _projection(MODELS_BY_NAME[model], num_tokens, device)
        configs = [config for config in (_GATED if x.is_cuda else _SMALL_GATED) if is_allowed(config, 2, target)]
        fused = {_name(config): functools.partial(_in_one, x, weight, kind, config) for config in configs}
        for name in list(fused):
            try:
                wrong = _error(fused[name](), x, weight, kind)
            except Exception as raised:  # a tile that does not compile or fit costs itself alone
                fused.pop(name)
                write(rows, f"{case}/{name}", {"left_out": f"{type(raised).__name__}: {str(raised)[:200]}"})
                continue
            if wrong:
                fused.pop(name)
                is_wrong = True
                write(rows, f"{case}/{name}", {}, f"failed: {wrong}")
        if not fused:
            continue
        times = medians({"apart": functools.partial(_apart, x, weight, kind), **fused}, device, rounds=rounds)
        best = min(fused, key=lambda name: times[name].median)
        best_us, apart_us = 1e6 * times[best].median, 1e6 * times["apart"].median
        write(rows, case, {"tile": best, "tile_us": best_us, "apart_us": apart_us, "gain_ratio": apart_us / best_us})
        config = next(config for config in configs if _name(config) == best)
        dtype = str(x.dtype).removeprefix("torch.")
        one = TunedGate(
            num_tokens, len(weight) // 2, x.shape[1], dtype, kind, config, round(best_us, 2), round(apart_us, 2)
        )
        save(path, gpu, target, gates=[one], copied=copied)
    return int(is_wrong)


def norm_backward(
    rows: Path, model: str, tokens: int, rounds: int = 10, programs: Sequence[int] = _NORM_PROGRAMS
) -> int:
    """Time a norm's backward by each configuration, beside a copy of as many bytes; return 1 if one is wrong.

    Args:
        rows: a row for each configuration and for that which is the default, with its share of the copy's bandwidth.
        model: whose width is taken.
        tokens: number of rows.
        rounds: samples of each.
        programs: among which rows are divided.
    """
    device, width, is_wrong = device_here(), MODELS_BY_NAME[model].hidden, False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator(device).manual_seed(0)
    x, dy, dtotal = (torch.randn(tokens, width, generator=generator, device=device).to(dtype) for _ in range(3))
    _, _, mean, rstd = launch_norm(x, x[0], None, None, 1e-5, False)
    present = backward_config(target_of(x))
    configs = dict.fromkeys([present])
    for block_bytes, stages, most in itertools.product(_NORM_BYTES, _NORM_STAGES, programs):
        configs[BackwardConfig(block_bytes, present.elements_per_warp, stages, most)] = None
    for residual in (False, True):
        case = f"norm_backward/{model}/residual_{int(residual)}"
        work = norm_backward_work(tokens, width, x.element_size(), residual=residual)
        given = (dy, dtotal if residual else None, x, x[0], mean, rstd, 1, False, False)
        want, want_sums = _wide_gradients(*given[:4], rstd)
        plain, _ = launch_norm_backward(*given, config=BackwardConfig(num_stages=1))
        unit = torch.finfo(dtype).eps * float(want.abs().max())
        allowed = max(unit, 2 * float((plain.double() - want).abs().max()))
        copied = torch.empty(work.memory_bytes // 2, dtype=torch.uint8, device=device)
        other = torch.empty_like(copied)
        calls: dict[str, Callable[[], object]] = {"copy": functools.partial(other.copy_, copied)}
        for config in configs:
            name = "x".join(map(str, config))
            dx, sums = launch_norm_backward(*given, config=config)
            error = float((dx.double() - want).abs().max())
            if not (error <= allowed and torch.allclose(sums[0, 0].double(), want_sums, rtol=1e-3, atol=1e-2)):
                write(rows, f"{case}/{name}", {}, f"failed: wrong by {error:.2g}, or its dw is")
                is_wrong = True
                continue
            calls[name] = functools.partial(launch_norm_backward, *given, config=config)
        times = medians(calls, device, rounds=rounds)
        of_copy = times["copy"].median
        for name, spread in times.items():
            fields = {
                "time_us": 1e6 * spread.median,
                "share_of_copy_ratio": of_copy / spread.median,
                "memory_bytes": work.memory_bytes,
                "is_default": name == "x".join(map(str, present)),
            }
            write(rows, f"{case}/{name}", fields)
    return int(is_wrong)


def _wide_gradients(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dx and dw of RMSNorm in float64."""
    h, wide = total.double() * rstd.double()[:, None], dy.double()
    g = wide * weight.double()
    dx = (g - h * (g * h).mean(1, keepdim=True)) * rstd.double()[:, None]
    return dx if dtotal is None else dx + dtotal.double(), (wide * h).sum(0)


def _projection(model: Model, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x[T, D] and the weight[2F, D]."""
    generator = torch.Generator(device).manual_seed(0)
    out, inner = model.projections["gate_up"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight = (torch.randn(n, inner, generator=generator, device=device) for n in (tokens, out))
    return x.to(dtype), (weight / inner**0.5).to(dtype)


def _apart(x: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    y = torch.mm(x, weight.T)
    return activation_forward(y, kind, True), y


def _in_one(x: Tensor, weight: Tensor, kind: str, config: MatmulConfig) -> tuple[Tensor, Tensor]:
    return launch_matmul_swiglu(x, weight, True, kind=kind, config=config)


def _error(found: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, kind: str) -> str:
    """Return how one kernel is wrong, by float64 and at most twice the error of two; or ""."""
    wide = x.double() @ weight.double().T
    wants, also = (activation_reference(wide, kind, True), wide), _apart(x, weight, kind)
    for name, got, want, of_two in zip(("h", "y"), found, wants, also, strict=True):
        unit = torch.finfo(x.dtype).eps * float(want.abs().max())
        allowed = max(unit, 2 * float((of_two.double() - want).abs().max()))
        error = float((got.double() - want).abs().max())
        if not error <= allowed:
            return f"{name} is wrong by {error:.2g}, allowed are {allowed:.2g}"
    return ""


def _name(config: MatmulConfig) -> str:
    return "x".join(map(str, config[:6]))
