"""Which settings are legal: every rule a user can break, checked before any process group exists.

A broken rule is reported in one line: the rule, the values and the nearest legal choice.
"""

from __future__ import annotations

import math
import re
import shlex
import types
import typing
from collections.abc import Mapping
from dataclasses import replace

from tpengine.config.amounts import Amount, amount_of, tokens_of
from tpengine.config.detail_rules import check_details
from tpengine.config.exact_sizes import MOST_SHARDS, largest_dp, num_shards_of
from tpengine.config.lengths import MOST_MICRO_BATCHES, MOST_STEPS, with_batch
from tpengine.config.nearest import divisors, nearest_multiples, nearest_of
from tpengine.config.settings import (
    DEFAULT_SHARE_HELD_OUT,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    round_up,
)
from tpengine.config.spikes import spike_rule_of
from tpengine.plan import Schedule, make_schedule
from tpengine.spelling import choose

# Of a model.
MOST_LAYERS = 2**14
# Of a pipeline rank; of a micro-batch; of a step.
MOST_CHUNKS = 2**10
MOST_SEQUENCES = 2**16
MOST_BATCH = 2**32


# The sizes of a layout, and the most processes that are counted with.
_SIZES = ("tp", "pp", "dp")
MOST_RANKS = 2**24


def check_sizes(parallel: ParallelConfig) -> None:
    """Raise ValueError for a size of a layout that is none by itself, whatever the others are."""
    for axis in _SIZES:
        size = getattr(parallel, axis)
        if size is not None and not 1 <= size <= MOST_RANKS:
            rule, nearest = ("at least 1", 1) if size < 1 else (f"at most {MOST_RANKS}", MOST_RANKS)
            raise ValueError(f"{axis} must be {rule}: got {size}: use {nearest}")


