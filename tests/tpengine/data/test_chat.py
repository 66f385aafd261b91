"""Rung: pure. Which tokens of a conversation are trained on: transformers' mask, also where the template marks nothing.

The oracle of a template without marks is the same template with them, in transformers.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.architectures.chats import TEMPLATES, chat_tokenizer, drawn_talk, talk

from tpengine.data import chat
from tpengine.data.chat import Conversation, conversations, parsed, weighted
from tpengine.data.documents import DocumentReader
from tpengine.hugging_face.chat_template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}


@pytest.fixture(scope="module")
def template_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str, marked: bool = False) -> ChatTemplate:
        return ChatTemplate(chat_tokenizer(tmp_path_factory.mktemp(name), name, marked=marked))

    return made


def theirs(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
    """What transformers says of a template with marks."""
    found = template._tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


def ours(template: ChatTemplate, messages: Any, train_on: str = "assistant", tools: Any = None) -> Any:
    return weighted(Conversation(messages, tools, "a.jsonl, line 7"), template, train_on)


def talks_for(name: str) -> list[list[dict[str, Any]]]:
    rng = random.Random(3)
    found = [drawn_talk(rng, 1 if name == "qwen3" else 0, system=name != "mistral" and i % 2 == 0) for i in range(6)]
    return [*found, talk("a", "\n\nb \n")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_transformers(name: str, template_of: Any) -> None:
    plain, marked = template_of(name), template_of(name, True)
    for messages in talks_for(name):
        want = theirs(marked, messages)
        assert sum(want[1]) and ours(marked, messages) == want
        assert ours(plain, messages) == want
        assert ours(plain, messages, "all") == (want[0], [1] * len(want[0]))


def test_tools_and_what_they_answer(template_of: Any) -> None:
    messages = [*talk("1 + 1?", system="Add."), CALL, {"role": "tool", "content": "2"}, *talk("", "It is 2.")[1:]]
    want = theirs(template_of("chatml", True), messages, TOOLS)
    assert (
        ours(template_of("chatml"), messages, tools=TOOLS)
        == want
        == ours(template_of("chatml", True), messages, tools=TOOLS)
    )
    text = template_of("chatml").render(messages, TOOLS)
    assert '"name": "add"' in text and "<tool_call>" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answer_alone(name: str, template_of: Any) -> None:
    messages = talk("import os", "os it is", "and sys?", "sys too", system="" if name == "mistral" else "Be brief.")
    ids, mask = theirs(template_of(name, True), messages)
    behind = len(mask) - mask[::-1].index(1)
    first = behind - [*mask[:behind][::-1], 0].index(0)
    want = ids, [int(first <= i < behind) for i in range(len(ids))]
    assert sum(want[1]) < sum(mask) and ours(template_of(name), messages, "last") == want
    assert ours(template_of(name, True), messages, "last") == want


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("shift", [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_a_mask_that_is_off_by_one_is_noticed(
    name: str, shift: tuple[int, int], template_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = chat._Rendering.answer

    def moved(self: Any, number: int) -> tuple[int, int]:
        first, end = right(self, number)
        return first + shift[0], end + shift[1]

    monkeypatch.setattr(chat._Rendering, "answer", moved)
    messages = talk("a", "b c", system="" if name == "mistral" else "d")
    want = theirs(template_of(name, True), messages)
    # Behind the last token there is nothing to take.
    assert ours(template_of(name), messages) != want or (shift == (0, 1) and want[1][-1])


def test_reasoning_that_is_dropped_from_earlier_answers_is_refused_by_name(template_of: Any) -> None:
    messages = talk("a", "first", "b", "second")
    with pytest.raises(ValueError) as refused:
        ours(template_of("qwen3"), messages)
    assert str(refused.value) == (
        "a template without {% generation %} must write answers, and what comes before them, alike alone and in the "
        "whole: a.jsonl, line 7, message 2 (assistant): alone it goes on '<think>\\n\\n</think>\\n\\nfirst<|im_e', in "
        "the whole 'first<|im_end|>\\n<|im_start|>us': end a line with each answer and use --train-on last, or use a "
        "template that marks answers"
    )
    # What the remedy says.
    for end in (2, 4):
        ids, weights = ours(template_of("qwen3"), messages[:end], "last")
        tokens = [token for token, weight in zip(ids, weights, strict=True) if weight]
        said = template_of("qwen3")._tokenizer.decode(tokens)
        assert said == f"<think>\n\n</think>\n\n{messages[end - 1]['content']}<|im_end|>"


def plain_template(directory: Path, asks: str) -> ChatTemplate:
    """A line for each message, which no token of its own ends."""
    lines = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    asked = f"{{% if add_generation_prompt %}}{asks}{{% endif %}}"
    return ChatTemplate(chat_tokenizer(directory, "chatml", chat_template=lines + asked))


def test_ids_that_join_over_a_border_are_refused_by_name(tmp_path: Path) -> None:
    template = plain_template(tmp_path, "assistant: im")
    assert len(template.encode("import")) < len(template.encode("im") + template.encode("port"))
    with pytest.raises(
        ValueError, match=r"line 7, message 2 \(assistant\): alone it goes on 'ids \[\d.*', in the whole"
    ):
        ours(template, talk("a", "import os"))


def test_an_answer_without_a_token_of_its_own_at_its_end(tmp_path: Path) -> None:
    template = plain_template(tmp_path, "assistant:")
    ids, weights = ours(template, talk("a", "b", "c", "d"))
    trained = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert template._tokenizer.decode(trained) == " b\n d\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing", "is no JSON: Expecting value"),
        ("3", "has no messages"),
        ("[]", "has no messages"),
        ("{}", "has no messages"),
        ('{"messages": []}', "has no messages"),
        ('{"messages": "a"}', "has no messages"),
        ('{"messages": [{"content": "a"}]}', "has no role in message 1"),
        ('{"messages": [{"role": "user"}, 3]}', "has no role in message 2"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}', "has no content in message 2"),
        ('{"messages": [{"role": "user"}], "tools": {}}', "has tools that are no list"),
        ('[{"role": "user", "content": "a"}, {"role": "assistant"}]', "has no content in message 2"),
        ('[{"role": "assistant", "content": null, "tool_calls": []}]', "has no content in message 1"),
        ('[{"role": "user", "content": "\\ud800"}]', "is no JSON: 'utf-8' codec can't encode"),
    ],
)
def test_a_line_that_is_no_conversation(line: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        parsed(line.encode(), "a.jsonl, line 7")
    assert str(refused.value).startswith(f"a line of a chat file must be a conversation: a.jsonl, line 7 {said}")
    assert "\n" not in str(refused.value)


def test_a_message_that_calls_tools_needs_no_content() -> None:
    assert parsed(json.dumps([CALL]).encode(), "").messages == [CALL]


def test_lines_of_a_file(tmp_path: Path, template_of: Any) -> None:
    talks = [talk("a", "b"), talk("c", "d", "e", "f"), talk("g")]
    path = tmp_path / "chat.jsonl"
    lines = [json.dumps({"messages": talks[0]}), "", json.dumps(talks[1]), json.dumps(talks[2])]
    path.write_text("\n".join(lines))
    found = conversations(DocumentReader([path], None), template_of("llama3"), "assistant")
    for messages in talks[:2]:
        ids, weights, _ = next(found)
        assert (ids.tolist(), weights.tolist()) == theirs(template_of("llama3", True), messages)
    with pytest.raises(ValueError) as refused:
        next(found)
    assert str(refused.value).startswith(f"a conversation must have an answer to train on: {path}, line 4 has none")

    long = len(weighted(Conversation(talks[0], None, ""), template_of("llama3"), "all")[0])
    assert next(conversations(DocumentReader([path], None), template_of("llama3"), "all", long)).after.line == 1
    with pytest.raises(ValueError) as refused:
        next(conversations(DocumentReader([path], None), template_of("llama3"), "all", long - 1))
    assert str(refused.value) == (
        f"a conversation must have at most --seq-len tokens: {path}, line 1 has {long}, --seq-len {long - 1}: shorten "
        "it, leave it out, or use longer samples"
    )


def test_marks_around_nothing_are_no_answer(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(ValueError, match=r"a\.jsonl, line 7 has only answers without a token: "):
        ours(ChatTemplate(chat_tokenizer(tmp_path, "chatml", chat_template=template)), talk("a", "b"))


def test_a_role_that_the_template_refuses(template_of: Any) -> None:
    for messages in (talk("a", "b", system="c"), [{"role": "assistant", "content": "a"}]):
        with pytest.raises(ValueError) as refused:
            ours(template_of("mistral"), messages)
        assert str(refused.value).startswith(
            "a conversation must be one that the template takes: a.jsonl, line 7: the template says 'roles must "
            "alternate user/assistant': "
        )
