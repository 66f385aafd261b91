"""Rung: gloo ranks. `tpengine generate --chat` says what transformers says, turn by turn."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures.chats import chat_tokenizer, talk
from support.architectures.runs import saved
from support.ranks.rank_pool import RankPool
from transformers import AutoTokenizer

from tpengine.cli import main
from tpengine.commands import generate_chat
from tpengine.commands.generate import FoundModel, GenerateOptions, find_model
from tpengine.commands.generate_rank import generating_rank
from tpengine.data.chat import end_of_turn
from tpengine.generation.text import Drawing
from tpengine.hugging_face.chat_template import ChatTemplate

MOST = 12
PROMPTS = [[17], list(range(40)), [3, 14, 15]]


def turns(options: GenerateOptions, drawing: Drawing) -> tuple[list[list[int]], list[list[int]]]:
    """A rank's program: the answers to prompts one by one with weights that stay, and with a rank for each."""
    rank = generating_rank(find_model(options).config, [], MOST, drawing, 1)
    assert not rank.prepare()[0]
    kept = []
    for number, prompt in enumerate(PROMPTS):
        assert not rank.begin(prompt, number * MOST if drawing.temperature else 0)
        kept.append([rank.step()[0] for _ in range(MOST)])
    fresh = []
    for prompt in PROMPTS:
        alone = generating_rank(find_model(options).config, [prompt], MOST, drawing, 1)
        assert not alone.prepare()[0]
        fresh.append([alone.step()[0] for _ in range(MOST)])
    return kept, fresh


@pytest.mark.by_default("1-2")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 1)])
def test_prompts_one_by_one_are_continued_as_alone(ranks: RankPool, tmp_path: Path, tp: int, pp: int) -> None:
    saved("qwen3", tmp_path)
    options = GenerateOptions(str(tmp_path), tp=tp, pp=pp)
    for kept, fresh in ranks.run(turns, tp * pp, options, Drawing(0)):
        assert kept == fresh
    if tp * pp == 1:
        ((kept, fresh),) = ranks.run(turns, 1, options, Drawing(1.0))
        # The first draws are the same; those that follow are not repeated.
        assert kept[0] == fresh[0] and kept[2] != fresh[2]


def test_the_token_that_ends_an_answer(tmp_path: Path) -> None:
    for name, end in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>"), ("qwen3", "<|im_end|>")):
        template = ChatTemplate(chat_tokenizer(tmp_path / name, name, eos_token="<|end|>"))
        assert template.encode(end) == [end_of_turn(template)]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("qwen3", tmp_path, torch.float32)
    for argv, said in (
        (["--prompt", "a"], "--chat reads messages from the standard input: got a prompt too: leave --prompt out, or"),
        ([], f"a tokenizer's directory must have a tokenizer.json: {tmp_path} has none: "),
    ):
        capsys.readouterr()
        assert main(["generate", str(tmp_path), "--chat", *argv]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"tpengine: error: {said}") and line.count("\n") == 1, line


class RankHere:
    """One rank in this process, instead of one that is started."""

    def __init__(self, options: GenerateOptions, source: FoundModel, prompts: list[list[int]]) -> None:
        self._rank = generating_rank(source.config, prompts, options.max_tokens, options.drawing, 1)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._rank, method)(*args)]


def refusal(options: GenerateOptions) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_chat, "started", lambda *given: nullcontext(RankHere(*given)))
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os\n")))
        with pytest.raises(ValueError) as refused:
            generate_chat.chat(options)
        return str(refused.value)


def test_a_message_of_tokens_that_the_model_does_not_have_is_one_line(ranks: RankPool, tmp_path: Path) -> None:
    """As of a prompt; the embedding would raise its own words on a rank, or give rows of padding."""
    chat_tokenizer(tmp_path, "chatml")
    saved("qwen3", tmp_path, torch.float32, vocab_size=64)
    (said,) = ranks.run(refusal, 1, GenerateOptions(str(tmp_path), max_tokens=1))
    assert said.startswith("a prompt's tokens must lie in the model's vocabulary: got ") and "\n" not in said


def their_answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Transformers' greedy answer."""
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    how = dict(max_new_tokens=MOST, do_sample=False, pad_token_id=0, eos_token_id=end)
    whole = model.generate(**given, **how)[0, given["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(whole[:-1] if whole[-1] == end else whole)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_a_talk_is_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pp: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path, "qwen3"))
    model = saved("qwen3", tmp_path, torch.float32, vocab_size=len(tokenizer))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os\n\nand sys?\n")))
    capsys.readouterr()
    assert (
        main(["generate", str(tmp_path), "--chat", "--temperature", "0", "--max-tokens", str(MOST), "--pp", str(pp)])
        == 0
    )
    first = their_answer(model, tokenizer, talk("import os"))
    second = their_answer(model, tokenizer, talk("import os", first, "and sys?"))
    assert capsys.readouterr().out == f"{first}\n{second}\n"
