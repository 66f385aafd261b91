"""Tokenizers of others: tokenizer.json, run by the library `tokenizers`, and what lies beside it.

The library is imported when a tokenizer is opened: training on bytes, and `--help`, do without it. What
`transformers` gives as ids for a text without marks is what `encode` gives: special tokens that tokenizer_config.json
declares are added where tokenizer.json lacks them, in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding

TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG, _MODEL_CONFIG = "tokenizer_config.json", "config.json"

# What each mark of a document is called in tokenizer_config.json.
_ROLES: Mapping[str, str] = {"begin": "bos_token", "end": "eos_token"}
# In the order in which transformers adds them.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("extra_special_tokens", "additional_special_tokens")  # of transformers 5, of 4
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


class TextTokenizer:
    """A tokenizer, from the files of a model's directory or of a run that began from one.

    Args:
        directory: has tokenizer.json, and perhaps tokenizer_config.json and the config.json of its model.

    Attributes:
        directory: as given.
        vocab_size: one more than the largest id that it can give.
        merges_pairs: whether ids come of merging neighbours, byte pairs.

    Raises:
        ValueError: the library is not installed; no tokenizer.json, or a damaged one; one that draws; declared tokens
            that would get other ids.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / TOKENIZER
        if not directory.is_dir():
            raise ValueError(
                f"--tokenizer must be bytes, or a local directory with a {TOKENIZER}: got {directory}: check the path, "
                "or download the model first"
            )
        if not path.is_file():
            raise ValueError(
                f"a tokenizer's directory must have a {TOKENIZER}: {directory} has none{_others(directory)}: let "
                "transformers write one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            from tokenizers import AddedToken, Tokenizer
        except ImportError:
            raise ValueError(
                f"a tokenizer needs the library tokenizers: it is not installed, for {path}: pip install 'tpengine[hf]'"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other class
            raise ValueError(
                f"{TOKENIZER} must be a tokenizer's: {path}: {str(error)[:120]!r}: copy it again, or upgrade tokenizers"
            ) from None
        # Some files keep the settings of the last call: they would cut documents short without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(
                f"a tokenizer must give a text the same ids each time: {path} has dropout "
                f"{self._tokenizer.model.dropout:g}: set it to null there"
            )
        self._declared = _read_object(directory / _TOKENIZER_CONFIG)
        self._add_declared(AddedToken)
        self.merges_pairs = type(self._tokenizer.model).__name__ == "BPE"
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str], with_places: bool = False) -> list[Encoding]:
        """Return the ids of texts, without marks; special tokens that are written in a text become their ids.

        Args:
            texts: any.
            with_places: whether the encodings also tell the place of each token in its text, and its word.
        """
        if with_places:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model continues, with the marks that transformers puts before it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def sha256(self) -> str:
        """Return the SHA-256 of tokenizer.json, in hex: equal ids mean equal text only under one of them."""
        return hashlib.sha256((self.directory / TOKENIZER).read_bytes()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens as they are written; ids that it does not know are a U+FFFD each."""
        parts: list[str] = []
        known: list[int] = []
        for token in ids:
            if self._tokenizer.id_to_token(token) is not None:
                known.append(token)
                continue
            parts += [self._tokenizer.decode(known, skip_special_tokens=False), "\N{REPLACEMENT CHARACTER}"]
            known = []
        return "".join([*parts, self._tokenizer.decode(known, skip_special_tokens=False)])

    def mark(self, name: str, asked: str) -> int:
        """Return the id of a mark of documents.

        Args:
            name: "begin" or "end".
            asked: an id, or a token as it is written; empty for the one that tokenizer_config.json declares.

        Raises:
            ValueError: the tokenizer does not have it, or declares none.
        """
        token = asked or self._token_of(_ROLES[name])
        if not token:
            raise ValueError(
                f"--{name} needs a token that the tokenizer declares: {self.directory / _TOKENIZER_CONFIG} has no "
                f"{_ROLES[name]}: name a token, as --{name} '<s>'"
            )
        # A number is an id, though every vocabulary has a token that is written so.
        found = int(token) if token.isdecimal() else self._tokenizer.token_to_id(token)
        if found is None or found >= self.vocab_size or self._tokenizer.id_to_token(found) is None:
            raise ValueError(
                f"--{name} must be a token of the tokenizer: {self.directory / TOKENIZER} has no {token!r}: use one of "
                f"{', '.join(sorted(self._added())[:8]) or 'its ids'}"
            )
        return found

    def declared_marks(self) -> dict[str, int]:
        """Return the ids that tokenizer_config.json declares to begin and end texts, by "begin" and "end"."""
        found = {name: self._tokenizer.token_to_id(self._token_of(role) or "") for name, role in _ROLES.items()}
        return {name: number for name, number in found.items() if number is not None}

    def model_vocab_size(self) -> int | None:
        """Return the vocabulary of the model beside it, by its config.json; None if there is none."""
        values = _read_object(self.directory / _MODEL_CONFIG)
        # Models of text and pictures say it one level down.
        inner = values.get("text_config")
        found = values.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
        return found if isinstance(found, int) else None

    def _add_declared(self, added_token: type[AddedToken]) -> None:
        """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, as transformers does."""
        try:
            declared = list(_tokens_of(self._declared))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{_TOKENIZER_CONFIG} must declare tokens as transformers writes them: {self.directory}: "
                f"{type(error).__name__} {str(error)[:80]}: copy it again"
            ) from None
        present = self._added()
        for number, content, flags in declared:
            if content in present:
                continue
            self._tokenizer.add_tokens([added_token(content, **flags)])
            present.add(content)
            found = self._tokenizer.token_to_id(content)
            if number is not None and found != number:
                raise ValueError(
                    f"{_TOKENIZER_CONFIG} and {TOKENIZER} must agree: {self.directory}: {content!r} is declared as "
                    f"{number} and would be {found}: copy both again"
                )

    def _token_of(self, role: str) -> str | None:
        token = self._declared.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        return content if isinstance(content, str) else None

    def _added(self) -> set[str]:
        return {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}


def _tokens_of(declared: Mapping[str, Any]) -> Iterator[tuple[int | None, str, dict[str, bool]]]:
    """Yield id, where it is said, text and flags of each token that tokenizer_config.json declares."""
    numbered: dict[str, Any] = declared.get("added_tokens_decoder") or {}
    for number in sorted(numbered, key=int):
        token = numbered[number]
        yield int(number), str(token["content"]), {flag: bool(token.get(flag, False)) for flag in _FLAGS}
    listed: Any = next((declared[name] for name in _LISTED if declared.get(name)), [])
    # A dictionary gives tokens names of the model's own.
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    for token in [declared.get(name) for name in _NAMED] + listed:
        if isinstance(token, str):
            yield None, token, {"special": True, "normalized": False}
        elif token is not None:
            flags = {flag: bool(token.get(flag, False)) for flag in _FLAGS}
            yield None, str(token["content"]), flags | {"special": True}


def _others(directory: Path) -> str:
    """Say which files of slower tokenizers are there instead."""
    names = [name for name in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")]
    found = [name for name in names if (directory / name).is_file()]
    return f" but {', '.join(found)}" if found else ""


def _read_object(path: Path) -> Mapping[str, Any]:
    """Return the values of a file of JSON; none if it is not there."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be valid JSON: {path}: {str(error)[:120]!r}: copy it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must be an object: {path}: got {type(values).__name__}: copy it again")
    return values
