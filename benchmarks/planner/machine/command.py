"""`python -m benchmarks.run machine --out m.toml`: measure this machine for `tpengine plan` and `tpengine advise`.

As many processes as ranks measure at the same time, since ranks share memory, caches and power: what they attain
together is what a step attains. Each figure is the mean over them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from benchmarks.planner.machine.sizes import TINY, sizes_of
from tpengine.distributed.local_ranks import Ranks
from tpengine.files import write_beside
from tpengine.planner.machine import Curve, Link, Machine, Measured, machine_text

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Options:
    """Measure a machine by microbenchmarks, and write its file."""

    out: Path | None = None
    """The machine's file (TOML); without it the file is printed."""
    ranks: int = 2
    """Processes that measure at the same time, one core each; on a GPU one."""
    dtypes: tuple[str, ...] = ("float32",)
    """Dtypes of activations."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure. On cuda one process does, and exchanges are copies within its memory."""
    passes: int = 6
    """How often everything is measured; the middle figures count."""
    tiny: bool = False
    """Tiny sizes: the file is valid and tells nothing."""


def main(options: Options) -> int:
    """Measure, and write the file; return 0."""
    begin = time.monotonic()
    if options.out is not None and options.out.is_dir():
        raise ValueError(f"--out must be a file: {options.out} is a directory: name a file in it, as m.toml")
    machine = measured_machine(options)
    text = machine_text(machine)
    if options.out is None:
        print(text, end="")
        return 0
    write_beside(options.out, text.encode())
    Console().print(f"{options.out}: {machine.source}; {time.monotonic() - begin:.0f} s", soft_wrap=True)
    return 0


def measured_machine(options: Options) -> Machine:
    """Return this machine, measured.

    Raises:
        ValueError: an unknown dtype.
    """
    unknown = set(options.dtypes) - {"float32", "float64", "bfloat16", "float16"}
    if unknown:
        raise ValueError(f"--dtypes must be of float32, float64, bfloat16, float16: got {min(unknown)}: use float32")
    is_gpu = options.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a GPU: torch {torch.__version__} sees none: use --device cpu")
    sizes = TINY if options.tiny else sizes_of(options.device)
    num_ranks = 1 if is_gpu else options.ranks
    with Ranks(num_ranks, "benchmarks.planner.machine.rank:Member", options.device, sizes) as ranks:
        passes = [_measured(ranks, options.dtypes) for _ in range(options.passes)]
    found = _of_each(passes, statistics.median)
    rates, copies, host = (found[name] for name in ("rates", "copies", "host"))
    peaks = {dtype: max(_all_rates(of["products"])) for dtype, of in rates.items()}
    peak_bytes = max(rate for _, rate in copies)
    per_operator, per_action, launch = host
    first = next(iter(rates.values()))
    attention = first["operators"]["attention"]
    processes = f"{num_ranks} process{'es' if num_ranks > 1 else ''}"
    sizes_told = "tiny sizes, which tell nothing: " if options.tiny else ""
    return Machine(
        name=f"this {'GPU' if is_gpu else 'CPU'}",
        source=f"{sizes_told}microbenchmarks by {processes} at once{_differ(passes)}",
        is_asynchronous=is_gpu,
        flops_per_s=peaks,
        matmul=_share(_by_flops(first["products"]["forward"]), max(peaks.values())),
        attention=_share([(1.0, statistics.median(rate for _, rate in attention))], max(peaks.values())),
        memory_bytes_per_s=peak_bytes,
        memory=_share(copies, peak_bytes),
        kernel_s=launch if is_gpu else 0.0,
        host_s_per_operator=per_operator,
        host_s_per_action=per_action,
        ranks_per_node=num_ranks,
        num_nodes=1,
        within=_link(found, num_ranks, peak_bytes),
        between=_link(found, num_ranks, peak_bytes),
        measured={dtype: _rates(of) for dtype, of in rates.items()},
        cached={dtype: _rates(of) for dtype, of in found["cached"].items()},
        cold_share=_rising(found["cold"]),
        reduce_share=0.0 if is_gpu else 1.0,
    )


