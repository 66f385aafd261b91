"""Small tokenizers with chat templates, written after those of known models, and conversations."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from support.architectures.trained_tokenizers import hard_text, saved_tokenizer

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>")
_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_SAYS = "{{ m.content or '' }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls | tojson }}</tool_call>{% endif %}"

# Each marks what the assistant generates; `chat_tokenizer` takes the marks out.
TEMPLATES = {
    "chatml": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + "{% generation %}"
    + _SAYS
    + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + _ASKS,
    # Behind the last question the last answer has its reasoning, if only an empty one; what is earlier loses it.
    "qwen3": _TOOLS
    + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    + "{% if m.role == 'assistant' %}{% generation %}"
    + "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    + "<think>\n{{ m.reasoning_content or '' }}\n</think>{{ '\n\n' }}{% endif %}"
    + _SAYS
    + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    + _ASKS,
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}"
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
    + "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}",
    # Nothing asks for an answer, and roles must alternate.
    "mistral": "{{ bos_token }}{% for m in messages %}"
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    + "{% else %}{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}",
}
_ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>"}


def chat_tokenizer(directory: Path, template: str, *, marked: bool = False, **config: Any) -> Path:
    """Write a tokenizer of byte pairs with one of TEMPLATES; return the directory."""
    text = TEMPLATES[template]
    declared = {
        "chat_template": text if marked else re.sub(r"{% (end)?generation %}", "", text),
        "extra_special_tokens": list(_SPECIAL),
        "bos_token": "<s>",
        "eos_token": _ENDS.get(template, "<|im_end|>"),
    }
    return saved_tokenizer(directory, "gpt2", **{**declared, **config})


def talk(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """A user and an assistant in turns, behind a system's message if there is one."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def drawn_talk(rng: random.Random, num_answers: int = 0, system: bool = False) -> list[dict[str, Any]]:
    """A talk of hard texts."""
    num_messages = 2 * (num_answers or rng.randrange(1, 4))
    contents = [hard_text(rng, rng.randrange(1, 60)).strip() or "a" for _ in range(num_messages)]
    return talk(*contents, system="Be brief." if system else "")
