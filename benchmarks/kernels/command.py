"""`python -m benchmarks.run kernels`: operators against their rivals, or against themselves at another git revision.

For each operator and per-rank shape of a model this measures the time of forward, backward and both, checked first,
interleaved and paired as in harness/timing.py; the speed by the formulas of tpkernels.work, relative to that of a large
copy or a large matmul in the same run; and peak memory on a GPU. Cases are in cases/, the rule for right results in
check.py, traps of GPU timing in timing.py, the process of the other revision in side.py.

Backward alone is timed after a forward pass that does not count. An operator that computes gradients in its forward
pass, such as linear + cross-entropy, is only measured in both together.

Without a GPU the host paths run, on one thread as in training, at shapes that a printed line names.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from benchmarks.harness.journal import append
from benchmarks.harness.revision import ROOT, checked_out, commit_of
from benchmarks.harness.rows import make_row
from benchmarks.harness.shapes import MODELS, REHEARSED, SEQUENCES, WHOLE_MODELS
from benchmarks.harness.timing import PASSED, Comparison, interleave, spread_fields
from benchmarks.kernels.cases.cases import (
    CASES,
    DIRECTIONS,
    OURS,
    RIVALS,
    TORCH,
    Case,
    Ceiling,
    Direction,
    MissingOperator,
    Shape,
    cases_of,
)
from benchmarks.kernels.check import Findings
from benchmarks.kernels.measure import Asked, Measured
from benchmarks.kernels.plot import check_plot, write_plot
from benchmarks.kernels.side import Side
from benchmarks.kernels.table import kernel_table, notes
from benchmarks.kernels.timing import measure_ceilings
from tpengine.distributed.local_ranks import THREADS_PER_RANK
from tpengine.spelling import use

_RESULTS = ROOT / "benchmarks" / "results"
MODELS_BY_NAME = {model.name: model for model in (*MODELS, *WHOLE_MODELS, REHEARSED)}
HOST_MODELS, _HOST_SEQUENCES = (MODELS[0].name,), (512,)
_WORKING_TREE, _REVISION = "working_tree", "revision"
_TABLE_COLUMNS = 136


@dataclass(frozen=True)
class Options:
    """What to measure. Without a GPU the defaults are small, and a line names them."""

    op: tuple[str, ...] | None = None
    """Operators; by default all."""
    cases: tuple[str, ...] | None = None
    """Cases of these operators, such as attention_qkv; by default all."""
    models: tuple[str, ...] | None = None
    """Models whose per-rank shapes, at tp 8, are used: llama3_8b, llama3_70b, llama3_405b, by default these; undivided
    llama3_8b_whole, llama_1b, qwen3_30b_a3b (its experts)."""
    seqs: tuple[int, ...] | None = None
    """Tokens per sequence; by default 4096, 8192 and 32768."""
    batch: int = 1
    """Sequences of each case, of attention only: what a micro-batch has."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtypes of activations and weights; by default bfloat16, without a GPU float32."""
    direction: tuple[Direction, ...] = DIRECTIONS
    """Forward, backward after a forward that does not count, or both together."""
    rivals: tuple[str, ...] = RIVALS
    """Rivals, where they have the operator."""
    against: str | None = None
    """A git revision whose operators are the only rival."""
    rounds: int = 20
    """Samples of each contestant."""
    plot: Path | None = None
    """Draw the results into this file, .png or .svg."""
    out: Path | None = None
    """Append one JSON line per case to this file; by default on a GPU benchmarks/results/<GPU>/kernels.jsonl."""


@dataclass(frozen=True)
class _Contest:
    """The contestants: those of one process by their names, or our operator in two processes, by the processes' labels.

    Attributes:
        processes: by label; without --against there is only this one, with an empty label.
        ours: the contestant whose results must be right, and whose speed-up is reported.
        chosen: contestants that a process measures.
        against: commit of the other revision.
    """

    processes: Mapping[str, Asked]
    ours: str
    chosen: tuple[str, ...]
    against: str | None = None

    def open(self, op: str, shape: Shape, case: str) -> Findings:
        """Check a case in every process."""
        every = Findings({}, {})
        for label, process in self.processes.items():
            for all_of_kind, of_process in zip(every, process.ask("open", op, shape, case, self.chosen), strict=True):
                all_of_kind.update({label or name: text for name, text in of_process.items()})
        return every

    def contestants(self, direction: Direction) -> dict[str, tuple[Asked, str]]:
        """Return the contestants of the open case: the process to ask, and the name there."""
        return {
            label or name: (process, name)
            for label, process in self.processes.items()
            for name in process.ask("contestants", direction)
        }


