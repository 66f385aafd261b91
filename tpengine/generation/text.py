"""Text to tokens and back, as it comes: by the tokenizer of a model or a run, as bytes, or as numbers. No torch.

Also how the next token is drawn: what a user asks for, which needs no torch either. decoder.py draws it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpengine.config import ModelConfig
from tpengine.tokenizer import TOKENIZER, TextTokenizer

_BYTES = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Tokens that are decoded with each new one: a tokenizer may write a word otherwise at a beginning.
_MOST_AGAIN = 16
# What a model says about generation comes before what its sizes' file says of it.
_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; below 1 makes likely tokens likelier. 0 takes the likeliest.
        top_k: draw among the k likeliest, and those as likely as the last of them; 0 for all.
        top_p: then among the likeliest that together have at least this probability.
        seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that say nothing.

        Raises:
            ValueError: names the flag.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be at least 0 and finite: got {self.temperature:g}: use 0.8, or 0")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be at least 0, which keeps all: got {self.top_k}: use 40")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1: got {self.top_p:g}: use 0.9")


class Vocabulary(Protocol):
    """What a model's tokens mean."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the marks that the tokenizer puts before it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is not text, as a byte alone of several, is U+FFFD."""


class TokenizerText:
    """Tokens of a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See Vocabulary."""
        return self._tokenizer.prompt(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary."""
        return self._tokenizer.decode(tokens)


class Bytes:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        """See Vocabulary."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary."""
        # No byte is 0xFF in a text.
        return bytes(token if token < _BYTES else 0xFF for token in tokens).decode(errors="replace")


class Numbers:
    """A token is its number, in a text of numbers with spaces: where nobody knows what they mean."""

    def encode(self, text: str) -> list[int]:
        """See Vocabulary.

        Raises:
            ValueError: the text is not numbers.
        """
        words = text.replace(",", " ").split()
        if not all(word.isdecimal() for word in words):
            raise ValueError(
                f"without a tokenizer a prompt is token numbers: got {text[:40]!r}: use --prompt '1 2 3', or "
                "--tokenizer DIR, or --tokenizer bytes"
            )
        return [int(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary."""
        return "".join(f" {token}" for token in tokens)


def vocabulary_of(directory: Path, model: ModelConfig, asked: str = "") -> Vocabulary:
    """Return what a model's tokens mean: as its tokenizer.json says, else bytes if there are 256, else numbers.

    Args:
        directory: of the model, or of a run.
        model: its sizes.
        asked: "bytes", or a directory with a tokenizer; empty for what is in `directory`.

    Raises:
        ValueError: the tokenizer cannot be opened.
    """
    if asked and asked != "bytes":
        return TokenizerText(TextTokenizer(Path(asked)))
    if not asked and (directory / TOKENIZER).is_file():
        return TokenizerText(TextTokenizer(directory))
    return Bytes() if asked or model.vocab_size == _BYTES else Numbers()


def marks_of(directory: Path, name: str) -> list[int]:
    """Return the tokens that begin a text ("bos_token_id") or end it ("eos_token_id"), as the model's files say."""
    for file in _FILES:
        path = directory / file
        if not path.is_file():
            continue
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} must be valid JSON: {path}: {str(error)[:120]!r}: copy it again") from None
        found = values.get(name) if isinstance(values, dict) else None
        if found is not None:
            listed = found if isinstance(found, list) else [found]
            return [token for token in listed if isinstance(token, int)]
    return []


class Stream:
    """The text of a sequence that grows, in parts that are printed one behind the other.

    A part of a character is no text yet: it is U+FFFD at the end of what is decoded, and is held back until it is whole
    or the next token shows that it never will be. Only the last tokens are decoded again each time.

    Args:
        vocabulary: of its tokens.
        tokens: that it begins with; their text is not given again.
    """

    def __init__(self, vocabulary: Vocabulary, tokens: Sequence[int] = ()) -> None:
        self._vocabulary, self._tokens = vocabulary, list(tokens)[-_MOST_AGAIN:]
        self._given = len(vocabulary.decode(self._tokens))
        # As many tokens made whole characters when it was last looked.
        self._num_whole = len(self._tokens)

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while it is a part of a character."""
        self._tokens.append(token)
        text = self._vocabulary.decode(self._tokens)
        is_whole = not text.endswith(_UNKNOWN)
        part = text[self._given : None if is_whole else -1]
        self._given += len(part)
        if is_whole:
            if len(self._tokens) > 2 * _MOST_AGAIN:
                self._tokens = self._tokens[self._num_whole :]
                self._given = len(self._vocabulary.decode(self._tokens))
            self._num_whole = len(self._tokens)
        return part

    def end(self) -> str:
        """Return what was held back."""
        return self._vocabulary.decode(self._tokens)[self._given :]
