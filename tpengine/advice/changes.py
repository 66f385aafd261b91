"""What would change an answer: the same question of another machine or batch, and whether another layout wins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpengine.advice.candidates import Candidate, shapes
from tpengine.advice.question import Question
from tpengine.advice.search import search
from tpengine.advice.search.bounds import Bounds
from tpengine.plan import verify
from tpengine.simulate.machine import Link

# Of the memory that a rank has; of an H200 about 24 GB.
_LESS_MEMORY = 1 / 6
_SMALLER_BATCH = 4
# Where nothing fits, so many times as many ranks are tried.
_MORE = (2, 4, 8, 16)


@dataclass(frozen=True)
class Change:
    """A question that was changed, and its answer.

    Attributes:
        words: what was changed.
        layout: the first row then; None if nothing fits.
    """

    words: str
    layout: Candidate | None


@dataclass(frozen=True)
class Fits:
    """What to change so that a layout fits, and that layout."""

    words: str
    layout: Candidate


def asked_changes(question: Question) -> list[str]:
    """Return the changes that `changes` tries of a question, in words: those that apply to it."""
    return [words for words, _ in _others(question)]


def changes(question: Question, best: Candidate, limit_seconds: float, known: Bounds | None = None) -> list[Change]:
    """Return the changes after which the first row has other axes or another schedule.

    Args:
        question: as it was asked.
        best: its first row.
        limit_seconds: how long to look for each.
        known: bounds of the question, for what they share.
    """
    found = []
    for words, other in _others(question):
        answer = search(other, num_rows=1, limit_seconds=limit_seconds, known=known, tells_all=False)
        rows = answer.rows
        layout = rows[0].layout if rows else None
        if answer.gap is not None and layout is None:
            # Time was up: nothing is known.
            continue
        if layout is None or (layout.family, layout.schedule) != (best.family, best.schedule):
            # What is told has a plan that is right.
            if rows:
                verify(rows[0].sheet.plan)
            found.append(Change(words, layout))
    return found


def what_fits(question: Question, limit_seconds: float) -> Iterator[Fits]:
    """Yield the changes after which a layout fits: a setting that is not fixed any more, or more ranks.

    Args:
        question: of which nothing fits.
        limit_seconds: how long to look for each.
    """
    tried = [
        (f"another {name}", replace(question, fixed={key: of for key, of in question.fixed.items() if key != name}))
        for name in question.fixed
    ]
    more = [(f"{times * question.num_ranks} ranks", _with_ranks(question, times)) for times in _MORE]
    for words, other in (*tried, *more):
        rows = search(other, num_rows=1, limit_seconds=limit_seconds, tells_all=False).rows
        if rows:
            verify(rows[0].sheet.plan)
            yield Fits(words, rows[0].layout)
        if rows and other.num_ranks > question.num_ranks:
            return


def _with_ranks(question: Question, times: int) -> Question:
    """Return the question of more ranks, on more nodes; a fixed axis of replicas grows too."""
    fixed = dict(question.fixed)
    if "dp" in fixed:
        replicas = [times * dp for dp in question.choices("dp", ())]
        fixed["dp"] = tuple(replicas) if len(replicas) > 1 else replicas[0]
    return replace(question, num_ranks=times * question.num_ranks, fixed=fixed)


def _others(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield changed questions that have layouts at all, in words."""
    yield from ((words, other) for words, other in _changed(question) if next(shapes(other), None) is not None)


def _changed(question: Question) -> Iterator[tuple[str, Question]]:
    machine = question.machine
    if 0 < machine.ranks_per_node < question.num_ranks:
        faster = replace(machine, between=_twice(machine.between))
        yield "links between nodes 2x as fast", replace(question, machine=faster)
    if machine.memory_bytes:
        less = int(machine.memory_bytes * _LESS_MEMORY)
        yield f"{less / 1e9:.0f} GB less memory", _with_less_memory(question, less)
    if question.global_batch % _SMALLER_BATCH == 0:
        batch = question.global_batch // _SMALLER_BATCH
        yield f"batch {batch}", replace(question, global_batch=batch)


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s, ring_bytes_per_s=2 * link.ring_bytes_per_s)


def _with_less_memory(question: Question, num_bytes: int) -> Question:
    """Return the question of ranks that may hold less; a limit that was asked for shrinks too."""
    machine, parallel = question.machine, question.base.parallel
    if parallel.memory_limit:
        parallel = replace(parallel, memory_limit=max(1, parallel.memory_limit - num_bytes))
    machine = replace(machine, memory_bytes=machine.memory_bytes - num_bytes)
    return replace(question, machine=machine, base=replace(question.base, parallel=parallel))
