"""`python -m benchmarks.run pipeline`: schedules against torch.distributed.pipelining; or measured against simulated.

Without --predict, three contestants run the steps of each schedule in turns, on ranks of this host over gloo with one
thread each (see sides.py):

    engine      the trainer with tpengine's own layers            what a user of tpengine gets
    sequential  tpengine.pipeline over torch's modules            the same modules as torch's, so only runtimes differ
    torch       torch.distributed.pipelining over torch's modules

A step is forward and backward of all micro-batches, without clipping and update. Losses and gradients must agree, or
nothing is timed. Memory is the peak resident set in a step minus that of the process before it had a model, measured in
separate steps (resident_memory.py says why); on a GPU it would be torch.cuda.max_memory_allocated.

With --predict: see prediction.py.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, interleave
from benchmarks.pipeline.contestants import Contestant, check_agreement
from benchmarks.pipeline.options import Options, config_of, names_of, shrunk, sizes_of
from benchmarks.pipeline.prediction import predict
from benchmarks.pipeline.rival import check_rival
from benchmarks.pipeline.sides import SEQUENTIAL_SCHEDULES
from tpengine.config import Config
from tpengine.distributed.local_ranks import THREADS_PER_RANK

_THEIRS = "torch"
# Our contestants in a row: each is compared with torch.
_OURS = ("engine", "sequential")
_AGAINST_TORCH = ("gpipe", "1f1b", "interleaved", "zbv")
_PREDICTED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
_WARMUP_ROUNDS = 1


def main(options: Options) -> int:
    """Run what the options ask for, and print a table.

    Returns: 0, or 1 if a check was red.
    Raises: ValueError: an option that is not possible, before any process is started.
    """
    options = shrunk(options) if options.smoke else options
    if options.predict:
        return predict(options, names_of(options.schedules or _PREDICTED))
    names = names_of(options.schedules or _AGAINST_TORCH)
    configs = {name: config_of(options, name, options.micro_batches) for name in names}
    sides = {name: sides_of(config) for name, config in configs.items()}
    rows = [run_case(config, sides[name], options) for name, config in configs.items()]
    Console(width=max(Console().width, 130)).print(table(rows))
    return stored(rows, options.out)


def sides_of(config: Config) -> list[str]:
    """Return the contestants of a schedule, torch last.

    Raises:
        ValueError: torch does not have the schedule or the model.
    """
    check_rival(config)
    mine = [name for name in _OURS if name == "engine" or config.parallel.schedule in SEQUENTIAL_SCHEDULES]
    return [*mine, _THEIRS]


def run_case(config: Config, sides: Sequence[str], options: Options) -> dict[str, Any]:
    """Start the contestants of a schedule; check, measure memory, time; return the row."""
    num_steps = 1 + options.memory_steps + _WARMUP_ROUNDS + options.rounds
    with _started(config, sides, num_steps) as contestants:
        found = check_agreement(contestants)
        comparison = Comparison(f"failed: {found}")
        measured: dict[str, Any] = {}
        if not found:
            measured = _memory(contestants, options.memory_steps)
            measured["live_activations"] = {name: c.most_live() for name, c in contestants.items()}
            for contestant in contestants.values():
                contestant.begin_timing()
            timers = {name: contestant.step_seconds for name, contestant in contestants.items()}
            samples = interleave(timers, rounds=options.rounds, warmup=_WARMUP_ROUNDS)
            comparison = Comparison(PASSED, samples)
    return case_row(config, sides, comparison, measured)


def case_row(
    config: Config, sides: Sequence[str], comparison: Comparison, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one row: sizes, times, memory, and both ratios for each of our contestants, above 1 if it is better."""
    fields: dict[str, Any] = {
        "against": _THEIRS,
        "contestants": list(sides),
        "timed": "forward and backward, no update",
    }
    fields |= {**sizes_of(config), **comparison.fields(baseline=_THEIRS), **measured}
    return make_row(f"pipeline/{config.parallel.schedule}", threads_per_rank=THREADS_PER_RANK, fields=fields)


def _memory(contestants: Mapping[str, Contestant], num_steps: int) -> dict[str, Any]:
    """Return medians over steps of the peak memory, of all ranks and of the largest, and torch's over ours."""
    steps = {name: [c.step_memory() for _ in range(num_steps)] for name, c in contestants.items()}
    found: dict[str, Any] = {}
    totals: dict[str, Callable[[list[int]], int]] = {"sum": sum, "largest_rank": max}
    for which, total in totals.items():
        held = {name: int(statistics.median(map(total, samples))) for name, samples in steps.items()}
        found |= {f"{name}_memory_{which}_bytes": size for name, size in held.items()}
        found |= {
            f"{_THEIRS}_memory_over_{name}_{which}_ratio": held[_THEIRS] / size
            for name, size in held.items()
            if name != _THEIRS and size > 0
        }
    return found


@contextlib.contextmanager
def _started(config: Config, sides: Sequence[str], num_steps: int) -> Iterator[dict[str, Contestant]]:
    """Start the contestants, and show on stderr how many of their steps are done."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*Progress.get_default_columns(), console=Console(stderr=True)))
        task = progress.add_task(config.parallel.schedule, total=len(sides) * num_steps)
        yield {
            side: stack.enter_context(Contestant(side, config, lambda: progress.advance(task)))  # type: ignore[arg-type]
            for side in sides
        }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, one line per comparison; a red check shows its reason and no number."""
    first = rows[0]
    title = f"pp {first['pp']}, {first['batch']['num_micro_batches']} micro-batches; times: torch's over ours by round"
    shown = Table(title=title, box=box.SIMPLE)
    for i, column in enumerate(
        ("schedule", "ours", "ms", "torch ms", "time ratio", "p20 to p80", "MB", "torch MB", "memory ratio", "live")
    ):
        shown.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        if row["check"] != PASSED:
            shown.add_row(row["schedule"], row["check"])
            continue
        for name in row["contestants"]:
            if name != _THEIRS:
                shown.add_row(row["schedule"], name, *_numbers(row, name))
    return shown


def _numbers(row: Mapping[str, Any], name: str) -> list[str]:
    times = [f"{row[f'{who}_median_seconds'] * 1e3:.1f}" for who in (name, _THEIRS)]
    median, p20, p80 = (row[f"{name}_speedup_over_{_THEIRS}_{which}_ratio"] for which in ("median", "p20", "p80"))
    sizes = [f"{row[f'{who}_memory_sum_bytes'] / 1e6:,.0f}" for who in (name, _THEIRS)]
    memory = row.get(f"{_THEIRS}_memory_over_{name}_sum_ratio")
    live = " ".join(map(str, row["live_activations"][name]))
    return [
        *times,
        f"{median:.3f}",
        f"{p20:.3f} to {p80:.3f}",
        *sizes,
        "unknown" if memory is None else f"{memory:.3f}",
        live,
    ]
