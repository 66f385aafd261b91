"""What a search finds: rows, and the layout that nearly fits."""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.advice.candidates import Candidate
from tpengine.advice.search.bounds import Bounds
from tpengine.advice.sheets.sheet import Sheet
from tpengine.simulate.modelled.memory import RankMemory

# A layout is not looked for that is faster than the best one of its axes by less than this share.
CLOSE = 0.002


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