def main(options: Options) -> int:
    """Measure every case and print a table per operator; return 1 if our results were wrong in any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = _shapes(options, device)
    console = Console(width=max(Console().width, _TABLE_COLUMNS))
    if options.plot is not None:
        check_plot(options.plot)
    with ExitStack() as stack:
        contest = _contest(options, stack)
        stack.enter_context(_threads(device))
        ops = _ops(options, contest, shapes[0], console)
        if device == "cpu":
            sizes = ", ".join(dict.fromkeys(f"{shape.model.name} at {shape.seq} tokens" for shape in shapes))
            console.print(
                f"no GPU: host paths on {THREADS_PER_RANK} thread, {sizes}: --models and --seqs choose others"
            )
        out = _out(options.out, device)
        _check_cases(options, ops, shapes[0])
        ceilings = measure_ceilings(device, shapes[0].dtype)
        rows: list[dict[str, Any]] = []
        for op in ops:
            of_op = []
            for row in _rows(op, shapes, contest, options, ceilings):
                of_op.append(row)
                if out is not None:
                    append(out, row)
            console.print(kernel_table(op, of_op))
            for line in notes(of_op):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            rows += of_op
    if options.plot is not None:
        write_plot(options.plot, rows)
    return int(any(row["check"] != PASSED for row in rows))


def _shapes(options: Options, device: str) -> list[Shape]:
    """Return the shapes that are asked for; refuse unknown names."""
    for flag, chosen, known in (
        ("--op", options.op or (), CASES),
        ("--models", options.models or (), MODELS_BY_NAME),
        ("--rivals", options.rivals, RIVALS),
    ):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{flag} must be of {', '.join(known)}: got {name!r}: {use(name, known)}")
    on_host = device == "cpu"
    dtype = getattr(torch, options.dtype or ("float32" if on_host else "bfloat16"))
    models = options.models or (HOST_MODELS if on_host else tuple(model.name for model in MODELS))
    seqs = options.seqs or (_HOST_SEQUENCES if on_host else SEQUENCES)
    if options.batch > 1 and options.op != ("attention",):
        raise ValueError(f"--batch is attention's: got {options.batch}: leave it out, or use --op attention")
    return [Shape(MODELS_BY_NAME[model], seq, dtype, device, options.batch) for model in models for seq in seqs]


def _contest(options: Options, stack: ExitStack) -> _Contest:
    """Start the processes that the options need; the stack ends them."""
    if options.against is None:
        return _Contest({"": Measured()}, OURS, (OURS, *options.rivals))
    commit = commit_of(options.against)
    trees = {_REVISION: stack.enter_context(checked_out(commit)), _WORKING_TREE: ROOT}
    names = {_REVISION: f"--against {options.against}", _WORKING_TREE: "the working tree"}
    sides = {label: stack.enter_context(Side(names[label], tree, THREADS_PER_RANK)) for label, tree in trees.items()}
    return _Contest(sides, _WORKING_TREE, (OURS,), commit[:12])


def _ops(options: Options, contest: _Contest, shape: Shape, console: Console) -> list[str]:
    """Return the operators that every process has; a missing one is an error only if it was asked for by name.

    Raises: MissingOperator: one was asked for.
    """
    found = []
    for op in options.op or CASES:
        try:
            for process in contest.processes.values():
                process.ask("names", op, shape)
            measured = {direction for case in cases_of(op, shape) for direction in case.directions}
            if not measured & set(options.direction):
                known = " ".join(direction for direction in DIRECTIONS if direction in measured)
                raise MissingOperator(f"{op} is measured in {known} only: use --direction {known}")
        except MissingOperator as error:
            if options.op is not None:
                raise
            console.print(f"{op} is not measured: {error}", markup=False, highlight=False)
        else:
            found.append(op)
    return found


def _check_cases(options: Options, ops: Sequence[str], shape: Shape) -> None:
    """Refuse cases that the operators do not have."""
    known = [case.name for op in ops for case in cases_of(op, shape)]
    for name in options.cases or ():
        if name not in known:
            raise ValueError(f"--cases must be of {', '.join(known)}: got {name!r}: leave it out for all")


@contextlib.contextmanager
def _threads(device: str) -> Iterator[None]:
    """Use as many threads on a CPU as a rank has in training."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(THREADS_PER_RANK)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _out(chosen: Path | None, device: str) -> Path | None:
    if chosen is not None or device == "cpu":
        return chosen
    directory = _RESULTS / re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "kernels.jsonl"


