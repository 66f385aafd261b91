"""Parse a plan's text: the exact inverse of `Plan.text`.

Only the exact text that `Plan.text` writes is accepted, so that a text that parses has the plan's digest. Whether the
plan is correct is not checked here: a wrong plan has a text too, and `verify` says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tpengine.plan.actions import Action, format_actions, parse_actions
from tpengine.plan.plan import Bucket, Chunk, CountBucket, Gathered, Plan, Recompute, Reduced, TensorSpec, Tie, Weights

T = TypeVar("T")

# Called with the number of lines of this form parsed before, and the groups of its pattern.
_Build = Callable[[int, tuple[str, ...]], T]

_INTEGER = "(0|-?[1-9][0-9]*)"
_ANY_INTEGER = "(?:0|-?[1-9][0-9]*)"
_INTEGERS = f"((?:{_ANY_INTEGER}(?: {_ANY_INTEGER})*)?)"
_SPEC = rf"(none|[^\s\[\]]+\[(?:{_ANY_INTEGER}(?:,{_ANY_INTEGER})*)?\])"
_SHOWN_CHARACTERS = 80


def parse_plan(text: str) -> Plan:
    """Parse the text of a plan; the inverse of `Plan.text`.

    Args: text: one line that starts with "plan", then the lines of the chunks, buckets, counts, ties and ranks, in this
        order.
    Returns: the plan, not verified; `parse_plan(plan.text()) == plan` where the schedule's name is one line and each
        dtype is one word.
    Raises: ValueError: malformed text; one line with the line's number, the rule and the text.
    """
    lines = _Lines(text)
    heads = lines.take(_HEAD)
    if len(heads) != 1:
        raise lines.error(f"a plan's text starts with one line like {_HEAD.example!r}", after=len(heads) > 1)
    schedule, training, num_microbatches, num_layers = heads[0]
    chunks, buckets, counts, ties = (
        lines.take(_CHUNK),
        lines.take(_BUCKET),
        lines.take(_COUNTS),
        lines.take(_TIE),
    )
    actions = lines.take(_RANK)
    if not lines.at_end:
        raise lines.error("a plan's text is its head, chunks, buckets, counts, ties and ranks, in this order")
    return Plan(schedule, num_microbatches, num_layers, chunks, buckets, ties, actions, training, counts)


@dataclass(frozen=True)
class _Form(Generic[T]):
    """A kind of line: its first word, its pattern, an example for error messages, and what builds its value."""

    word: str
    pattern: re.Pattern[str]
    example: str
    build: _Build[T]


class _Lines:
    """The text's lines, and how many of them have been parsed."""

    def __init__(self, text: str) -> None:
        *self.lines, rest = text.split("\n")
        self.num_parsed = 0
        if rest:
            self.num_parsed = len(self.lines)
            self.lines.append(rest)
            raise self.error("each line ends in a newline, the last one too")

    @property
    def at_end(self) -> bool:
        return self.num_parsed == len(self.lines)

    def take(self, form: _Form[T]) -> tuple[T, ...]:
        """Parse the lines from here on that start with the form's word."""
        taken: list[T] = []
        while not self.at_end and self.lines[self.num_parsed].startswith(f"{form.word} "):
            match = form.pattern.fullmatch(self.lines[self.num_parsed])
            if match is None:
                raise self.error(f"a line of a {form.word} reads like {form.example!r}")
            try:
                taken.append(form.build(len(taken), match.groups()))
            except ValueError as error:
                raise ValueError(f"line {self.num_parsed + 1}: {error}") from None
            self.num_parsed += 1
        return tuple(taken)

    def error(self, rule: str, after: bool = False) -> ValueError:
        """Build the error for the next line, or with `after` for the one parsed last."""
        place = self.num_parsed - after
        return ValueError(
            f"line {place + 1}: {rule}: got {_shown(self.lines[place]) if not self.at_end else 'the end'}"
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def _head(_: int, groups: tuple[str, ...]) -> tuple[str, bool, int, int]:
    schedule, mode, num_microbatches, num_layers = groups
    return schedule, mode == "training", int(num_microbatches), int(num_layers)


def _chunk(number: int, groups: tuple[str, ...]) -> Chunk:
    index, rank, first, end, received, given, recompute, gathered, forward = groups
    _check_number("chunk", number, index)
    return Chunk(
        int(rank),
        (int(first), int(end)),
        _spec(received),
        _spec(given),
        Recompute(recompute),
        Gathered(gathered),
        has_backward=not forward,
    )


def _spec(text: str) -> TensorSpec | None:
    if text == "none":
        return None
    dtype, _, dims = text.removesuffix("]").partition("[")
    return TensorSpec(tuple(map(int, dims.split(","))) if dims else (), dtype)


def _bucket(_: int, groups: tuple[str, ...]) -> Bucket:
    index, chunks, weights, reduced = groups
    return Bucket(int(index), tuple(map(int, chunks.split())), Weights(weights), Reduced(reduced))


def _counts(_: int, groups: tuple[str, ...]) -> CountBucket:
    index, chunks = groups
    return CountBucket(int(index), tuple(map(int, chunks.split())))


def _tie(_: int, groups: tuple[str, ...]) -> Tie:
    index, chunks = groups
    return Tie(int(index), tuple(map(int, chunks.split())))


def _rank(number: int, groups: tuple[str, ...]) -> tuple[Action, ...]:
    rank, listed = groups
    _check_number("rank", number, rank)
    actions = parse_actions(listed)
    if format_actions(actions) != listed:
        raise ValueError(f"actions are separated by exactly one space: got {_shown(listed)}: remove the others")
    return actions


def _check_number(word: str, number: int, text: str) -> None:
    if int(text) != number:
        raise ValueError(f"the lines of the {word}s count from 0: got {word} {text}, where {word} {number} is next")


_HEAD = _Form(
    "plan",
    re.compile(rf"plan (.*) (training|forward) microbatches {_INTEGER} layers {_INTEGER}"),
    "plan 1f1b training microbatches 8 layers 12",
    _head,
)
_CHUNK = _Form(
    "chunk",
    re.compile(
        rf"chunk {_INTEGER} rank {_INTEGER} layers {_INTEGER}:{_INTEGER} input {_SPEC} output {_SPEC} "
        rf"recompute ({'|'.join(Recompute)}) gathered ({'|'.join(Gathered)})( forward|)"
    ),
    "chunk 0 rank 0 layers 0:6 input none output float32[128,64] recompute none gathered keep",
    _chunk,
)
_BUCKET = _Form(
    "bucket",
    re.compile(rf"bucket {_INTEGER} chunks {_INTEGERS} weights ({'|'.join(Weights)}) reduced ({'|'.join(Reduced)})"),
    "bucket 2 chunks 0 weights whole reduced step",
    _bucket,
)
_COUNTS = _Form(
    "counts",
    re.compile(rf"counts {_INTEGER} chunks {_INTEGERS}"),
    "counts 4 chunks 0 1",
    _counts,
)
_TIE = _Form(
    "tie",
    re.compile(rf"tie {_INTEGER} chunks {_INTEGERS}"),
    "tie 0 chunks 0 3",
    _tie,
)
_RANK = _Form("rank", re.compile(rf"rank {_INTEGER}: (.*)"), "rank 0: 0F0 0B0[r0] w[r0] CLIP STEP", _rank)
