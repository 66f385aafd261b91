"""What each rank did in the recorded steps, and how long each step took: a profile's evidence of why a run is slow.

The medians over all ranks (file.py) predict other plans. They cannot tell that one replica is slower than the others,
that a step waits for its text, or which part of an action is an exchange between tensor-parallel ranks; this can.

A file may come from anybody: the type, range and length of each field of its JSON is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from tpengine.journal import numbered
from tpengine.plan.actions import COMPUTE, Kind

T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)


class WrongProfile(Exception):
    """What is wrong with a profile's content, as the message."""


def each(content: Any, name: str, parse: Callable[[Any], T]) -> list[T]:
    """Return the items of a list, parsed."""
    return [parse(item) for item in field_of(content, name, list)]


def field_of(content: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of an object, of one of some types."""
    if not isinstance(content, dict):
        raise WrongProfile(f"{name} must be in an object: got {shown(content)}")

    if name not in content:
        raise WrongProfile(f"it has no {name}")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def name_of(content: Any, name: str) -> str:
    """Return a field that is a short printable text."""
    value: str = field_of(content, name, str)
    if not value.isprintable() or len(value) > 200:
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def word_of(content: Any, name: str, words: type[Word]) -> Word:
    """Return a field that is one of some words."""
    value = field_of(content, name, str)
    if value not in list(words):
        raise WrongProfile(f"{name} is one of {', '.join(words)}: got {shown(value)}")
    return words(value)


def count_of(content: Any, name: str, least: int = 0) -> int:
    """Return a field that counts: an integer of at least `least`."""
    value: int = field_of(content, name, int)
    if not least <= value < 2**62:
        raise WrongProfile(f"{name} is {shown(value)}")
    return value


def number_of(content: Any, name: str) -> float:
    """Return a field that is a finite number of at least 0."""
    value = field_of(content, name, (int, float))
    if not (0.0 <= value < 1e12 and math.isfinite(value)):
        raise WrongProfile(f"{name} is {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """Return a value's text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True)
class ActionProfile:
    """One kind of action of one chunk on one rank, in seconds: medians over steps and micro-batches.

    Args:
        seconds: from its beginning to its end; on a GPU between the events before and behind its kernels.
        issue: how long the host was in it. On a CPU that is the same.
        exchange: how long the host was blocked in it until other tensor-parallel ranks wrote their part into shared
            memory. What collectives and a GPU's kernels wait is not known, and 0.
        reducing: how long the host was in it to start reductions of gradients: next to nothing where they run beside
            it. The median over micro-batches: often only the last one starts any.
        ends: how much of it was the embedding, or norm, head and loss behind the last block, without exchanges; 0 in W,
            where that is not known. None in profiles that were written before there was such a field.
        starved: on a CPU, how long the rank's thread stood in line for a core in it: other threads ran there.
    """

    seconds: float
    issue: float
    exchange: float
    reducing: float
    ends: float | None = None
    starved: float = 0.0


@dataclass(frozen=True)
class RankProfile:
    """What one rank did in the recorded steps.

    Args:
        pp, dp, tp: its place.
        actions: by kind and chunk, all that it computed.
        read: seconds that it waited for its micro-batches of a step, which a thread reads meanwhile; the median over
            steps; 0 on a stage that reads none.
        reduced: seconds of a step in which its host started reductions of gradients, as `reducing`, in all actions.
        allocator_retries: how often a GPU's allocator had to give back its memory and ask again, in all steps.
    """

    pp: int
    dp: int
    tp: int
    actions: Mapping[tuple[Kind, int], ActionProfile]
    read: float
    reduced: float
    allocator_retries: int

    def to_json(self) -> dict[str, Any]:
        """Return what `parse_rank` reads."""
        return {
            "pp": self.pp,
            "dp": self.dp,
            "tp": self.tp,
            "read_seconds": self.read,
            "reduced_seconds": self.reduced,
            "allocator_retries": self.allocator_retries,
            "actions": [
                {
                    "kind": kind,
                    "chunk": chunk,
                    "seconds": action.seconds,
                    "issue_seconds": action.issue,
                    "exchange_seconds": action.exchange,
                    "reducing_seconds": action.reducing,
                }
                | ({} if action.ends is None else {"ends_seconds": action.ends, "starved_seconds": action.starved})
                for (kind, chunk), action in self.actions.items()
            ],
        }


@dataclass(frozen=True)
class StepSeconds:
    """A recorded step, from 0; its time in seconds, and that of the plan within it."""

    step: int
    seconds: float
    plan: float

    def to_json(self) -> dict[str, Any]:
        """Return what `parse_step` reads."""
        return {**numbered(self.step), "seconds": self.seconds, "plan_seconds": self.plan}


def parse_step(item: Any) -> StepSeconds:
    """Return a step from its JSON.

    Raises: WrongProfile: it is not one.
    """
    number = count_of(item, "step")
    # Profiles of earlier versions count from 0.
    first = count_of(item, "counted_from") if "counted_from" in item else 0
    if first > number:
        raise WrongProfile(f"steps are counted from {first}: got step {number}")
    step = StepSeconds(number - first, number_of(item, "seconds"), number_of(item, "plan_seconds"))
    if not 0.0 < step.plan <= step.seconds:
        raise WrongProfile(f"a step takes at least as long as its plan: got {step.seconds} s and {step.plan} s")
    return step


def parse_rank(item: Any) -> RankProfile:
    """Return a rank's profile from its JSON.

    Raises: WrongProfile: it is not one.
    """
    return RankProfile(
        pp=count_of(item, "pp"),
        dp=count_of(item, "dp"),
        tp=count_of(item, "tp"),
        actions=dict(each(item, "actions", _action)),
        read=number_of(item, "read_seconds"),
        reduced=number_of(item, "reduced_seconds"),
        allocator_retries=count_of(item, "allocator_retries"),
    )


def _action(item: Any) -> tuple[tuple[Kind, int], ActionProfile]:
    kinds, name = {kind.value: kind for kind in COMPUTE}, name_of(item, "kind")
    if name not in kinds:
        raise WrongProfile(f"a rank's actions are F, B, I and W: got {shown(name)}")
    parts = ("", "issue_", "exchange_", "reducing_")
    seconds, issue, exchange, reducing = (number_of(item, f"{part}seconds") for part in parts)
    if not seconds > 0.0 or exchange + reducing > issue * (1.0 + 1e-9):
        raise WrongProfile(
            f"an action takes more than 0 s, its exchange and reductions no longer than the host: got {shown(item)}"
        )
    ends, starved = None, 0.0
    if "ends_seconds" in item:  # profiles of earlier versions do not say
        ends, starved = number_of(item, "ends_seconds"), number_of(item, "starved_seconds")
        if ends > seconds or starved > issue * (1.0 + 1e-9):
            raise WrongProfile(
                f"an action takes at least as long as the model's ends in it, and its host in line: got {shown(item)}"
            )
    return (kinds[name], count_of(item, "chunk")), ActionProfile(seconds, issue, exchange, reducing, ends, starved)


def check_ranks(ranks: Sequence[RankProfile], actions_by_stage: Sequence[frozenset[tuple[Kind, int]]]) -> None:
    """Check that ranks are those of a mesh, each with the actions of its stage.

    Args: actions_by_stage: the kinds and chunks that a stage's ranks compute.
    Raises: WrongProfile: a place is missing or taken twice, or a rank lacks an action of its stage.
    """
    sizes = [max(getattr(rank, axis) for rank in ranks) + 1 for axis in ("pp", "dp", "tp")]
    places = {(rank.pp, rank.dp, rank.tp) for rank in ranks}
    if sizes[0] != len(actions_by_stage) or not len(ranks) == len(places) == sizes[0] * sizes[1] * sizes[2]:
        raise WrongProfile(f"its ranks are not those of a mesh with {len(actions_by_stage)} stages, each once")
    for rank in ranks:
        if rank.actions.keys() != actions_by_stage[rank.pp]:
            raise WrongProfile(f"rank pp {rank.pp}, dp {rank.dp}, tp {rank.tp} has not the actions of its stage")
