"""What a run has reported so far: metrics.jsonl as series of numbers by step, and events."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpengine.checkpoint.run.run_directory import is_running
from tpengine.config.lengths import first_of_rows

# (field of a row, title, factor); wall time where a row has it.
PANELS = (
    ("loss", "loss", 1.0),
    ("held_out_loss", "held-out loss", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("lr", "learning rate", 1.0),
    ("wall_tokens_per_second", "tokens/s, wall time", 1.0),
    ("bubble", "bubble, share of the step", 1.0),
    ("peak_memory_bytes", "peak memory, GB", 1e-9),
)
# A float knows them apart: rows of others are none of a run's.
_MOST_STEPS = 2**53
_SIGNS = ("skipped", "overflowed", "left_out")


@dataclass
class History:
    """One run.

    Attributes:
        name: of its directory.
        series: by field of a row, (step, value).
        events: (step, what).
        num_steps: that are done.
        length: steps of the run, if config.toml says so; else 0.
        is_running: whether a process holds the run's directory; None if this host cannot tell.
    """

    name: str
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    num_steps: int = 0
    length: int = 0
    is_running: bool | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the last step is done."""
        return 0 < self.length <= self.num_steps

    @property
    def state(self) -> str:
        """What the run does, in words."""
        if self.has_ended:
            return "ended"
        return {True: "running", False: "not running", None: ""}[self.is_running]


def read_history(run_dir: Path) -> History:
    """Read what a run has written; lines that are cut, or are no rows, are passed over.

    Raises:
        ValueError: there is no such run.
    """
    path = run_dir / "metrics.jsonl"
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(
            f"a run to watch must have a metrics.jsonl: {path}: {error.strerror}: give the --run-dir of a run that "
            "has begun"
        ) from None
    history = History(run_dir.name or str(run_dir), length=_length_of(run_dir))
    history.is_running = is_running(run_dir)
    rows = list(_rows(text))
    before_first = 1 - first_of_rows(rows)
    for row in rows:
        _add(history, row, row["step"] + before_first)
    return history


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield what is a row of a step."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < _MOST_STEPS:
                yield row


def _add(history: History, row: dict[str, Any], number: int) -> None:
    if "event" in row:
        history.events.append((number, str(row["event"])))
    elif sign := next((sign for sign in reversed(_SIGNS) if row.get(sign) is True), None):
        history.events.append((number, sign.replace("_", " ")))
    if "event" not in row:
        history.num_steps = max(history.num_steps, number)
    for name, _, factor in PANELS:
        value = row.get(name)
        # An integer of JSON may be larger than any float; NaN is not below.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            history.series.setdefault(name, []).append((number, value * factor))


def _length_of(run_dir: Path) -> int:
    import tomllib

    try:
        steps = tomllib.loads((run_dir / "config.toml").read_text())["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return steps if isinstance(steps, int) else 0
