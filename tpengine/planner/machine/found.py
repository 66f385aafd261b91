"""A machine of what microbenchmarks have found: plain numbers and lists of points, as ranks answer them. No torch.

What is deliberately elsewhere: the measuring, which needs torch and the engine's own layers (the room doctor), and the
file (file.py).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpengine.planner.machine.machine import Link, Machine
from tpengine.planner.machine.measured import Curve, Measured

Points = Sequence[Sequence[float]]

# Two times of which the larger message took no longer: a difference that only noise made.
_LEAST_SECONDS = 1e-9


def machine_of_found(
    found: Mapping[str, Any],
    *,
    name: str,
    source: str,
    is_gpu: bool,
    ranks_per_node: int,
    num_nodes: int = 1,
    memory_bytes: int = 0,
) -> Machine:
    """Return the machine of which this was found.

    Args:
        found: "rates" and "cached" by dtype, each "products" by kind and rows and "operators" by name, points [size,
            rate]; "copies" and "cold", points; "host", seconds of an operator, an action and a launch; and of the ranks
            of a node "messages", points [bytes, seconds], "sums" and "fused" by number of ranks, points [bytes, bytes
            per second]; of nodes "between", messages too, where there are several.
        name, source: of the file.
        is_gpu: the host starts what runs on another device.
        ranks_per_node, num_nodes: as they measured.
        memory_bytes: of a rank's device; 0 for no limit.
    """
    rates, copies = found["rates"], found["copies"]
    peaks = {dtype: max(_all_rates(of["products"])) for dtype, of in rates.items()}
    peak_bytes = max(rate for _, rate in copies)
    per_operator, per_action, launch = found["host"]
    first = next(iter(rates.values()))
    attention = first["operators"]["attention"]
    within = _link(found, peak_bytes)
    between = found.get("between")
    return Machine(
        name=name,
        source=source,
        is_asynchronous=is_gpu,
        flops_per_s=peaks,
        matmul=_share(_by_flops(first["products"]["forward"]), max(peaks.values())),
        attention=_share([(1.0, statistics.median(rate for _, rate in attention))], max(peaks.values())),
        memory_bytes_per_s=peak_bytes,
        memory=_share(copies, peak_bytes),
        kernel_s=launch if is_gpu else 0.0,
        host_s_per_operator=per_operator,
        host_s_per_action=per_action,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes,
        num_nodes=num_nodes,
        within=within,
        between=_straight(between) if between else within,
        measured={dtype: _rates(of) for dtype, of in rates.items()},
        cached={dtype: _rates(of) for dtype, of in found["cached"].items()},
        cold_share=rising(found["cold"]),
        reduce_share=0.0 if is_gpu else 1.0,
    )


def mean_of(answers: Sequence[Any]) -> Any:
    """Return the mean of what ranks answered; keys and sizes are the same on all."""
    return each_of(answers, statistics.mean)


def each_of(answers: Sequence[Any], of: Callable[[Sequence[float]], float]) -> Any:
    """Return what `of` makes of several answers of the same form, number by number."""
    first = answers[0]
    if isinstance(first, Mapping):
        return {name: each_of([answer[name] for answer in answers], of) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(each_of(each, of) for each in zip(*answers, strict=True))
    return of(answers)


def differ(passes: Sequence[Any]) -> str:
    """Return in words how far the slowest pass is from the fastest: large where others use the machine too."""
    if len(passes) == 1:
        return ""
    most, least, middle = (list(_numbers(each_of(passes, of))) for of in (max, min, statistics.median))
    # Sizes are the same in all.
    shares = [(high - low) / mid for high, low, mid in zip(most, least, middle, strict=True) if high != low]
    return (
        f", {len(passes)} passes: half of the figures differ by less than {statistics.median(shares):.0%}"
        if shares
        else ""
    )


def rising(points: Points) -> Curve:
    """Return the curve of shares that never fall, whatever one measurement says.

    Of twice as much as was measured all comes from memory, which is what the other rates were measured with.
    """
    sizes, shares = zip(*points, strict=True)
    return Curve((*zip(sizes, itertools.accumulate(shares, max), strict=True), (2 * sizes[-1], 1.0)))


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
    found = {2 * int(rows) * elements: rate for rows, points in by_rows.items() for elements, rate in points}
    return sorted(found.items())


def _curve(points: Points) -> Curve:
    return Curve(tuple((size, quantity) for size, quantity in points))


def _share(points: Points, peak: float) -> Curve:
    return Curve(tuple((size, rate / peak) for size, rate in points))


def _rates(found: Mapping[str, Any]) -> Measured:
    return Measured(
        products={
            kind: {int(rows): _curve(sorted(points)) for rows, points in by_rows.items()}
            for kind, by_rows in found["products"].items()
        },
        operators={name: _curve(points) for name, points in found["operators"].items()},
    )


def _link(found: Mapping[str, Any], copied_bytes_per_s: float) -> Link:
    """Return what connects the ranks of a node; of a process alone what copies attain."""
    if not found["messages"]:
        return Link(copied_bytes_per_s / 2, 0.0, copied_bytes_per_s / 2)
    straight = _straight(found["messages"])
    sums = {int(ranks): points for ranks, points in found["sums"].items()}
    return Link(
        bytes_per_s=straight.bytes_per_s,
        latency_s=straight.latency_s,
        ring_bytes_per_s=sums[max(sums)][-1][1] if sums else straight.bytes_per_s,
        measured={ranks: _curve(points) for ranks, points in sums.items()},
        fused={int(ranks): _curve(points) for ranks, points in found["fused"].items()},
    )


def _straight(messages: Points) -> Link:
    """Return a link of which messages are known alone: the smallest tells the latency, the largest the rate."""
    (small, latency), *_, (large, longest) = messages
    rate = (large - small) / max(longest - latency, _LEAST_SECONDS)
    return Link(bytes_per_s=rate, latency_s=latency, ring_bytes_per_s=rate)
