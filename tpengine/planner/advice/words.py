"""An answer in words: the rows of `tpengine advise`, and the sheet of one layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tpengine.config import Config, ParallelConfig, num_blocks, num_shards_of
from tpengine.config.rules import zero_in_words
from tpengine.planner.advice.changes import ChangedQuestion
from tpengine.planner.advice.question import Question
from tpengine.planner.advice.search import Row, SearchResult, TooLarge
from tpengine.planner.advice.sheets import Sheet, StepParts, days_text, exchange_lines, gigabytes, seconds_text
from tpengine.planner.modelled.memory import ALLOCATOR_SHARE

# Parts in the order in which they are told, by their names in StepParts.
_NAMES: Mapping[str, str] = {
    "compute": "compute",
    "again": "recomputation",
    "tp": "tp exposed",
    "pp": "pp exposed",
    "bubble": "bubble",
    "dp": "dp exposed",
    "optimizer": "optimizer",
    "host": "host",
    "exact": "exact mode",
}
# A part below this share of what it is a part of is not told.
_TOLD = 0.005
# Below this share of a step a part is rounding.
_NOTHING = 1e-6


def answer_lines(
    question: Question, name: str, found: SearchResult, changed: Sequence[ChangedQuestion], run: str
) -> Iterator[str]:
    """Yield the answer of `tpengine advise`.

    Args:
        question: as it was asked.
        name: of the model.
        found: what the search has found; at least one row.
        changed: the answers to changed questions.
        run: the command before the layout's options.
    """
    machine = question.machine
    yield (
        f"{name}, {question.num_ranks} x {machine.name}, {_counted(question.global_batch, 'sequence')} of "
        f"{question.base.train.seq_len:,}: {_counted(found.num_layouts, 'layout')}, {found.num_fitting:,} may fit, "
        f"{found.num_simulated} simulated, {found.seconds:.1f} s"
    )
    width = max(len(row.layout.words()) for row in found.rows)
    yield f"  #  {'layout':{width}}  {'step':>8}  {'MFU':>5}  {'memory':>7}  why"
    best = found.rows[0].sheet
    for number, row in enumerate(found.rows, start=1):
        sheet = row.sheet
        is_first = number == 1
        step = seconds_text(sheet.seconds) if is_first else f"+{seconds_text(sheet.seconds - best.seconds)}"
        why = shares(sheet.parts) if is_first else f"lost by: {differences(sheet.parts, best.parts)}"
        yield (
            f"{number:>3}  {row.layout.words():{width}}  {step:>8}  {_percent(sheet.share_of_peak()):>5}  "
            f"{gigabytes(sheet.peak_bytes):>7}  {why}"
        )
    if found.gap is not None:
        yield f"time was up: layouts that were not looked at take at least {seconds_text(found.gap)}"
    if found.too_large is not None:
        yield f"nearest that does not fit: {too_large_text(question, found.too_large)}"
    told = "; ".join(change_text(change) for change in changed if change.wins)
    others = ", ".join(change.words for change in changed if change.is_certain)
    if told or others:
        yield f"would change it: {told or 'none of: ' + others}"
    yield f"row 1: {_rate(best, question)}"
    yield from exchange_lines(best.config, best.plan, best.load)
    yield from _zero_of_one_replica(question, found.rows)
    yield f"run it: {run} {found.rows[0].layout.flags(question)}"
    yield from _basis(question, found.rows[0].sheet.config)


def _zero_of_one_replica(question: Question, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line if stages of ZeRO were asked for, and a row has one replica, which shards nothing."""
    asked = question.choices("zero", [question.kept.zero])
    if 0 not in asked and any(row.layout.dp == 1 for row in rows):
        yield zero_in_words(ParallelConfig(dp=1, zero=asked[0]))


def sheet_lines(sheet: Sheet, question: Question) -> Iterator[str]:
    """Yield the whole sheet of one layout: time by cause, shares of the peak, memory of each stage."""
    parts = sheet.parts
    yield f"step {seconds_text(sheet.seconds)}: {shares(parts)}"
    for field, words in _NAMES.items():
        seconds = getattr(parts, field)
        if abs(seconds) > _NOTHING * sheet.seconds:
            yield f"  {words:<14} {seconds_text(seconds):>10}  {_percent(seconds / sheet.seconds, 1):>7}"
    yield _rate(sheet, question)
    yield (
        f"MFU {_percent(sheet.share_of_peak(), 1)} (model flops, causal attention counted half), "
        f"{_percent(sheet.share_of_peak(causal_half=False), 1)} (attention counted whole); hardware flops "
        f"{_percent(sheet.share_of_peak(counts_again=True), 1)} of the peak"
    )
    for rank, memory in enumerate(sheet.memory):
        kinds = ", ".join(f"{kind} {gigabytes(num)}" for kind, num in memory.kinds().items())
        yield f"rank {rank}: {gigabytes(memory.peak)} at {memory.compute_action}: {kinds}"
    limit = question.memory_limit
    if limit < float("inf"):
        room = limit - sheet.peak_bytes
        yield f"{'fits' if room >= 0 else 'does not fit'}: {gigabytes(abs(room))} {'left' if room >= 0 else 'too many'}"
    yield from exchange_lines(sheet.config, sheet.plan, sheet.load)
    if said := zero_in_words(sheet.config.parallel):
        yield said
    yield from _basis(question, sheet.config)


