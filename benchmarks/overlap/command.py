"""`python -m benchmarks.run overlap`: how much communication time is left when it is fused with the matmul.

Four bars for each operator, forward and backward, all computing the same thing from the same operands:

    matmul    the fastest plain matmul of the same local shapes, all operands present, nothing split, nothing sent:
              torch.mm, host_gemm.product of the weight, or of the weight prepared once for many micro-batches
    own       the matmuls as the fused operator does them, all operands present: products that are scattered are
              split by owner; products of gathered rows are not, if that gives the same bits (on ranks that begin
              together all shards arrive at once; a rank whose peers are late multiplies shard by shard, see `split`)
    split     the matmuls shard by shard; in the rows only
    serial    the collective, then the matmul; or the matmul, then the collective
    fused     the operator

    ECT = T - T(matmul), the effective communication time;   E = 1 - ECT(fused) / ECT(serial);   ceiling = E of own

The last three multiply by prepared weights, as training does. E is 1 if the communication is hidden, 0 if fusing gains
nothing, negative if it loses. No E is printed if ECT(serial) is not positive. The pair is a feed-forward network's two
matmuls in a row, as in a training step; its backward has both data gradients and both weight gradients. Weight
gradients alone need no communication.

Ranks are processes on this machine's CPU. What a GPU hides only several GPUs show: ranks that share one are tested, not
timed (co_located.py).

Sources: ECT and overlap efficiency as Chang et al., "Flux", arXiv 2406.06858, section 5, with the same local shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tpkernels.exchange.arena import exchange_bytes, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.scatter import matmul_scatter
from tpkernels.ops.matmul.host import PreparedMatrix, product, rows_are_independent
from tpkernels.ops.matmul.wgrad import accumulate_wgrad

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, compare
from benchmarks.overlap.table import overlap_fields, overlap_table
from tpengine.distributed.local_ranks import THREADS_PER_RANK, run_ranks

_TABLE_COLUMNS = 116
_PLAIN = ("torch.mm", "host_gemm", "prepared")
_BARS = ("own", "split", "serial", "fused")


@dataclass(frozen=True)
class Options:
    """x[T/tp, D] -> h[T, F/tp] -> y[T/tp, D], a feed-forward's matmuls, by ranks on this machine's CPU."""

    tp: int = 2
    """Number of ranks."""
    tokens: tuple[int, ...] = (1024,)
    """T, tokens of all ranks, measured one after another."""
    hidden: int = 512
    """D."""
    ffn: int = 1408
    """F, features of all ranks; divisible by tp."""
    rounds: int = 60
    """Samples of each variant."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


Variants = Mapping[str, Callable[[], Sequence[Tensor]]]


