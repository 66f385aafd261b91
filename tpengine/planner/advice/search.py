"""The fastest layouts that fit: bounds leave most out, what is left is simulated as a whole plan; rows are verified.

If none fits, the layout that is nearest to it is found, and what makes it fit.

Layouts wait in a heap, by their bound of the step: first all of the same sizes as one entry, then those that compute
alike, then each by itself; what comes up is bounded more sharply, and put back, before it is simulated. One is left out
only if its bound of memory is above the limit, or its bound of time is not below the best of its axes, less `CLOSE`; so
the search ends when the next bound is above what the last row of the answer takes. The stages of ZeRO differ by what is
exchanged and held: one with more exchanges is never faster, and is looked at only if those with fewer do not fit.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.layout.step_plan import lowered
from tpengine.plan import SCHEDULES, Gathered, Recompute, Residency, verify
from tpengine.planner.advice.bounds import Bounds, Key
from tpengine.planner.advice.question import Candidate, Question, alike, counted, groups, shapes
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.modelled.memory import RankMemory

# A layout is not looked for that is faster than the best one of its axes by less than this share.
CLOSE = 0.002
# A layout that does not fit is looked at if by its bound it may take less than this share of the first row's step.
_WORTH = 0.99
# So many layouts are simulated; more only where bounds of the step tell little.
_MOST_TRIED = 6
Family = tuple[int, int, int]
# Bytes of buckets that are tried where those of the question let ranks wait.
_BUCKETS = (100_000_000, 400_000_000, 1_600_000_000)
# Ranks wait where gathers and reductions that nothing hides are this share of a step.
_WAITS = 0.01
# Without any layout that fits, a search goes on for so many times its limit.
_PATIENCE = 3


@dataclass(frozen=True)
class Row:
    """A layout of the answer."""

    layout: Candidate
    sheet: Sheet


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit.

    Attributes:
        layout: it.
        num_bytes: what the rank that holds most holds.
        seconds: what a step would take.
        memory: that rank, and what it holds by kind.
        remedy: what to change in it, so that it fits, and how much longer a step takes then; None if nothing helps.
    """

    layout: Candidate
    num_bytes: float
    seconds: float
    memory: tuple[int, RankMemory]
    remedy: tuple[str, float] | None = None


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        rows: the fastest layouts, one of each family (tp, pp, dp), fastest first.
        num_layouts, num_fitting: how many there are, and how many fit by the bound of their memory.
        num_simulated: how many were simulated.
        too_large: of the layouts that do not fit the one that is nearest to it; only faster ones than the first row.
        refused: messages of layouts that no run accepts, by how often each was met.
        gap: None if nothing else can be faster than the last row; else a bound of what was not looked at, because time
            was up.
        seconds: what the search took.
        bounds: those that it used, for another question of the model.
    """

    rows: tuple[Row, ...]
    num_layouts: int
    num_fitting: int
    num_simulated: int
    too_large: TooLarge | None
    refused: tuple[str, ...]
    gap: float | None
    seconds: float
    bounds: Bounds


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
        return Sheet.of(layout.config(question), question.machine, builds=lowered, load=question.load)
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


def search(
    question: Question,
    num_rows: int = 5,
    limit_seconds: float = 10.0,
    clock: Callable[[], float] = time.process_time,
    known: Bounds | None = None,
    *,
    tells_all: bool = True,
    watch: Callable[[int, float], None] = lambda *_: None,
) -> SearchResult:
    """Return the fastest layouts.

    Args:
        question: model, machine, batch, what is fixed.
        num_rows: how many rows to find.
        limit_seconds: when to stop looking; rows found by then are worked out all the same.
        clock: seconds, from any beginning; by default those that this process has computed.
        known: bounds of another question of this model.
        tells_all: verify the rows' plans, count layouts, and explain the nearest that does not fit; else only rows are
            looked for.
        watch: called now and then with how many layouts were simulated, and the fastest step so far, infinite without.
    """
    return _Search(question, num_rows, limit_seconds, clock, known).run(watch, tells_all=tells_all)


class _Search:
    def __init__(
        self,
        question: Question,
        num_rows: int,
        limit_seconds: float,
        clock: Callable[[], float],
        known: Bounds | None,
    ) -> None:
        self.question, self.num_rows, self.limit_seconds = question, num_rows, limit_seconds
        self.clock, self.started = clock, clock()
        self.bounds = Bounds(question, known)
        self.order = itertools.count()
        self.heap: list[tuple[float, int, Family, Callable[[], None]]] = []
        self.best: dict[Family, Row] = {}
        # Layouts that fit: gathering again instead, which takes longer, is not looked at.
        self.fitting: set[Candidate] = set()
        # Layouts that do not fit: what they hold at least, what a step takes at least.
        self.too_large: list[tuple[float, float, Candidate]] = []
        self.refused: dict[str, int] = {}
        self.num_simulated = 0

    def run(self, watch: Callable[[int, float], None], *, tells_all: bool) -> SearchResult:
        for shape in shapes(self.question):
            self._push(self.bounds.least_seconds(*shape), shape[:3], lambda shape=shape: self._expand(shape))  # type: ignore[misc]
        gap, told = None, 0
        while self.heap:
            bound, _, family, look = heapq.heappop(self.heap)
            if bound > self._last_row():
                break
            if family in self.best and bound >= self._enough(family):
                continue
            if self.clock() - self.started > self.limit_seconds * (1 if self.best else _PATIENCE):
                gap = bound
                break
            look()
            if self.num_simulated != told:
                told = self.num_simulated
                watch(told, min((row.sheet.seconds for row in self.best.values()), default=float("inf")))
        rows = self._rows(verifies=tells_all)
        num_layouts = num_fitting = 0
        for shape in shapes(self.question) if tells_all else ():
            num, fitting = counted(self.question, shape, self.bounds.state_bytes, self.bounds.activation_bytes)
            num_layouts, num_fitting = num_layouts + num, num_fitting + fitting
        return SearchResult(
            rows,
            num_layouts,
            num_fitting,
            self.num_simulated,
            self._nearest(rows) if tells_all else None,
            tuple(sorted(self.refused, key=self.refused.__getitem__, reverse=True)),
            gap,
            self.clock() - self.started,
            self.bounds,
        )

    def _push(self, bound: float, family: Family, look: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (bound, next(self.order), family, look))

    def _enough(self, family: Family) -> float:
        """Return what a layout of these axes must take less than to be looked at."""
        return (1 - CLOSE) * self.best[family].sheet.seconds

    def _last_row(self) -> float:
        """Return what the last row of the answer takes so far."""
        found = sorted(row.sheet.seconds for row in self.best.values())
        return found[self.num_rows - 1] if len(found) >= self.num_rows else float("inf")

    def _expand(self, shape: tuple[int, int, int, int]) -> None:
        """Put what shares these sizes into the heap, those that compute alike as one entry."""
        tp, pp, dp, size = shape
        for again in alike(self.question, tp, dp):
            key: Key = (tp, size, *again)
            bound = self.bounds.group_seconds(pp, dp, key)
            self._push(bound, shape[:3], lambda key=key, bound=bound: self._expand_group(shape, key, bound))  # type: ignore[misc]

    def _expand_group(self, shape: tuple[int, int, int, int], key: Key, at_least: float) -> None:
        """Put each schedule into the heap, with its stages of ZeRO as one entry: by the first that may fit."""
        for stages in groups(self.question, shape, key):
            self._push_next(iter(stages), at_least)

    def _push_next(self, stages: Iterator[Candidate], at_least: float) -> None:
        """Put the next of layouts, of which none is faster than those before it, into the heap."""
        for layout in stages:
            num_bytes = self.bounds.num_bytes(layout)
            if num_bytes > self.question.memory_limit:
                self.too_large.append((num_bytes, at_least, layout))
                continue
            bound = self.bounds.seconds(layout)
            self._push(bound, layout.family, lambda: self._look_closer(bound, layout, stages))  # noqa: B023  # returns at once
            return

    def _look_closer(self, bound: float, layout: Candidate, stages: Iterator[Candidate]) -> None:
        """Bound memory and step by the schedule's lists; if the layout may fit, put it back into the heap."""
        if replace(layout, gathered=Gathered.KEEP.value) in self.fitting:
            return
        if layout.schedule in SCHEDULES:
            held = self.bounds.held_bytes(layout)
            if held > self.question.memory_limit:
                self.too_large.append((held, bound, layout))
                self._push_next(stages, bound)
                return
            bound = max(bound, self.bounds.played_seconds(layout))
        self._push(bound, layout.family, lambda: self._simulate(bound, layout, stages))

    def _simulate(self, bound: float, layout: Candidate, stages: Iterator[Candidate]) -> None:
        """Simulate a layout's plan; it is verified when it becomes a row."""
        if replace(layout, gathered=Gathered.KEEP.value) in self.fitting:
            return
        try:
            sheet = self._whole(layout)
        except ValueError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + 1
            self._push_next(stages, bound)
            return
        self.num_simulated += 1
        if sheet.peak_bytes > self.question.memory_limit:
            self.too_large.append((sheet.peak_bytes, sheet.seconds, layout))
            self._push_next(stages, bound)
            return
        self.fitting.add(layout)
        layout, sheet = self._with_buckets(layout, sheet)
        if layout.family not in self.best or sheet.seconds < self.best[layout.family].sheet.seconds:
            self.best[layout.family] = Row(layout, sheet)

    def _with_buckets(self, layout: Candidate, sheet: Sheet) -> tuple[Candidate, Sheet]:
        """Return the layout with larger buckets, if ranks wait for gathers or reductions, and less so with those.

        Bounds do not depend on the size of buckets, so what they left out is not faster with any.
        """
        if "bucket_bytes" in self.question.fixed or layout.dp == 1:
            return layout, sheet
        for size in _BUCKETS:
            if sheet.parts.dp < _WAITS * sheet.seconds:
                break
            other = replace(layout, bucket_bytes=size)
            found, self.num_simulated = self._whole(other), self.num_simulated + 1
            if found.seconds < (1 - CLOSE) * sheet.seconds and found.peak_bytes <= self.question.memory_limit:
                layout, sheet = other, found
        return layout, sheet

    def _whole(self, layout: Candidate) -> Sheet:
        question = self.question
        return Sheet.of(layout.config(question), question.machine, builds=lowered, load=question.load)

    def _rows(self, *, verifies: bool) -> tuple[Row, ...]:
        """Return the best layouts, their plans verified."""
        rows = sorted(self.best.values(), key=lambda row: row.sheet.seconds)[: self.num_rows]
        for row in rows if verifies else ():
            verify(row.sheet.plan)
        return tuple(rows)

    def _nearest(self, rows: tuple[Row, ...]) -> TooLarge | None:
        return nearest(self.question, self.bounds, self.too_large, rows[0].sheet.seconds if rows else float("inf"))
