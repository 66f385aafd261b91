"""`tpengine generate`: find the model, read the prompts, start the ranks, print their tokens as they come. No torch.

Ranks are processes of this host, as `certify` starts them, also where there is one. Each step is one call: all ranks
answer with the tokens, and rank 0's are printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from tpengine.architectures.model_path import model_at, run_of
from tpengine.checkpoint.resume import saved_config
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig, validate
from tpengine.distributed.launch import num_cores
from tpengine.distributed.local_ranks import Ranks
from tpengine.dtypes import FILE_NAMES
from tpengine.generation.text import Drawing, Stream, Vocabulary, marks_of, vocabulary_of
from tpengine.hugging_face.directory import open_directory
from tpengine.terminal import write_text

_RANK = "tpengine.commands.generate_rank:generating_rank"


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate; see the command's help."""

    model: str
    prompts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tp: int = 1
    pp: int = 1
    dtype: str = ""
    device: str = "auto"
    tokenizer: str = ""
    architecture: str = ""

    @property
    def drawing(self) -> Drawing:
        """How tokens are drawn."""
        return Drawing(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class FoundModel:
    """A model that has been found.

    Attributes:
        config: validated for the layout that was asked for.
        directory: of the model, or of the run.
        trained_on: tokens of the sequences that it was trained on, where that is known.
    """

    config: Config
    directory: Path
    trained_on: int | None


def generate(options: GenerateOptions) -> None:
    """Continue the prompts and print them.

    Raises:
        ValueError: what a user can get wrong, in one line.
        RanksFailed: a rank raised or died.
    """
    options.drawing.check()
    source = find_model(options)
    model, vocabulary = source.config.model, vocabulary_of(source.directory, source.config.model, options.tokenizer)
    begin, ends = (marks_of(source.directory, name) for name in ("bos_token_id", "eos_token_id"))
    prompts = [prompt_of(text, vocabulary, begin, model) for text in _texts(options)]
    check_room(model, prompts, options.max_tokens)
    num_places = max(map(len, prompts)) + options.max_tokens
    with started(options, source, prompts) as ranks:
        prepared = ranks.call("prepare")
        if prepared[0][0]:
            raise ValueError(prepared[0][0])
        if source.trained_on is not None and num_places > source.trained_on:
            say(f"sequences of up to {num_places} tokens; the run was trained on {source.trained_on}")
        cache = max(num_bytes for _, num_bytes in prepared)
        say(f"a cache for {len(prompts)} x {num_places} tokens, {cache / 1e6:,.1f} MB per rank")
        _print(ranks, prompts, vocabulary, set(ends), options.max_tokens)


def find_model(options: GenerateOptions) -> FoundModel:
    """Return the model of RUN, RUN@STEP or a directory, with a layout that its sizes allow.

    Raises:
        ValueError: no such model, or a layout or dtype that cannot be.
    """
    parallel = ParallelConfig(options.tp, options.pp, 1)
    if (run := run_of(options.model)) is not None:
        saved = saved_config(str(run[0]), options.architecture)
        model, directory, trained_on = replace(saved.model, path=options.model), run[0], saved.train.seq_len
        dtype: str = options.dtype or saved.train.dtype
    else:
        asked = ModelConfig(path=options.model, architecture=options.architecture or ModelConfig().architecture)
        model, directory, trained_on = model_at(asked), Path(options.model), None
        dtype = options.dtype or next(name for name, of in FILE_NAMES.items() if of == open_directory(directory).dtype)
    # Nothing is dropped, and a pass is one micro-batch of one sequence.
    model = replace(model, residual_dropout=0.0, attention_dropout=0.0, mlp_dropout=0.0)
    train = TrainConfig(
        dtype=cast(Any, dtype), seq_len=options.tp, micro_batch_size=1, num_micro_batches=1, steps=1, timeout_seconds=0
    )
    config = Config(model=model, parallel=parallel, train=train, device=cast(Any, options.device))
    return FoundModel(validate(config, options.tp * options.pp), directory, trained_on)


def started(options: GenerateOptions, source: FoundModel, prompts: list[list[int]]) -> Ranks:
    """Return processes that continue prompts, when they have been told to prepare; of none, those that come later."""
    world = options.tp * options.pp
    return Ranks(world, _RANK, source.config, prompts, options.max_tokens, options.drawing, num_threads_of(world))


def num_threads_of(world_size: int) -> int:
    """Return how many threads each of so many processes of this host computes with."""
    # What a user has set counts; started ranks have one thread.
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, num_cores() // world_size)


def prompt_of(text: str, vocabulary: Vocabulary, begin: Sequence[int], model: ModelConfig) -> list[int]:
    """Return the tokens of a prompt; of an empty one, the mark that begins a text.

    Raises:
        ValueError: it is empty, and the model has no such mark; the tokenizer is not the model's.
    """
    tokens = vocabulary.encode(text) or list(begin[:1])
    if not tokens:
        raise ValueError(
            "a prompt needs a token where a model has none that begins a text: got an empty one: use --prompt TEXT"
        )
    check_vocabulary(tokens, model)
    return tokens


def check_vocabulary(tokens: Sequence[int], model: ModelConfig) -> None:
    """Raise ValueError for tokens that the model does not have."""
    if (largest := max(tokens, default=0)) >= model.vocab_size:
        raise ValueError(
            f"a prompt's tokens must lie in the model's vocabulary: got {largest}, vocabulary {model.vocab_size}: use "
            f"0 to {model.vocab_size - 1}, or the tokenizer of this model"
        )


def _texts(options: GenerateOptions) -> list[str]:
    """Return the prompts as they were given; one empty one if none was."""
    return [*options.prompts, *map(_read, options.files)] or [""]


def _read(file: str) -> str:
    return decoded(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes(), file)


def decoded(content: bytes, file: str) -> str:
    """Return the text of bytes that were read; ValueError where they are none."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"a prompt must be UTF-8: {file}: {error.reason} at byte {error.start}: convert it") from None


def check_room(model: ModelConfig, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Refuse more tokens than learned positions; rotary ones have no end."""
    longest, most = max(map(len, prompts)), model.details.max_positions
    if most and longest + max_tokens > most:
        remedy = f"use --max-tokens {most - longest}" if longest < most else "use a shorter prompt"
        raise ValueError(
            f"prompt and --max-tokens must have positions: {longest} + {max_tokens} tokens, the model has {most}: "
            f"{remedy}"
        )


def _print(ranks: Ranks, prompts: Sequence[Sequence[int]], vocabulary: Vocabulary, ends: set[int], most: int) -> None:
    """Ask the ranks for tokens until all sequences have ended; print them, and how long it took.

    One sequence is printed as it comes. Of several each is printed as a whole, once all have ended.
    """
    streams = [Stream(vocabulary, prompt) for prompt in prompts]
    texts = [vocabulary.decode(prompt) for prompt in prompts]
    open_ones, seconds = set(range(len(prompts))), list[float]()
    if len(prompts) == 1:
        write_text(texts[0])
    while open_ones and len(seconds) < most:
        begin = time.perf_counter()
        tokens = ranks.call("step")[0]
        seconds.append(time.perf_counter() - begin)
        # What follows on an end is computed, and nobody reads it.
        open_ones -= {row for row in open_ones if tokens[row] in ends}
        for row in open_ones:
            part = streams[row].add(tokens[row])
            texts[row] += part
            if len(prompts) == 1:
                write_text(part)
    for number, (text, stream) in enumerate(zip(texts, streams, strict=True), start=1):
        write_text(f"{stream.end()}\n" if len(prompts) == 1 else f"--- prompt {number}\n{text}{stream.end()}\n")
    num_read, num_drawn = sum(map(len, prompts)), len(prompts) * (len(seconds) - 1)
    said = [f"prefill {_speed(num_read, seconds[0])}"]
    if num_drawn:
        said.append(f"decode {_speed(num_drawn, sum(seconds[1:]))}")
    say("; ".join(said))


def _speed(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens} tokens in {seconds:.3f} s, {num_tokens / max(seconds, 1e-9):,.0f} tokens/s"


def say(line: str) -> None:
    """Say what is no part of the text, so that `> FILE` has the text alone."""
    print(f"tpengine: {line}", file=sys.stderr, flush=True)
