"""Conversations as tokens, by a chat template, and which of the tokens are trained on.

What a template is stands in `Template`: transformers' is handed in (hugging_face/chat_template.py). Where it marks what
the assistant generates, the mask is its own. Else an answer is what the whole conversation has between two prefixes:

    messages[:i], asked for an answer  |  content and end-of-turn token of messages[i]  |  the rest

Both prefixes are rendered alone and must begin the whole, in text and in ids; nothing is guessed where they do not, as
where a template drops the reasoning of earlier answers: what would be trained on there is not what the model is asked
for later. What a template puts behind the end-of-turn token, as a new line, belongs to no answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tpengine.data.documents import DocumentPiece, DocumentPlace

TRAIN_ON = ("assistant", "last", "all")
Message = Mapping[str, Any]

_ANSWERS = "assistant"
_SHOWN = 30
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class Template(Protocol):
    """How a tokenizer writes conversations.

    Attributes:
        special_ids: ids of tokens that are never a part of a word.
    """

    special_ids: Collection[int]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, asks: bool = False) -> str:
        """Return messages as text; with `asks` also what an answer follows on. ValueError: what the template says."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, with no marks but those that it has."""

    def answers(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int] | None:
        """Return 1 for each id that the template marks as the assistant's, else 0; None if it marks none anywhere."""


@dataclass(frozen=True)
class Conversation:
    """What a line of a chat file has.

    Attributes:
        messages: at least one, each with its role.
        tools: that the assistant may call; None for none.
        where: the line, for messages about it.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    where: str


class WeightedTokens(NamedTuple):
    """A conversation's ids, of each whether it is trained on (1) or only read (0), and where reading goes on."""

    ids: NDArray[np.uint32]
    weights: NDArray[np.uint8]
    after: DocumentPlace


def conversations(
    pieces: Iterable[DocumentPiece], template: Template, train_on: str, seq_len: int | None = None
) -> Iterator[WeightedTokens]:
    """Yield the conversations of a chat file's lines as tokens.

    Args:
        pieces: a line of JSON each, {"messages": [...], "tools": [...]} or a list of messages.
        template: renders them.
        train_on: one of TRAIN_ON: all answers of the assistant, its last one, or every token.
        seq_len: the most tokens of one; None for any number.

    Raises:
        ValueError: in one line with file and line: no conversation, one that the template refuses, has nothing to train
            on, is too long, or in which answers cannot be told apart.

    Cost:
        A rendering and an encoding of the whole, and without marks two of each answer's beginning.
    """
    for piece in pieces:
        conversation = parsed(piece.content, f"{piece.path}, line {piece.after.line}")
        ids, weights = weighted(conversation, template, train_on)
        if seq_len is not None and len(ids) > seq_len:
            raise ValueError(
                f"a conversation must have at most --seq-len tokens: {conversation.where} has {len(ids)}, --seq-len "
                f"{seq_len}: shorten it, leave it out, or use longer samples"
            )
        yield WeightedTokens(np.array(ids, np.uint32), np.array(weights, np.uint8), piece.after)


def parsed(line: bytes, where: str) -> Conversation:
    """Return the conversation of a line.

    Raises: ValueError: it is not JSON, or has no messages with roles and contents.
    """
    try:
        value = json.loads(line)
        # Half of a surrogate pair is nobody's text.
        json.dumps(value, ensure_ascii=False).encode()
        problem = ""
    except (ValueError, RecursionError) as error:
        value, problem = None, f"is no JSON: {str(error)[:80]}"
    messages: Any = value.get("messages") if isinstance(value, dict) else value
    tools: Any = value.get("tools") if isinstance(value, dict) else None
    if problem := problem or _problem_of(messages, tools):
        raise ValueError(f"a line of a chat file must be a conversation: {where} {problem}: write it as {_EXAMPLE}")
    return Conversation(messages, tools or None, where)


def _problem_of(messages: Any, tools: Any) -> str:
    """Return why these are no conversation; empty if they are one."""
    if not isinstance(messages, list) or not messages:
        return "has no messages"
    if tools is not None and not isinstance(tools, list):
        return "has tools that are no list"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has no role in message {number}"
    for number, message in enumerate(messages, start=1):
        if message.get("content") is None and not message.get("tool_calls"):
            return f"has no content in message {number}"
    return ""


