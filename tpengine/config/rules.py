"""Which settings are legal together: every rule a user can break, checked before any process group exists.

Which values are legal by themselves is in ranges.py. A broken rule is reported in one line: the rule, the values and
the nearest legal choice.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tpengine.config.exact_sizes import BLOCK, MOST_SHARDS, elements_of_shared_experts, largest_dp, num_shards_of
from tpengine.config.lengths import Amount, amount_of, with_batch
from tpengine.config.optimizers import optimizer_kind
from tpengine.config.ranges import (
    check_model,
    check_ranges,
    divisors,
    legal_heads,
    nearest_multiples,
    nearest_of,
    shares_heads,
)
from tpengine.config.settings import (
    DEFAULT_SHARE_HELD_OUT,
    Config,
    DataConfig,
    ParallelConfig,
    TrainConfig,
    round_up,
    spike_rule_of,
)
from tpengine.plan import Schedule, make_schedule

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
    processes is even, and dp takes the rest: 4 processes are tp 2, pp 2, dp 1. Where ranks share experts they become
    what comes first after that and lets ep be tp, or tp times a divisor of dp: with ep 4 tp 2, pp 1, dp 2.

    Raises:
        ValueError: more processes than are counted with, or no choice gives their number; names the nearest layouts.
    """
    if world_size < 1:
        raise ValueError(f"a run needs a process: the number of processes is {world_size}: start at least 1")
    if world_size > MOST_RANKS:
        raise ValueError(f"a run has at most {MOST_RANKS} processes: got {world_size}: start {MOST_RANKS} or fewer")
    check_sizes(parallel)
    given = {axis: getattr(parallel, axis) for axis in _SIZES}
    known = math.prod(size for size in given.values() if size is not None)
    rest, remainder = divmod(world_size, known)
    missing = [axis for axis, size in given.items() if size is None]
    if remainder or (not missing and rest != 1):
        raise ValueError(_layout_message(given, world_size, known))
    filled = _filled(missing, rest, all_of_them=parallel.ep > 1)
    first = given | next(filled)
    # If none lets ep be what it is, the first is refused for that (_check_experts).
    layouts = itertools.chain([first], (given | sizes for sizes in filled))
    return replace(parallel, **next((layout for layout in layouts if _fits_ep(layout, parallel.ep)), first))


