"""`python -m benchmarks.run exchange`: exchanges through shared memory against torch's collectives over gloo.

    all_gather        y[T, D] from x[T/tp, D]
    reduce_scatter    y[T/tp, D] from x[T, D]
    all_reduce        a bucket of gradients, in place, through an arena of the size that the engine gives it
    message           x[T, D] to the next rank and back, as between two pipeline stages

Values are integers, so that every order of sums gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.mailbox import Mailbox

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.tables import speed_table
from benchmarks.harness.timing import compare
from tpengine.distributed.local_ranks import THREADS_PER_RANK, run_ranks
from tpengine.distributed.mesh import SUM_ARENA_BYTES

_OURS, _GLOO = "memory", "gloo"
_ITEM_BYTES = 4

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Options:
    """Sizes of the exchanged tensors, float32."""

    ranks: int = 2
    """Processes."""
    activations: tuple[int, ...] = (1 << 19, 1 << 21, 1 << 23)
    """Bytes of a whole tensor that is gathered, scattered or sent; divisible by 2048 and by 4 times the ranks."""
    buckets: tuple[int, ...] = (1 << 20, 25_000_000, 100_000_000)
    """Bytes of a bucket that is summed; divisible by 4."""
    rounds: int = 20
    """Samples of each variant."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


Variants = Mapping[str, Callable[[], Tensor]]


def main(options: Options) -> int:
    """Run all cases; return 1 if a check was red."""
    row_bytes = 512 * _ITEM_BYTES
    if options.ranks < 2 or any(size % row_bytes or size // row_bytes % options.ranks for size in options.activations):
        raise ValueError(
            f"activations must be rows of {row_bytes} bytes that 2 or more ranks share: ranks {options.ranks}, "
            f"activations {options.activations}: use the defaults"
        )
    if any(size % _ITEM_BYTES for size in options.buckets):
        raise ValueError(f"buckets must be divisible by {_ITEM_BYTES} bytes: got {options.buckets}: use the defaults")
    rows: list[dict[str, Any]] = run_ranks(options.ranks, "benchmarks.overlap.exchange:measure", options)
    title = f"{options.ranks} ranks, float32; medians in ms; ratios by round"
    labels = {
        "case": [row["case"].split("/")[1] for row in rows],
        "MB": [f"{row['whole_bytes'] / 1e6:.1f}" for row in rows],
    }
    Console(width=max(Console().width, 90)).print(speed_table(title, labels, rows, _OURS, _GLOO))
    return stored(rows, options.out)


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure every case on this rank; collective. Returns the rows, equal on all ranks."""
    rows = []
    cases = [
        (f"{name}/{size}", variants)
        for size in options.activations
        for name, variants in _activation_cases(size).items()
    ] + [(f"all_reduce/{size}", _bucket_case(size)) for size in options.buckets]
    for name, variants in cases:
        comparison = compare(variants, check=lambda v=variants: _check(v), rounds=options.rounds)  # type: ignore[misc]
        fields = {"ranks": options.ranks, "whole_bytes": int(name.rpartition("/")[2])}
        rows.append(
            make_row(f"exchange/{name}", threads_per_rank=THREADS_PER_RANK, fields=fields | comparison.fields(_GLOO))
        )
    return rows


def _integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def _activation_cases(num_bytes: int) -> dict[str, Variants]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = num_bytes // (512 * _ITEM_BYTES)
    comm = Communicator(dist.group.WORLD, arena_bytes=exchange_bytes(tokens, 512 * _ITEM_BYTES, world))
    assert comm.group is not None and comm.arena is not None
    mailbox = Mailbox.open(comm.group, num_bytes, 2)
    shard, whole = _integers(rank, tokens // world, 512), _integers(10 + rank, tokens, 512)
    received = torch.zeros_like(whole)

    def gather_by_gloo() -> Tensor:
        y = whole.new_empty(whole.shape)
        _all_gather_single(y, shard)
        return y

    def scatter_by_gloo() -> Tensor:
        y = shard.new_empty(shard.shape)
        _reduce_scatter_single(y, whole)
        return y

    # Rank 0 sends to rank 1, which sends it back; other pairs do the same; a rank without partner does nothing.
    peer = rank ^ 1
    message = _integers(20 + rank // 2, tokens, 512)

    def there_and_back(send: Callable[[Tensor], object], receive: Callable[[Tensor], object]) -> Tensor:
        if peer < world:
            if rank < peer:
                send(message)
                receive(received)
            else:
                receive(received)
                send(received)
        return received

    return {
        "all_gather": {_OURS: lambda: comm.all_gather_rows(shard, tokens), _GLOO: gather_by_gloo},
        "reduce_scatter": {_OURS: lambda: comm.reduce_scatter(whole), _GLOO: scatter_by_gloo},
        "message": {
            _OURS: lambda: there_and_back(lambda x: mailbox.send(peer, x), lambda x: mailbox.receive(peer, x)),
            _GLOO: lambda: there_and_back(lambda x: dist.send(x, peer), lambda x: dist.recv(x, peer)),
        },
    }


def _bucket_case(num_bytes: int) -> Variants:
    comm = Communicator(dist.group.WORLD, arena_bytes=SUM_ARENA_BYTES)
    assert comm.arena is not None
    bucket = _integers(dist.get_rank(), num_bytes // _ITEM_BYTES)
    summed = torch.empty_like(bucket)

    def by_gloo() -> Tensor:
        dist.all_reduce(summed.copy_(bucket))
        return summed

    return {_OURS: lambda: comm.all_reduce_(summed.copy_(bucket)), _GLOO: by_gloo}


def _check(variants: Variants) -> None:
    """Check with tolerance zero."""
    got = variants[_OURS]().clone()
    want = variants[_GLOO]()
    assert torch.equal(got, want), f"memory and gloo differ by up to {(got - want).abs().max().item():g}"
