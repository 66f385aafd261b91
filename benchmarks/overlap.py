"""`python -m benchmarks.run overlap`: what is left of the communication when it is fused with the matmul.

Four bars for each operator, forward and backward, all computing the same thing from the same operands:

    matmul    the fastest plain matmul of the same local shapes, all operands present, nothing split, nothing sent:
              torch.mm, host_gemm.product of the weight, or of the weight prepared once for many micro-batches
    own       the matmuls as the fused operator does them, all operands present: products that are scattered are
              split by owner; products of gathered rows are not, where that gives the same bits (on ranks that begin
              together all shards come at once; a rank whose peers are late multiplies shard by shard, see `split`)
    split     the matmuls shard by shard; only in the rows
    serial    the collective, then the matmul; or the matmul, then the collective
    fused     the operator

    ECT = T - T(matmul), the effective communication time;   E = 1 - ECT(fused) / ECT(serial);   ceiling = E of own

The last three multiply by prepared weights, as training does. E is 1 where the communication is hidden, 0 where fusing
gains nothing, negative where it loses. No E is printed where ECT(serial) is not positive. The pair is a feed-forward
network's two matmuls in a row, as a training step has them; backward has both data gradients and both weight gradients.
Weight gradients alone need no communication.

Sources: ECT and overlap efficiency as Chang et al., "Flux", arXiv 2406.06858, section 5, with the same local shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tpkernels.arena import exchange_bytes, shard_rows
from tpkernels.communicator import Communicator
from tpkernels.fused.exchange_matmul import gather_matmul, matmul_scatter
from tpkernels.host_gemm import Matrix, PreparedMatrix, product, rows_are_independent
from tpkernels.wgrad import accumulate_wgrad

from benchmarks.harness import Comparison, compare, spread_fields
from benchmarks.processes import THREADS_PER_RANK, run_ranks
from benchmarks.rows import append, make_row

_TABLE_COLUMNS = 116
_PLAIN = ("torch.mm", "host_gemm", "prepared")


@dataclass(frozen=True)
class Options:
    """Shapes of the two matmuls of a feed-forward network: x[T/tp, D] -> h[T, F/tp] -> y[T/tp, D]."""

    tp: int = 2
    """Ranks."""
    tokens: int = 1024
    """T, all ranks' tokens."""
    hidden: int = 512
    """D."""
    ffn: int = 1408
    """F, all ranks' features; divisible by tp."""
    rounds: int = 60
    """Samples of each variant."""
    out: Path | None = None
    """Append a JSON line a case to this file."""


Variants = Mapping[str, Callable[[], Sequence[Tensor]]]