def _measured(ranks: Ranks, dtypes: Sequence[str]) -> dict[str, Any]:
    """Return one pass: the means over the processes."""
    exchanges = _mean(ranks.call("exchanges"))
    return {
        "rates": {dtype: _mean(ranks.call("rates", dtype)) for dtype in dtypes},
        "cached": {dtype: _mean(ranks.call("cached_rates", dtype)) for dtype in dtypes},
        "cold": _mean(ranks.call("cold_shares", dtypes[0])),
        "copies": _mean(ranks.call("copies")),
        "host": _mean(ranks.call("host")),
        **{name: exchanges.get(name, []) for name in ("messages", "sums", "fused")},
    }


def _mean(answers: Sequence[Any]) -> Any:
    """Return the mean of what ranks answered; keys and sizes are the same on all."""
    return _of_each(answers, statistics.mean)


def _of_each(answers: Sequence[Any], of: Callable[[Sequence[float]], float]) -> Any:
    """Return what `of` makes of several answers of the same form, number by number."""
    first = answers[0]
    if isinstance(first, Mapping):
        return {name: _of_each([answer[name] for answer in answers], of) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_of_each(each, of) for each in zip(*answers, strict=True))
    return of(answers)


def _differ(passes: Sequence[Any]) -> str:
    """Return in words how far the slowest pass is from the fastest: large where others use the machine too."""
    if len(passes) == 1:
        return ""
    most, least, middle = (list(_numbers(_of_each(passes, of))) for of in (max, min, statistics.median))
    # Sizes are the same in all.
    shares = [(high - low) / mid for high, low, mid in zip(most, least, middle, strict=True) if high != low]
    return (
        f", {len(passes)} passes: half of the figures differ by less than {statistics.median(shares):.0%}"
        if shares
        else ""
    )


def _numbers(answer: Any) -> Iterator[float]:
    """Yield the numbers of an answer in a fixed order."""
    if isinstance(answer, Mapping | list | tuple):
        for each in answer.values() if isinstance(answer, Mapping) else answer:
            yield from _numbers(each)
    else:
        yield float(answer)


def _all_rates(products: Mapping[str, Mapping[int, Points]]) -> list[float]:
    return [rate for by_rows in products.values() for points in by_rows.values() for _, rate in points]


def _by_flops(by_rows: Mapping[int, Points]) -> Points:
    return sorted({2 * rows * elements: rate for rows, points in by_rows.items() for elements, rate in points}.items())


def _share(points: Points, peak: float) -> Curve:
    return Curve(tuple((size, rate / peak) for size, rate in points))


def _rising(points: Points) -> Curve:
    """Return the curve of shares that never fall, whatever one measurement says.

    Of twice as much as was measured all comes from memory, which is what the other rates were measured with.
    """
    sizes, shares = zip(*points, strict=True)
    return Curve((*zip(sizes, itertools.accumulate(shares, max), strict=True), (2 * sizes[-1], 1.0)))


def _rates(found: Mapping[str, Any]) -> Measured:
    return Measured(
        products={
            kind: {rows: Curve(tuple(sorted(points))) for rows, points in by_rows.items()}
            for kind, by_rows in found["products"].items()
        },
        operators={name: Curve(tuple(points)) for name, points in found["operators"].items()},
    )


def _link(found: Mapping[str, Points], num_ranks: int, copied_bytes_per_s: float) -> Link:
    """Return what connects ranks; of a process alone what copies attain."""
    messages, sums = found["messages"], found["sums"]
    if not messages:
        return Link(copied_bytes_per_s / 2, 0.0, copied_bytes_per_s / 2)
    (small, latency), *_, (large, longest) = messages
    return Link(
        bytes_per_s=(large - small) / max(longest - latency, 1e-9),
        latency_s=latency,
        ring_bytes_per_s=sums[-1][1],
        measured={num_ranks: Curve(tuple(sums))},
        fused={num_ranks: Curve(tuple(found["fused"]))},
    )
