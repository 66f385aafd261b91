"""`python -m benchmarks.run blind --machine m.toml --dir DIR`: are the steps right that advise predicts here?

1. Every layout's step is predicted, by the plan and the simulation that `tpengine advise` prints, for a preset and for
   a model drawn at run time. The predictions are written to DIR/predictions.json, and the file's SHA-256 is printed.
2. Then the layouts run, in rounds, in processes that stay up. Each visit is in DIR/journal.jsonl at once, under the
   predictions' hash: the same command goes on where it was interrupted.
3. The table: predicted / measured, the layout's own spread; median and worst error; regret.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.journal import append, read
from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Spread, rotation, spread_fields
from tpengine.advice.candidates import Candidate, candidates, shapes
from tpengine.advice.question import Question
from tpengine.advice.sheet import Sheet
from tpengine.config import Config, ModelConfig, validate
from tpengine.config.presets import preset_config
from tpengine.distributed.local_ranks import THREADS_PER_RANK, Ranks
from tpengine.files import write_beside
from tpengine.simulate.machine import Machine, machine_named

_PREDICTIONS, _JOURNAL = "predictions.json", "journal.jsonl"
# What must be reached: errors of the step at the median and at worst, and what the first row may lose.
MEDIAN, WORST, REGRET = 0.08, 0.15, 0.05


@dataclass(frozen=True)
class Options:
    """Predict steps of many layouts, then measure them."""

    machine: str = "cpu"
    """The machine's file, of `benchmarks.run machine`."""
    dir: Path = Path("blind")
    """Predictions and journal; the same directory goes on."""
    preset: str = "bench"
    """Model of the first half."""
    ranks: int = 2
    """Processes: 2 on a CPU; 1 takes layouts of one rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute; on cuda with --ranks 1."""
    global_batch: int = 16
    """Sequences of a step."""
    seq_len: int = 128
    """Tokens of a sequence."""
    layouts: int | None = None
    """So many layouts of each model, evenly over all; default all."""
    repeats: int = 3
    """Rounds over all layouts."""
    steps: int = 2
    """Steps of a layout in a round that count."""
    minutes: float = 60.0
    """When to stop measuring; what was measured by then is told."""
    seed: int | None = None
    """Of the drawn model; default drawn."""
    drawn: bool = True
    """Also take a drawn model."""
    out: Path | None = None
    """Append one JSON line per layout; results to keep go to benchmarks/results."""


@dataclass(frozen=True)
class Prediction:
    """A layout of a model, and what was predicted before it ran."""

    model: str
    config: Config
    words: str
    seconds: float
    peak_bytes: float

    @property
    def name(self) -> str:
        """The name of the layout within the proof."""
        return f"{self.model}: {self.words}"


def main(options: Options) -> int:
    """Predict, measure, tell; return 0.

    Raises:
        ValueError: an unknown machine, preset or layout; a directory of other predictions.
    """
    machine = machine_named(options.machine)
    options.dir.mkdir(parents=True, exist_ok=True)
    seed = _seed_of(options)
    predictions = list(predicted(options, machine, seed))
    digest = _written(options.dir / _PREDICTIONS, predictions, seed)
    print(f"{len(predictions)} layouts predicted: {options.dir / _PREDICTIONS}, SHA-256 {digest}", flush=True)
    samples = _measured(options, predictions, digest)
    rows = [_row(of, samples[of.name], options, digest) for of in predictions if len(samples.get(of.name, [])) >= 2]
    Console(width=140).print(table(rows))
    for line in verdict(rows):
        print(line)
    return stored(rows, options.out)


def predicted(options: Options, machine: Machine, seed: int) -> Iterator[Prediction]:
    """Yield every layout with its prediction."""
    base = preset_config(options.preset)
    models = {options.preset: base.model}
    if options.drawn:
        models[f"drawn {seed}"] = drawn_model(seed)
    for name, model in models.items():
        train = replace(base.train, seq_len=options.seq_len, steps=1_000_000)
        config = replace(base, model=model, train=train, device=options.device)
        question = Question(config, machine, options.ranks, options.global_batch)
        for layout in chosen(question, options.layouts):
            sheet = Sheet.of(layout.config(question), machine)
            yield Prediction(name, sheet.config, layout.words(), sheet.seconds, sheet.peak_bytes)


def drawn_model(seed: int) -> ModelConfig:
    """Return a model that nobody has chosen."""
    drawn = random.Random(seed)
    heads = drawn.choice((4, 6))
    return ModelConfig(
        hidden_size=64 * heads,
        num_layers=drawn.choice((4, 6)),
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=32 * drawn.randint(16, 40),
    )


