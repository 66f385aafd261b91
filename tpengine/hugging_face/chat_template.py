"""The chat template of a tokenizer, rendered by transformers. The library, an extra, is imported when one is opened.

A template is a program that came with the model. transformers runs it in jinja's sandbox, and no other code of the
directory: a tokenizer that needs its own is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# As transformers looks for it.
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """How a model's conversations are written.

    Args:
        directory: a tokenizer's, of a model or a run; has chat_template.jinja, or tokenizer_config.json has it.

    Attributes:
        special_ids: ids of special tokens.

    Raises:
        ValueError: transformers is not installed, cannot open the tokenizer, or it has no template.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import jinja2  # noqa: F401
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError(
                f"a chat template needs the libraries transformers and jinja2: {error.name} is not installed: pip "
                "install 'tpengine[chat]'"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # what it raises depends on the tokenizer's class
            raise ValueError(
                f"a tokenizer must be one that transformers opens: {directory}: {type(error).__name__}: "
                f"{str(error)[:120]!r}: copy it again, or upgrade transformers"
            ) from None
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"a tokenizer for chats must have a chat template: {directory} has none: copy chat_template.jinja of "
                "the model's chat version there, or name that one's directory"
            )
        added = self._tokenizer.added_tokens_decoder
        self.special_ids: Collection[int] = {number for number, token in added.items() if token.special}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, asks: bool = False
    ) -> str:
        """Return messages as text.

        Args:
            messages: each has a role, and what else the template reads.
            tools: as the template reads them, mostly JSON schemas of functions.
            asks: whether the text ends with what an answer follows on (transformers' add_generation_prompt).

        Raises:
            ValueError: what the template says against them.
        """
        return str(self._applied(messages, tools, add_generation_prompt=asks, tokenize=False))

    def answers(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int] | None:
        """Return transformers' return_assistant_tokens_mask: 1 for each id that the template marks, else 0.

        Returns:
            None for a template without {% generation %}.

        Raises:
            ValueError: as `render`.
        """
        if not _MARKS.search(self._tokenizer.get_chat_template(tools=tools)):
            return None
        found = self._applied(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["assistant_masks"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, as transformers' apply_chat_template gives them."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _applied(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=tools, **how)
        except Exception as error:  # a template is a program
            raise ValueError(f"the template says {(str(error) or type(error).__name__)[:120]!r}") from None
