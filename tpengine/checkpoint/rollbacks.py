"""The rollbacks of a run, and the samples that they leave out: a list in the run's directory and in checkpoints.

    rollbacks.jsonl    one JSON object per rollback, in their order:
                       {"step": 813, "counted_from": 1, "to": 600, "order": 0, "samples": [[25984, 26016]],
                        "loss": 9.1, "grad_norm": 31.0}

`step` is the one that leaped; `to` the steps of the checkpoint that the run went back to; `samples` are
half-open ranges of numbers of an order of samples (training/samples.py), that of the phase `order`. No step reads
them any more. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpengine import journal

FILE_NAME = "rollbacks.jsonl"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rollback:
    """A rollback; see the module.

    Attributes: as in the file, but for `step`, which is from 0.
    """

    step: int
    to: int
    order: int
    samples: Ranges
    loss: float
    grad_norm: float

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self) | journal.numbered(self.step)


def rollback_of(value: Any) -> Rollback:
    """Return the rollback that JSON says.

    Raises:
        ValueError: it says none.
    """
    try:
        ranges = tuple((_natural(first), _natural(end)) for first, end in value["samples"])
        if not ranges or any(first >= end for first, end in ranges):
            raise ValueError("no range of samples")
        to, order = (_natural(value[name]) for name in ("to", "order"))
        return Rollback(journal.index_of(value), to, order, ranges, float(value["loss"]), float(value["grad_norm"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no rollback: {error if str(error) else value!r}") from None


def read_rollbacks(path: Path) -> list[Rollback]:
    """Read a list.

    Raises:
        ValueError: a line says no rollback.
        OSError: it cannot be read.
    """
    found = []
    for line in journal.read(path):
        if not line.row:
            raise ValueError(f"line {line.number}: no rollback: no JSON object")
        try:
            found.append(rollback_of(line.row))
        except ValueError as error:
            raise ValueError(f"line {line.number}: {error}") from None
    return found


def joined(first: Sequence[Rollback], second: Sequence[Rollback]) -> tuple[Rollback, ...]:
    """Return the rollbacks of two lists of one run, each once, those of the first before others."""
    return tuple(dict.fromkeys([*first, *second]))


def left_out(rollbacks: Sequence[Rollback]) -> dict[int, Ranges]:
    """Return the ranges left out of each order, as a SamplePosition takes them: ascending, without overlaps."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rollback in rollbacks:
        found.setdefault(rollback.order, []).extend(rollback.samples)
    return {order: _merged(ranges) for order, ranges in found.items()}


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((first, end))
    return tuple(merged)


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no natural number")
    return value