def chosen(question: Question, most: int | None = None) -> list[Candidate]:
    """Return the layouts that are compared: each axis by itself, over numbers of micro-batches and settings.

    Raises:
        ValueError: none of these is a layout of the question.
    """
    every = [layout for shape in shapes(question) for layout in candidates(question, shape)]
    found = [layout for layout in every if _is_compared(layout) and _is_legal(layout, question)]
    if not found:
        raise ValueError(
            f"a proof needs layouts: none of {question.num_ranks} ranks and a global batch of {question.global_batch} "
            "has 2 to 16 micro-batches: use --ranks 2 --global-batch 16"
        )
    if most is None or most >= len(found):
        return found
    return [found[number * len(found) // most] for number in range(most)]


def _is_compared(layout: Candidate) -> bool:
    number, again = layout.num_micro_batches, layout.recompute
    if not 2 <= number <= 16 or layout.gathered != "keep" or layout.tp_comm != "fused" or layout.chunks_per_rank > 2:
        return False
    if layout.tp * layout.pp * layout.dp == 1:
        return again != "full"
    if again != "none":
        # Recomputation once for each axis.
        return number == 4 and layout.zero == 0 and layout.schedule in ("1f1b", "gpipe")[: 1 + (layout.pp == 1)]
    if layout.dp > 1 and layout.residency == "use":
        return number == 4
    return layout.pp == 1 or number >= 4


def _is_legal(layout: Candidate, question: Question) -> bool:
    config = layout.config(question)
    try:
        validate(config, question.num_ranks)
    except ValueError:
        return False
    return True


def _seed_of(options: Options) -> int:
    """Return the seed of the drawn model: of the directory's predictions, where it has some."""
    path = options.dir / _PREDICTIONS
    if options.seed is None and path.exists():
        return int(json.loads(path.read_text())["seed"])
    return random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed


def _written(path: Path, predictions: Sequence[Prediction], seed: int) -> str:
    """Write the predictions, and return the file's hash; a file that is there must say the same."""
    rows = [
        {"model": of.model, "layout": of.words, "seconds": of.seconds, "peak_bytes": of.peak_bytes}
        | {"sizes": asdict(of.config.model)}
        for of in predictions
    ]
    text = json.dumps({"seed": seed, "predictions": rows}, indent=1).encode()
    if path.exists() and path.read_bytes() != text:
        raise ValueError(f"--dir has other predictions: {path}: name a new directory, or use the same options")
    write_beside(path, text)
    return hashlib.sha256(text).hexdigest()


def _measured(options: Options, predictions: Sequence[Prediction], digest: str) -> dict[str, list[float]]:
    """Measure what the journal lacks, and return the seconds by layout."""
    journal, end = options.dir / _JOURNAL, time.monotonic() + 60 * options.minutes
    samples: dict[str, list[float]] = {}
    done = set()
    for row in read(journal):
        if row["predictions"] == digest:
            done.add((row["layout"], row["round"]))
            samples.setdefault(row["layout"], []).extend(row["seconds"])
    by_name = {of.name: of for of in predictions}
    left = [
        (name, round_)
        for round_ in range(options.repeats)
        for name in rotation(list(by_name), round_ * len(by_name) // options.repeats)
        if (name, round_) not in done
    ]
    if not left:
        return samples
    with Ranks(options.ranks, "benchmarks.machine.blind_rank:Member") as ranks:
        for name, round_ in left:
            if time.monotonic() > end:
                print("time is up: the same command goes on", flush=True)
                break
            answers = ranks.call("steps", by_name[name].config, options.steps)
            seconds = [max(of) for of in zip(*answers, strict=True)]
            visit = {"predictions": digest, "layout": name, "round": round_, "seconds": seconds}
            # Above the number of ranks something else computes too.
            append(journal, visit | {"load": os.getloadavg()[0]})
            samples.setdefault(name, []).extend(seconds)
    return samples


def _row(of: Prediction, seconds: Sequence[float], options: Options, digest: str) -> dict[str, Any]:
    spread = Spread.of(seconds)
    fields: dict[str, Any] = {
        "check": PASSED,
        "model": of.model,
        "layout": of.words,
        "machine_file": Path(options.machine).name,
        "device": options.device,
        "global_batch": options.global_batch,
        "seq_len": options.seq_len,
        "sizes": asdict(of.config.model),
        "predictions_sha256": digest,
        "predicted_seconds": of.seconds,
        **spread_fields("measured", "seconds", spread),
        "num_samples": spread.num_samples,
        "predicted_over_measured_ratio": of.seconds / spread.median,
        "spread_ratio": (spread.p80 - spread.p20) / spread.median,
    }
    return make_row(f"blind/{of.name}", threads_per_rank=THREADS_PER_RANK, fields=fields)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, one line per layout."""
    shown = Table(title="steps predicted before they ran", box=box.SIMPLE)
    for i, column in enumerate(("model", "layout", "predicted ms", "measured ms", "p20 to p80", "ratio", "spread")):
        shown.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row["model"],
            row["layout"],
            f"{1e3 * row['predicted_seconds']:.1f}",
            f"{1e3 * row['measured_median_seconds']:.1f}",
            f"{1e3 * row['measured_p20_seconds']:.1f} to {1e3 * row['measured_p80_seconds']:.1f}",
            f"{row['predicted_over_measured_ratio']:.3f}",
            f"{row['spread_ratio']:.1%}",
        )
    return shown


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each model: median and worst error, how many are outside their bar, regret, whether 3 rows suffice."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        errors = [abs(row["predicted_over_measured_ratio"] - 1) for row in of]
        # Twice the layout's own spread, where that is larger.
        outside = sum(error > max(WORST, 2 * row["spread_ratio"]) for error, row in zip(errors, of, strict=True))
        advised = sorted(of, key=lambda row: row["predicted_seconds"])
        fastest = min(of, key=lambda row: row["measured_median_seconds"])
        least = fastest["measured_median_seconds"]
        regret = advised[0]["measured_median_seconds"] / least - 1
        suffices = any(row["measured_p20_seconds"] <= fastest["measured_p80_seconds"] for row in advised[:3])
        met = statistics.median(errors) <= MEDIAN and not outside and regret <= REGRET and suffices
        lines.append(
            f"{model}: {len(of)} layouts, error {statistics.median(errors):.1%} median, {max(errors):.1%} worst, "
            f"{outside} outside {WORST:.0%} and twice their spread; regret of the first row {regret:.1%}; the first 3 "
            f"{'contain' if suffices else 'do not contain'} the fastest: {'met' if met else 'short'}"
        )
    return lines