def resolve_layout(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """Fill in the sizes that were left out, so that tp * pp * dp is the number of processes.

    Two given sizes determine the third. If more are left out, tp and then pp become 2 if the remaining number of
    processes is even, and dp takes the rest: 4 processes are tp 2, pp 2, dp 1.

    Raises:
        ValueError: no choice gives the number of processes; names the nearest layouts.
    """
    if world_size < 1:
        raise ValueError(f"a run needs a process: the number of processes is {world_size}: start at least 1")
    check_sizes(parallel)
    given = {axis: getattr(parallel, axis) for axis in _SIZES}
    known = math.prod(size for size in given.values() if size is not None)
    rest, remainder = divmod(world_size, known)
    missing = [axis for axis, size in given.items() if size is None]
    if remainder or (not missing and rest != 1):
        raise ValueError(_layout_message(given, world_size, known))
    for axis in missing:
        is_last = axis == missing[-1]
        given[axis] = rest if is_last else (2 if rest % 2 == 0 else 1)
        rest //= given[axis]
    return replace(parallel, **given)


def _layout_message(given: Mapping[str, int | None], world_size: int, known: int) -> str:
    sizes = " ".join(f"{axis} {size}" for axis, size in given.items() if size is not None)
    default = resolve_layout(ParallelConfig(), world_size)
    processes = round_up(world_size, known) if None in given.values() else known
    return (
        f"tp*pp*dp must equal the number of processes: {sizes}, processes {world_size}: start {processes} "
        f"processes, or use tp {default.tp} pp {default.pp} dp {default.dp}"
    )


def validate(config: Config, world_size: int) -> Config:
    """Check everything a user can get wrong and resolve the layout.

    Args:
        world_size: number of processes.

    Returns:
        The configuration with tp, pp, dp and the micro-batches of a step set.

    Raises:
        ValueError: the rule, the values and the nearest legal choice, in one line.
    """
    check_ranges(config)
    _check_data(config)
    _check_evaluation(config)
    _check_after_checkpoint(config.train)
    _check_checkpoints(config.train)
    profiled_steps(config)
    _check_model(config.model)
    _check_attention(config)
    config = with_batch(replace(config, parallel=resolve_layout(config.parallel, world_size)))
    _check_learning_rate(config)
    _check_layout(config)
    _check_schedule(config)
    return config


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of a configuration whose layout is resolved, generated or read from a file.

    Raises:
        ValueError: the file is not a schedule for these ranks and micro-batches.
    """
    parallel = config.parallel
    assert parallel.pp, "resolve the layout first: config.validate"
    return make_schedule(parallel.schedule, parallel.pp, config.train.num_micro_batches, parallel.chunks_per_rank)


def profiled_steps(config: Config) -> range:
    """Return the steps that train.profile_steps says to record, from 0; none where the run chooses them (auto).

    Raises:
        ValueError: the text is neither empty nor auto nor A:B with 0 <= A < B <= steps.
    """
    text, steps = config.train.profile_steps, config.train.steps
    if text in ("", "auto"):
        return range(0)
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    first, end = map(int, match.groups()) if match else (0, 0)
    if not (first < end <= steps and end - first <= _MOST_PROFILED_STEPS):
        # Propose the given start if there is one, else a late step: the first steps are not representative.
        first = min(first if match else 3, steps - 1)
        end = min(max(end, first + 1), first + _MOST_PROFILED_STEPS, steps)
        raise ValueError(
            f"train.profile_steps must be auto, or A:B, from A finished steps to B of {steps}, at most "
            f"{_MOST_PROFILED_STEPS}: got {text!r}: use {first}:{end}"
        )
    return range(first, end)


def _check_attention(config: Config) -> None:
    """Check what torch's attention, if it is asked for, never computes; what this GPU's does is asked where it runs."""
    if config.train.attention != "torch":
        return
    rate, dtype = config.model.attention_dropout, config.train.dtype
    refusal = ""
    if config.train.reduction == "exact":
        refusal = "with train.reduction exact attention is ours, whose bits repeat"
    elif rate:
        refusal = f"it drops probabilities by a mask of its own, and model.attention_dropout is {rate}"
    elif dtype == "float32":
        refusal = f"it is for 16 bits, and train.dtype is {dtype}"
    if refusal:
        raise ValueError(
            f"train.attention torch must be what torch computes alike: {refusal}: use train.attention auto, or ours"
        )


def _check_schedule(config: Config) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    schedule = schedule_of(config)
    num_chunks = len(schedule.ranks)
    if num_chunks > num_layers:
        raise ValueError(
            f"every chunk of a schedule needs a layer: {parallel.schedule} cuts the model into {num_chunks} chunks "
            f"over pp {parallel.pp}, num_layers {num_layers}: use num_layers {num_chunks} or more, or another schedule"
        )
    if config.train.reduction == "exact" and parallel.gathered != "keep":
        raise ValueError(
            f"parallel.gathered {parallel.gathered} is for train.reduction fast: with exact all shards share "
            "what is gathered: use parallel.gathered keep"
        )
    if config.train.reduction == "exact" and not schedule.keeps_order:
        raise ValueError(
            "with train.reduction exact a schedule must add each chunk's gradients in the order of the micro-batches: "
            f"{parallel.schedule} does not: reorder its B and W, or use train.reduction fast"
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.mixture and data.path != DataConfig().path:
        raise ValueError(
            f"a run reads one text or one mixture: got data.path {data.path} and data.mixture {data.mixture}: leave "
            "one out, or name the text in the mixture"
        )
    if data.held_out and data.held_out_fraction:
        raise ValueError(
            f"a run holds out a text or a share of its own: got data.held_out {data.held_out} and "
            f"data.held_out_fraction {data.held_out_fraction:g}: use data.held_out_fraction 0, or leave one out"
        )


def _check_evaluation(config: Config) -> None:
    train, data = config.train, config.data
    # Sources of a mixture may have held-out texts: what they lack is said when they are opened.
    holds_out = bool(data.held_out or data.held_out_share or data.mixture)
    for every, number, what in (
        ("eval_every", "eval_micro_batches", "a held-out loss"),
        ("eval_samples", "eval_micro_batches", "a held-out loss"),
        ("sample_every", "sample_tokens", "a sample"),
    ):
        asked, default = getattr(train, every), getattr(TrainConfig(), number)
        if asked and not getattr(train, number):
            raise ValueError(
                f"train.{every} {asked} asks for {what}, which train.{number} 0 leaves out: use train.{number} "
                f"{default}, or train.{every} 0"
            )
        if asked and not holds_out:
            raise ValueError(
                f"train.{every} {asked} needs a held-out text: data.held_out_fraction is 0: use "
                f"data.held_out_fraction {DEFAULT_SHARE_HELD_OUT}, data.held_out FILE, or train.{every} 0"
            )


def _check_after_checkpoint(train: TrainConfig) -> None:
    command = train.after_checkpoint
    if not command:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"train.after_checkpoint must be a command: got {command!r}: {error}: use quotes as a shell has them"
        ) from None
    if not any("{path}" in word for word in words[1:]):
        raise ValueError(
            f"train.after_checkpoint must say where a checkpoint's path goes: got {command!r}: use "
            f"'{' '.join(words) or 'COMMAND'} {{path}}'"
        )
    if not train.checkpoint_every:
        raise ValueError(
            f"train.after_checkpoint needs checkpoints: train.checkpoint_every is 0: use train.checkpoint_every "
            f"{TrainConfig().checkpoint_every}, or no train.after_checkpoint"
        )


def _check_checkpoints(train: TrainConfig) -> None:
    """Check what needs checkpoints."""
    default, every, evaluated = TrainConfig().checkpoint_every, train.checkpoint_every, train.eval_every
    rule = spike_rule_of(train.spike)
    if rule is not None and rule.action == "rollback" and not every:
        raise ValueError(
            f"a rollback needs checkpoints: train.spike {train.spike}, train.checkpoint_every 0: use "
            f"train.checkpoint_every {default}, or train.spike skip"
        )
    if not train.keep_best:
        return
    if not every:
        raise ValueError(
            "the best checkpoint can only be kept of a run that saves some: train.checkpoint_every is 0: use "
            f"train.checkpoint_every {default}, or no train.keep_best"
        )
    if not evaluated:
        raise ValueError(
            f"the best checkpoint is that of the lowest held-out loss: train.eval_every is 0: use train.eval_every "
            f"{every}, or no train.keep_best"
        )
    if every % evaluated:
        nearest = max(round(every / evaluated), 1) * evaluated
        raise ValueError(
            "with train.keep_best every checkpoint needs a held-out loss, so that train.checkpoint_every is a multiple "
            f"of train.eval_every: got {every} and {evaluated}: use train.checkpoint_every {nearest}, or "
            f"train.eval_every {math.gcd(every, evaluated)}"
        )


# Rank 0 holds the records of all ranks until the last recorded step.
_MOST_PROFILED_STEPS = 100

# From which stages of ZeRO on a rank holds a slice only: of gradients, and of weights.
ZERO_OF_SLICED_GRADIENTS, ZERO_OF_SLICED_WEIGHTS = 2, 3

# A dropout mask can distinguish this many.
_MOST_MICRO_BATCHES = 2**24

# Open bounds, written as the nearest closed bounds.
_POSITIVE, _BELOW_ONE = math.ulp(0.0), math.nextafter(1.0, 0.0)

# Smallest and largest legal value by key; None for no bound.
RANGES: Mapping[str, tuple[float | None, float | None]] = types.MappingProxyType(
    {
        "model.hidden_size": (1, 2**20),
        "model.num_layers": (1, MOST_LAYERS),
        "model.num_heads": (1, 2**16),
        "model.num_kv_heads": (1, 2**16),
        "model.ffn_size": (1, 2**22),
        "model.vocab_size": (2, 2**32),
        "model.rope_theta": (1, None),
        "model.norm_eps": (0, None),
        "model.residual_dropout": (0, _BELOW_ONE),
        "model.attention_dropout": (0, _BELOW_ONE),
        "model.mlp_dropout": (0, _BELOW_ONE),
        "parallel.chunks_per_rank": (1, MOST_CHUNKS),
        "parallel.bucket_bytes": (1, 2**62),
        "parallel.memory_limit": (0, 2**62),
        "train.seq_len": (1, 2**24),
        "train.micro_batch_size": (1, MOST_SEQUENCES),
        "train.num_micro_batches": (1, MOST_MICRO_BATCHES),
        "train.global_batch": (0, MOST_BATCH),
        "train.steps": (1, MOST_STEPS),
        "train.epochs": (0, 2**30),
        "train.seed": (0, 2**63 - 1),
        "train.eval_micro_batches": (0, 2**14),
        "train.eval_samples": (0, 2**30),
        "train.sample_tokens": (0, 2**20),
        "train.eval_every": (0, 2**40),
        "train.sample_every": (0, 2**40),
        "train.checkpoint_every": (0, 2**40),
        "train.keep_checkpoints": (1, 2**20),
        "train.keep_every": (0, 2**40),
        "train.nonfinite_steps": (1, 2**20),
        "train.check_replicas_every": (0, 2**40),
        "train.timeout_seconds": (0, None),
        "data.held_out_fraction": (0, 0.9),
        "optim.lr": (_POSITIVE, None),
        "optim.beta1": (0, _BELOW_ONE),
        "optim.beta2": (0, _BELOW_ONE),
        "optim.eps": (_POSITIVE, None),
        "optim.weight_decay": (0, None),
        "optim.min_lr_ratio": (0, 1),
        "optim.clip_norm": (0, None),
    }
)


def check_model_sizes(model: ModelConfig) -> None:
    """Check the sizes of a model by themselves, as `validate` does.

    Raises:
        ValueError: as validate.
    """
    check_ranges(Config(model=model))
    _check_model(model)


def check_ranges(config: Config) -> None:
    """Raise ValueError for the first setting whose value is none by itself, whatever the others are."""
    tokens_of(config.train.tokens, "train.tokens")
    for key, (low, high) in RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        default = getattr(getattr(Config(), section), name)
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite: got {value}: use {default}")
        if low is not None and value < low:
            rule, nearest = ("positive", default) if low == _POSITIVE else (f"at least {low}", low)
            raise ValueError(f"{key} must be {rule}: got {value}: use {nearest}")
        if high is not None and value > high:
            rule, nearest = ("below 1", default) if high == _BELOW_ONE else (f"at most {high}", high)
            raise ValueError(f"{key} must be {rule}: got {value}: use {nearest}")
    check_details(config.model)
    for owner, section, name in (
        (config.parallel, "parallel.", "tp_comm"),
        (config.parallel, "parallel.", "recompute"),
        (config.parallel, "parallel.", "gathered"),
        (config.parallel, "parallel.", "zero"),
        (config.parallel, "parallel.", "residency"),
        (config.train, "train.", "dtype"),
        (config.train, "train.", "reduction"),
        (config.train, "train.", "attention"),
        (config.optim, "optim.", "schedule"),
        (config, "", "device"),
    ):
        key, value = section + name, getattr(owner, name)
        choices = typing.get_args(typing.get_type_hints(type(owner))[name])
        if value not in choices:
            raise ValueError(
                f"{key} must be one of {', '.join(map(str, choices))}: got {value!r}: {choose(value, choices)}"
            )
    token, vocab = config.data.ignore_token, config.model.vocab_size
    if token is not None and not 0 <= token < vocab:
        raise ValueError(
            f"data.ignore_token must be a token of the vocabulary: got {token}, vocab_size {vocab}: "
            f"use 0 to {vocab - 1}"
        )


def _check_learning_rate(config: Config) -> None:
    optim = config.optim
    amounts = {
        name: amount_of(getattr(optim, name), f"optim.{name}") for name in ("warmup_steps", "decay_steps", "decay_from")
    }
    begin, end = amounts["decay_from"], amounts["decay_steps"]
    if not end.number:
        end = Amount(config.train.steps, "steps")
    train = config.train
    tokens_per_step = train.micro_batch_size * train.seq_len * train.num_micro_batches * (config.parallel.dp or 1)
    in_tokens = [amount.number * (tokens_per_step if amount.unit == "steps" else 1) for amount in (begin, end)]
    # Phases may have other batches: there only lengths in one unit can be compared.
    if begin.number and (begin.unit == end.unit or not config.phases) and in_tokens[0] >= in_tokens[1]:
        raise ValueError(
            f"a schedule's decay must begin before its end: optim.decay_from {begin}, optim.decay_steps {end}: use "
            f"optim.decay_from {end.number * 4 // 5}{' tokens' * (end.unit == 'tokens')} or another optim.decay_steps"
        )


def _check_model(model: ModelConfig) -> None:
    d, heads, kv = model.hidden_size, model.num_heads, model.num_kv_heads
    if model.details.head_size % 2:
        raise ValueError(
            f"a head's size must be even: config.json has head_dim {model.details.head_size}: use another model"
        )
    if not model.details.head_size and (d % heads or model.head_size % 2):
        raise ValueError(
            f"hidden_size must be num_heads times an even head size: hidden_size {d}, num_heads {heads}: "
            f"use {nearest_multiples('hidden_size', d, 2 * heads)}, or "
            f"{nearest_of('num_heads', heads, _legal_heads(model, 1))}"
        )
    if heads % kv:
        raise ValueError(
            f"num_heads must be divisible by num_kv_heads: num_heads {heads}, num_kv_heads {kv}: "
            f"use {nearest_of('num_kv_heads', kv, divisors(heads))}"
        )


def _check_layout(config: Config) -> None:
    model, train = config.model, config.train
    if 0 < model.details.max_positions < train.seq_len:
        raise ValueError(
            f"a model with learned positions has no more than {model.details.max_positions}: train.seq_len "
            f"{train.seq_len}: use --train.seq-len {model.details.max_positions}"
        )
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.dp
    assert tp is not None and pp is not None and dp is not None
    world_size = tp * pp * dp
    if pp > model.num_layers:
        raise ValueError(
            f"every pipeline stage needs a layer: pp {pp}, num_layers {model.num_layers}: "
            f"use pp {model.num_layers} or fewer, or num_layers {pp} or more"
        )
    # The sizes of a model that a directory has are no settings: there the layout alone can change.
    is_open = not model.path
    if model.num_heads % tp:
        other = f", or {nearest_of('num_heads', model.num_heads, _legal_heads(model, tp))}"
        raise ValueError(
            f"num_heads must be divisible by tp: num_heads {model.num_heads}, tp {tp}: use "
            f"{nearest_of('tp', tp, divisors(math.gcd(model.num_heads, world_size)))}"
            f"{other if is_open else ''}"
        )
    if model.ffn_size % tp:
        other = f", or {nearest_multiples('ffn_size', model.ffn_size, tp)}"
        raise ValueError(
            f"ffn_size must be divisible by tp: ffn_size {model.ffn_size}, tp {tp}: use "
            f"{nearest_of('tp', tp, divisors(math.gcd(model.ffn_size, world_size)))}"
            f"{other if is_open else ''}"
        )
    kv = model.num_kv_heads
    if not _shares_heads(kv, tp):
        sharing = [of for of in divisors(math.gcd(model.num_heads, world_size)) if _shares_heads(kv, of)]
        remedy = nearest_of("num_kv_heads", kv, _legal_kv_heads(kv, tp)) if is_open else nearest_of("tp", tp, sharing)
        raise ValueError(f"num_kv_heads must divide tp or be divisible by it: num_kv_heads {kv}, tp {tp}: use {remedy}")
    tokens = train.micro_batch_size * train.seq_len
    if tokens % tp:
        raise ValueError(
            f"the tokens of a micro-batch must be divisible by tp: micro_batch_size {train.micro_batch_size} * "
            f"seq_len {train.seq_len} = {tokens}, tp {tp}: use {nearest_multiples('seq_len', train.seq_len, tp)}, "
            f"or {nearest_multiples('micro_batch_size', train.micro_batch_size, tp)}"
        )
    if train.num_micro_batches * dp > _MOST_MICRO_BATCHES:
        raise ValueError(
            f"a step has at most {_MOST_MICRO_BATCHES} micro-batches: num_micro_batches {train.num_micro_batches} * dp "
            f"{dp}: use num_micro_batches {_MOST_MICRO_BATCHES // dp} or fewer"
        )
    _check_residency(config.parallel)
    if train.reduction == "exact":
        _check_exact(config, tp, dp)


def zero_in_words(parallel: ParallelConfig) -> str:
    """Return a line that says that the stage of ZeRO is 0 in effect; empty where it is as it was asked for."""
    if parallel.zero == parallel.zero_in_effect:
        return ""
    return f"zero {parallel.zero} with dp 1 is zero 0 in effect: replicas share what all hold, and there is one"


def _check_residency(parallel: ParallelConfig) -> None:
    zero, residency = parallel.zero, parallel.residency
    if zero != ZERO_OF_SLICED_WEIGHTS and residency != "auto":
        raise ValueError(
            f"residency says how long zero {ZERO_OF_SLICED_WEIGHTS} keeps gathered weights: residency {residency} "
            f"with zero {zero}, whose weights are whole: use residency auto, or zero {ZERO_OF_SLICED_WEIGHTS}"
        )


def _check_exact(config: Config, tp: int, dp: int) -> None:
    model, train = config.model, config.train
    shards = num_shards_of(config)
    if shards % tp:
        raise ValueError(
            f"with train.reduction exact tp must divide the number of shards, {shards}, that num_heads "
            f"{model.num_heads}, num_kv_heads {model.num_kv_heads}, ffn_size {model.ffn_size} and "
            f"{train.micro_batch_size} * {train.seq_len} tokens allow: tp {tp}: use "
            f"{nearest_of('tp', tp, divisors(shards))}, or train.reduction fast"
        )
    blocks = largest_dp(train.num_micro_batches * dp)
    if blocks % dp:
        # Independent of the micro-batches: dp divides the number of blocks if it is a power of two up to 8.
        raise ValueError(
            f"with train.reduction exact dp must divide the {blocks} blocks that the {train.num_micro_batches} * {dp} "
            f"micro-batches of a step are summed in: dp {dp}: use "
            f"{nearest_of('dp', dp, divisors(MOST_SHARDS))}, "
            "or train.reduction fast"
        )


def _legal_heads(model: ModelConfig, tp: int) -> list[int]:
    """Return the numbers of query heads that width, KV heads and tp allow."""
    even = divisors(model.hidden_size // 2) if model.hidden_size % 2 == 0 else ()
    return [heads for heads in even if heads % model.num_kv_heads == 0 and heads % tp == 0]


def _legal_kv_heads(kv: int, tp: int) -> list[int]:
    """Return numbers of KV heads that divide tp or are divisible by it: all that are near `kv`."""
    return [*divisors(tp), *(multiple for multiple in (kv // tp * tp, round_up(kv, tp)) if multiple)]


def _shares_heads(num_kv_heads: int, tp: int) -> bool:
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0