def _rows(
    op: str, shapes: Sequence[Shape], contest: _Contest, options: Options, ceilings: Mapping[Ceiling, float]
) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        for case in cases_of(op, shape):
            if options.cases is not None and case.name not in options.cases:
                continue
            wrong, less_exact = contest.open(op, shape, case.name)
            for direction in options.direction:
                if direction not in case.directions:
                    continue
                comparison, peaks = _compared(contest, direction, wrong, options.rounds)
                fields: dict[str, Any] = {"op": op, "model": shape.model.name, "seq": shape.seq, "batch": shape.batch}
                fields |= {"dtype": str(shape.dtype).removeprefix("torch."), "direction": direction, **case.sizes}
                fields |= {"against": contest.against, "less_exact": less_exact}
                fields["left_out"] = {name: text for name, text in wrong.items() if name != contest.ours}
                fields |= _numbers(case, direction, comparison, contest.ours, ceilings)
                fields |= _memory(peaks, contest.ours)
                sizes = f"seq_{shape.seq}" + (f"/batch_{shape.batch}" if shape.batch > 1 else "")
                name = f"kernels/{case.name}/{shape.model.name}/{sizes}/{direction}"
                yield make_row(name, threads_per_rank=torch.get_num_threads(), fields=fields)


def _compared(
    contest: _Contest, direction: Direction, wrong: Mapping[str, str], rounds: int
) -> tuple[Comparison, dict[str, int]]:
    """Return times of contestants with right results, and peak memory if known; nothing if ours is wrong."""
    if contest.ours in wrong:
        return Comparison(f"failed: {contest.ours}: {wrong[contest.ours]}"), {}
    who = {name: asked for name, asked in contest.contestants(direction).items() if name not in wrong}
    peaks = {name: process.ask("start", inner, direction) for name, (process, inner) in who.items()}
    calls = {name: functools.partial(process.ask, "seconds", inner) for name, (process, inner) in who.items()}
    samples = interleave(calls, rounds=rounds, warmup=3)
    return Comparison(PASSED, samples), {name: peak for name, peak in peaks.items() if peak is not None}


def _numbers(
    case: Case, direction: Direction, comparison: Comparison, ours: str, ceilings: Mapping[Ceiling, float]
) -> dict[str, Any]:
    """Return check, times, speeds, shares of the ceiling, and our speed-up over each rival and over the fastest."""
    work = case.total_work(direction)
    amount, unit = (
        (work.memory_bytes, "bytes_per_second") if case.ceiling == "copy" else (work.flops, "flops_per_second")
    )
    ceiling = ceilings[case.ceiling]
    fields: dict[str, Any] = {"work_flops": work.flops, "work_memory_bytes": work.memory_bytes}
    fields |= {"ceiling": case.ceiling, f"ceiling_{unit}": ceiling, "check": comparison.check, "ours": ours}
    medians: dict[str, float] = {}
    for name in comparison.samples:
        spread = comparison.seconds(name)
        assert spread is not None, "a check that passed has samples"
        medians[name] = spread.median
        fields |= spread_fields(name, "seconds", spread)
        fields[f"{name}_{unit}"] = amount / spread.median
        fields[f"{name}_of_ceiling_percent"] = 100 * amount / spread.median / ceiling
        if name != ours:
            fields |= spread_fields(f"{ours}_speedup_over_{name}", "ratio", comparison.ratio(name, ours))
    rivals = [name for name in medians if name != ours]
    fields |= {"contestants": list(medians), "num_samples": len(comparison.samples.get(ours, ()))}
    if rivals:
        best = min(rivals, key=medians.__getitem__)
        fields["best_rival"] = best
        fields |= spread_fields("speedup_over_best_rival", "ratio", comparison.ratio(best, ours))
    return fields


def _memory(peaks: Mapping[str, int], ours: str) -> dict[str, Any]:
    """Return each contestant's peak memory, and ours relative to plain torch's."""
    fields: dict[str, Any] = {f"{name}_peak_bytes": peak for name, peak in peaks.items()}
    if ours in peaks and peaks.get(TORCH):
        fields["peak_over_torch_ratio"] = peaks[ours] / peaks[TORCH]
    return fields