def _filled(missing: Sequence[str], rest: int, *, all_of_them: bool) -> Iterator[dict[str, int]]:
    """Yield sizes for the axes that are left out, whose product is `rest`: the preferred ones, or all."""
    if len(missing) < 2:
        yield dict.fromkeys(missing, rest)
        return
    axis, *others = missing
    preferred = [2, 1] if rest % 2 == 0 else [1]
    sizes = [*preferred, *(size for size in divisors(rest) if size > 2 or size not in preferred)]
    for size in sizes if all_of_them else sizes[:1]:
        for more in _filled(others, rest // size, all_of_them=all_of_them):
            yield {axis: size, **more}


def _fits_ep(sizes: Mapping[str, int | None], ep: int) -> bool:
    """Return whether ep is tp, or tp times a divisor of dp; also where experts are not shared."""
    tp, dp = sizes["tp"], sizes["dp"]
    assert tp and dp, "all sizes are filled in"
    return ep < 2 or (ep % tp == 0 and tp * dp % ep == 0)


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
    optimizer_kind(config.optim)
    _check_data(config)
    _check_evaluation(config)
    _check_after_checkpoint(config.train)
    _check_checkpoints(config.train)
    profiled_steps(config)
    check_model(config.model)
    _check_attention(config)
    config = _with_router_bias(config)
    config = with_batch(replace(config, parallel=resolve_layout(config.parallel, world_size)))
    _check_learning_rate(config)
    _check_layout(config)
    _check_schedule(config)
    return config


def _with_router_bias(config: Config) -> Config:
    """Return a configuration whose routers have the bias that train.balance moves.

    Raises:
        ValueError: a model without experts.
    """
    balance, details = config.train.balance, config.model.details
    if balance != "none" and not details.num_experts:
        raise ValueError(
            f"train.balance is of a model with experts: got {balance}, model.details.num_experts 0: use none, or a "
            "model with experts, as --preset tiny_moe"
        )
    if balance != "bias" or details.router_bias:
        return config
    return replace(config, model=replace(config.model, details=replace(details, router_bias=True)))


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
        other = f", or {nearest_of('num_heads', model.num_heads, legal_heads(model, tp))}"
        raise ValueError(
            f"num_heads must be divisible by tp: num_heads {model.num_heads}, tp {tp}: use "
            f"{nearest_of('tp', tp, divisors(math.gcd(model.num_heads, world_size)))}"
            f"{other if is_open else ''}"
        )
    for name, width in model.ffn_widths.items():
        # Ranks that share experts hold whole ones.
        if width % tp and (name != "expert_ffn_size" or config.parallel.ep == 1):
            other = f", or {nearest_multiples(name, width, tp)}"
            raise ValueError(
                f"{name} must be divisible by tp: {name} {width}, tp {tp}: use "
                f"{nearest_of('tp', tp, divisors(math.gcd(width, world_size)))}"
                f"{other if is_open and name == 'ffn_size' else ''}"
            )
    kv = model.num_kv_heads
    if not shares_heads(kv, tp):
        sharing = [of for of in divisors(math.gcd(model.num_heads, world_size)) if shares_heads(kv, of)]
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
    _check_experts(config)
    _check_moe_load(config)
    _check_residency(config.parallel)
    if train.reduction == "exact":
        _check_exact(config, tp, dp)


def legal_ep(config: Config) -> list[int]:
    """Return the values of parallel.ep that a configuration may have whose tp and dp are resolved, ascending."""
    parallel, num_experts = config.parallel, config.model.details.num_experts
    assert parallel.tp and parallel.dp, "resolve the layout first: config.resolve_layout"
    if not num_experts:
        return [1]
    shared = [parallel.tp * number for number in divisors(parallel.dp)]
    return sorted({1, *(ep for ep in shared if num_experts % ep == 0 and _has_whole_blocks(config, ep))})


def _has_whole_blocks(config: Config, ep: int) -> bool:
    """Return whether exact mode's norm adds up whole blocks of a rank's experts; in fast mode there are none."""
    return config.train.reduction == "fast" or elements_of_shared_experts(config, ep) % BLOCK == 0


def _check_experts(config: Config) -> None:
    tp, dp, ep = config.parallel.tp, config.parallel.dp, config.parallel.ep
    num_experts = config.model.details.num_experts
    assert tp is not None and dp is not None
    legal = legal_ep(config)
    if ep in legal:
        return
    if not num_experts:
        raise ValueError(f"ep shares out the experts of a model: ep {ep}, and this model has none: use ep 1")
    remedy = f"use {nearest_of('ep', ep, legal)}"
    if num_experts % ep:
        raise ValueError(f"num_experts must be divisible by ep: num_experts {num_experts}, ep {ep}: {remedy}")
    if tp * dp % ep:
        raise ValueError(f"ep must divide the tp * dp ranks of a stage: ep {ep}, tp {tp} * dp {dp}: {remedy}")
    if not _has_whole_blocks(config, ep):
        raise ValueError(
            f"with train.reduction exact a rank's experts must be whole blocks of {BLOCK} elements of each of the "
            f"{num_shards_of(config)} shards, in which the gradient's norm adds up: {num_experts} experts / ep {ep} x "
            f"expert_ffn_size {config.model.details.expert_ffn_size} / {num_shards_of(config)} x hidden_size "
            f"{config.model.hidden_size} = {elements_of_shared_experts(config, ep)}: {remedy}, or train.reduction fast"
        )
    raise ValueError(f"ep must be tp, or tp times a divisor of dp: ep {ep}, tp {tp}, dp {dp}: {remedy}")


def _check_moe_load(config: Config) -> None:
    load, ep, reduction = config.parallel.moe_load, config.parallel.ep, config.train.reduction
    if load and load < 1:
        raise ValueError(
            f"moe_load is for how many times the mean number of rows a rank's experts have room: got {load:g}: use 1 "
            "or more, or 0 for what fits"
        )
    if load and (ep == 1 or reduction == "exact"):
        why = "ep 1" if ep == 1 else "train.reduction exact, where rows travel at their exact number"
        raise ValueError(
            f"moe_load is of ranks that share experts, in fast mode: got {load:g} with {why}: use moe_load 0"
        )


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
    shards, widths = num_shards_of(config), " and ".join(f"{name} {of}" for name, of in model.ffn_widths.items())
    if shards % tp:
        raise ValueError(
            f"with train.reduction exact tp must divide the number of shards, {shards}, that num_heads "
            f"{model.num_heads}, num_kv_heads {model.num_kv_heads}, {widths} and "
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


def _legal_kv_heads(kv: int, tp: int) -> list[int]:
    """Return numbers of KV heads that divide tp or are divisible by it: all that are near `kv`."""
    return [*divisors(tp), *(multiple for multiple in (kv // tp * tp, round_up(kv, tp)) if multiple)]
