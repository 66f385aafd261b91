"""`python -m benchmarks.run import`: a directory of weights becomes a model, against transformers' from_pretrained.

The files are a Llama's, drawn here: 1 GB in 8 files as float32, half of it as bfloat16. Both make float32 parameters of
them. Ours runs as one rank with all cores, and as 4 ranks at tp 2 and pp 2 that share them; from_pretrained as one
process with all cores, which is what a script would do before it distributes the model. Every contestant's weights are
compared with the files first. With warm pages of the files, then with cold ones: those are dropped before every load
(posix_fadvise), and the bytes that the disk was read for stand in the rows.

A time is until every page of the weights is the process's own; `returned` until the call returned (import_rank.py).

What limits ours on 2 cores (2026-11-23): of 0.54 CPU seconds for 1 GB of float32 files 0.52 are the system's, which
makes new pages and copies into them; of 0.88 for half as large bfloat16 files, 0.74. from_pretrained takes 0.65 for the
first, nearly all when the weights are first written to, and some 1.05 for the second, in several threads. So by CPU
time 4 ranks could be 2.5 and 1.3 times as fast on 2 idle cores; they are 1.6 and 0.84 times. Beside 4 to 8 times as
much work as cores the slowest of 4 processes decides, and 4 ranks are no faster than one.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, Spread, interleave, spread_fields
from tpengine.architectures.model_path import model_at
from tpengine.config import ModelConfig
from tpengine.distributed.launch import num_cores
from tpengine.distributed.local_ranks import Ranks
from tpengine.hugging_face.directory import CONFIG, INDEX
from tpengine.hugging_face.names import wanted

_NUM_FILES = 8
_LAYOUTS: Mapping[str, tuple[int, int]] = {"1_rank": (1, 1), "4_ranks": (2, 2)}
_RIVAL = "transformers"


@dataclass(frozen=True)
class Options:
    """A directory of weights becomes a model."""

    against: Literal["transformers"] = "transformers"
    """transformers: AutoModelForCausalLM.from_pretrained."""
    hidden: int = 1024
    """Features; a multiple of 256."""
    layers: int = 18
    """Layers."""
    vocabulary: int = 16384
    """Rows of the embedding and of the head."""
    rounds: int = 7
    """Timed loads of each contestant."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


def main(options: Options) -> int:
    """Load with all contestants, and print a table.

    Returns: 0, or 1 if a check was red.
    Raises: ValueError: an option that is not possible, before any process is started.
    """
    if options.hidden % 256 or options.layers < 2:
        raise ValueError(
            "2 tp ranks share heads of 64 features, 2 of them a KV head, and 2 stages the layers: got --hidden "
            f"{options.hidden}, --layers {options.layers}: use a multiple of 256, and 2 layers or more"
        )
    rows = []
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(prefix="tpengine-import-") as directory:
            num_bytes = write_model(Path(directory), options, getattr(torch, dtype))
            rows += measure(directory, dtype, num_bytes, options)
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


def write_model(directory: Path, options: Options, dtype: torch.dtype) -> int:
    """Write a Llama with drawn weights in several files; return the bytes of its tensors.

    Args:
        directory: to write to.
        options: sizes.
        dtype: of the files.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": 11 * options.hidden // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 128,
        "vocab_size": options.vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    (directory / CONFIG).write_text(json.dumps(config))
    shapes = {place.name: place.shape for place in wanted(model_at(ModelConfig(path=str(directory))))}
    sizes, names = [0] * _NUM_FILES, [[] for _ in range(_NUM_FILES)]  # type: tuple[list[int], list[list[str]]]
    for name, shape in sorted(shapes.items(), key=lambda item: -math.prod(item[1])):
        smallest = sizes.index(min(sizes))
        names[smallest].append(name)
        sizes[smallest] += math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, held in enumerate(names, start=1):
        file = f"model-{number:05}-of-{_NUM_FILES:05}.safetensors"
        tensors = {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in held}
        save_file(tensors, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}))
    return sum(sizes)


def measure(directory: str, dtype: str, num_bytes: int, options: Options) -> list[dict[str, Any]]:
    """Check the contestants, then time them with warm and with cold files; return the rows."""
    cores = num_cores()
    with ExitStack() as stack:

        def start(name: str, tp: int, pp: int) -> Ranks:
            threads = max(1, cores // (tp * pp))
            member = "benchmarks.training.import_rank:Member"
            return stack.enter_context(Ranks(tp * pp, member, name, directory, tp, pp, threads))

        contestants = {name: start("ours", *layout) for name, layout in _LAYOUTS.items()}
        contestants[_RIVAL] = start(_RIVAL, 1, 1)
        wrong = wrong_ones(contestants)
        check = f"failed: {wrong}" if wrong else PASSED
        rows = []
        for pages in ("warm", "cold"):
            times = {} if wrong else _times(contestants, pages, options.rounds)
            rows += [_row(name, dtype, num_bytes, pages, check, times, options) for name in _LAYOUTS]
    return rows


def wrong_ones(contestants: Mapping[str, Ranks]) -> str:
    """Return what is wrong with the contestants, or nothing; their memory is free again."""
    found = []
    for name, ranks in contestants.items():
        found += [f"{name}: rank {rank}: {what}" for rank, what in enumerate(ranks.call("wrong")) if what]
        ranks.call("release")
    return "; ".join(found)


@dataclass(frozen=True)
class _Times:
    """A contestant's samples: seconds until ready, seconds until the call returned, bytes of disk; by round."""

    ready: tuple[float, ...]
    returned: tuple[float, ...]
    disk: tuple[int, ...]


