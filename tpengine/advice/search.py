"""The fastest layouts that fit: bounds leave most out, the simulator at few micro-batches orders what is left, and the
rows of the answer are whole plans, verified and simulated.

Layouts wait in a heap, by their bound of the step: first all of the same sizes as one entry, then each by itself. The
search ends when the next bound is above what the last row of the answer takes. Of settings that only trade time for
memory (recompute, gathering again), the fastest that fits is taken; slower ones are looked at only if it does not.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tpengine.advice.bounds import Bounds
from tpengine.advice.candidates import Candidate, candidates, counted, shapes
from tpengine.advice.question import Question
from tpengine.advice.sheet import Sheet, estimate, short_sheet
from tpengine.plan import Recompute
from tpengine.simulate.modelled.memory import RankMemory

Family = tuple[int, int, int]
# A layout that does not fit is told if it takes less than this share of the first row's step.
_WORTH = 0.99
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
        num_bytes: what a rank would hold.
        seconds: what a step would take.
        memory: the rank that holds most, and what it holds, if the layout was simulated.
        remedy: what to compute again, so that it fits, and how much longer a step takes then; None if nothing helps.
    """

    layout: Candidate
    num_bytes: float
    seconds: float
    memory: tuple[int, RankMemory] | None = None
    remedy: tuple[str, float] | None = None


@dataclass(frozen=True)
class Found:
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
    """

    rows: tuple[Row, ...]
    num_layouts: int
    num_fitting: int
    num_simulated: int
    too_large: TooLarge | None
    refused: tuple[str, ...]
    gap: float | None
    seconds: float


def search(
    question: Question, num_rows: int = 5, limit_seconds: float = 10.0, clock: Callable[[], float] = time.process_time
) -> Found:
    """Return the fastest layouts.

    Args:
        question: model, machine, batch, what is fixed.
        num_rows: how many rows to find.
        limit_seconds: when to stop looking; rows found by then are worked out all the same.
        clock: seconds, from any beginning; by default those that this process has computed.
    """
    return _Search(question, num_rows, limit_seconds, clock).run()


class _Search:
    def __init__(self, question: Question, num_rows: int, limit_seconds: float, clock: Callable[[], float]) -> None:
        self.question, self.num_rows, self.limit_seconds = question, num_rows, limit_seconds
        self.clock, self.started = clock, clock()
        self.bounds = Bounds(question)
        self.order = itertools.count()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.best: dict[Family, tuple[float, Candidate]] = {}
        self.too_large: list[TooLarge] = []
        self.refused: dict[str, int] = {}
        self.num_layouts = self.num_fitting = self.num_simulated = 0

    def run(self) -> Found:
        for shape in shapes(self.question):
            bound = self.bounds.least_seconds(*shape)
            self._push(bound, lambda shape=shape: self._expand(shape))  # type: ignore[misc]
        gap = None
        while self.heap:
            bound, _, look = heapq.heappop(self.heap)
            if bound > self._last_row():
                break
            if self.clock() - self.started > self.limit_seconds * (1 if self.best else _PATIENCE):
                gap = bound
                break
            look()
        rows = self._rows()
        for shape in shapes(self.question):
            num, fitting = counted(self.question, shape, self.bounds.state_bytes, self.bounds.activation_bytes)
            self.num_layouts, self.num_fitting = self.num_layouts + num, self.num_fitting + fitting
        return Found(
            rows,
            self.num_layouts,
            self.num_fitting,
            self.num_simulated,
            self._nearest(rows),
            tuple(sorted(self.refused, key=self.refused.__getitem__, reverse=True)),
            gap,
            self.clock() - self.started,
        )

    def _push(self, bound: float, look: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (bound, next(self.order), look))

    def _last_row(self) -> float:
        """Return what the last row of the answer takes so far."""
        found = sorted(seconds for seconds, _ in self.best.values())
        return found[self.num_rows - 1] if len(found) >= self.num_rows else float("inf")

    def _expand(self, shape: tuple[int, int, int, int]) -> None:
        """Put what shares these sizes into the heap, with settings that trade time for memory as one entry."""
        for chain in _chains(candidates(self.question, shape)):
            # Of settings that take equally long the one that does less, which comes first, is tried first.
            by_time = sorted(((self.bounds.seconds(layout), layout) for layout in chain), key=lambda pair: pair[0])
            self._push_next(iter(by_time))

    def _push_next(self, chain: Iterator[tuple[float, Candidate]]) -> None:
        for bound, layout in chain:
            num_bytes = self.bounds.num_bytes(layout)
            if num_bytes > self.question.memory_limit:
                self.too_large.append(TooLarge(layout, num_bytes, bound))
                continue
            self._push(bound, lambda: self._simulate(bound, layout, chain))  # noqa: B023  # returns at once
            return

    def _simulate(self, bound: float, layout: Candidate, chain: Iterator[tuple[float, Candidate]]) -> None:
        known = self.best.get(layout.family)
        if known is not None and known[0] <= bound:
            return
        try:
            found = estimate(layout, self.question)
        except ValueError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + 1
            self._push_next(chain)
            return
        self.num_simulated += 1
        if found.peak_bytes > self.question.memory_limit:
            self.too_large.append(TooLarge(layout, found.peak_bytes, found.seconds))
            self._push_next(chain)
        elif known is None or found.seconds < known[0]:
            self.best[layout.family] = found.seconds, layout

    def _rows(self) -> tuple[Row, ...]:
        """Work the best layouts out; one that turns out too large as a whole plan is no row."""
        rows: list[Row] = []
        for _, layout in sorted(self.best.values()):
            if len(rows) == self.num_rows:
                break
            sheet = Sheet.of(layout.config(self.question), self.question.machine)
            if sheet.peak_bytes <= self.question.memory_limit:
                rows.append(Row(layout, sheet))
            else:
                self.too_large.append(TooLarge(layout, sheet.peak_bytes, sheet.seconds))
        return tuple(sorted(rows, key=lambda row: row.sheet.seconds))

    def _nearest(self, rows: tuple[Row, ...]) -> TooLarge | None:
        least = _WORTH * rows[0].sheet.seconds if rows else float("inf")
        wanted = [layout for layout in self.too_large if layout.seconds < least]
        nearest = min(wanted, key=lambda layout: layout.num_bytes, default=None)
        return None if nearest is None else self._explained(nearest)

    def _explained(self, nearest: TooLarge) -> TooLarge:
        """Work out what a layout that does not fit holds, and what makes it fit."""
        try:
            sheet = short_sheet(nearest.layout, self.question)
        except ValueError:
            return nearest
        memory = max(enumerate(sheet.memory), key=lambda of: of[1].peak)
        remedy = None
        asked = self.question.fixed.get("recompute")
        for recompute in Recompute if asked is None else ():
            other = replace(nearest.layout, recompute=recompute.value)
            if self.bounds.num_bytes(other) > self.question.memory_limit or other == nearest.layout:
                continue
            found = estimate(other, self.question)
            if found.peak_bytes <= self.question.memory_limit:
                longer = found.seconds - estimate(nearest.layout, self.question).seconds
                remedy = f"recompute {recompute.value}", longer
                break
        return replace(nearest, num_bytes=memory[1].peak, memory=memory, remedy=remedy)


def _chains(layouts: Iterator[Candidate]) -> Iterator[list[Candidate]]:
    """Group layouts that differ in what is computed or gathered again only."""
    groups: dict[Candidate, list[Candidate]] = {}
    for layout in layouts:
        groups.setdefault(replace(layout, recompute="", gathered=""), []).append(layout)
    yield from groups.values()
