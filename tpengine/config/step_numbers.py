"""How files and lines count steps: a step has the number of steps that are finished when it is, as its checkpoint has.

So the first step is 1, and the last one of `--train.steps 250` is 250: in metrics.jsonl, samples.jsonl, skipped.jsonl,
rollbacks.jsonl and profile.json, in what a run prints, and in the names of checkpoints. In the code a step is an index
from 0, which decides its samples and its learning rate.

Files of earlier versions counted from 0, and are still read. A line of JSON says what it counts from. Rows of
metrics.jsonl do not, because other programs read them: a file that has a row of step 0 counts from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_FIRST = 1


def numbered(index: int) -> dict[str, int]:
    """Return how JSON names a step that is given from 0."""
    return {"step": index + _FIRST, "counted_from": _FIRST}


def index_of(value: Mapping[str, Any]) -> int:
    """Return the step that JSON names, from 0.

    Raises:
        ValueError: it names none.
        KeyError, TypeError: as ValueError.
    """
    step, first = value["step"], value.get("counted_from", 0)
    if type(step) is not int or first not in (0, _FIRST) or step < first:
        raise ValueError(f"{step!r} is no step, counted from {first!r}")
    return step - int(first)


def first_of_rows(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return what the rows of a metrics.jsonl count steps from."""
    return 0 if any(row.get("step") == 0 for row in rows) else _FIRST
