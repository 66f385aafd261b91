"""The parts of a ShardedOptimizer's state, as each replica has saved its own, for any other number of replicas.

    part = {"state": {number: {...}}, "param_groups": [...],                     as torch.optim.Optimizer has them
            "sharding": {"steps": number of steps, "rows": {number: [start, stop]}, "shapes": {number: [...]},
                         "masters": {number: tensor}}}

Numbers are those of torch: parameters in the order of their groups. A state dict of torch's own, without "sharding", is
a part that holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tpengine.modules.step_agreement import options_of, words_of


@dataclass(frozen=True)
class _Saved:
    """What one part has of a parameter."""

    start: int
    stop: int
    state: Mapping[str, Any]
    master: Tensor | None


class SavedParts:
    """The parts of all replicas of a saved optimizer.

    Args:
        parts: of every replica, in any order.
        shapes: of the parameters that they are loaded for, by number.
        group_numbers: the numbers of each group's parameters.

    Attributes:
        param_groups: options of the groups, as saved.
        num_steps: that the optimizer had done; 0 if the parts do not say.

    Raises:
        ValueError: parts are missing, overlap, are of different steps, or are of another model.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, Any]],
        shapes: Mapping[int, Sequence[int]],
        group_numbers: Sequence[Sequence[int]],
    ) -> None:
        if not parts:
            raise ValueError("a state is loaded from the parts of all replicas: got none: pass a list of state dicts")
        self.param_groups: list[dict[str, Any]] = parts[0]["param_groups"]
        for part in parts:
            numbers = [list(group["params"]) for group in part["param_groups"]]
            if numbers != [list(of_group) for of_group in group_numbers]:
                raise ValueError(
                    f"parts are of the optimizer that they are loaded for: got groups of {[len(n) for n in numbers]} "
                    f"parameters for groups of {[len(n) for n in group_numbers]}: make it with the same groups"
                )
            for number, shape in part.get("sharding", {}).get("shapes", {}).items():
                if list(shape) != list(shapes[number]):
                    raise ValueError(
                        f"parts are of the model that they are loaded for: parameter {number} is {list(shape)} in a "
                        f"part, {list(shapes[number])} here: load those of this model"
                    )
        _check_one_step(parts)
        self.num_steps: int = parts[0].get("sharding", {}).get("steps", 0)
        self._shapes = shapes
        self._saved: dict[int, list[_Saved]] = {number: [] for number in shapes}
        for part in parts:
            sharding = part.get("sharding", {"rows": {n: [0, num_rows(s)] for n, s in shapes.items()}, "masters": {}})
            for number, (start, stop) in sharding["rows"].items():
                state, master = part["state"].get(number, {}), sharding["masters"].get(number)
                self._saved[number].append(_Saved(start, stop, state, master))
        for number, shape in shapes.items():
            self._saved[number].sort(key=lambda saved: saved.start)
            self._check_cover(number, num_rows(shape), len(parts))

    def _check_cover(self, number: int, rows: int, num_parts: int) -> None:
        edges = [(0, 0), *((saved.start, saved.stop) for saved in self._saved[number]), (rows, rows)]
        # A tensor without rows is one that somebody has.
        missing = not self._saved[number] or any(a[1] < b[0] for a, b in pairwise(edges))
        overlap = any(a[1] > b[0] for a, b in pairwise(edges)) or (rows == 0 and len(self._saved[number]) > 1)
        if missing or overlap:
            raise ValueError(
                f"every row of a parameter is in one part: of parameter {number} with {rows} rows the {num_parts} "
                f"parts have {[[s.start, s.stop] for s in self._saved[number]]}: pass the part of each replica once"
            )

    def state_of(self, number: int, start: int, stop: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return the state and the master of some rows of a parameter.

        Raises:
            ValueError: parts of one parameter have different states.
        """
        inside = [s for s in self._saved[number] if s.start < stop and start < s.stop] or self._saved[number]
        keys = dict.fromkeys(key for saved in inside for key in saved.state)
        state = {key: self._joined(number, key, [(s, s.state.get(key)) for s in inside], start, stop) for key in keys}
        masters = [(s, s.master) for s in inside]
        has_master = any(master is not None for _, master in masters)
        return state, self._joined(number, "master", masters, start, stop) if has_master else None

    def _joined(self, number: int, key: str, values: Sequence[tuple[_Saved, Any]], start: int, stop: int) -> Any:
        first = values[0][1]
        if len(values) == 1 and (values[0][0].start, values[0][0].stop) == (start, stop):
            return first
        rest = list(self._shapes[number][1:])
        if all(isinstance(v, Tensor) and v.dim() and list(v.shape) == [s.stop - s.start, *rest] for s, v in values):
            cut = [v[max(start - s.start, 0) : stop - s.start] for s, v in values]
            return torch.cat(cut)
        if any(type(v) is not type(first) or not _equal(v, first) for _, v in values):
            raise ValueError(
                f"rows of one parameter are updated alike: parts of parameter {number} differ in {key}: pass parts of "
                "one step"
            )
        return first


def _check_one_step(parts: Sequence[Mapping[str, Any]]) -> None:
    steps = [part.get("sharding", {}).get("steps", 0) for part in parts]
    if any(step != steps[0] for step in steps):
        raise ValueError(f"parts are of one step: got those of steps {steps}: pass the parts that were saved together")
    words = [[words_of(options_of(group)) for group in part["param_groups"]] for part in parts]
    for number, of_part in enumerate(words):
        for i, (theirs, first) in enumerate(zip(of_part, words[0], strict=True)):
            if theirs != first:
                raise ValueError(
                    f"parts are of one step: group {i} has '{theirs}' in part {number}, '{first}' in part 0: pass the "
                    "parts that were saved together"
                )


def num_rows(shape: Sequence[int]) -> int:
    """Return the rows along the first dim; a tensor without dims is one."""
    return shape[0] if len(shape) else 1


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
