"""Actions: the words of a step plan. Each has a text form of a few characters that parses back.

    2F0                   chunk 2, forward, micro-batch 0 (B backward; I and W its input and weight halves)
    0B7[g3 r2 r1 f2]      a compute action with the sub-actions it starts, in this order: gathers when it begins,
                          reductions as it completes their buckets, frees when it ends
    1SEND_F3 2RECV_F3     activation of micro-batch 3 from chunk 1 to chunk 2
    1SEND_B3 0RECV_B3     gradient of micro-batch 3 from chunk 1 to chunk 0
    r2 g2 f2  t0          reduce bucket 2; gather, free its weights; reduce tied parameter 0
    w[1RECV_F3 r0 g1]     wait for the earlier asynchronous actions listed
    CLIP STEP             clip the gradient norm, step the optimizer

The chunk of a transfer is always the local one; the peer holds the chunk before or after it in the model. So an
action can be read without knowing which rank executes it. This file only says what a single action must look like;
the rules for a whole list of actions are in verify.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """What an action does; the value is its text."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's name for the input half of a backward)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "r"
    GATHER = "g"
    FREE = "f"
    WAIT = "w"
    TIE_REDUCE = "t"
    CLIP = "CLIP"
    STEP = "STEP"

    # That of the text, which is equal to the kind. Enum's own is computed in Python, and plans look kinds up often.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
