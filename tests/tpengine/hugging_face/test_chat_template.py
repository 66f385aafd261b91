"""Rung: pure. A chat template is transformers'; what cannot be opened is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.architectures.chats import chat_tokenizer, talk

from tpengine.hugging_face.chat_template import ChatTemplate


def refused(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        ChatTemplate(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_tokenizer_without_a_template_or_that_is_none(tmp_path: Path) -> None:
    assert refused(chat_tokenizer(tmp_path / "a", "chatml", chat_template=None)) == (
        f"a tokenizer for chats must have a chat template: {tmp_path / 'a'} has none: copy chat_template.jinja of the "
        "model's chat version there, or name that one's directory"
    )
    (tmp_path / "b").mkdir()
    assert refused(tmp_path / "b").startswith(f"a tokenizer must be one that transformers opens: {tmp_path / 'b'}: ")


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert refused(tmp_path) == (
        "a chat template needs the libraries transformers and jinja2: jinja2 is not installed: pip install "
        "'tpengine[chat]'"
    )


def test_a_template_in_a_file_of_its_own_and_one_for_tools(tmp_path: Path) -> None:
    directory = chat_tokenizer(tmp_path, "chatml", chat_template=None)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (directory / "additional_chat_templates").mkdir()
    marked = "{% generation %}{{ tools[0].b }}{% endgeneration %}?"
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(marked)
    template = ChatTemplate(directory)
    assert template.render(talk("a")) == "a!" and template.answers(talk("a")) is None
    assert template.render(talk("a"), [{"b": 1}]) == "1?" and template.answers(talk("a"), [{"b": 1}]) == [1, 0]
    (directory / "chat_template.jinja").write_text("{{ messages[0].content.no.such }}!")
    changed = ChatTemplate(directory)
    with pytest.raises(ValueError, match=r"^the template says .*has no attribute 'no'"):
        changed.render(talk("a"))
