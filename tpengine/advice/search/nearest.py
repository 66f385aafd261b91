"""Of the layouts that do not fit the one that is nearest to it, and what makes it fit."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tpengine.advice.candidates import Candidate
from tpengine.advice.question import Question
from tpengine.advice.search.bounds import Bounds
from tpengine.advice.search.found import TooLarge
from tpengine.advice.sheets.sheet import Sheet
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.layout.step_plan import lowered
from tpengine.plan import SCHEDULES, Gathered, Recompute, Residency

# A layout that does not fit is looked at if by its bound it may take less than this share of the first row's step.
_WORTH = 0.99
# So many layouts are simulated; more only where bounds of the step tell little.
_MOST_TRIED = 6


def nearest(
    question: Question, bounds: Bounds, too_large: Iterable[tuple[float, float, Candidate]], best: float
) -> TooLarge | None:
    """Return the layout that holds least of those that do not fit and would be faster than the first row.

    Args:
        question, bounds: of the search.
        too_large: bytes that a layout holds at least, what a step takes at least, and it.
        best: what the first row takes; infinite if there is none.

    Cost: bounds of those that hold least; a simulated step for the one that is returned, and for each that holds less
        and turns out to take too long.
    """
    order, least = itertools.count(), _WORTH * best
    found: dict[Candidate, Sheet] = {}
    num_tried = 0
    # By bytes, which are looked at more closely whenever a layout comes up.
    heap = [(held, next(order), False, layout) for held, seconds, layout in too_large if seconds < least]
    heapq.heapify(heap)
    while heap and num_tried < _MOST_TRIED:
        held, _, is_close, layout = heapq.heappop(heap)
        if layout in found:
            return _explained(question, bounds, layout, found[layout])
        if not is_close:
            if layout.schedule in SCHEDULES:
                held = max(held, bounds.held_bytes(layout))
            heapq.heappush(heap, (held, next(order), True, layout))
            continue
        if layout.schedule in SCHEDULES and bounds.played_seconds(layout) >= least:
            continue
        sheet, num_tried = _sheet(layout, question), num_tried + 1
        if sheet is not None and sheet.seconds < best and sheet.peak_bytes > question.memory_limit:
            found[layout] = sheet
            heapq.heappush(heap, (sheet.peak_bytes, next(order), True, layout))
    if not found:
        return None
    layout = min(found, key=lambda layout: found[layout].peak_bytes)
    return _explained(question, bounds, layout, found[layout])


def _sheet(layout: Candidate, question: Question) -> Sheet | None:
    try:
        return Sheet.of(layout.config(question), question.machine, builds=lowered)
    except ValueError:
        return None


def _explained(question: Question, bounds: Bounds, layout: Candidate, sheet: Sheet) -> TooLarge:
    memory = max(enumerate(sheet.memory), key=lambda of: of[1].peak)
    return TooLarge(layout, sheet.peak_bytes, sheet.seconds, memory, _remedy(question, bounds, layout, sheet))


def _remedy(question: Question, bounds: Bounds, layout: Candidate, sheet: Sheet) -> tuple[str, float] | None:
    """Return the one change after which the layout fits that costs least time, by bounds, and what it costs."""
    tried = []
    for words, other in smaller(question, layout):
        if layout.schedule not in SCHEDULES:
            tried.append((bounds.seconds(other), words, other))
        elif bounds.held_bytes(other) <= question.memory_limit:
            tried.append((bounds.played_seconds(other), words, other))
    for _, words, other in sorted(tried):
        changed = _sheet(other, question)
        if changed is not None and changed.peak_bytes <= question.memory_limit:
            return words, changed.seconds - sheet.seconds
    return None


def smaller(question: Question, layout: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield layouts that hold less and differ in one setting, which the question leaves open, in words."""
    if question.allows("gathered", Gathered.AGAIN.value) and layout.tp > 1 and layout.gathered == Gathered.KEEP.value:
        yield "gathered again", replace(layout, gathered=Gathered.AGAIN.value)
    every = list(Recompute)
    for recompute in every[every.index(Recompute(layout.recompute)) + 1 :]:
        if question.allows("recompute", recompute.value):
            yield f"recompute {recompute.value}", replace(layout, recompute=recompute.value)
    step, use = Residency.STEP.value, Residency.USE.value
    for zero in range(layout.zero + 1, ZERO_OF_SLICED_WEIGHTS + 1) if layout.dp > 1 else ():
        # Below stage 3 a residency says nothing.
        says = zero < ZERO_OF_SLICED_WEIGHTS or question.allows("residency", step)
        if question.allows("zero", zero) and says:
            yield f"zero {zero}", replace(layout, zero=zero, residency=step)
    holds_more = layout.zero < ZERO_OF_SLICED_WEIGHTS or layout.residency == step
    allowed = question.allows("zero", ZERO_OF_SLICED_WEIGHTS) and question.allows("residency", use)
    if layout.dp > 1 and holds_more and allowed:
        yield f"zero {ZERO_OF_SLICED_WEIGHTS} use", replace(layout, zero=ZERO_OF_SLICED_WEIGHTS, residency=use)