# These two produce the gradient of the chunk's input.
INPUT_GRADIENT = frozenset({Kind.B, Kind.I})
# After one of these two, the micro-batch's part of the chunk's weight gradients is complete.
WEIGHT_GRADIENT = frozenset({Kind.B, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
ACTIVATIONS = frozenset({Kind.SEND_F, Kind.RECV_F})
BUCKET = frozenset({Kind.REDUCE, Kind.GATHER, Kind.FREE})

_OPPOSITE = MappingProxyType(
    {
        Kind.SEND_F: Kind.RECV_F,
        Kind.RECV_F: Kind.SEND_F,
        Kind.SEND_B: Kind.RECV_B,
        Kind.RECV_B: Kind.SEND_B,
    }
)
_LOCATED = COMPUTE | TRANSFERS
_INDEXED = BUCKET | {Kind.TIE_REDUCE}
# These may still be under way after the action that started them, so a WAIT can name them.
AWAITABLE = TRANSFERS | {Kind.REDUCE, Kind.GATHER}


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list.

    Args:
        kind: what is done.
        chunk: the local chunk, for compute and transfers only.
        microbatch: the micro-batch, for compute and transfers only.
        index: the bucket (REDUCE, GATHER, FREE) or the tie (TIE_REDUCE), for these only.
        subs: for compute, the bucket actions started inside it, in order; for WAIT, the actions waited for (at least
            one). Empty for every other kind.

    Raises:
        ValueError: a field that the kind needs is missing, or one that it does not take is given.
    """

    kind: Kind
    chunk: int | None = None
    microbatch: int | None = None
    index: int | None = None
    subs: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        # A plan has a hundred thousand actions without sub-actions: what they must look like is asked at once.
        chunk, microbatch = self.chunk, self.microbatch
        is_plain = self.kind in _LOCATED and not self.subs and self.index is None
        if is_plain and chunk is not None and microbatch is not None and chunk >= 0 and microbatch >= 0:
            return
        _check_number(self, "chunk", self.chunk, self.kind in _LOCATED)
        _check_number(self, "microbatch", self.microbatch, self.kind in _LOCATED)
        _check_number(self, "index", self.index, self.kind in _INDEXED)
        _check_subs(self)

    def __str__(self) -> str:
        if self.kind in _LOCATED:
            head = f"{self.chunk}{self.kind.value}{self.microbatch}"
        elif self.kind in _INDEXED:
            head = f"{self.kind.value}{self.index}"
        else:
            head = self.kind.value
        return f"{head}[{format_actions(self.subs)}]" if self.subs else head

    @property
    def piece(self) -> tuple[int, int]:
        """Return (chunk, microbatch) of a compute action or transfer."""
        assert self.chunk is not None and self.microbatch is not None, f"{self} has no chunk and micro-batch"
        return self.chunk, self.microbatch

    @property
    def posts(self) -> tuple[Action, ...]:
        """Return the asynchronous actions that this action starts, in order: itself, or its gathers and reductions."""
        if self.kind in AWAITABLE:
            return (self,)
        if not self.subs or self.kind not in COMPUTE:
            return ()
        return tuple(sub for sub in self.subs if sub.kind in AWAITABLE)

    @property
    def gathers(self) -> tuple[Action, ...]:
        """Return the gathers that this action starts, in order."""
        return self._started(Kind.GATHER)

    @property
    def reduces(self) -> tuple[Action, ...]:
        """Return the bucket reductions that this action starts, in order."""
        return self._started(Kind.REDUCE)

    @property
    def frees(self) -> tuple[Action, ...]:
        """Return the frees that this action does when it ends, in order."""
        return self._started(Kind.FREE)

    def _started(self, kind: Kind) -> tuple[Action, ...]:
        if self.kind is kind:
            return (self,)
        if not self.subs or self.kind not in COMPUTE:
            return ()
        return tuple(sub for sub in self.subs if sub.kind is kind)


def peer_chunk(transfer: Action) -> int:
    """Return the chunk on the other side: the next one for SEND_F and RECV_B, the one before otherwise."""
    chunk, _ = transfer.piece
    return chunk + 1 if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else chunk - 1


def counterpart(transfer: Action) -> Action:
    """Return the transfer that the peer posts for this one: 1SEND_F3 <-> 2RECV_F3, 1SEND_B3 <-> 0RECV_B3."""
    _, microbatch = transfer.piece
    return Action(_OPPOSITE[transfer.kind], peer_chunk(transfer), microbatch)


def format_actions(actions: Iterable[Action]) -> str:
    """Return the actions' text, separated by one space."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse a list of actions separated by white space; the inverse of `format_actions`.

    Raises:
        ValueError: malformed text; one line with the rule and the text.
    """
    return tuple(_parse_word(word) for word in _split(text))


def parse_action(text: str) -> Action:
    """Parse exactly one action; the inverse of `str`.

    Raises:
        ValueError: malformed text; one line with the rule and the text.
    """
    actions = parse_actions(text)
    if len(actions) != 1:
        raise ValueError(f"expected one action, found {len(actions)} in {text!r}")
    return actions[0]


def _names(kinds: Iterable[Kind]) -> str:
    return ", ".join(kind.name for kind in Kind if kind in kinds)


def _check_number(action: Action, name: str, value: int | None, taken: bool) -> None:
    if taken and (value is None or value < 0):
        raise ValueError(f"{action.kind.name} needs {name} of 0 or more: got {value}")
    if not taken and value is not None:
        raise ValueError(f"{action.kind.name} takes no {name}: got {value}")


def _check_subs(action: Action) -> None:
    allowed: frozenset[Kind] = frozenset()
    if action.kind in COMPUTE:
        allowed = BUCKET
    elif action.kind is Kind.WAIT:
        allowed = AWAITABLE
    for sub in action.subs:
        if sub.kind not in allowed:
            rule = f"takes sub-actions {_names(allowed)} only" if allowed else "takes no sub-actions"
            raise ValueError(f"{action.kind.name} {rule}: got {sub}")
    if action.kind is Kind.WAIT and not action.subs:
        raise ValueError(f"{action.kind.name} takes at least one sub-action: got none")


_NUMBER = "(0|[1-9][0-9]*)"
_WORD = re.compile(
    rf"(?:{_NUMBER}({'|'.join(kind for kind in Kind if kind in _LOCATED)}){_NUMBER}"
    rf"|({'|'.join(kind for kind in Kind if kind in _INDEXED)}){_NUMBER}"
    rf"|({'|'.join(kind for kind in Kind if kind not in _LOCATED | _INDEXED)}))"
    r"(?:\[(.+)\])?",
    re.DOTALL,
)


def _split(text: str) -> list[str]:
    """Split at white space outside brackets; brackets are not nested."""
    words: list[str] = []
    depth, start = 0, 0
    for end, character in enumerate(text + " "):
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1:
            break
        if character.isspace() and depth == 0:
            if start < end:
                words.append(text[start:end])
            start = end + 1
    if depth:
        # The list of a rank can be long: the last 60 characters show the place.
        raise ValueError(f"brackets must be balanced and not nested: got {text[: end + 1][-60:]!r}")
    return words


def _parse_word(word: str) -> Action:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"an action reads like 2F0, 0B7[r1 r0], 1SEND_F3, w[...], r2, CLIP: got {word!r}")
    chunk, located, microbatch, indexed, index, bare, inside = match.groups()
    try:
        return Action(
            Kind(located or indexed or bare),
            chunk=None if chunk is None else int(chunk),
            microbatch=None if microbatch is None else int(microbatch),
            index=None if index is None else int(index),
            subs=() if inside is None else parse_actions(inside),
        )
    except ValueError as error:
        raise ValueError(f"{error}, in {word!r}") from None
