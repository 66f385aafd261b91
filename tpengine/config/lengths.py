"""How large a step and how long a run is, where they are said by what matters: sequences of a step, tokens, epochs.

A length is in steps or in tokens: 2000, "4e9 tokens", "500M tokens", 2B.

    train.global_batch    decides train.num_micro_batches, once dp is known
    train.tokens          decides train.steps, once the tokens of a step are known
    train.epochs          decides train.steps, once the text is known, too (commands/arguments.py)

What is decided takes the place of what was said: a run's config.toml has numbers of micro-batches and of steps. A
resume in another layout keeps the product of micro-batches and replicas, and the steps, so batch and end stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple

from tpengine.config.settings import Config, TrainConfig

_FORM = re.compile(r"([0-9]{1,19}(?:\.[0-9]{0,9})?(?:e\+?[0-9]{1,2})?) *([kmbt]?) *(steps?|tokens?)?", re.IGNORECASE)
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Nobody trains as many steps, so that without a word these are tokens; 2k may be either.
_OF_TOKENS = ("m", "b", "t")
_MOST = 2**62
# Of a run; of a step and replica.
MOST_STEPS = 2**40
MOST_MICRO_BATCHES = 2**14
# Settings that say the same: the first is what a run has, the others decide it.
_SAY_THE_SAME = (("num_micro_batches", "global_batch"), ("steps", "tokens", "epochs"))
# Those others, and their values where nothing is said.
DECIDING = {name: getattr(TrainConfig(), name) for _, *deciding in _SAY_THE_SAME for name in deciding}


class Amount(NamedTuple):
    """A length.

    Attributes:
        number: at least 0.
        unit: "steps" or "tokens".
    """

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def amount_of(value: object, key: str) -> Amount:
    """Read a length in steps or tokens.

    Args:
        value: a number of steps, or a text: a number, maybe with k, M, B or T for thousands to millions of millions,
            and "steps" or "tokens". 2M, 2B and 2T alone are tokens.
        key: for the message.

    Raises:
        ValueError: anything else.
    """
    if type(value) is int and value < 0:
        raise ValueError(f"{key} must be at least 0: got {value}: use 0")
    rule = f'{key} must be a number of steps, or of tokens: got {_shown(value)}: use 2000 or "4e9 tokens"'
    number, letter, word = _parts(value, rule)
    if not word and letter == "k":
        raise ValueError(f'{key} must say of what it is: got {value!r}: use "{value} tokens" or "{value} steps"')
    return Amount(number, "tokens" if word == "tokens" or (not word and letter in _OF_TOKENS) else "steps")


def tokens_of(value: object, key: str) -> int:
    """Read a number of tokens: 2000000, or a text as "2e9 tokens", 2B, 500M.

    Args: value: of the setting. key: for the message.

    Raises:
        ValueError: anything else.
    """
    rule = f'{key} must be a number of tokens, at least 0: got {_shown(value)}: use 2000000, 2B or "4e9 tokens"'
    number, _, word = _parts(value, rule)
    if word == "steps":
        raise ValueError(rule)
    return number


def _parts(value: object, rule: str) -> tuple[int, str, str]:
    """Return a number, the letter that it was written with, and the word behind it: steps, tokens or none.

    Raises: ValueError: `rule`: it is no such text, no whole number, or too large.
    """
    # true and 1.0 are numbers of Python, too.
    match = _FORM.fullmatch(str(value).strip()) if type(value) in (int, str) else None
    if match is None:
        raise ValueError(rule)
    letter, word = match[2].lower(), (match[3] or "").lower()
    # A float has not the digits of every whole number.
    number = Decimal(match[1]) * _TIMES[letter]
    if number > _MOST or number != int(number):
        raise ValueError(rule)
    return int(number), letter, f"{word.removesuffix('s')}s" if word else ""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60]


def last_said(config: Config, given: Collection[str], where: str) -> Config:
    """Return the configuration in which what was given last decides.

    Args:
        config: with the given settings.
        given: names of settings of `train` that one place gives, a file or the command line.
        where: that place, for the message.

    Raises:
        ValueError: they say the same thing twice.
    """
    train = config.train
    for decided, *deciding in _SAY_THE_SAME:
        said = [name for name in (decided, *deciding) if name in given and (name == decided or getattr(train, name))]
        if len(said) > 1:
            values = " and ".join(f"train.{name} {getattr(train, name)}" for name in said)
            raise ValueError(f"one setting says it: {where} has {values}: leave one out")
        if said:
            train = replace(train, **{name: DECIDING[name] for name in deciding if name not in said})
    return replace(config, train=train)


def open_settings(train: TrainConfig) -> list[str]:
    """Return the settings of `train` that others decide later."""
    return [decided for decided, *deciding in _SAY_THE_SAME if any(getattr(train, name) for name in deciding)]


def with_batch(config: Config) -> Config:
    """Return the configuration with the micro-batches that train.global_batch asks for. The layout must be resolved.

    Raises:
        ValueError: the sequences of a step do not divide.
    """
    train, dp = config.train, config.parallel.dp or 1
    if not train.global_batch:
        return config
    of_one = train.micro_batch_size * dp
    number, rest = divmod(train.global_batch, of_one)
    if rest or not number:
        below, above = number * of_one, (number + 1) * of_one
        size = math.gcd(train.micro_batch_size, train.global_batch // math.gcd(train.global_batch, dp))
        other = f", or train.micro_batch_size {size}" if train.global_batch % (size * dp) == 0 else ""
        raise ValueError(
            f"train.global_batch must be divisible by the sequences of a micro-batch times dp: got "
            f"{train.global_batch}, {train.micro_batch_size} * {dp}: use train.global_batch "
            f"{f'{below} or {above}' if below else above}{other}"
        )
    if number > MOST_MICRO_BATCHES:
        raise ValueError(
            f"a step has at most {MOST_MICRO_BATCHES} micro-batches of a replica: train.global_batch "
            f"{train.global_batch}, {train.micro_batch_size} * {dp} sequences at once: use train.global_batch "
            f"{MOST_MICRO_BATCHES * of_one} or fewer"
        )
    return replace(config, train=replace(train, num_micro_batches=number, global_batch=0))


def with_steps(config: Config) -> Config:
    """Return the configuration with the steps that train.tokens asks for: the last one completes them.

    Args: config: without phases, layout and micro-batches decided.

    Raises:
        ValueError: they are more than a run may have.
    """
    train = config.train
    tokens = tokens_of(train.tokens, "train.tokens")
    if not tokens:
        return config
    per_step = train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1) * train.seq_len
    steps = -(-tokens // per_step)
    if steps > MOST_STEPS:
        raise ValueError(
            f"a run has at most {MOST_STEPS} steps: train.tokens {train.tokens}, {per_step} tokens per step: use "
            f'train.tokens "{MOST_STEPS * per_step} tokens" or fewer'
        )
    return replace(config, train=replace(train, steps=steps, tokens=0))


def with_epochs(config: Config, num_sequences: int) -> Config:
    """Return the configuration with the steps that train.epochs asks for: the last one completes them.

    Args: config: layout and micro-batches decided. num_sequences: of the text that is trained on.

    Raises:
        ValueError: they are more than a run may have.
    """
    train = config.train
    batch = train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)
    steps = math.ceil(train.epochs * num_sequences / batch)
    if steps > MOST_STEPS:
        raise ValueError(
            f"a run has at most {MOST_STEPS} steps: train.epochs {train.epochs:g} of {num_sequences} sequences, "
            f"{batch} per step: use train.epochs {MOST_STEPS * batch / num_sequences:.0f} or fewer"
        )
    return replace(config, train=replace(train, steps=max(1, steps), epochs=0.0))
