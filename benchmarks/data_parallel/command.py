"""`python -m benchmarks.run data_parallel`: `DataParallel` and `ShardedOptimizer` against torch's, one transformer.

    whole, sharded                  DataParallel over gloo, with torch's optimizer or with ShardedOptimizer
    whole_memory, sharded_memory    the same, through the shared memory of one host
    ddp, ddp_zero                   DistributedDataParallel, with torch's optimizer or with ZeroRedundancyOptimizer

Each contestant has processes of its own, which sleep while others run. Weights are checked first (replica.py); then
memory is measured: the peak resident set in a step minus that before there was a model, the largest rank's, median over
steps (resident_memory.py says how). Then steps are timed in turns. After a red check nothing is timed.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.data_parallel.options import CHECKED_STEPS, Options, check
from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, interleave, spread_fields
from tpengine.distributed.local_ranks import THREADS_PER_RANK, Ranks

__all__ = ["Options", "main"]

# The rival that holds as much.
RIVAL_OF = {"whole": "ddp", "sharded": "ddp_zero"}
OURS = tuple(f"{how}{transport}" for transport in ("", "_memory") for how in RIVAL_OF)
_WARMUP_ROUNDS = 1
_SIZES = ("ranks", "hidden", "layers", "tokens", "sequences", "micro_batches")


def main(options: Options) -> int:
    """Run all contestants, and print a table.

    Returns: 0, or 1 if a check was red.
    Raises: ValueError: an option that is not possible, before any process is started.
    """
    check(options)
    with started((*OURS, *RIVAL_OF.values()), options) as contestants:
        comparison, peaks = measure(contestants, options)
    rows = [row_of(name, options, comparison, peaks) for name in OURS]
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


@contextlib.contextmanager
def started(names: tuple[str, ...], options: Options) -> Iterator[Mapping[str, Callable[[str], list[Any]]]]:
    """Start the contestants; yield what calls a method on all ranks of one. Progress is shown on stderr."""
    num_steps = CHECKED_STEPS + options.memory_steps + _WARMUP_ROUNDS + options.rounds
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*Progress.get_default_columns(), console=Console(stderr=True)))
        task = progress.add_task("steps", total=len(names) * num_steps)

        def call(ranks: Ranks, method: str) -> list[Any]:
            answers = ranks.call(method)
            if method.startswith("step"):
                progress.advance(task)
            return answers

        member = "benchmarks.data_parallel.replica:Member"
        yield {name: partial(call, stack.enter_context(Ranks(options.ranks, member, name, options))) for name in names}


def measure(
    contestants: Mapping[str, Callable[[str], list[Any]]], options: Options
) -> tuple[Comparison, dict[str, int]]:
    """Check all contestants, then measure memory, then time; return times, and peak bytes by contestant."""
    for name, call in contestants.items():
        for _ in range(CHECKED_STEPS):
            call("step")
        if found := next(filter(None, call("wrong")), ""):
            return Comparison(f"failed: {name}: {found}"), {}
    peaks = {
        name: int(statistics.median(max(call("step_memory")) for _ in range(options.memory_steps)))
        for name, call in contestants.items()
    }
    for call in contestants.values():
        call("begin_timing")

    def seconds(call: Callable[[str], list[Any]]) -> float:
        return max(call("step"))

    timers = {name: partial(seconds, call) for name, call in contestants.items()}
    return Comparison(PASSED, interleave(timers, rounds=options.rounds, warmup=_WARMUP_ROUNDS)), peaks


def row_of(name: str, options: Options, comparison: Comparison, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Return the row of one of ours against its rival, and against our `whole` over the same transport."""
    how = name.removesuffix("_memory")
    rival, base = RIVAL_OF[how], name.replace(how, "whole")
    fields: dict[str, Any] = {"against": rival, **{size: getattr(options, size) for size in _SIZES}}
    fields |= {"check": comparison.check, "load_average_ratio": os.getloadavg()[0] / (os.cpu_count() or 1)}
    if comparison.passed:
        num_tokens = options.ranks * options.micro_batches * options.sequences * options.tokens
        for side, who in (("ours", name), ("rival", rival)):
            seconds = comparison.seconds(who)
            assert seconds is not None
            fields |= spread_fields(side, "seconds", seconds)
            fields[f"{side}_median_tokens_per_second"] = num_tokens / seconds.median
            fields[f"{side}_peak_bytes"] = peaks[who]
        fields |= spread_fields("speedup", "ratio", comparison.ratio(rival, name))
        fields |= spread_fields("time_over_whole", "ratio", comparison.ratio(name, base))
        fields["peak_over_rival_ratio"] = peaks[name] / peaks[rival] if peaks[rival] > 0 else None
    return make_row(f"data_parallel/{name}", threads_per_rank=THREADS_PER_RANK, fields=fields)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; a red check shows its reason and no number."""
    shown = Table(title="ours against torch's: medians, and ratios within a round", box=box.SIMPLE)
    for i, column in enumerate(
        ("ours", "rival", "tokens/s", "its tokens/s", "speed", "p20 to p80", "MB", "its MB", "time over whole")
    ):
        shown.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        numbers = [row["check"]]
        if row["check"] == PASSED:
            numbers = [
                f"{row['ours_median_tokens_per_second']:,.0f}",
                f"{row['rival_median_tokens_per_second']:,.0f}",
                f"{row['speedup_median_ratio']:.2f}",
                f"{row['speedup_p20_ratio']:.2f} to {row['speedup_p80_ratio']:.2f}",
                f"{row['ours_peak_bytes'] / 1e6:.0f}",
                f"{row['rival_peak_bytes'] / 1e6:.0f}",
                f"{row['time_over_whole_median_ratio']:.2f}",
            ]
        shown.add_row(row["case"].split("/")[1], row["against"], *numbers)
    return shown