def main(options: Options) -> int:
    """Run all cases; return 1 if a check was red."""
    if options.ffn % options.tp:
        nearest = max(options.ffn // options.tp, 1) * options.tp
        raise ValueError(f"--ffn must be divisible by tp: got {options.ffn}, tp {options.tp}: use {nearest}")
    rows: list[dict[str, Any]] = run_ranks(options.tp, measure, options)
    console = Console(width=max(Console().width, _TABLE_COLUMNS))
    console.print(_table(rows))
    for row in rows:
        if row["check"] != "passed":
            console.print(f"{row['case']}: check {row['check']}", markup=False, highlight=False)
        if options.out is not None:
            append(options.out, row)
    return int(any(row["check"] != "passed" for row in rows))


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure every case on this rank; collective. Returns the rows, equal on all ranks."""
    arena_bytes = exchange_bytes(options.tokens, options.hidden * 4, options.tp)
    fused = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    plain = Communicator(dist.group.WORLD)
    cases = _cases(_Operands(options, fused), fused, plain)
    sizes = {name: value for name, value in asdict(options).items() if name not in ("rounds", "out")}
    rows = []
    for name, variants in cases.items():
        comparison = compare(variants, check=lambda v=variants: _check(v), rounds=options.rounds, warmup=5)  # type: ignore[misc]
        fields = {"arena": fused.arena is not None, **sizes, **_fields(comparison)}
        rows.append(make_row(f"overlap/{name}", threads_per_rank=THREADS_PER_RANK, fields=fields))
    return rows


class _Right:
    """The right-hand side of a product, as it is and prepared for a rank's rows."""

    def __init__(self, matrix: Tensor, num_rows: int) -> None:
        self.plain, self.prepared = matrix, PreparedMatrix(matrix, num_rows)


_Product = Callable[[Tensor, _Right], Tensor]


class _Operands:
    """Integer-valued operands, so that every order of sums gives the same bits, and buffers made once."""

    def __init__(self, options: Options, comm: Communicator) -> None:
        tp, t, d, f = options.tp, options.tokens, options.hidden, options.ffn // options.tp

        def integers(seed: int, *shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()

        own = shard_rows(t, tp, comm.rank)
        self.tokens, self.own = t, own
        self.pieces = [shard_rows(t, tp, (comm.rank + i) % tp) for i in range(tp)]
        self.x_full, self.dy_full = integers(1, t, d), integers(2, t, d)
        self.x, self.dy = self.x_full[own].clone(), self.dy_full[own].clone()
        w, v = integers(10 + comm.rank, f, d), integers(30 + comm.rank, d, f)
        self.w, self.w_t, self.v, self.v_t = (_Right(m, own.stop - own.start) for m in (w, w.T, v, v.T))
        self.h = integers(50 + comm.rank, t, f)
        self.dh = integers(70 + comm.rank, t, f)
        self.dw, self.dv = torch.zeros(f, d), torch.zeros(d, f)


def _cases(o: _Operands, fused: Communicator, plain: Communicator) -> dict[str, Variants]:
    """The cases. A variant returns what the operator returns; the plain products, what one rank would add to it."""
    ag, rs = "all_gather_matmul", "matmul_reduce_scatter"

    def gathered(x: Tensor, m: Matrix, comm: Communicator, name: str) -> tuple[Tensor, Tensor]:
        (y,), full = gather_matmul(x, [m], comm, o.tokens, name, keep=True)
        assert full is not None, "asked for"
        return y, full

    def wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        accumulate_wgrad(buffer.zero_(), dy, x)
        return buffer

    def split(x: Tensor, m: Matrix) -> Tensor:
        out = x.new_empty(len(x), m.shape[1])
        for rows in o.pieces:
            product(x[rows], m, out[rows])
        return out

    lengths = [rows.stop - rows.start for rows in o.pieces]

    def own_of_gathered(x: Tensor, m: Matrix) -> Tensor:
        return product(x, m) if rows_are_independent(m, len(x), lengths) else split(x, m)

    def plain_products(x: Tensor, m: _Right, own: Callable[[Tensor, Matrix], Tensor]) -> Variants:
        return {
            "torch.mm": lambda: [torch.mm(x, m.plain)],
            "host_gemm": lambda: [product(x, m.plain)],
            "prepared": lambda: [product(x, m.prepared)],
            "own": lambda: [own(x, m.prepared)],
            "split": lambda: [split(x, m.prepared)],
        }

    def gather_case(x: Tensor, full: Tensor, m: _Right, name: str) -> Variants:
        return {
            **plain_products(full, m, own_of_gathered),
            "serial": lambda: [product(plain.all_gather_rows(x, o.tokens), m.prepared)],
            "fused": lambda: [gathered(x, m.prepared, fused, name)[0]],
        }

    def scatter_case(x: Tensor, m: _Right, name: str) -> Variants:
        return {
            **plain_products(x, m, split),
            "serial": lambda: [plain.reduce_scatter(product(x, m.prepared))],
            "fused": lambda: [matmul_scatter([(x, m.prepared)], fused, name)],
        }

    def pair_forward(of_gathered: _Product, to_scatter: _Product) -> list[Tensor]:
        return [to_scatter(of_gathered(o.x_full, o.w_t), o.v_t)]

    def pair_backward(of_gathered: _Product, to_scatter: _Product) -> list[Tensor]:
        dh = of_gathered(o.dy_full, o.v)
        dv = wgrad(o.dv, o.dy_full, o.h)
        return [to_scatter(dh, o.w), dv, wgrad(o.dw, dh, o.x_full)]

    def serial_forward() -> list[Tensor]:
        h = product(plain.all_gather_rows(o.x, o.tokens), o.w_t.prepared)
        return [plain.reduce_scatter(product(h, o.v_t.prepared))]

    def fused_forward() -> list[Tensor]:
        h, _ = gathered(o.x, o.w_t.prepared, fused, ag)
        return [matmul_scatter([(h, o.v_t.prepared)], fused, rs)]

    def serial_backward() -> list[Tensor]:
        full = plain.all_gather_rows(o.dy, o.tokens)
        dh = product(full, o.v.prepared)
        dv = wgrad(o.dv, full, o.h)
        return [plain.reduce_scatter(product(dh, o.w.prepared)), dv, wgrad(o.dw, dh, o.x_full)]

    def fused_backward() -> list[Tensor]:
        dh, full = gathered(o.dy, o.v.prepared, fused, rs)
        dv = wgrad(o.dv, full, o.h)
        return [matmul_scatter([(dh, o.w.prepared)], fused, ag), dv, wgrad(o.dw, dh, o.x_full)]

    def pair_case(
        pair: Callable[[_Product, _Product], list[Tensor]],
        serial: Callable[[], list[Tensor]],
        fused: Callable[[], list[Tensor]],
    ) -> Variants:
        def alike(multiply: _Product) -> Callable[[], list[Tensor]]:
            return lambda: pair(multiply, multiply)

        return {
            "torch.mm": alike(lambda x, m: torch.mm(x, m.plain)),
            "host_gemm": alike(lambda x, m: product(x, m.plain)),
            "prepared": alike(lambda x, m: product(x, m.prepared)),
            "own": lambda: pair(lambda x, m: own_of_gathered(x, m.prepared), lambda x, m: split(x, m.prepared)),
            "split": alike(lambda x, m: split(x, m.prepared)),
            "serial": serial,
            "fused": fused,
        }

    return {
        "all_gather_matmul/forward": gather_case(o.x, o.x_full, o.w_t, ag),
        "matmul_reduce_scatter/forward": scatter_case(o.h, o.v_t, rs),
        "all_gather_matmul/dgrad": scatter_case(o.dh, o.w, ag),
        "matmul_reduce_scatter/dgrad": gather_case(o.dy, o.dy_full, o.v, rs),
        "pair/forward": pair_case(pair_forward, serial_forward, fused_forward),
        "pair/backward": pair_case(pair_backward, serial_backward, fused_backward),
    }


def _check(variants: Variants) -> None:
    """Tolerance zero: operands are integers. The plain products are one rank's part of what the others return."""
    serial = [result.clone() for result in variants["serial"]()]
    for got, want in zip(variants["fused"](), serial, strict=True):
        assert torch.equal(got, want), f"fused and serial differ by up to {(got - want).abs().max().item():g}"
    plain = [result.clone() for result in variants["torch.mm"]()]
    for name in ("host_gemm", "prepared", "own", "split"):
        for got, want in zip(variants[name](), plain, strict=True):
            assert torch.equal(got, want), f"{name} and torch.mm differ by up to {(got - want).abs().max().item():g}"


def _fields(comparison: Comparison) -> dict[str, Any]:
    fields: dict[str, Any] = {"check": comparison.check}
    if not comparison.passed:
        return fields
    seconds = {name: comparison.seconds(name) for name in comparison.samples}
    medians = {name: spread.median for name, spread in seconds.items() if spread is not None}
    fastest = min(_PLAIN, key=medians.__getitem__)
    fields |= {"fastest_matmul": fastest, "num_samples": len(comparison.samples["fused"])}
    for bar, name in (("matmul", fastest), *((bar, bar) for bar in ("own", "split", "serial", "fused"))):
        fields |= spread_fields(bar, "seconds", seconds[name])
    for bar in ("own", "split", "serial", "fused"):
        fields |= spread_fields(f"{bar}_over_matmul", "ratio", comparison.ratio(bar, fastest))
    fields |= spread_fields("fused_over_torch_mm", "ratio", comparison.ratio("fused", "torch.mm"))
    ect = {bar: medians[bar] - medians[fastest] for bar in ("own", "serial", "fused")}
    fields |= {f"ect_{bar}_seconds": value for bar, value in ect.items()}
    if ect["serial"] > 0:
        fields |= {
            "overlap_efficiency_ratio": 1 - ect["fused"] / ect["serial"],
            "overlap_ceiling_ratio": 1 - ect["own"] / ect["serial"],
        }
    return fields


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    table = Table(
        box=box.SIMPLE,
        title=f"tp {first['tp']}, T {first['tokens']}, D {first['hidden']}, F {first['ffn']}, float32; medians in ms",
        caption=(
            "matmul: the fastest plain one; own: as fused does it, all operands present; serial: beside a collective\n"
            "/ matmul, / torch.mm: fused over the fastest plain matmul, and over torch.mm\n"
            "E: hidden part of serial's communication (1 all, 0 none, below 0 a loss); ceiling: E of own"
        ),
    )
    for name in ("case", "matmul", "own", "serial", "fused", "/ matmul", "/ torch.mm", "E", "ceiling"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in rows:
        case = row["case"].removeprefix("overlap/")
        if row["check"] != "passed":
            table.add_row(case, "check failed")
            continue
        times = [f"{row[f'{bar}_median_seconds'] * 1e3:.2f}" for bar in ("matmul", "own", "serial", "fused")]
        over = [f"{row[f'fused_over_{bar}_median_ratio']:.3f}" for bar in ("matmul", "torch_mm")]
        e = [row.get(f"overlap_{what}_ratio") for what in ("efficiency", "ceiling")]
        shares = ["-" if value is None else f"{value:.2f}" for value in e]
        table.add_row(case, *times, *over, *shares)
    return table
