"""Timing of variants against each other: checked first, interleaved, paired.

What has given wrong numbers, here or elsewhere, and how it is avoided:

1.  Variants that compute different things. Results are checked before anything is timed; after a red check nothing is.
2.  First touch: page faults, the allocator's growth, tables and connections built late. Warm-up rounds do not count.
3.  A core's frequency and its neighbours drift over seconds. Variants are interleaved call by call, and a ratio is the
    median of the ratios within a round, in which drift cancels. The ratio of two medians would be something else.
4.  What ran just before leaves the caches hot with its operands, or cold. The order rotates from round to round.
5.  One rank's time. The others may still be working: a sample is the largest over the ranks.
6.  Ranks that start at different times. A barrier comes before every timed call, outside the measured time.
7.  Barriers and waits that poll take the core from the slower peer that they wait for. Ours block.
8.  More ranks than cores. Then a variant's time includes the scheduler's; rows name ranks, threads and cores.
9.  An open thread count: torch uses all cores in every rank. tpengine/distributed/local_ranks.py sets one thread.
10. Denormal, NaN or infinite operands run at another speed. Inputs are of ordinary size, and checks compare values.
11. An allocator that returns memory to the system after a call and faults it in again in the next: 2 to 10 % of a
    matmul. `keep_freed_memory` raises glibc's thresholds first, as any training process does after one step.
12. The mean: one interrupted call moves it. Medians with the 20th and 80th percentile are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Check = Callable[[], object]
PASSED = "passed"

# glibc does not raise its thresholds for a block above 32 MiB, including its header.
_LARGEST_THRESHOLD_BYTES = (32 << 20) - 65536


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of samples, linear between neighbours, and how many there were."""

    median: float
    p20: float
    p80: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        values = torch.tensor(samples, dtype=torch.float64)
        p20, median, p80 = torch.quantile(values, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
        return cls(median, p20, p80, len(samples))


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        check: "passed" or "failed: ...".
        samples: seconds by variant and round, the largest over ranks; empty after a red check.
    """

    check: str
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the check passed, so that there are times."""
        return self.check == PASSED

    @property
    def exit_code(self) -> int:
        """0, or 1 after a red check."""
        return 0 if self.passed else 1

    def seconds(self, variant: str) -> Spread | None:
        """Return the time of a call; None after a red check."""
        return Spread.of(self.samples[variant]) if self.passed else None

    def ratio(self, numerator: str, denominator: str) -> Spread | None:
        """Return the time of one variant over another's, by round; None after a red check."""
        if not self.passed:
            return None
        return Spread.of(paired_ratios(self.samples[numerator], self.samples[denominator]))

    def fields(self, baseline: str) -> dict[str, object]:
        """Return the comparison as fields of a row: check, times, and each variant's speed-up over `baseline`."""
        row: dict[str, object] = {"check": self.check}
        for variant in self.samples:
            row |= spread_fields(f"{variant}", "seconds", self.seconds(variant))
            row[f"{variant}_num_samples"] = len(self.samples[variant])
            if variant != baseline:
                row |= spread_fields(f"{variant}_speedup_over_{baseline}", "ratio", self.ratio(baseline, variant))
        return row


def spread_fields(what: str, unit: str, spread: Spread | None) -> dict[str, float]:
    """Return a spread as three fields of a row, `<what>_median_<unit>` and so on; none without a spread."""
    if spread is None:
        return {}
    return {f"{what}_{which}_{unit}": getattr(spread, which) for which in ("median", "p20", "p80")}


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Return the ratios within each round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def rotation(variants: Sequence[str], round_: int) -> list[str]:
    """Return the order of a round: the first variant advances by one from round to round."""
    first = round_ % len(variants)
    return [*variants[first:], *variants[:first]]


def interleave(
    variants: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 0
) -> dict[str, tuple[float, ...]]:
    """Call every variant once per round, in rotating order.

    Args:
        variants: by name, a call that returns its own time in seconds, the largest over its ranks.
        rounds: samples of each variant.
        warmup: rounds before those, which are not counted.

    Returns:
        Seconds by variant, in the order of rounds.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warmup, rounds):
        for name in rotation(names, round_):
            seconds = variants[name]()
            if round_ >= 0:
                samples[name].append(seconds)
    return {name: tuple(values) for name, values in samples.items()}


def compare(
    variants: Mapping[str, Callable[[], object]],
    *,
    check: Check | Mapping[str, Check],
    rounds: int = 20,
    warmup: int = 3,
    group: ProcessGroup | None = None,
) -> Comparison:
    """Check variants, then time them against each other in this process; collective over `group`.

    Args:
        variants: by name, the call to time; on a GPU it must itself wait for its work.
        check: one call, or one by variant, that raises AssertionError if a result is wrong. A collective check must
            raise after its last collective, or the other ranks wait for ever.
        rounds, warmup: as interleave.
        group: the ranks that call this; None for the default group, or for this process alone if there is none.

    Returns:
        The same on every rank: red if the check is red on any of them.

    The module docstring explains the order of the steps.
    """
    several = dist.is_initialized() and dist.get_world_size(group) > 1
    checks = check if isinstance(check, Mapping) else {"": check}
    found = "; ".join(
        _of_all_ranks([text for name, c in checks.items() if (text := _failure(name, c))], several, group)
    )
    if found:
        return Comparison(f"failed: {found}")

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: _seconds(call, several, group)

    keep_freed_memory()
    timers = {name: timed(call) for name, call in variants.items()}
    return Comparison(PASSED, interleave(timers, rounds=rounds, warmup=warmup))


def keep_freed_memory() -> None:
    """Make glibc keep what is freed: its thresholds follow the largest block ever freed, up to 32 MiB."""
    torch.empty(_LARGEST_THRESHOLD_BYTES, dtype=torch.uint8)


def _failure(name: str, check: Check) -> str:
    try:
        check()
    except AssertionError as error:
        text = " ".join(str(error).split()) or "assertion"
        return f"{name}: {text}" if name else text
    return ""


def _of_all_ranks(failures: list[str], several: bool, group: ProcessGroup | None) -> list[str]:
    """Return each rank's failures, with its number if there are several ranks."""
    if not several:
        return failures
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, failures, group=group)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]


def _seconds(call: Callable[[], object], several: bool, group: ProcessGroup | None) -> float:
    if several:
        dist.barrier(group)
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    if not several:
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    return longest.item()