def _rate(sheet: Sheet, question: Question) -> str:
    """Return how many tokens are trained per second, of all ranks and of each, and how long a run's tokens take."""
    rate = _tokens_per_s(sheet)
    num_ranks = sheet.layout.tp * sheet.layout.pp * sheet.layout.dp
    of_each = "GPU" if sheet.machine.is_asynchronous else "rank"
    takes = f"; {question.num_tokens:,} tokens take {days_text(question.num_tokens / rate)}"
    return f"{rate:,.0f} tokens/s, {rate / num_ranks:,.0f} per {of_each}{takes if question.num_tokens else ''}"


def _tokens_per_s(sheet: Sheet) -> float:
    train = sheet.config.train
    tokens = train.micro_batch_size * train.num_micro_batches * sheet.layout.dp * train.seq_len
    return tokens / sheet.seconds


def shares(parts: StepParts) -> str:
    """Return the parts of a step in percent, those of at least half a percent."""
    told = [(words, getattr(parts, field) / parts.step) for field, words in _NAMES.items()]
    return ", ".join(f"{words} {_percent(share)}" for words, share in told if abs(share) >= _TOLD)


def differences(parts: StepParts, best: StepParts) -> str:
    """Return by how much each part is longer than the best one's; those of less than a fiftieth together."""
    less = parts.less(best)
    whole = max(sum(abs(seconds) for seconds in less.values()), 1e-12)
    order = sorted(less.items(), key=lambda part: -abs(part[1]))
    told = {name: value for name, value in order if abs(value) >= whole / 50}
    words = [f"{_NAMES[name]} {_signed(value)}" for name, value in told.items()]
    others = sum(less.values()) - sum(told.values())
    return ", ".join(words + [f"others {_signed(others)}"] * (abs(others) >= whole / 100))


def too_large_text(question: Question, layout: TooLarge) -> str:
    """Return a layout that does not fit in words."""
    over = layout.num_bytes - question.memory_limit
    kinds = ""
    if layout.memory is not None:
        rank, memory = layout.memory
        kind, num_bytes = max(memory.kinds().items(), key=lambda item: item[1])
        kinds = f" on rank {rank} at {memory.compute_action}: {kind} {gigabytes(num_bytes)}"
    remedy = "" if layout.remedy is None else f"; {layout.remedy[0]} fits, step {_signed(layout.remedy[1])}"
    return f"{layout.layout.words()} ({gigabytes(over)} too many{kinds}{remedy})"


def answer_json(
    question: Question, name: str, found: SearchResult, changed: Sequence[ChangedQuestion], run: str
) -> dict[str, Any]:
    """Return the answer as JSON's types; seconds and bytes."""
    return {
        "model": name,
        "machine": question.machine.name,
        "ranks": question.num_ranks,
        "global_batch": question.global_batch,
        "seq_len": question.base.train.seq_len,
        "tokens": question.num_tokens or None,
        "moe_load": question.load,
        "layouts": found.num_layouts,
        "may_fit": found.num_fitting,
        "simulated": found.num_simulated,
        "search_seconds": found.seconds,
        "unseen_take_at_least": found.gap,
        "memory_limit_bytes": None if question.memory_limit == float("inf") else question.memory_limit,
        "rows": [row_json(row, question, run) for row in found.rows],
        "too_large": None
        if found.too_large is None
        else {
            "layout": asdict(found.too_large.layout),
            "peak_bytes": found.too_large.num_bytes,
            "step_seconds": found.too_large.seconds,
        },
        "changes": [
            {
                "change": change.words,
                "layout": None if change.layout is None else asdict(change.layout),
                "is_certain": change.is_certain,
            }
            for change in changed
            if change.wins
        ],
    }


def row_json(row: Row, question: Question, run: str) -> dict[str, Any]:
    """Return one row as JSON's types."""
    return {
        "layout": asdict(row.layout),
        "run": f"{run} {row.layout.flags(question)}",
        **sheet_json(row.sheet),
    }


def sheet_json(sheet: Sheet) -> dict[str, Any]:
    """Return one layout's figures as JSON's types."""
    return {
        "step_seconds": sheet.seconds,
        "tokens_per_s": _tokens_per_s(sheet),
        "parts": asdict(sheet.parts),
        "mfu_attention_causal": sheet.share_of_peak(),
        "mfu_attention_full": sheet.share_of_peak(causal_half=False),
        "hfu_attention_causal": sheet.share_of_peak(counts_again=True),
        "peak_bytes": sheet.peak_bytes,
        "memory": [
            {"rank": rank, "peak_bytes": memory.peak, "action": memory.action, "kinds": memory.kinds()}
            for rank, memory in enumerate(sheet.memory)
        ],
    }


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def change_text(change: ChangedQuestion) -> str:
    """Return a changed question and its answer in words."""
    then = "nothing fits" if change.layout is None else change.layout.words()
    return f"{change.words} (then {then}{'' if change.is_certain else ', the best found in time'})"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{seconds_text(abs(seconds))}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _basis(question: Question, config: Config) -> Iterator[str]:
    """Yield what the figures rest on."""
    machine = question.machine
    exact = ""
    if config.train.reduction == "exact":
        exact = (
            f" Exact mode: V {num_shards_of(config)} shards, W {num_blocks(config)} blocks of micro-batches; what the "
            "shards take longer is a part."
        )
    slack = ""
    if machine.memory_bytes and not question.base.parallel.memory_limit:
        slack = f" {_percent(ALLOCATOR_SHARE)} of a rank's memory is left to the allocator and libraries."
    measured = "" if machine.recorded else "; no run of it was measured"
    yield (
        f"simulated in {config.train.dtype} at the rates of {machine.name} ({machine.source}){measured}.{exact}{slack}"
    )
