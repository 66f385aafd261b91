"""Settings of a layout that a question fixes: one value, several, or a range, as `--zero 1..3 --schedule 1f1b,zbv`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from tpengine.commands.parsing import count
from tpengine.config.ranges import MOST_CHUNKS, MOST_SEQUENCES
from tpengine.config.rules import MOST_RANKS
from tpengine.plan import SCHEDULES, Gathered, Recompute, Residency
from tpengine.planner.advice.question import AXES

# A range names at most so many values.
_MOST = 100_000
# A line tells at most so many, and as much of what was typed.
_TOLD = 8
_MOST_SHOWN = 40


def add_fixed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings that may be fixed."""
    fixed = parser.add_argument_group(
        "settings that are fixed",
        "advise searches all others, and takes several values, too: 1..3, or 1,4. plan has them as such a run would.",
    )
    for axis in ("tp", "pp", "dp"):
        fixed.add_argument(f"--{axis}", type=_numbers(1, MOST_RANKS), metavar="N", help=f"size of the axis {axis}")
    fixed.add_argument("--zero", type=_numbers(0, 3), metavar="0..3", help="what replicas shard")
    fixed.add_argument(
        "--residency", type=_words([each.value for each in Residency]), metavar="WHICH", help="of weights at zero 3"
    )
    fixed.add_argument("--schedule", type=_words(()), help=f"one of {', '.join(SCHEDULES)}, or a file")
    fixed.add_argument(
        "--chunks", dest="chunks_per_rank", type=_numbers(1, MOST_CHUNKS), metavar="V", help="chunks per rank"
    )
    recomputes = [each.value for each in Recompute]
    fixed.add_argument(
        "--recompute",
        type=_words(recomputes),
        metavar="WHAT",
        help=f"what backward recomputes: {', '.join(recomputes)}",
    )
    fixed.add_argument(
        "--gathered",
        type=_words([each.value for each in Gathered]),
        metavar="HOW",
        help="what becomes of gathered tokens: keep, again",
    )
    fixed.add_argument(
        "--tp-comm", type=_words(("fused", "plain")), metavar="HOW", help="exchanges of tp ranks: fused, plain"
    )
    fixed.add_argument(
        "--micro-batch",
        dest="micro_batch_size",
        type=_numbers(1, MOST_SEQUENCES),
        metavar="N",
        help="sequences of one",
    )
    fixed.add_argument("--bucket-bytes", type=count, metavar="BYTES", help="of gradients that are reduced at once")


def fixed_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the arguments fix, by the names in AXES: a value, or a tuple of several."""
    found = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis) is not None}
    return {axis: value[0] if isinstance(value, tuple) and len(value) == 1 else value for axis, value in found.items()}


def flag_of(name: str) -> str:
    """Return the option of a setting, or of another argument, by its name."""
    return "--" + {"chunks_per_rank": "chunks", "micro_batch_size": "micro-batch"}.get(name, name).replace("_", "-")


def refuse_several(fixed: dict[str, Any], command: str) -> None:
    """Raise for a setting with several values.

    Raises:
        ValueError: in one line, which, and what takes it.
    """
    for name, value in fixed.items():
        if isinstance(value, tuple):
            given = f"{flag_of(name)} {listed(value)}"
            raise ValueError(f"{command} works one layout out: got {given}: use one of them, or tpengine advise")


def listed(values: Sequence[Any]) -> str:
    """Return values for a line: many of them as the first, and how many there are."""
    first = ",".join(map(str, values[:_TOLD]))
    return first if len(values) <= _TOLD else f"{first},... ({len(values)} values)"


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of 4, 1..3 and 1,2,4."""

    def parse(text: str) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for part in text.split(","):
            match = re.fullmatch(r"([0-9]{1,30})(?:\.\.([0-9]{1,30}))?", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not least <= first <= last <= most or last - first >= _MOST:
                raise argparse.ArgumentTypeError(
                    f"must be an integer of {least} to {most}, several as 1,2, or a range as 1..{min(most, 4)}: got "
                    f"{text[:_MOST_SHOWN]!r}: use {most if least <= first <= last and first > most else least}"
                )
            found |= dict.fromkeys(range(first, last + 1))
        return tuple(found)

    return parse


def _words(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of one of the choices, or several between commas; without choices anything is one."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        wrong = next((word for word in found if choices and word not in choices), None)
        if wrong is not None:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(choices)}: got {wrong!r}")
        return found

    return parse