def main(options: Options) -> int:
    """Run all cases; return 1 if a check was red."""
    if options.ffn % options.tp:
        nearest = max(options.ffn // options.tp, 1) * options.tp
        raise ValueError(f"--ffn must be divisible by tp: got {options.ffn}, tp {options.tp}: use {nearest}")
    console = Console(width=max(Console().width, _TABLE_COLUMNS))
    exit_code = 0
    for tokens in options.tokens:
        rows = run_ranks(options.tp, "benchmarks.overlap.command:measure", replace(options, tokens=(tokens,)))
        console.print(_table(rows))
        for row in rows:
            if row["check"] != PASSED:
                console.print(f"{row['case']}: check {row['check']}", markup=False, highlight=False)
        exit_code |= stored(rows, options.out)
    return exit_code


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure every case of one number of tokens on this rank; collective. Returns the rows, equal on all ranks."""
    (tokens,) = options.tokens
    arena_bytes = exchange_bytes(tokens, options.hidden * 4, options.tp)
    fused = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    plain = Communicator(dist.group.WORLD)
    operands = _Operands(options, tokens, fused)
    ways = _ways(operands, fused, plain)
    sizes = {"tp": options.tp, "tokens": tokens, "hidden": options.hidden, "ffn": options.ffn}
    rows = []
    for name, compute in _cases(operands).items():
        variants = {bar: functools.partial(compute, way) for bar, way in ways.items()}
        comparison = compare(variants, check=lambda v=variants: check_variants(v), rounds=options.rounds, warmup=5)  # type: ignore[misc]
        of_row = {"arena": fused.arena is not None, **sizes, **fields_of(comparison)}
        rows.append(make_row(f"overlap/{name}", threads_per_rank=THREADS_PER_RANK, fields=of_row))
    return rows


class _Right:
    """The right-hand side of a product, as it is and prepared for a rank's rows."""

    def __init__(self, matrix: Tensor, num_rows: int) -> None:
        self.plain, self.prepared = matrix, PreparedMatrix(matrix, num_rows)


_Product = Callable[[Tensor, _Right], Tensor]


class _Operands:
    """Integer-valued operands, for which every order of sums gives the same bits, and buffers allocated once."""

    def __init__(self, options: Options, tokens: int, comm: Communicator) -> None:
        tp, t, d, f = options.tp, tokens, options.hidden, options.ffn // options.tp

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


@dataclass(frozen=True)
class _Way:
    """One way to compute both kinds of product; the plain ones leave out what other ranks would add.

    Attributes:
        gather: (shard, all rows, m, operator) -> (rows @ m, the gathered rows).
        scatter: (x, m, operator) -> this rank's rows of x @ m, summed; for plain ways all rows, not summed.
    """

    gather: Callable[[Tensor, Tensor, _Right, str], tuple[Tensor, Tensor]]
    scatter: Callable[[Tensor, _Right, str], Tensor]


def _ways(o: _Operands, fused: Communicator, plain: Communicator) -> dict[str, _Way]:
    """Return the bars; see the module docstring."""

    def alone(of_gathered: _Product, to_scatter: _Product) -> _Way:
        return _Way(lambda x, full, m, name: (of_gathered(full, m), full), lambda x, m, name: to_scatter(x, m))

    def split(x: Tensor, m: _Right) -> Tensor:
        out = x.new_empty(len(x), m.plain.shape[1])
        for rows in o.pieces:
            product(x[rows], m.prepared, out[rows])
        return out

    def own_of_gathered(x: Tensor, m: _Right) -> Tensor:
        lengths = [rows.stop - rows.start for rows in o.pieces]
        return product(x, m.prepared) if rows_are_independent(m.prepared, len(x), lengths) else split(x, m)

    def gather_serially(x: Tensor, full: Tensor, m: _Right, name: str) -> tuple[Tensor, Tensor]:
        full = plain.all_gather_rows(x, o.tokens)
        return product(full, m.prepared), full

    def gather_fused(x: Tensor, full: Tensor, m: _Right, name: str) -> tuple[Tensor, Tensor]:
        (y,), gathered = gather_matmul(x, [m.prepared], fused, o.tokens, name, keep=True)
        assert gathered is not None, "the gathered rows were asked for"
        return y, gathered

    products: dict[str, _Product] = {
        "torch.mm": lambda x, m: torch.mm(x, m.plain),
        "host_gemm": lambda x, m: product(x, m.plain),
        "prepared": lambda x, m: product(x, m.prepared),
    }
    return {
        **{name: alone(multiply, multiply) for name, multiply in products.items()},
        "own": alone(own_of_gathered, split),
        "split": alone(split, split),
        "serial": _Way(gather_serially, lambda x, m, name: plain.reduce_scatter(product(x, m.prepared))),
        "fused": _Way(gather_fused, lambda x, m, name: matmul_scatter([(x, m.prepared)], fused, name)),
    }


def _cases(o: _Operands) -> dict[str, Callable[[_Way], list[Tensor]]]:
    """Return what is computed, the same in every way."""
    ag, rs = "all_gather_matmul", "matmul_reduce_scatter"

    def wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        accumulate_wgrad(buffer.zero_(), dy, x)
        return buffer

    def pair_forward(way: _Way) -> list[Tensor]:
        h, _ = way.gather(o.x, o.x_full, o.w_t, ag)
        return [way.scatter(h, o.v_t, rs)]

    def pair_backward(way: _Way) -> list[Tensor]:
        dh, full = way.gather(o.dy, o.dy_full, o.v, rs)
        dv = wgrad(o.dv, full, o.h)
        return [way.scatter(dh, o.w, ag), dv, wgrad(o.dw, dh, o.x_full)]

    return {
        f"{ag}/forward": lambda way: [way.gather(o.x, o.x_full, o.w_t, ag)[0]],
        f"{rs}/forward": lambda way: [way.scatter(o.h, o.v_t, rs)],
        f"{ag}/dgrad": lambda way: [way.scatter(o.dh, o.w, ag)],
        f"{rs}/dgrad": lambda way: [way.gather(o.dy, o.dy_full, o.v, rs)[0]],
        "pair/forward": pair_forward,
        "pair/backward": pair_backward,
    }


def check_variants(variants: Variants) -> None:
    """Check with tolerance zero: operands are integers. Plain products are one rank's part of the other results."""
    serial = [result.clone() for result in variants["serial"]()]
    for got, want in zip(variants["fused"](), serial, strict=True):
        assert torch.equal(got, want), f"fused and serial differ by up to {(got - want).abs().max().item():g}"
    plain = [result.clone() for result in variants["torch.mm"]()]
    for name in ("host_gemm", "prepared", "own", "split"):
        for got, want in zip(variants[name](), plain, strict=True):
            assert torch.equal(got, want), f"{name} and torch.mm differ by up to {(got - want).abs().max().item():g}"


def fields_of(comparison: Comparison) -> dict[str, Any]:
    """Return a row's fields about the comparison."""
    return overlap_fields(comparison, {"matmul": _PLAIN} | {bar: (bar,) for bar in _BARS})


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    sizes = f"tp {first['tp']}, T {first['tokens']}, D {first['hidden']}, F {first['ffn']}"
    return overlap_table(f"{sizes}, float32; medians in ms", rows)
