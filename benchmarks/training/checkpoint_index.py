"""`python -m benchmarks.run index`: what a checkpoint's index costs at a save and at a start, at large dp. No ranks.

    merge   what all ranks have written becomes one index, as rank 0 does it at each save
    read    the index is read from disk and checked, as every rank does it at each start

The model has the shape of Llama 3 8B in bfloat16, so that each tensor is there four times: weights, masters, two
moments. With zero 1 a replica writes what its slices hold: pieces in proportion to dp. Nothing but indices is written.

Bar: the time per piece at the largest dp is at most twice that at the smallest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Spread, spread_fields
from tpengine.checkpoint.index import (
    INDEX_FILE,
    FileEntry,
    Index,
    SavedPiece,
    TensorEntry,
    merged,
    read_index_alone,
    write_index,
)
from tpengine.config import Config, ParallelConfig, validate
from tpengine.config.presets import preset_config
from tpengine.layout.parameters import pieces_of, stage_specs
from tpengine.layout.slices import boxes_of, parts_of
from tpengine.layout.step_plan import layout_of

_KINDS = {"": "BF16", "optimizer.master.": "F32", "optimizer.exp_avg.": "F32", "optimizer.exp_avg_sq.": "F32"}


@dataclass(frozen=True)
class Options:
    """The index of a large checkpoint."""

    dp: tuple[int, ...] = (64, 256, 1024)
    """Replicas, each with a file."""
    rounds: int = 3
    """Timed calls of each kind."""
    out: Path | None = None
    """Append one JSON line per dp to this file."""


def main(options: Options) -> int:
    """Measure each dp, and print a table.

    Returns: 0, or 1 if a check was red.
    """
    rows = [_row(dp, options.rounds) for dp in options.dp]
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


def of_8b(dp: int) -> Config:
    """Return an 8B's training on dp ranks, each with a slice."""
    base = preset_config("llama_70b")
    model = replace(base.model, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_size=14336)
    return validate(replace(base, model=model, parallel=ParallelConfig(tp=1, pp=1, dp=dp, zero=1)), dp)


def written(dp: int) -> Iterator[Mapping[str, Any]]:
    """Yield what each rank tells rank 0 that it has written, as JSON."""
    config = of_8b(dp)
    layout, model = layout_of(config), config.model
    pieces = {
        name: piece
        for spec in stage_specs(model, 1, 0, model.num_layers)
        for name, piece in ((piece.name, piece) for piece in pieces_of(spec, 1, range(1)))
    }
    for rank in range(dp):
        file = f"rank-{rank:05}-of-{dp:05}.safetensors"
        found: dict[str, list[SavedPiece]] = defaultdict(list)
        for bucket in layout.buckets_of(0).values():
            for part in parts_of(bucket, dp, rank):
                for of in boxes_of(pieces[part.name].block[1], part.in_tensor):
                    found[part.name].append(SavedPiece(of.offset, of.size, file, f"{part.name}@{of.offset}"))
        tensors = {
            f"{kind}model.{name}": asdict(TensorEntry(dtype, pieces[name].spec.shape, tuple(of_tensor)))
            for kind, dtype in _KINDS.items()
            for name, of_tensor in found.items()
        }
        yield {"tensors": _as_json(tensors), "files": {file: asdict(FileEntry(1, "0" * 64))}}


def _as_json(value: Any) -> Any:
    """Return a value as it comes out of JSON: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: _as_json(of) for key, of in value.items()}
    return [_as_json(of) for of in value] if isinstance(value, tuple | list) else value


def _row(dp: int, rounds: int) -> dict[str, Any]:
    ranks = list(written(dp))
    merges, reads = [], []
    with tempfile.TemporaryDirectory(prefix="tpengine-index-") as temporary:
        for _ in range(rounds):
            begin = time.perf_counter()
            tensors, files = merged(ranks)
            merges.append(time.perf_counter() - begin)
            index = Index(1, tensors, files, {})
            write_index(Path(temporary), index)
            begin = time.perf_counter()
            is_equal = read_index_alone(Path(temporary)) == index
            reads.append(time.perf_counter() - begin)
        num_bytes = (Path(temporary) / INDEX_FILE).stat().st_size
    num_pieces = sum(len(entry.pieces) for entry in tensors.values())
    fields: dict[str, Any] = {
        "check": PASSED if is_equal else "the index is not what was written",
        "dp": dp,
        "num_samples": rounds,
        "pieces": num_pieces,
        "index_bytes": num_bytes,
        "merge_per_piece_us": 1e6 * min(merges) / num_pieces,
        "read_per_piece_us": 1e6 * min(reads) / num_pieces,
        "load_average_ratio": os.getloadavg()[0] / (os.cpu_count() or 1),
    }
    fields |= spread_fields("merge", "seconds", Spread.of(merges)) | spread_fields("read", "seconds", Spread.of(reads))
    return make_row("index/llama_8b", threads_per_rank=1, fields=fields)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    made = Table(box=box.SIMPLE)
    for column in ("dp", "pieces", "index MB", "merge s", "read s", "merge us/piece", "read us/piece", "check"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            str(row["dp"]),
            f"{row['pieces']:,}",
            f"{row['index_bytes'] / 1e6:.1f}",
            f"{row['merge_median_seconds']:.2f}",
            f"{row['read_median_seconds']:.2f}",
            f"{row['merge_per_piece_us']:.1f}",
            f"{row['read_per_piece_us']:.1f}",
            row["check"],
        )
    return made
