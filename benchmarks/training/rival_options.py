"""The rival's own settings against each other: evidence that the defaults of RivalOptions are the fastest ones here.

The name of a variant says how it differs from the first one, the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from benchmarks.harness.journal import append
from benchmarks.harness.rows import make_row
from benchmarks.harness.timing import PASSED
from benchmarks.training.command import base_config, compare_contestants, in_layout
from benchmarks.training.contestants import Entry, RivalOptions, started
from tpengine.distributed.local_ranks import THREADS_PER_RANK

_BASELINE = "defaults"

# Settings that can matter in a layout, by the axis that the layout has.
_CHOICES: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        # torch.compile of blocks that parallelize_module has cut fails in backward (torch 2.13, CPU): a gradient is not
        # a DTensor.
        "tp": tuple(
            {"tensor_parallel": between, "loss": loss}
            for between in ("sequence", "replicated")
            for loss in ("gathered", "parallel")
        ),
        "dp": ({"data_parallel": "fsdp"}, {"compile": True}),
        "": ({"optimizer": "foreach"}, {"zero_to_none": False}, {"compile": True}),
    }
)


@dataclass(frozen=True)
class Options:
    """Compare settings of the rival."""

    layouts: tuple[str, ...] = ("tp1", "tp2", "dp2")
    """Layouts; for tp1 the optimizer's settings are tried, for the others those of their axis."""
    steps: int = 7
    """Timed steps of each variant, after two that are checked."""
    num_micro_batches: int = 2
    """Micro-batches per step; few, so that many variants fit into minutes."""
    preset: str = "bench"
    """Model and size of a micro-batch."""
    config: Path | None = None
    """TOML file applied over the preset."""
    out: Path | None = None
    """Append one JSON line per layout."""


def main(options: Options) -> int:
    """Run every layout; print each variant's speed-up over the defaults.

    Returns: 0, or 1 if a check was red.
    """
    console, exit_code = Console(), 0
    base = base_config(options.preset, options.config)
    for layout in options.layouts:
        config = in_layout(base, layout, options.num_micro_batches)
        entries = {name: Entry("torch", config, rival) for name, rival in variants(layout).items()}
        with started(entries, layout, options.steps) as contestants:
            comparison = compare_contestants(contestants, options.steps)
        exit_code |= comparison.exit_code
        fields: dict[str, Any] = {
            "layout": layout,
            "tokens_per_step": entries[_BASELINE].tokens_per_step,
            "defaults": asdict(RivalOptions()),
            **comparison.fields(_BASELINE),
        }
        row = make_row("rival_options", threads_per_rank=THREADS_PER_RANK, fields=fields)
        if options.out is not None:
            append(options.out, row)
        console.print(f"{layout}: check {row['check']}", highlight=False)
        for name in entries:
            if comparison.check == PASSED and name != _BASELINE:
                ratio = comparison.ratio(_BASELINE, name)
                assert ratio is not None
                text = f"    {name}: {ratio.median:.3f} times the defaults' speed ({ratio.p20:.3f} to {ratio.p80:.3f})"
                console.print(text, highlight=False)
    return exit_code


def variants(layout: str) -> dict[str, RivalOptions]:
    """Return the defaults, and every choice of the layout's axes that differs from them, by name."""
    axes = [axis for axis in ("tp", "dp") if axis in layout and f"{axis}1" not in layout] or [""]
    found = {_BASELINE: RivalOptions()}
    for axis in axes:
        for choice in _CHOICES[axis]:
            rival = replace(RivalOptions(), **choice)
            if rival != RivalOptions():
                found["_".join(f"{name}_{value}".lower() for name, value in choice.items())] = rival
    return found