def weighted(conversation: Conversation, template: Template, train_on: str) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and the weight of each.

    Raises: ValueError: as `conversations`.
    """
    rendering = _Rendering(conversation, template)
    if train_on == "all":
        return rendering.ids, [1] * len(rendering.ids)
    numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == _ANSWERS]
    if train_on == "last":
        numbers = numbers[-1:]
    weights = template.answers(conversation.messages, conversation.tools)
    if weights is None:
        weights = [0] * len(rendering.ids)
        for number in numbers:
            first, end = rendering.answer(number)
            weights[first:end] = [1] * (end - first)
    elif train_on == "last":
        num_before = len(rendering.before(numbers[0], asks=False)) if numbers else len(weights)
        weights[:num_before] = [0] * num_before
    if not any(weights):
        problem = "only answers without a token" if numbers else f"none of the role {_ANSWERS}"
        raise ValueError(
            f"a conversation must have an answer to train on: {conversation.where} has {problem}: add one, leave the "
            "line out, or use --train-on all"
        )
    return rendering.ids, weights


def end_of_turn(template: Template) -> int | None:
    """Return the special token with which the template ends an answer; None if it ends one with none."""
    messages = [{"role": "user", "content": "a"}, {"role": _ANSWERS, "content": "b"}]
    try:
        ids, weights = weighted(Conversation(messages, None, "a question and its answer"), template, "last")
    except ValueError:
        return None
    last = next(token for token, weight in zip(reversed(ids), reversed(weights), strict=True) if weight)
    return last if last in template.special_ids else None


class _Rendering:
    """A conversation as the template writes it, and prefixes of it, which are checked to be prefixes."""

    def __init__(self, conversation: Conversation, template: Template) -> None:
        self._conversation, self._template = conversation, template
        self._text = self._rendered(len(conversation.messages), asks=False)
        self.ids = template.encode(self._text)

    def answer(self, number: int) -> tuple[int, int]:
        """Return the first token of a message, and the one behind its end-of-turn token."""
        first = len(self.before(number, asks=True))
        text = self._prefix(number + 1, asks=False)
        # Where the turn ends with a token of its own, blanks behind it are not the answer's.
        ids = self._template.encode(text.rstrip())
        if ids and ids[-1] in self._template.special_ids and self.ids[: len(ids)] == ids:
            return first, len(ids)
        return first, len(self._ids_of(text, number))

    def before(self, number: int, asks: bool) -> list[int]:
        """Return the ids of all that comes before a message; with `asks` also of what asks for it."""
        return self._ids_of(self._prefix(number, asks), number) if number or asks else []

    def _prefix(self, num_messages: int, asks: bool) -> str:
        text, whole = self._rendered(num_messages, asks), self._text
        if not whole.startswith(text):
            place = _first_difference(text, whole)
            number = num_messages if asks else num_messages - 1
            self._refuse(number, text[place:], whole[place:])
        return text

    def _ids_of(self, text: str, number: int) -> list[int]:
        ids, whole = self._template.encode(text), self.ids
        if whole[: len(ids)] != ids:
            place = _first_difference(ids, whole)
            self._refuse(number, f"ids {ids[place : place + 3]}", f"ids {whole[place : place + 3]}")
        return ids

    def _rendered(self, num_messages: int, asks: bool) -> str:
        conversation = self._conversation
        try:
            return self._template.render(conversation.messages[:num_messages], conversation.tools, asks)
        except ValueError as error:
            which = "" if num_messages == len(conversation.messages) else f", its first {num_messages} messages alone"
            raise ValueError(
                f"a conversation must be one that the template takes: {conversation.where}{which}: {error}: correct "
                "it, leave it out, or use the template of another model"
            ) from None

    def _refuse(self, number: int, alone: str, whole: str) -> None:
        where = f"{self._conversation.where}, message {number + 1} ({self._conversation.messages[number]['role']})"
        raise ValueError(
            "a template without {% generation %} must write answers, and what comes before them, alike alone and in "
            f"the whole: {where}: alone it goes on {alone[:_SHOWN]!r}, in the whole {whole[:_SHOWN]!r}: end a line "
            "with each answer and use --train-on last, or use a template that marks answers"
        )


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    places = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in places if a != b), min(len(one), len(other)))
