"""What the blind proof tells: a row for each layout, the table, and whether the bars are reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.rows import make_row
from benchmarks.harness.timing import PASSED, Spread, spread_fields
from benchmarks.planner.blind.predictions import Prediction
from benchmarks.planner.blind.visits import Step
from tpengine.distributed.local_ranks import THREADS_PER_RANK

# What must be reached: errors of the step at the median and at worst, and what the first row may lose.
MEDIAN, WORST, REGRET = 0.08, 0.15, 0.05
# Peaks: predicted over counted, at least and at most.
LEAST_BYTES, MOST_BYTES = 0.98, 1.05


def row_of(
    of: Prediction, steps: Sequence[Step], still: float, counted: Sequence[int] | None, said: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a layout's row; None if none of its steps counts.

    Args:
        of: the prediction.
        steps: of the layout.
        still: a step counts if the machine's speed differed by at most this share from its file's.
        counted: bytes that each pipeline rank held at most; None if that was not counted.
        said: what is the same for all layouts.
    """
    kept = [step.seconds for step in steps if step.counts(still)]
    if not kept:
        return None
    spread, every = Spread.of(kept), Spread.of([step.seconds for step in steps])
    fields: dict[str, Any] = {
        "check": PASSED,
        "model": of.model,
        "layout": of.words,
        **said,
        "still_ratio": still,
        "sizes": asdict(of.config.model),
        "predicted_seconds": of.seconds,
        **spread_fields("measured", "seconds", spread),
        "num_samples": spread.num_samples,
        "predicted_over_measured_ratio": of.seconds / spread.median,
        "spread_ratio": (spread.p80 - spread.p20) / spread.median,
        # With the steps during which the machine was faster or slower than its file says.
        "num_steps": every.num_samples,
        **spread_fields("every_step", "seconds", every),
        "predicted_over_every_ratio": of.seconds / every.median,
    }
    if counted is not None:
        fields |= {"predicted_peak_bytes": list(of.peak_bytes), "counted_peak_bytes": list(counted)}
        ratios = [said / held for said, held in zip(of.peak_bytes, counted, strict=True)]
        fields |= {"least_peak_ratio": min(ratios), "largest_peak_ratio": max(ratios)}
    return make_row(f"blind/{of.name}", threads_per_rank=THREADS_PER_RANK, fields=fields)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, one line per layout."""
    shown = Table(title="steps predicted before they ran", box=box.SIMPLE)
    for i, column in enumerate(
        (
            "model",
            "layout",
            "predicted ms",
            "measured ms",
            "p20 to p80",
            "ratio",
            "spread",
            "steps",
            "of",
            "ratio of all",
            "peak",
        )
    ):
        shown.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row["model"],
            row["layout"],
            f"{1e3 * row['predicted_seconds']:.1f}",
            f"{1e3 * row['measured_median_seconds']:.1f}",
            f"{1e3 * row['measured_p20_seconds']:.1f} to {1e3 * row['measured_p80_seconds']:.1f}",
            f"{row['predicted_over_measured_ratio']:.3f}",
            f"{row['spread_ratio']:.1%}",
            f"{row['num_samples']}",
            f"{row['num_steps']}",
            f"{row['predicted_over_every_ratio']:.3f}",
            f"{row['largest_peak_ratio']:.3f}" if "largest_peak_ratio" in row else "",
        )
    return shown


def verdict(rows: Sequence[Mapping[str, Any]], num_predicted: Mapping[str, int]) -> list[str]:
    """Return for each model: median and worst error, how many are outside their bar, regret, whether 3 rows suffice.

    The bars count for the steps that count; the errors of all stand beside them. They are met by all layouts or not.

    Args:
        rows: of the layouts with steps that count.
        num_predicted: layouts by model.
    """
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        errors = [abs(row["predicted_over_measured_ratio"] - 1) for row in of]
        # Twice the layout's own spread, where that is larger.
        outside = sum(error > max(WORST, 2 * row["spread_ratio"]) for error, row in zip(errors, of, strict=True))
        every = [abs(row["predicted_over_every_ratio"] - 1) for row in of]
        advised = sorted(of, key=lambda row: row["predicted_seconds"])
        fastest = min(of, key=lambda row: row["measured_median_seconds"])
        regret = advised[0]["measured_median_seconds"] / fastest["measured_median_seconds"] - 1
        # Not distinguishable: the one is now and then faster.
        suffices = any(row["measured_p20_seconds"] <= fastest["measured_p80_seconds"] for row in advised[:3])
        met = len(of) == num_predicted[model] and statistics.median(errors) <= MEDIAN
        met = met and not outside and regret <= REGRET and suffices
        ratios = [(row["least_peak_ratio"], row["largest_peak_ratio"]) for row in of if "least_peak_ratio" in row]
        met = met and all(least >= LEAST_BYTES and most <= MOST_BYTES for least, most in ratios)
        lines.append(
            f"{model}: {len(of)} of {num_predicted[model]} layouts, error {statistics.median(errors):.1%} median, "
            f"{max(errors):.1%} worst, "
            f"{outside} outside {WORST:.0%} and twice their spread (of all steps {statistics.median(every):.1%} and "
            f"{max(every):.1%}); "
            f"regret of the first row {regret:.1%}; "
            f"the first 3 {'contain' if suffices else 'do not contain'} the fastest; "
            f"{_peaks(ratios)}: {'met' if met else 'short'}"
        )
    return lines


def machine_varied(steps: Sequence[Step], still: float) -> str:
    """Return how much the machine's own speed varied: what no prediction can know."""
    if not steps:
        return "no step was measured"
    speeds = [speed for step in steps for speed in step.speeds]
    kept = sum(step.counts(still) for step in steps)
    return (
        f"{kept} of {len(steps)} steps count, where the machine was within {still:.0%} as fast as when its file was "
        f"measured, by products of the file; it was {min(speeds):.2f} to {max(speeds):.2f}, at the median "
        f"{statistics.median(speeds):.2f} times as fast"
    )


def _peaks(ratios: Sequence[tuple[float, float]]) -> str:
    if not ratios:
        return "peaks not counted"
    least, most = min(least for least, _ in ratios), max(most for _, most in ratios)
    return f"peaks of {len(ratios)} layouts {least:.3f} to {most:.3f} of what was counted"
