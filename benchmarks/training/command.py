"""Whole training steps: tpengine in some layouts, against torch's own tools, another layout, or another git revision.

Both sides have the same initial weights and train on the same global batches. Losses and gradient norms of the first
steps must agree, or nothing is timed; then their steps alternate. harness/timing.py lists the traps that this avoids,
contestants.py has how the two sides take turns, torch_rival.py has the rival.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.journal import append
from benchmarks.harness.revision import checked_out, commit_of
from benchmarks.harness.rows import make_row
from benchmarks.harness.timing import PASSED, Comparison, interleave
from benchmarks.training.contestants import Contestant, Entry, RivalOptions, check_agreement, started
from benchmarks.training.torch_rival import check_rival
from tpengine.config import Config, ParallelConfig, validate
from tpengine.config.presets import PRESETS
from tpengine.config.toml import load_toml
from tpengine.distributed.local_ranks import THREADS_PER_RANK

OURS = "tpengine"
_ONE_PROCESS = "one-process"
_REVISION = "revision"

_LAYOUT = re.compile(r"((tp|pp|dp)[1-9]\d*)+")

# The length of the learning-rate schedule, not of the benchmark.
_SCHEDULE_STEPS = 1000


@dataclass(frozen=True)
class Options:
    """Compare training steps."""

    against: str = "torch"
    """torch (its own tools in the same layout), exact (tpengine's exact mode in the same layout), zero0 (tpengine in
    the same layout at --parallel.zero 0, where --config sets another stage), one-process (tpengine in one process), a
    layout of tpengine such as tp2, or a git revision such as HEAD~5 (tpengine of that revision in the same layout)."""
    layouts: tuple[str, ...] = ("tp1", "tp2", "pp2", "dp2", "tp2pp2")
    """Layouts of tpengine: sizes of tp, pp and dp; an axis that is not named has size 1."""
    steps: int = 7
    """Timed steps of each side, after two that are checked."""
    preset: str = "bench"
    """Model and batch; the number of micro-batches is that of a replica, whatever --against is."""
    config: Path | None = None
    """TOML file applied over the preset, for settings of tpengine such as parallel.tp_comm."""
    rival: RivalOptions = field(default_factory=RivalOptions)
    """Settings of the rival."""
    out: Path | None = None
    """Append one JSON line per layout; results to keep go to benchmarks/results."""


def main(options: Options) -> int:
    """Run every layout, and print a table.

    Returns: 0, or 1 if a check was red.
    Raises: ValueError: an option that is not possible, before any process is started.
    """
    base = base_config(options.preset, options.config)
    commit = None if _is_known(options.against) else commit_of_rival(options.against)
    rows = []
    with checked_out(commit) if commit is not None else nullcontext() as tree:
        cases = {layout: entries_of(base, layout, options, tree) for layout in options.layouts}
        for layout, entries in cases.items():
            row = run_case(layout, entries, options.steps)
            if commit is not None:
                row["against_commit"] = commit
            rows.append(row)
            if options.out is not None:
                append(options.out, row)
    Console().print(table(rows))
    return 0 if all(row["check"] == PASSED for row in rows) else 1


def run_case(layout: str, entries: Mapping[str, Entry], steps: int) -> dict[str, Any]:
    """Start both contestants, check, time.

    Args:
        layout: its name.
        entries: tpengine's first, then what it is compared with.
        steps: timed steps of each.

    Returns:
        The row.
    """
    with started(entries, layout, steps) as contestants:
        comparison = compare_contestants(contestants, steps)
        memory = {name: c.peak_memory_bytes() for name, c in contestants.items()} if comparison.passed else {}
    return case_row(layout, entries, comparison, memory)


def compare_contestants(contestants: Mapping[str, Contestant], steps: int) -> Comparison:
    """Check that contestants agree, then time their steps in turns; after a red check nothing is timed."""
    if difference := check_agreement(contestants):
        return Comparison(f"failed: {difference}")
    return Comparison(PASSED, interleave({name: c.step_seconds for name, c in contestants.items()}, rounds=steps))


def case_row(
    layout: str, entries: Mapping[str, Entry], comparison: Comparison, memory: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Return one row: what was compared, times, tokens per second, their ratio, peak memory.

    Args:
        memory: bytes by contestant and rank.
    """
    ours, theirs = entries
    config, tokens = entries[ours].config, entries[ours].tokens_per_step
    fields: dict[str, Any] = {
        "layout": layout,
        "against": theirs,
        f"{ours}_ranks": entries[ours].num_ranks,
        f"{theirs}_ranks": entries[theirs].num_ranks,
        "tokens_per_step": tokens,
        "dtype": config.train.dtype,
        "model": {name: getattr(config.model, name) for name in _MODEL_FIELDS},
        "batch": {name: getattr(config.train, name) for name in _BATCH_FIELDS},
        "tp_comm": config.parallel.tp_comm,
        "zero": config.parallel.zero,
        "residency": config.parallel.residency,
    }
    if entries[theirs].engine == "torch":
        fields["rival_options"] = asdict(entries[theirs].rival)
    fields |= comparison.fields(baseline=theirs)
    for name in comparison.samples:
        seconds = comparison.seconds(name)
        assert seconds is not None
        fields[f"{name}_median_tokens_per_second"] = tokens / seconds.median
        fields[f"{name}_p20_tokens_per_second"] = tokens / seconds.p80
        fields[f"{name}_p80_tokens_per_second"] = tokens / seconds.p20
    for name, by_rank in memory.items():
        fields[f"{name}_peak_memory_sum_bytes"] = sum(by_rank)
        fields[f"{name}_peak_memory_largest_rank_bytes"] = max(by_rank)
    return make_row("train_step", threads_per_rank=THREADS_PER_RANK, fields=fields)