def _times(contestants: Mapping[str, Ranks], pages: str, rounds: int) -> dict[str, _Times]:
    returned: dict[str, list[float]] = {name: [] for name in contestants}
    disk: dict[str, list[int]] = {name: [] for name in contestants}

    def load(name: str, ranks: Ranks) -> float:
        if pages == "cold":
            ranks.call("drop_pages")
        of_ranks = ranks.call("load")
        # Not kept until its next turn: mapped pages would stay warm for the others.
        ranks.call("release")
        returned[name].append(max(seconds for seconds, _, _ in of_ranks))
        disk[name].append(sum(num_bytes for _, _, num_bytes in of_ranks))
        return max(seconds for _, seconds, _ in of_ranks)

    timers = {name: partial(load, name, ranks) for name, ranks in contestants.items()}
    ready = interleave(timers, rounds=rounds, warmup=1)
    return {name: _Times(ready[name], tuple(returned[name][1:]), tuple(disk[name][1:])) for name in contestants}


def _row(
    name: str, dtype: str, num_bytes: int, pages: str, check: str, times: Mapping[str, _Times], options: Options
) -> dict[str, Any]:
    """Return the row of one of ours beside from_pretrained."""
    tp, pp = _LAYOUTS[name]
    threads = max(1, num_cores() // (tp * pp))
    fields: dict[str, Any] = {
        "against": options.against,
        "ranks": tp * pp,
        "tp": tp,
        "pp": pp,
        "pages": pages,
        "file_dtype": dtype,
        "dtype": "float32",
        "file_bytes": num_bytes,
        "check": check,
        "load_average_ratio": os.getloadavg()[0] / (os.cpu_count() or 1),
    }
    if times:
        ours, rival = times[name], times[_RIVAL]
        comparison = Comparison(PASSED, {"ours": ours.ready, "rival": rival.ready, "returned": rival.returned})
        for side, of_side in (("ours", ours), ("rival", rival)):
            fields |= spread_fields(side, "seconds", Spread.of(of_side.ready))
            fields |= spread_fields(f"{side}_returned", "seconds", Spread.of(of_side.returned))
            fields[f"{side}_disk_bytes"] = sorted(of_side.disk)[len(of_side.disk) // 2]
        fields |= spread_fields("speedup", "ratio", comparison.ratio("rival", "ours"))
        fields |= spread_fields("speedup_over_returned", "ratio", comparison.ratio("returned", "ours"))
        fields["num_samples"] = len(ours.ready)
    return make_row(f"import/{dtype}/{name}/{pages}", threads_per_rank=threads, fields=fields)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; a red check shows its reason and no number."""
    title = "seconds until every weight is in memory of one's own, float32; ratios within a round"
    shown = Table(title=title, box=box.SIMPLE)
    columns = (
        "files",
        "ours",
        "pages",
        "ours s",
        "rival s",
        "speed",
        "p20 to p80",
        "rival returned s",
        "speed over it",
    )
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for row in rows:
        numbers = [row["check"]]
        if row["check"] == PASSED:
            numbers = [
                f"{row['ours_median_seconds']:.2f}",
                f"{row['rival_median_seconds']:.2f}",
                f"{row['speedup_median_ratio']:.2f}",
                f"{row['speedup_p20_ratio']:.2f} to {row['speedup_p80_ratio']:.2f}",
                f"{row['rival_returned_median_seconds']:.2f}",
                f"{row['speedup_over_returned_median_ratio']:.2f}",
            ]
        shown.add_row(
            f"{row['file_dtype']}, {row['file_bytes'] / 1e9:.2f} GB", row["case"].split("/")[2], row["pages"], *numbers
        )
    return shown
