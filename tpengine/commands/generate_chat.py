"""`tpengine generate --chat`: lines of the standard input are messages, answers are printed as they come. No torch.

The conversation is kept, and read as a whole for each answer, as the template writes it then: it may drop the reasoning
of earlier answers. The processes stay, with the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tpengine.commands.generate import GenerateOptions, check_room, check_vocabulary, decoded, find_model, say, started
from tpengine.data.chat import end_of_turn
from tpengine.distributed.local_ranks import Ranks
from tpengine.generation.text import Stream, TokenizerText, marks_of
from tpengine.hugging_face.chat_template import ChatTemplate
from tpengine.terminal import write_text
from tpengine.tokenizer import TextTokenizer


def chat(options: GenerateOptions) -> None:
    """Answer each line of the standard input, until it ends.

    An answer ends with the token that ends one in the template, with one that the model or the tokenizer declares to
    end texts, or after options.max_tokens.

    Raises:
        ValueError: what a user can get wrong, in one line.
        RanksFailed: a rank raised or died.
    """
    options.drawing.check()
    if options.prompts or options.files:
        raise ValueError(
            "--chat reads messages from the standard input: got a prompt too: leave --prompt out, or --chat"
        )
    source = find_model(options)
    directory = Path(options.tokenizer) if options.tokenizer else source.directory
    tokenizer, template = TextTokenizer(directory), ChatTemplate(directory)
    ends = {*marks_of(source.directory, "eos_token_id"), tokenizer.declared_marks().get("end"), end_of_turn(template)}
    messages, num_drawn, most = list[dict[str, str]](), 0, options.max_tokens
    with started(options, source, []) as ranks:
        if problem := ranks.call("prepare")[0][0]:
            raise ValueError(problem)
        for line in _lines():
            messages.append({"role": "user", "content": line})
            prompt = template.encode(template.render(messages, asks=True))
            check_vocabulary(prompt, source.config.model)
            check_room(source.config.model, [prompt], most)
            if problem := ranks.call("begin", prompt, num_drawn)[0]:
                raise ValueError(problem)
            tokens = list[int]()
            stream, answer = Stream(TokenizerText(tokenizer), prompt), ""
            for token in _drawn(ranks, most):
                tokens.append(token)
                if token in ends:
                    break
                part = stream.add(token)
                answer += part
                write_text(part)
            else:
                say(f"the answer goes on after {most} tokens: use a larger --max-tokens")
            num_drawn += len(tokens)
            messages.append({"role": "assistant", "content": answer + stream.end()})
            write_text(f"{stream.end()}\n")


def _drawn(ranks: Ranks, most: int) -> Iterator[int]:
    for _ in range(most):
        yield ranks.call("step")[0][0]


def _lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank; a terminal is asked for each."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        if not line.isspace():
            yield decoded(line, "-").rstrip("\r\n")
