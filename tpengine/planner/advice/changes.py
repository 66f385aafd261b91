"""What would change an answer: the same question of another machine or batch, and whether another layout wins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpengine.plan import verify
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.question import Candidate, Question, shapes
from tpengine.planner.advice.search import Row, SearchResult, search
from tpengine.planner.advice.sheets import gigabytes
from tpengine.planner.machine import Link

# Of the memory that a rank has; of an H200 about 24 GB.
_LESS_MEMORY = 1 / 6
_SMALLER_BATCH = 4
# Where nothing fits, so many times as many ranks are tried.
_MORE = (2, 4, 8, 16)


@dataclass(frozen=True)
class ChangedQuestion:
    """A question that was changed, and its answer.

    Attributes:
        words: what was changed.
        layout: the first row then; None if nothing fits.
        wins: whether that has other axes or another schedule than the first row without the change, or that row does
            not fit any more.
        is_certain: whether the search ended by its bounds; else the layout is the best that was found in time.
    """

    words: str
    layout: Candidate | None
    wins: bool
    is_certain: bool


def changes(
    question: Question, best: Row, limit_seconds: float, known: Bounds | None = None
) -> Iterator[ChangedQuestion]:
    """Yield changed questions that have layouts, with their answers; none whose time was up before a layout was found.

    Args:
        question: as it was asked.
        best: its first row.
        limit_seconds: how long to look for each.
        known: bounds of the question, for what they share.
    """
    for words, other in _changed(question):
        if next(shapes(other), None) is None:
            continue
        answer = search(other, num_rows=1, limit_seconds=limit_seconds, known=known, tells_all=False)
        if not answer.rows and answer.gap is not None:
            continue
        layout = answer.rows[0].layout if answer.rows else None
        won = best.layout.family, best.layout.schedule
        has_room = best.sheet.peak_bytes <= other.memory_limit
        wins = layout is None or not has_room or (layout.family, layout.schedule) != won
        if wins:
            _verify(answer)
        yield ChangedQuestion(words, layout, wins, answer.gap is None)


def what_fits(question: Question, limit_seconds: float) -> Iterator[ChangedQuestion]:
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
        answer = search(other, num_rows=1, limit_seconds=limit_seconds, tells_all=False)
        if answer.rows:
            _verify(answer)
            yield ChangedQuestion(words, answer.rows[0].layout, wins=True, is_certain=answer.gap is None)
            if other.num_ranks > question.num_ranks:
                return


def _verify(found: SearchResult) -> None:
    """Verify the plans of a search that looked for rows alone: what is told has a plan that is right."""
    for row in found.rows:
        verify(row.sheet.plan)


def _with_ranks(question: Question, times: int) -> Question:
    """Return the question of more ranks, on more nodes; a fixed axis of replicas grows too."""
    fixed = dict(question.fixed)
    if "dp" in fixed:
        replicas = [times * dp for dp in question.choices("dp", ())]
        fixed["dp"] = tuple(replicas) if len(replicas) > 1 else replicas[0]
    return replace(question, num_ranks=times * question.num_ranks, fixed=fixed)


def _changed(question: Question) -> Iterator[tuple[str, Question]]:
    machine = question.machine
    if 0 < machine.ranks_per_node < question.num_ranks:
        faster = replace(machine, between=_twice(machine.between))
        yield "links between nodes 2x as fast", replace(question, machine=faster)
    if machine.memory_bytes or question.base.parallel.memory_limit:
        less = int((question.base.parallel.memory_limit or machine.memory_bytes) * _LESS_MEMORY)
        yield f"{gigabytes(less)} less memory", _with_less_memory(question, less)
    if question.global_batch % _SMALLER_BATCH == 0:
        batch = question.global_batch // _SMALLER_BATCH
        yield f"batch {batch}", replace(question, global_batch=batch)


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s, ring_bytes_per_s=2 * link.ring_bytes_per_s)


def _with_less_memory(question: Question, num_bytes: int) -> Question:
    """Return the question of ranks that may hold less: than the limit that was asked for, if there is one."""
    machine, parallel = question.machine, question.base.parallel
    if parallel.memory_limit:
        parallel = replace(parallel, memory_limit=max(1, parallel.memory_limit - num_bytes))
    else:
        machine = replace(machine, memory_bytes=machine.memory_bytes - num_bytes)
    return replace(question, machine=machine, base=replace(question.base, parallel=parallel))
