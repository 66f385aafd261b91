"""Which units are whole within one forward or backward pass, and what is gathered next (ZeRO 3).

    forward    units 0, 1, 2, ...: a unit is whole until the next one is needed; the one after it is gathered meanwhile
    backward   the same from the last to the first; a unit is whole until its own backward has ended

A forward keeps what a backward needs first: the last two units, and the model itself. As many are whole in the middle
of a pass. They are freed by the backward that follows, or when anything else follows.

All replicas gather the same units in the same order, whatever each of them uses: what a replica passes over it gathers
with the others, and frees. So units that some replicas skip cannot make them wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpengine.data_parallel.any_module.unit_weights import UnitWeights

# The unit that computes, and the next one.
_NUM_WHOLE = 2


class GatherOrder:
    """One pass at a time.

    Args:
        weights: the buckets.
        buckets: those of every unit; the last unit is the model itself, which is whole as long as a pass runs.
        names: of the units, for errors.
    """

    def __init__(self, weights: UnitWeights, buckets: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self._weights, self._buckets, self._names = weights, buckets, names
        self._model = len(buckets) - 1
        self._order: list[int] = []
        self._cursor = 0
        # Units that a forward leaves whole, and those of them that it must not use any more.
        self._kept: frozenset[int] = frozenset()
        self._passed: set[int] = set()
        self._is_wanted: Callable[[int], bool] = lambda unit: False
        # Units being gathered, and units that are whole, in the order of their gathers.
        self._under_way: list[int] = []
        self._whole: list[int] = []

    def begin(self, units: Sequence[int], *, backward: bool, is_wanted: Callable[[int], bool]) -> None:
        """Begin a pass: gather what belongs to the model itself, unless the forward before has kept it.

        Args:
            units: those of the pass, in the order of forward, without the model itself.
            backward: the order of backward.
            is_wanted: whether a unit that has been passed must stay whole.
        """
        assert not self._order, "the last pass has not ended"
        if not backward:
            self.free_kept()
        self._passed = set()
        self._kept = frozenset() if backward else frozenset((self._model, *units[-_NUM_WHOLE:]))
        self._order = [self._model, *(reversed(units) if backward else units)]
        self._cursor, self._is_wanted = 0, is_wanted
        self._start_next()
        self._wait(self._model)

    def need(self, unit: int) -> None:
        """Make a unit whole.

        Raises:
            RuntimeError: it was freed in this pass already.
        """
        place = self._order.index(unit)
        is_there = unit in self._whole or unit in self._under_way
        if unit in self._passed or (place < self._cursor and not is_there):
            raise RuntimeError(
                "zero 3 gathers each unit once in a pass, and in one order: "
                f"'{self._names[unit]}' is used after '{self._names[self._order[self._cursor - 1]]}': pass units= in "
                "the order of their use, without those that are used again later"
            )
        self._release_before(place)
        while self._cursor <= place:
            self._start_next()
            self._release_before(place)
        self._wait(unit)
        if self._cursor < len(self._order) and self._cursor == place + 1:
            self._start_next()

    def release(self, unit: int) -> None:
        """Free a unit, if it is whole."""
        if unit in self._whole:
            self._free(unit)

    def end(self) -> None:
        """End a pass: gather what is left, with the others, and free all but what a forward keeps."""
        self._is_wanted = lambda unit: False
        while self._cursor < len(self._order):
            self._start_next()
            self._release_before(self._cursor)
        self._release_before(self._cursor)
        for unit in list(self._under_way):
            self._wait(unit)
        if not self._kept:
            self.release(self._model)
        self._order = []

    def free_kept(self) -> None:
        """Free what the last forward has kept, if there is any; between passes."""
        for unit in list(self._whole):
            self._free(unit)

    def _start_next(self) -> None:
        unit = self._order[self._cursor]
        self._cursor += 1
        if unit in self._whole:
            return
        for index in self._buckets[unit]:
            self._weights.gather(index)
        self._under_way.append(unit)

    def _release_before(self, place: int) -> None:
        """Free the units before a place in the order that nobody wants."""
        for unit in self._order[: min(place, self._cursor)]:
            if unit == self._model or self._is_wanted(unit):
                continue
            if unit in self._kept:
                self._passed.add(unit)
                continue
            if unit in self._under_way:
                self._wait(unit)
            self.release(unit)

    def _wait(self, unit: int) -> None:
        if unit in self._under_way:
            self._under_way.remove(unit)
            for index in self._buckets[unit]:
                self._weights.wait(index)
            self._whole.append(unit)

    def _free(self, unit: int) -> None:
        self._whole.remove(unit)
        for index in self._buckets[unit]:
            self._weights.free(index)
