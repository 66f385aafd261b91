"""The case that times whose attention is the fastest in a layer, ours or torch's, and writes what the layer reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tpkernels.launch import target_of
from tpkernels.ops.matmul.tuned import OURS, TunedAttention, path_for

from benchmarks.gpu.cases.clock import device_here, medians, write
from benchmarks.gpu.cases.kernels.tiles import MODELS_BY_NAME, save
from benchmarks.harness.rows import environment
from benchmarks.harness.shapes import Model
from tpengine.layers.attention import attend
from tpengine.layers.scores import Rotation, Scores, tables_of
from tpengine.layers.torch_attention import attend_by_torch

# The reference's scores of all heads are in float64.
_CHECKED_SEQ = 512
_ROTATION = Rotation(500000.0)


def choose(
    rows: Path,
    model: str,
    seqs: Sequence[int],
    copy: str | None = None,
    into: str | None = None,
    rounds: int = 10,
    batch: int = 1,
) -> int:
    """Time forward and backward of a layer's attention by ours and by each backend; return 1 if one is wrong.

    A backend that does not run here, or whose results are wrong, is left out of the choice. Each is also timed without
    the rotation: what stands around torch's attention, and what is within ours, is the difference.

    Args:
        rows: a row for each length: the fastest, and its speed over ours.
        model: of which one rank's heads are timed.
        seqs: tokens of a sequence.
        copy: a directory that gets a copy of the file.
        into: the directory of the file; default where the operators look.
        rounds: samples of each.
        batch: sequences: what a micro-batch has.
    """
    device = device_here()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    path = path_for(gpu) if into is None else Path(into) / path_for(gpu).name
    target = target_of(torch.empty(0, device=device))
    copied = None if copy is None else Path(copy) / path.name
    backends = ("cudnn", "flash") if device.type == "cuda" else ("math",)
    sizes, is_wrong = MODELS_BY_NAME[model], False
    for seq in seqs:
        case = f"attention_choice/{model}/tokens_{seq}" + (f"/batch_{batch}" if batch > 1 else "")
        found = {OURS: _both(sizes, seq, batch, device, OURS)}
        for backend in backends:
            try:
                wrong = _error(sizes, min(seq, _CHECKED_SEQ), device, backend)
                found[backend] = _both(sizes, seq, batch, device, backend)
                found[backend]()
            except RuntimeError as raised:  # a backend that has no kernel for these sizes costs itself alone
                found.pop(backend, None)
                text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
                write(rows, f"{case}/{backend}", {"left_out": text})
                continue
            if wrong:
                found.pop(backend)
                write(rows, f"{case}/{backend}", {}, f"failed: {wrong}")
                is_wrong = True
        plain = {f"{name}_without_rotation": _both(sizes, seq, batch, device, name, rotates=False) for name in found}
        every = {name: 1e6 * s.median for name, s in medians({**found, **plain}, device, rounds=rounds).items()}
        times = {name: every[name] for name in found}
        winner = min(times, key=lambda name: times[name])
        fields = {f"{name}_us": time_us for name, time_us in every.items()} | {"num_samples": rounds}
        write(rows, case, {**fields, "winner": winner, "gain_over_ours_ratio": times[OURS] / times[winner]})
        where = environment()
        heads = sizes.heads, sizes.kv_heads, sizes.head_size
        dtype = str(_dtype(device)).removeprefix("torch.")
        times_us = round(times[winner], 2), round(times[OURS], 2)
        one = TunedAttention(seq, *heads, dtype, winner, *times_us, where["date"], where["commit"])
        save(path, gpu, target, attentions=[one], copied=copied)
    return int(is_wrong)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _inputs(model: Model, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return qkv and y's gradient."""
    generator = torch.Generator(device).manual_seed(0)
    columns = (model.heads + 2 * model.kv_heads) * model.head_size, model.heads * model.head_size
    qkv, dy = (torch.randn(tokens, n, generator=generator, device=device).to(_dtype(device)) for n in columns)
    return qkv, dy


def _attended(qkv: Tensor, model: Model, seq: int, who: str, rotates: bool) -> Tensor:
    """Return y as the layer computes it, by ours or a backend."""
    if who == OURS:
        return attend(qkv, model.heads, model.kv_heads, seq, Scores(_ROTATION if rotates else None), None)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    tables = tables_of(seq, model.head_size, _ROTATION, wide, qkv.device) if rotates else (None, None)
    return attend_by_torch(qkv, model.heads, model.kv_heads, seq, tables, who)


def _gradient(qkv: Tensor, dy: Tensor, model: Model, seq: int, who: str, rotates: bool = True) -> tuple[Tensor, Tensor]:
    leaf = qkv.detach().requires_grad_()
    y = _attended(leaf, model, seq, who, rotates)
    (dqkv,) = torch.autograd.grad(y, leaf, dy)
    return y, dqkv


def _both(
    model: Model, seq: int, batch: int, device: torch.device, who: str, *, rotates: bool = True
) -> Callable[[], object]:
    """Return a call of forward and backward."""
    qkv, dy = _inputs(model, batch * seq, device)
    return functools.partial(_gradient, qkv, dy, model, seq, who, rotates)


def _error(model: Model, seq: int, device: torch.device, backend: str) -> str:
    """Return how a backend is wrong, by float64 and at most twice the error of torch's unfused attention; or ""."""
    qkv, dy = _inputs(model, seq, device)
    wide = _gradient(qkv.double(), dy.double(), model, seq, "math")
    of_math, ours = (_gradient(qkv, dy, model, seq, who) for who in ("math", backend))
    for name, want, also, got in zip(("y", "dqkv"), wide, of_math, ours, strict=True):
        unit = torch.finfo(qkv.dtype).eps * float(want.abs().max())
        allowed = max(unit, 2 * float((also.double() - want).abs().max()))
        error = float((got.double() - want).abs().max())
        if not error <= allowed:
            return f"{name} is wrong by {error:.2g}, allowed are {allowed:.2g}"
    return ""
