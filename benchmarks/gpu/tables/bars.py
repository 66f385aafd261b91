"""The bars for a first day on a GPU: what must be reached, decided from rows of results. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.tables.rows import has_samples

Row = Mapping[str, Any]

_MODELS = ("llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192)
_CUBLAS_MEDIAN, _CUBLAS_LEAST = 1.0, 0.9
_HOST_US, _HOST_AIM_US = 60.0, 25.0
# Of the time of a step: of the rival with less state, and of the one with as much as ours.
_OVER_TORCH, _OVER_FLOAT32 = 0.95, 0.90
_MFU_PERCENT = {"H200": 58.0, "H100": 54.0}
# Of a step that was predicted before it ran.
_STEP = 0.1
# Of bfloat16, over that of transformers in bfloat16.
LARGEST_ERROR_RATIO = 1.5


class Verdict(NamedTuple):
    """A bar, and whether it was reached.

    Attributes:
        bar: what was asked.
        state: "met", "short", or "not measured".
        found: the figures.
    """

    bar: str
    state: str
    found: str


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return every bar's verdict."""
    passed = [row for row in rows if row.get("check", "passed") == "passed" and has_samples(row)]
    found = [
        _judged(
            "matmul >= 1.0 of cuBLAS at the median", _matmul(passed), lambda r: median(r) >= _CUBLAS_MEDIAN, median
        ),
        _judged("no matmul below 0.9 of cuBLAS", _matmul(passed), lambda r: min(r) >= _CUBLAS_LEAST, min),
    ]
    for direction in ("forward", "backward"):
        ratios = _attention(passed, direction)
        found.append(
            _judged(f"attention {direction} >= the best SDPA at 4k and 8k", ratios, lambda r: min(r) >= 1, min)
        )
    host = [row for row in passed if str(row["case"]).startswith("host/fused/")]
    for by_engine, how in ((False, "kernels"), (True, "copy engines")):
        times = [row["host_us"] for row in host if bool(row.get("by_engine")) == by_engine]
        bar = f"host time <= {_HOST_US:.0f} us per fused call (aim {_HOST_AIM_US:.0f}), rows moved by {how}"
        found.append(_judged(bar, times, lambda r: max(r) <= _HOST_US, max))
    found += _steps(passed)
    # A layout has a few steps; all layouts count.
    layouts = [row for row in rows if str(row["case"]).startswith("blind/")]
    steps = [abs(row["predicted_over_measured_ratio"] - 1) for row in layouts]
    asked = max((row["num_layouts"] for row in layouts), default=0)
    bar = f"steps of {asked or 'all'} layouts of one GPU predicted within {_STEP:.0%}, at the worst"
    found.append(_judged(bar, steps, lambda r: max(r) <= _STEP and len(r) == asked, max))
    # Their rows are wrong where the bar is missed.
    kls = [row["kl_over_limit_ratio"] for row in rows if "kl_over_limit_ratio" in row]
    errors = [row["error_over_transformers_ratio"] for row in rows if "error_over_transformers_ratio" in row]
    found += [
        _judged("architectures in float32: KL to transformers over 1e-6 nats < 1", kls, lambda r: max(r) < 1, max),
        _judged(
            "architectures in bfloat16: error over transformers' <= 1.5",
            errors,
            lambda r: max(r) <= LARGEST_ERROR_RATIO,
            max,
        ),
    ]
    return found


def _steps(rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdicts on llama_1b's step beside its two rivals, all of one row: no ratio is taken across runs."""
    beside = [row for row in rows if row["case"] == "train/llama_1b/against_torch"]
    found = []
    for rival, most, whose in (
        ("torch", _OVER_TORCH, "torch.compile with all state in bfloat16"),
        ("torch_float32", _OVER_FLOAT32, "torch.compile with float32 masters, moments and sums"),
    ):
        name = f"ours_over_{rival}_median_ratio"
        ratios = [row[name] for row in beside if name in row]
        found.append(_judged(f"llama_1b in <= {most:.2f} of {whose}", ratios, functools.partial(_at_most, most), max))
    for kind, least in _MFU_PERCENT.items():
        mfu = [row["mfu_attention_half_percent"] for row in beside if kind in (row.get("gpu") or "").split()]
        bar = f"llama_1b >= {least:.0f} % MFU on an {kind}, causal attention counted half"
        found.append(_judged(bar, mfu, functools.partial(_at_least, least), min))
    return found


def _at_most(most: float, figures: list[float]) -> bool:
    return max(figures) <= most


def _at_least(least: float, figures: list[float]) -> bool:
    return min(figures) >= least


def _judged(
    bar: str, figures: list[float], is_met: Callable[[list[float]], bool], shown: Callable[[Iterable[float]], float]
) -> Verdict:
    if not figures:
        return Verdict(bar, "not measured", "")
    return Verdict(bar, "met" if is_met(figures) else "short", f"{shown(figures):.3g} of {len(figures)} rows")


def _matmul(rows: Iterable[Row]) -> list[float]:
    """Return our speed over torch.mm's for each product of Llama-3 8B and 70B."""
    name = "tpkernels_speedup_over_torch_median_ratio"
    found = []
    for row in rows:
        case = str(row["case"])
        # SwiGLU is more than a product: torch's side is a product and two passes over memory.
        if not case.startswith("kernels/matmul_") or case.startswith("kernels/matmul_swiglu/"):
            continue
        if row.get("model") in _MODELS and row.get("seq") in _SEQUENCES and row.get("dtype") == "bfloat16":
            found += [row[name]] if name in row else []
    return found


def _attention(rows: Iterable[Row], direction: str) -> list[float]:
    """Return our speed over the fastest backend's."""
    found = []
    for row in rows:
        if not str(row["case"]).startswith("kernels/attention/") or row.get("direction") != direction:
            continue
        backends = [row[f"{name}_median_seconds"] for name in row["contestants"] if name.startswith("sdpa")]
        if backends and row["seq"] in _SEQUENCES and row.get("model") in _MODELS:
            found.append(min(backends) / row["tpkernels_median_seconds"])
    return found
