"""`python -m benchmarks.run generate`: a model continues a prompt, with a cache of keys and values and without one.

The model is a Llama with drawn weights, greedy. Without a cache each token takes a pass over the whole sequence, padded
to a multiple of tp; only the last token's logits are looked at. Both run on the same ranks, one after the other, and
must give the same tokens before anything is timed.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Comparison, Spread, interleave, spread_fields
from benchmarks.training import import_weights
from tpengine.commands.generate import GenerateOptions, find_model
from tpengine.config.settings import round_up
from tpengine.distributed.local_ranks import Ranks
from tpengine.generation.decoder import MOST_ROWS, Decoder, rows_to_prepare
from tpengine.generation.rank import build
from tpengine.generation.text import Drawing
from tpengine.hugging_face.beginning import fill_model
from tpengine.layout.step_plan import layout_of
from tpengine.model.meta_modules import Uninitialized
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer

_GREEDY = Drawing(temperature=0)


@dataclass(frozen=True)
class Options:
    """A model continues a prompt."""

    hidden: int = 512
    """Features; a multiple of 256."""
    layers: int = 4
    """Layers."""
    vocabulary: int = 4096
    """Rows of the embedding and of the head."""
    prompt: int = 16
    """Tokens of the prompt."""
    tokens: int = 200
    """Tokens that it is continued by."""
    tp: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    rounds: int = 3
    """Timed continuations of each kind."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


class Member:
    """A rank that continues the prompt in either way.

    Args:
        directory: of the model.
        options: lengths.
        tp: number of ranks.
    """

    def __init__(self, directory: str, options: Options, tp: int) -> None:
        config = find_model(GenerateOptions(directory, tp=tp, device="cpu")).config
        rows = round_up(options.prompt + options.tokens, tp)
        config = replace(config, train=replace(config.train, seq_len=rows))
        self._options, self._tp, self._ranks = options, tp, build(config, layout_of(config), torch.device("cpu"))
        # Without a cache: training's layers, whose rows are cut over tp.
        comms = self._ranks.comms
        parts = FastParts(config.model, comms.tp, replicas=comms.replica, dtype=torch.float32)
        with Uninitialized():
            self._training = Transformer(parts).requires_grad_(False)
        for model, num_rows in ((self._ranks.model, rows_to_prepare(1)), (self._training, MOST_ROWS)):
            fill_model(model, config)
            model.prepare(num_rows)

    @torch.no_grad()
    def cached(self) -> tuple[list[int], float, float]:
        """Return the tokens, the seconds of all, and those until the first."""
        begin = time.perf_counter()
        prompt = list(range(self._options.prompt))
        decoder = Decoder(self._ranks, [prompt], self._options.tokens, _GREEDY)
        found = [decoder.step()[0]]
        first = time.perf_counter() - begin
        found += [decoder.step()[0] for _ in range(self._options.tokens - 1)]
        return found, time.perf_counter() - begin, first

    @torch.no_grad()
    def uncached(self) -> tuple[list[int], float]:
        """Return the tokens, and the seconds of all."""
        begin = time.perf_counter()
        ranks, sequence = self._ranks, list(range(self._options.prompt))
        for _ in range(self._options.tokens):
            length = round_up(len(sequence), self._tp)
            padded = torch.tensor([*sequence, *[0] * (length - len(sequence))])
            logits = ranks.comms.tp.all_gather(self._training(padded, length)[len(sequence) - 1])
            sequence.append(int(logits[: ranks.config.model.vocab_size].argmax()))
        return sequence[self._options.prompt :], time.perf_counter() - begin


def main(options: Options) -> int:
    """Check and time, and print a table.

    Returns: 0, or 1 if a check was red.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="tpengine-generate-") as directory:
        sizes = import_weights.Options(hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary)
        import_weights.write_model(Path(directory), sizes, torch.float32)
        for tp in options.tp:
            rows.append(measure(directory, tp, options))
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


def measure(directory: str, tp: int, options: Options) -> dict[str, Any]:
    """Check both ways on so many ranks, then time them; return the row."""
    with ExitStack() as stack:
        member = "benchmarks.training.generate:Member"
        ranks = stack.enter_context(Ranks(tp, member, directory, options, tp))
        firsts: list[float] = []

        def seconds_of(way: str) -> float:
            of_ranks = ranks.call(way)
            if way == "cached":
                firsts.append(max(first for _, _, first in of_ranks))
            return max(answer[1] for answer in of_ranks)

        found = {tuple(answer[0]) for way in ("cached", "uncached") for answer in ranks.call(way)}
        check = PASSED if len(found) == 1 else f"failed: {len(found)} different continuations"
        fields: dict[str, Any] = {
            "ranks": tp,
            "hidden": options.hidden,
            "layers": options.layers,
            "prompt_tokens": options.prompt,
            "tokens": options.tokens,
            "dtype": "float32",
            "check": check,
            "load_average_ratio": os.getloadavg()[0] / (os.cpu_count() or 1),
        }
        if check == PASSED:
            ways = {way: partial(seconds_of, way) for way in ("cached", "uncached")}
            samples = interleave(ways, rounds=options.rounds, warmup=0)
            rates = [
                (options.tokens - 1) / (whole - first) for whole, first in zip(samples["cached"], firsts, strict=True)
            ]
            for way, of_way in samples.items():
                fields |= spread_fields(way, "seconds", Spread.of(of_way))
            fields |= spread_fields("decode", "tokens_per_second", Spread.of(rates))
            fields |= spread_fields("speedup", "ratio", Comparison(PASSED, samples).ratio("uncached", "cached"))
            fields["num_samples"] = options.rounds
    return make_row(f"generate/tp{tp}/{options.tokens}", threads_per_rank=1, fields=fields)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; a red check shows its reason and no number."""
    shown = Table(title="seconds of a continuation, greedy, float32; ratios within a round", box=box.SIMPLE)
    for name in ("tp", "tokens", "with cache s", "without s", "speed", "p20 to p80", "decode tokens/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = [row["check"]]
        if row["check"] == PASSED:
            numbers = [
                f"{row['cached_median_seconds']:.2f}",
                f"{row['uncached_median_seconds']:.2f}",
                f"{row['speedup_median_ratio']:.1f}",
                f"{row['speedup_p20_ratio']:.1f} to {row['speedup_p80_ratio']:.1f}",
                f"{row['decode_median_tokens_per_second']:,.0f}",
            ]
        shown.add_row(str(row["ranks"]), str(row["tokens"]), *numbers)
    return shown
