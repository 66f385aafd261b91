"""How large a step and how long a run is, where they are said by what matters: sequences of a step, tokens, epochs.

    train.global_batch    decides train.num_micro_batches, once dp is known
    train.tokens          decides train.steps, once the tokens of a step are known
    train.epochs          decides train.steps, once the text is known, too (commands/arguments.py)

What is decided takes the place of what was said: a run's config.toml has numbers of micro-batches and of steps. A
resume in another layout keeps the product of micro-batches and replicas, and the steps, so batch and end stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tpengine.config.amounts import tokens_of
from tpengine.config.settings import Config, TrainConfig

# Of a run; of a step and replica.
MOST_STEPS = 2**40
MOST_MICRO_BATCHES = 2**14

# Settings that say the same: the first is what a run has, the others decide it.
_SAY_THE_SAME = (("num_micro_batches", "global_batch"), ("steps", "tokens", "epochs"))
# Those others, and their values where nothing is said.
DECIDING = {name: getattr(TrainConfig(), name) for _, *deciding in _SAY_THE_SAME for name in deciding}


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
