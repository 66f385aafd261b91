"""`python -m benchmarks.run overlap` on a GPU: the fused operators' kernels between co-located ranks in one process.

The bars are those of command.py; ways.py computes them here, ranks.py has the co-located ranks and what gives wrong
numbers, cases.py says what is computed. A row's `ranks` says that they are virtual: it shows how much of a wait the
kernels hide, without any link between the ranks.

Every variant is checked before any is timed, with integers and tolerance zero; new memory and slots are filled with
NaN. The plain ones and `own` are compared with a rank's products, the others with their sums over the ranks.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tpkernels.exchange.arena import CallMismatch, exchange_bytes
from tpkernels.exchange.device_arena import NUM_GENERATIONS, DeviceArena
from tpkernels.symmetric.signals import PeerError

from benchmarks.harness.journal import append
from benchmarks.harness.revision import ROOT
from benchmarks.harness.rows import make_row
from benchmarks.harness.shapes import MODELS, Model
from benchmarks.harness.timing import PASSED, Comparison, interleave
from benchmarks.overlap.cases import Case, Operands, cases_of
from benchmarks.overlap.ranks import (
    FEWEST_RANKS,
    MOST_RANKS,
    TIMEOUT_SECONDS,
    Clock,
    RanksClock,
    VirtualRanks,
    load,
    matmul_on,
    unwritten_is_nan,
)
from benchmarks.overlap.table import overlap_fields, overlap_table
from benchmarks.overlap.ways import PUSH, Fused, Own, Reference, Serial, Way
from tpengine.spelling import use

_MODELS = {model.name: model for model in MODELS}
_TOKENS = (512, 4096, 16384)
TABLE_COLUMNS = 124
WARMUP_ROUNDS = 5
BARS = {
    "matmul": ("torch.mm", "kernel"),
    "own": ("own",),
    "serial": ("serial_torch", "serial_kernel"),
    "fused": ("fused",),
    PUSH: (PUSH,),
}


def measure_on_gpu(
    models: Sequence[str] | None, tokens: Sequence[int] | None, num_ranks: int, rounds: int, out: Path | None
) -> int:
    """Measure every case, print a table for each model and number of tokens; return 1 if a check was red.

    Args:
        models: names in shapes.py; by default all.
        tokens: of all ranks together.
        num_ranks: number of co-located ranks.
        rounds: samples of each variant.
        out: the file that rows are appended to; by default the GPU's results.

    Raises:
        ValueError: an unknown model, a number of ranks that is not possible, or no GPU.
    """
    chosen = _checked(models, num_ranks)
    gpu = torch.cuda.get_device_name()
    ranks = VirtualRanks(num_ranks, torch.device("cuda", torch.cuda.current_device()))
    clock, out = RanksClock(ranks), out or _results(gpu)
    console = Console(width=max(Console().width, TABLE_COLUMNS))
    exit_code = 0
    for model in chosen:
        for num_tokens in tokens or _TOKENS:
            rows = []
            for row in measured_rows(model, num_tokens, ranks, clock, rounds, f"virtual, one {gpu}"):
                append(out, row)
                rows.append(row)
            sizes = f"{model.name}, T {num_tokens}, D {model.hidden}, F {model.ffn} per rank, bfloat16"
            title = f"{sizes}; {num_ranks} co-located ranks, one {gpu}; medians in ms"
            console.print(overlap_table(title, rows))
            for row in rows:
                if row["check"] != PASSED:
                    console.print(f"{row['case']}: check {row['check']}", markup=False, highlight=False)
                    exit_code = 1
    return exit_code


def _checked(models: Sequence[str] | None, num_ranks: int) -> list[Model]:
    """Return the models that are asked for; refuse unknown ones, and numbers of ranks that are not possible."""
    if not FEWEST_RANKS <= num_ranks <= MOST_RANKS:
        nearest = min(max(num_ranks, FEWEST_RANKS), MOST_RANKS)
        raise ValueError(
            f"--virtual-ranks must be {FEWEST_RANKS} to {MOST_RANKS}, which share a GPU: got {num_ranks}: use {nearest}"
        )
    for name in models or ():
        if name not in _MODELS:
            raise ValueError(f"--models must be of {', '.join(_MODELS)}: got {name!r}: {use(name, _MODELS)}")
    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a GPU: torch {torch.__version__} sees none: use --device cpu")
    return [_MODELS[name] for name in models or _MODELS]


def _results(gpu: str) -> Path:
    directory = ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "overlap.jsonl"


def measured_rows(
    model: Model,
    tokens: int,
    ranks: VirtualRanks,
    clock: Clock,
    rounds: int,
    which_ranks: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Any]]:
    """Return the rows of each case of a model and number of tokens.

    Args:
        which_ranks: the row's text about the ranks.
    """
    o = Operands(model, tokens, ranks, dtype)
    for case in cases_of(o):
        comparison = _compared(case, o, clock, rounds)
        fields: dict[str, Any] = {"ranks": which_ranks, "virtual_ranks": ranks.world}
        fields |= {"processors_per_rank": ranks.processors, "dtype": str(dtype).removeprefix("torch.")}
        fields |= {"model": model.name, "tokens": tokens, "hidden": model.hidden, "ffn_per_rank": model.ffn}
        bars = {bar: names for bar, names in BARS.items() if set(names) <= comparison.samples.keys()}
        fields |= overlap_fields(comparison, bars) | {"work_flops": case.flops}
        if comparison.passed:
            fields["matmul_flops_per_second"] = case.flops / fields["matmul_median_seconds"]
        name = f"overlap/{case.name}/{model.name}/tokens_{tokens}"
        yield make_row(name, threads_per_rank=torch.get_num_threads(), fields=fields)


def ways_of(case: Case, o: Operands, arenas: Sequence[DeviceArena], still: Sequence[DeviceArena]) -> dict[str, Way]:
    """Return the variants of a case, plain ones first, so that their kernels are loaded before anything waits.

    Args:
        arenas: by rank.
        still: other arenas without any call, for `Serial`.
    """
    ranks = o.ranks
    kernel = functools.partial(matmul_on, ranks.processors)
    ways: dict[str, Way] = {
        "torch.mm": Way(ranks, torch.mm),
        "kernel": Way(ranks, kernel),
        "own": Own(ranks, arenas),
        "serial_torch": Serial(ranks, torch.mm, still),
        "serial_kernel": Serial(ranks, kernel, still),
        "fused": Fused(ranks, arenas, push=False),
    }
    return ways | ({PUSH: Fused(ranks, arenas, push=True)} if case.is_pushed else {})


def arenas_for(o: Operands, timeout_seconds: float = TIMEOUT_SECONDS) -> list[DeviceArena]:
    """Return arenas so large that every case's exchange is one piece."""
    row_bytes = o.model.hidden * o.h[0].element_size()
    return o.ranks.arenas(exchange_bytes(o.tokens, row_bytes, o.ranks.world) // NUM_GENERATIONS, timeout_seconds)


def _compared(case: Case, o: Operands, clock: Clock, rounds: int) -> Comparison:
    """Check, then time the variants of a case. Its arenas are new, so that a failed call affects no other case."""
    arenas, still = arenas_for(o), arenas_for(o)
    ways = ways_of(case, o, arenas, still)
    every = [*arenas, *still]

    def seconds(name: str) -> float:
        sample, _ = clock.timed(functools.partial(case.compute, ways[name]), (o.model.name, o.tokens, case.name, name))
        for arena in every:
            arena.check()
        return sample

    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    # Without this, torch may add parts of the sums in bfloat16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        check(case, o, ways, every, clock)
        o.fill(integers=False)
        calls = {name: functools.partial(seconds, name) for name in ways}
        return Comparison(PASSED, interleave(calls, rounds=rounds, warmup=WARMUP_ROUNDS))
    except (AssertionError, PeerError, CallMismatch) as error:
        return Comparison(f"failed: {' '.join(str(error).split())}")
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def check(case: Case, o: Operands, ways: Mapping[str, Way], arenas: Sequence[DeviceArena], clock: Clock) -> None:
    """Compare each variant's results, for small integers, with the right ones.

    Raises:
        AssertionError: they differ; says which variant, and by how much.
        PeerError, CallMismatch: a wait was given up.
    """
    with unwritten_is_nan(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about deterministic algorithms, which are not needed here
        o.fill(integers=True)
        for way in ways.values():
            load(functools.partial(case.compute, way), o.ranks)
        right: dict[bool, list[torch.Tensor]] = {}
        for exchanges in {way.exchanges for way in ways.values()}:
            o.clear()
            reference = case.compute(Reference(o.ranks, exchanges))
            # Products are computed on the ranks' streams, which this one does not wait for.
            o.ranks.settle()
            right[exchanges] = [x.clone() for x in reference]
        for name, way in ways.items():
            o.clear()
            _spoil(arenas)
            _, results = clock.timed(functools.partial(case.compute, way))
            for arena in arenas:
                arena.check()
            for got, want in zip(results, right[way.exchanges], strict=True):
                difference = (got.float() - want.float()).abs().max().item() if want.numel() else 0.0
                assert torch.equal(got, want), f"{name}: differs by up to {difference:g} from what is right"


def _spoil(arenas: Sequence[DeviceArena]) -> None:
    """Fill the arenas with NaN."""
    for arena in arenas:
        for generation in range(NUM_GENERATIONS):
            arena.block(arena.rank, generation, (arena.generation_bytes,), torch.uint8).fill_(0xFF)
