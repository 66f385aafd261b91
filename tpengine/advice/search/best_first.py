"""The fastest layouts that fit: bounds leave most out, what is left is simulated as a whole plan; rows are verified.

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
from collections.abc import Callable, Iterator
from dataclasses import replace

from tpengine.advice.candidates import Candidate, alike, counted, groups, shapes
from tpengine.advice.question import Question
from tpengine.advice.search.bounds import Bounds, Key
from tpengine.advice.search.found import CLOSE, Found, Row, TooLarge
from tpengine.advice.search.nearest import nearest
from tpengine.advice.sheets.sheet import Sheet
from tpengine.layout.step_plan import lowered
from tpengine.plan import SCHEDULES, Gathered, verify

Family = tuple[int, int, int]
# Bytes of buckets that are tried where those of the question let ranks wait.
_BUCKETS = (100_000_000, 400_000_000, 1_600_000_000)
# Ranks wait where gathers and reductions that nothing hides are this share of a step.
_WAITS = 0.01
# Without any layout that fits, a search goes on for so many times its limit.
_PATIENCE = 3


def search(
    question: Question,
    num_rows: int = 5,
    limit_seconds: float = 10.0,
    clock: Callable[[], float] = time.process_time,
    known: Bounds | None = None,
    *,
    tells_all: bool = True,
    watch: Callable[[int, float], None] = lambda *_: None,
) -> Found:
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

    def run(self, watch: Callable[[int, float], None], *, tells_all: bool) -> Found:
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
        return Found(
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
        for recompute, gathered, comm in alike(self.question, tp):
            key: Key = (tp, size, recompute, gathered, comm)
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
        return Sheet.of(layout.config(self.question), self.question.machine, builds=lowered)

    def _rows(self, *, verifies: bool) -> tuple[Row, ...]:
        """Return the best layouts, their plans verified."""
        rows = sorted(self.best.values(), key=lambda row: row.sheet.seconds)[: self.num_rows]
        for row in rows if verifies else ():
            verify(row.sheet.plan)
        return tuple(rows)

    def _nearest(self, rows: tuple[Row, ...]) -> TooLarge | None:
        return nearest(self.question, self.bounds, self.too_large, rows[0].sheet.seconds if rows else float("inf"))
