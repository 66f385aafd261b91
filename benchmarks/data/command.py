"""`python -m benchmarks.run data`: from text to a step's batch, and what a step waits for its samples.

    start      a run's text is opened: 10**6 documents in 1,000 files, against one small file
    sample     one random sample of 2,048 tokens of these files, warm
    wait       steps of `tiny` on 4 ranks: the longest that a rank waited for its samples, as a share of the step
    tokenize   one worker, file to ids, against the library's own batches of documents in memory

Bars: 1 s and 64 MB more than one file, 50 us, 0.5 %, 0.9 of the library's rate.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.data.corpus import train_tokenizer, write_files, write_text
from benchmarks.data.members import of_text
from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, Spread, interleave, spread_fields
from tpengine.config import ParallelConfig, validate
from tpengine.config.presets import preset_config
from tpengine.distributed.local_ranks import Ranks

_MEMBERS = "benchmarks.data.members"
_RANKS = 4


@dataclass(frozen=True)
class Options:
    """From text to a step's batch."""

    files: int = 1000
    """Token files."""
    documents: int = 1_000_000
    """Documents of all files."""
    seq_len: int = 2048
    """Tokens of the sample that is read at random."""
    reads: int = 2000
    """Timed reads."""
    steps: int = 40
    """Timed steps of tiny."""
    text_megabytes: int = 8
    """Of the text that is tokenized."""
    vocabulary: int = 8192
    """Of the tokenizer."""
    rounds: int = 5
    """Timed starts, and tokenizations of each kind."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


def main(options: Options) -> int:
    """Measure all cases, and print a table.

    Returns: 0, or 1 if a check was red.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="tpengine-data-") as temporary:
        corpus, small = Path(temporary) / "many", Path(temporary) / "one"
        corpus.mkdir()
        small.mkdir()
        num_tokens = write_files(corpus, options.files, options.documents)
        write_files(small, 1, 1000)
        sizes = {"files": options.files, "documents": options.documents, "tokens": num_tokens}
        rows = [
            _row("start", sizes | _start(corpus, small, options)),
            _row("sample", sizes | _sample(corpus, options)),
            _row("wait", sizes | _wait(corpus, options)),
            _row("tokenize", _tokenize(Path(temporary), options)),
        ]
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


def _row(case: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return make_row(f"data/{case}", threads_per_rank=1, fields={**fields, "load_average_ratio": load})


def _start(corpus: Path, small: Path, options: Options) -> dict[str, Any]:
    """Open both texts in a process of its own each time."""
    config = validate(preset_config("tiny"), 1)
    found: dict[str, list[tuple[float, float]]] = {"many": [], "one": []}
    for _ in range(options.rounds):
        for name, path in (("many", corpus), ("one", small)):
            with Ranks(1, f"{_MEMBERS}:Opening", of_text(config, path)) as ranks:
                found[name] += ranks.call("open")
    fields: dict[str, Any] = {"check": PASSED, "num_samples": options.rounds}
    for name, pairs in found.items():
        fields |= spread_fields(f"{name}_open", "seconds", Spread.of([seconds for seconds, _ in pairs]))
        fields |= spread_fields(f"{name}_resident", "bytes", Spread.of([held for _, held in pairs]))
    return fields


def _sample(corpus: Path, options: Options) -> dict[str, Any]:
    with Ranks(1, f"{_MEMBERS}:Reading", str(corpus), options.seq_len, options.reads) as ranks:
        (taken,) = ranks.call("read")
    fields = {"check": PASSED, "seq_len": options.seq_len, "num_samples": len(taken)}
    return fields | spread_fields("read", "us", Spread.of([seconds * 1e6 for seconds in taken]))


def _wait(corpus: Path, options: Options) -> dict[str, Any]:
    """Of each step the slowest rank's time, and the longest wait of any rank."""
    tiny = of_text(preset_config("tiny"), corpus)
    train = replace(tiny.train, steps=options.steps + 2)
    config = validate(replace(tiny, parallel=ParallelConfig(tp=2, pp=2, dp=1), train=train), _RANKS)
    with Ranks(_RANKS, f"{_MEMBERS}:Training", config, options.steps) as ranks:
        of_ranks = ranks.call("train")
    steps = [max(of_step) for of_step in zip(*(steps for steps, _ in of_ranks), strict=True)]
    waits = [max(of_step) for of_step in zip(*(waits for _, waits in of_ranks), strict=True)]
    shares = [100.0 * wait / step for wait, step in zip(waits, steps, strict=True)]
    fields = {"check": PASSED, "ranks": _RANKS, "layout": "tp2 pp2", "num_samples": len(steps)}
    fields |= spread_fields("step", "seconds", Spread.of(steps)) | spread_fields("wait", "seconds", Spread.of(waits))
    return fields | spread_fields("wait_of_step", "percent", Spread.of(shares))


def _tokenize(directory: Path, options: Options) -> dict[str, Any]:
    text = directory / "text.jsonl"
    documents = write_text(text, options.text_megabytes * 1_000_000)
    train_tokenizer(directory, documents, options.vocabulary)
    with Ranks(1, f"{_MEMBERS}:Tokenizing", str(text), str(directory)) as ranks:
        numbers = {way: ranks.call(way)[0][0] for way in ("ours", "library")}
        check = PASSED if len(set(numbers.values())) == 1 else f"failed: other numbers of tokens: {numbers}"
        fields: dict[str, Any] = {
            "check": check,
            "text_bytes": text.stat().st_size,
            "tokens": numbers["library"],
            "num_samples": options.rounds,
        }
        if check != PASSED:
            return fields
        ways = {way: partial(_seconds, ranks, way) for way in ("ours", "library")}
        samples = interleave(ways, rounds=options.rounds)
    for way, taken in samples.items():
        rates = [numbers[way] / seconds for seconds in taken]
        fields |= spread_fields(way, "tokens_per_second", Spread.of(rates))
    return fields | spread_fields("rate_over_library", "ratio", Comparison(PASSED, samples).ratio("library", "ours"))


def _seconds(ranks: Ranks, way: str) -> float:
    seconds: float = ranks.call(way)[0][1]
    return seconds


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; a red check shows its reason and no number."""
    start, sample, wait, tokenize = rows
    shown = Table(title="medians, and 20th to 80th percentile", box=box.SIMPLE)
    for name in ("what", "median", "p20 to p80", "bar"):
        shown.add_column(name, no_wrap=True)

    def add(what: str, row: dict[str, Any], field: str, unit: str, scale: float, bar: str) -> None:
        if row["check"] != PASSED:
            shown.add_row(what, row["check"], "", bar)
            return
        median, p20, p80 = (row[f"{field}_{which}_{unit}"] * scale for which in ("median", "p20", "p80"))
        shown.add_row(what, f"{median:,.3f}", f"{p20:,.3f} to {p80:,.3f}", bar)

    add(f"a start, {start['files']:,} files: s", start, "many_open", "seconds", 1.0, "1")
    add("a start, one file: s", start, "one_open", "seconds", 1.0, "")
    add(f"resident after it, {start['files']:,} files: MB", start, "many_resident", "bytes", 1e-6, "64 more")
    add("resident after it, one file: MB", start, "one_resident", "bytes", 1e-6, "")
    add(f"a sample of {sample['seq_len']:,} tokens: us", sample, "read", "us", 1.0, "50")
    add("waiting for samples, % of a step of tiny", wait, "wait_of_step", "percent", 1.0, "0.5")
    add("tokenizing, of the library's rate", tokenize, "rate_over_library", "ratio", 1.0, "0.9")
    return shown