_MODEL_FIELDS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_size",
    "vocab_size",
    "tie_embeddings",
)
_BATCH_FIELDS = ("seq_len", "micro_batch_size", "num_micro_batches")


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of rows; a red check shows its reason and no number."""
    shown = Table(caption="tokens/s: median and 20th to 80th percentile; ratio: tpengine's over the other's, by round")
    for column in ("layout", "tpengine tokens/s", "against", "its tokens/s", "ratio", "MB", "its MB"):
        is_name = column in ("layout", "against")
        shown.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        theirs = row["against"]
        if row["check"] != PASSED:
            shown.add_row(row["layout"], row["check"], theirs)
            continue
        shown.add_row(
            row["layout"],
            _three(row, OURS, "tokens_per_second", ",.0f"),
            theirs,
            _three(row, theirs, "tokens_per_second", ",.0f"),
            _three(row, f"{OURS}_speedup_over_{theirs}", "ratio", ".3f"),
            *(f"{row[f'{name}_peak_memory_sum_bytes'] / 1e6:,.0f}" for name in (OURS, theirs)),
        )
    return shown


def _three(row: Mapping[str, Any], what: str, unit: str, form: str) -> str:
    median, p20, p80 = (row[f"{what}_{which}_{unit}"] for which in ("median", "p20", "p80"))
    return f"{median:{form}}\n{p20:{form}} to {p80:{form}}"


def parse_layout(text: str) -> ParallelConfig:
    """Parse "tp2pp2": each axis at most once; an axis that is not named has size 1.

    Raises:
        ValueError: the text is not of that form.
    """
    found = re.findall(r"(tp|pp|dp)([1-9]\d*)", text)
    sizes = {axis: int(size) for axis, size in found}
    if not found or len(sizes) < len(found) or "".join(axis + size for axis, size in found) != text:
        raise ValueError(f"a layout names tp, pp and dp with their sizes: got {text!r}: use tp2, or tp2pp2")
    return ParallelConfig(**({"tp": 1, "pp": 1, "dp": 1} | sizes))


def base_config(preset: str, toml: Path | None) -> Config:
    """Return a preset with a TOML file applied over it, on the CPU, with the layout open.

    Raises:
        ValueError: no such preset, or a mistake in the file.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}: got {preset!r}: use bench")
    config = PRESETS[preset]()
    if toml is not None:
        config = load_toml(toml, config)
    return replace(config, device="cpu", train=replace(config.train, steps=_SCHEDULE_STEPS))


def _is_known(against: str) -> bool:
    """Return whether --against names a known rival or a layout; else it must be a git revision."""
    return against in ("torch", "exact", "zero0", _ONE_PROCESS) or _LAYOUT.fullmatch(against) is not None


def commit_of_rival(against: str) -> str:
    """Return the commit that --against names.

    Raises:
        ValueError: it does not name a revision either.
    """
    try:
        return commit_of(against)
    except ValueError:
        raise ValueError(
            f"--against must be torch, exact, zero0, {_ONE_PROCESS}, a layout or a git revision: got {against!r}: "
            "use torch, tp2, or HEAD~1"
        ) from None


def entries_of(base: Config, layout: str, options: Options, tree: Path | None = None) -> dict[str, Entry]:
    """Return tpengine in a layout, then what it is compared with, both on the same global batch.

    Args:
        tree: a checkout of the revision that --against names; None if it names none.

    Raises:
        ValueError: sizes that do not divide; see config.validate.
    """
    ours = Entry("tpengine", in_layout(base, layout, base.train.num_micro_batches))
    if options.against == "torch":
        check_rival(ours.config)
        return {OURS: ours, "torch": replace(ours, engine="torch", rival=options.rival)}
    if options.against == "exact":
        exact = replace(ours.config, train=replace(ours.config.train, reduction="exact"))
        return {OURS: ours, "exact": Entry("tpengine", validate(exact, ours.num_ranks))}
    if options.against == "zero0":
        whole = replace(ours.config, parallel=replace(ours.config.parallel, zero=0, residency="auto"))
        return {OURS: ours, "zero0": Entry("tpengine", validate(whole, ours.num_ranks))}
    if tree is not None:
        return {OURS: ours, _REVISION: replace(ours, tree=tree)}
    other = "tp1" if options.against == _ONE_PROCESS else options.against
    # The same global batch for any number of replicas.
    num_global = base.train.num_micro_batches * (ours.config.parallel.dp or 1)
    num_replicas = parse_layout(other).dp or 1
    if num_global % num_replicas:
        raise ValueError(
            f"--against needs replicas that divide the micro-batches of a step: {num_global} micro-batches, {other}: "
            "use fewer replicas"
        )
    name = options.against.replace("-", "_")
    return {OURS: ours, name: Entry("tpengine", in_layout(base, other, num_global // num_replicas))}


def in_layout(base: Config, layout: str, num_micro_batches: int) -> Config:
    """Return the configuration in a layout, checked."""
    sizes = parse_layout(layout)
    assert sizes.tp and sizes.pp and sizes.dp
    parallel = replace(base.parallel, tp=sizes.tp, pp=sizes.pp, dp=sizes.dp)
    train = replace(base.train, num_micro_batches=num_micro_batches)
    return validate(replace(base, parallel=parallel, train=train), sizes.tp * sizes.pp * sizes.dp)
