"""Which values are legal by themselves: numbers within their ranges, words among their choices, a model's sizes.

What several settings may be together is in rules.py. The nearest legal value, for the remedy of a message, is computed
from divisors, never found by counting: what a user may type has no bound, so that a search from there has none either.
Details of a config.json are checked as it is read, in the file's own words (architectures/describe); a TOML file may
say anything.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tpengine.config.lengths import MOST_MICRO_BATCHES, MOST_STEPS, tokens_of
from tpengine.config.settings import Config, ModelConfig, ModelDetails, ParameterGroup, round_up
from tpengine.spelling import choose

_MOST_DETAIL = 2**31
# Characters of a wrong value that a message shows.
_MOST_SHOWN = 40
# What is divided by, or logarithms are taken of, by the kinds that read it.
_ROPE_POSITIVE = {
    "factor": ("linear", "llama3", "yarn", "longrope"),
    "original_max_position_embeddings": ("llama3", "yarn", "longrope"),
    "low_freq_factor": ("llama3",),
    "beta_slow": ("yarn",),
}
_ROPE_ASCENDING = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
# Of a model.
MOST_LAYERS = 2**14
# Of a pipeline rank; of a micro-batch; of a step.
MOST_CHUNKS = 2**10
# What the kernel that chooses them is written for.
MOST_EXPERTS = 2**12
MOST_SEQUENCES = 2**16
MOST_BATCH = 2**32
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
        "parallel.ep": (1, 2**24),
        "parallel.chunks_per_rank": (1, MOST_CHUNKS),
        "parallel.bucket_bytes": (1, 2**62),
        "parallel.memory_limit": (0, 2**62),
        "parallel.moe_load": (0, None),
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
        "train.label_smoothing": (0, 1),
        "train.z_loss": (0, None),
        "train.balance_rate": (_POSITIVE, None),
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


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number of at least 1, ascending. Cost: its square root."""
    below = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*below, *(number // size for size in below)}))


def nearest_of(name: str, number: int, legal: Iterable[int]) -> str:
    """Return the legal values on both sides of a number as text: "tp 2 or 4"."""
    known = sorted(legal)
    below = [value for value in known if value <= number][-1:]
    above = [value for value in known if value >= number][:1]
    found = dict.fromkeys(map(str, below + above))
    return f"{name} {' or '.join(found)}" if found else f"another {name}"


def nearest_multiples(name: str, number: int, multiple: int, most: int | None = None) -> str:
    """Return the multiples on both sides of a number as text: "seq_len 126 or 128".

    Args: most: the largest legal value; None for no bound.
    """
    up = round_up(number, multiple)
    return nearest_of(name, number, (of for of in (up - multiple, up) if of > 0 and (most is None or of <= most)))


def check_details(model: ModelConfig) -> None:
    """Raise ValueError for the first detail whose value is none by itself, or that does not fit the layers."""
    details = model.details
    _check_each(details, ModelDetails(), "model.details.")
    rope = details.rope
    for name, kinds in _ROPE_POSITIVE.items():
        if rope.rope_type in kinds and getattr(rope, name) <= 0:
            raise ValueError(
                f"model.details.rope.{name} must be positive with rope_type {rope.rope_type}: got "
                f"{getattr(rope, name)}: use that of config.json"
            )
    if rope.rope_type in _ROPE_ASCENDING:
        low, high = _ROPE_ASCENDING[rope.rope_type]
        if not getattr(rope, low) < getattr(rope, high):
            raise ValueError(
                f"model.details.rope.{low} must be below {high}: got {getattr(rope, low)} and {getattr(rope, high)}: "
                "use those of config.json"
            )
    size, head_size = model.rotary_size, model.head_size
    if rope.partial_rotary_factor != 1 and (size % 2 or not 0 < size <= head_size):
        raise ValueError(
            f"model.details.rope.partial_rotary_factor must rotate an even number of a head's elements: got "
            f"{rope.partial_rotary_factor} with heads of {head_size}, so {size}: use that of config.json"
        )
    for name in ("short_factor", "long_factor") if rope.rope_type == "longrope" else ():
        factors = getattr(rope, name)
        if len(factors) != size // 2 or min(factors, default=1.0) <= 0:
            raise ValueError(
                f"model.details.rope.{name} must be {size // 2} positive numbers, one of each pair of the {size} "
                f"rotated elements of a head: got {_shown(factors)}: use that of config.json"
            )
    if 0 < details.local_rope_theta < 1:
        raise ValueError(
            f"model.details.local_rope_theta must be at least 1, or 0: got {details.local_rope_theta}: use 0 for "
            "model.rope_theta"
        )
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        if getattr(details, name) <= 0:
            raise ValueError(f"model.details.{name} must be positive: got {getattr(details, name)}: use 1.0 for none")
    _check_experts(model)
    for name in ("windows", "rotates", "has_experts"):
        if (num := len(getattr(details, name))) not in (0, model.num_layers):
            raise ValueError(
                f"model.details.{name} must be one of each layer, or none: got {num} with num_layers "
                f"{model.num_layers}: use [] or {model.num_layers} of them"
            )


def _check_experts(model: ModelConfig) -> None:
    """Raise ValueError for numbers of experts that do not fit each other."""
    details = model.details
    num, chosen, groups = details.num_experts, details.experts_per_token, details.expert_groups
    if not num:
        return
    if num > MOST_EXPERTS:
        raise ValueError(
            f"a layer has at most {MOST_EXPERTS} experts: num_experts {num}: use num_experts {MOST_EXPERTS} or fewer"
        )
    if not 1 <= chosen <= num:
        raise ValueError(
            f"a token chooses 1 to num_experts experts: experts_per_token {chosen}, num_experts {num}: use "
            f"experts_per_token {min(max(chosen, 1), num)}"
        )
    if groups < 1 or num % groups or num == groups > 1:
        legal = [of for of in divisors(num) if of == 1 or of < num]
        raise ValueError(
            f"groups of experts must divide them, two at least in each: expert_groups {groups}, num_experts {num}: use "
            f"{nearest_of('expert_groups', groups, legal)}"
        )
    if not 1 <= details.groups_per_token <= groups or details.groups_per_token * (num // groups) < chosen:
        least = -(-chosen // (num // groups))
        raise ValueError(
            f"the groups that a token chooses within must hold its experts: groups_per_token "
            f"{details.groups_per_token} of {groups} groups of {num // groups} experts, experts_per_token {chosen}: "
            f"use groups_per_token {least} to {groups}"
        )
    if details.expert_ffn_size < 1 or details.router_scale <= 0:
        raise ValueError(
            f"experts need a width of at least 1 and a scale above 0: expert_ffn_size {details.expert_ffn_size}, "
            f"router_scale {details.router_scale}: use those of config.json"
        )
    if details.gates_shared_expert and not details.shared_expert_size:
        raise ValueError(
            "a gate of shared experts needs some: gates_shared_expert true, shared_expert_size 0: use "
            "gates_shared_expert false"
        )
    if model.mlp_dropout:
        raise ValueError(
            f"experts drop nothing inside: model.mlp_dropout {model.mlp_dropout} with num_experts {num}: use "
            "model.mlp_dropout 0, or model.residual_dropout"
        )


def _check_each(owner: Any, default: Any, prefix: str) -> None:
    for name in (field.name for field in fields(owner)):
        value, key = getattr(owner, name), prefix + name
        if is_dataclass(value):
            _check_each(value, getattr(default, name), f"{key}.")
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool | str):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{key} must be finite: got {number}: use {_shown(getattr(default, name))}")
            if number < 0:
                raise ValueError(f"{key} must be at least 0: got {_shown(number)}: use 0")
            if isinstance(number, int) and number > _MOST_DETAIL:
                raise ValueError(f"{key} must be at most {_MOST_DETAIL}: got {_shown(number)}: use {_MOST_DETAIL}")


def _shown(value: object) -> str:
    """Return a value as TOML has it; a long one by its beginning."""
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_model_sizes(model: ModelConfig) -> None:
    """Check the sizes of a model by themselves, as `validate` does.

    Raises:
        ValueError: as validate.
    """
    check_ranges(Config(model=model))
    check_model(model)


@functools.cache
def _choices(owner: type, name: str) -> tuple[Any, ...]:
    return typing.get_args(typing.get_type_hints(owner)[name])


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
    for group in config.optim.groups:
        _check_group(group)
    for owner, section, name in (
        (config.parallel, "parallel.", "tp_comm"),
        (config.parallel, "parallel.", "recompute"),
        (config.parallel, "parallel.", "gathered"),
        (config.parallel, "parallel.", "zero"),
        (config.parallel, "parallel.", "residency"),
        (config.train, "train.", "dtype"),
        (config.train, "train.", "reduction"),
        (config.train, "train.", "attention"),
        (config.train, "train.", "balance"),
        (config.optim, "optim.", "moments"),
        (config.optim, "optim.", "schedule"),
        (config, "", "device"),
    ):
        key, value = section + name, getattr(owner, name)
        kind: Any = type(owner)
        choices = _choices(kind, name)
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


def _check_group(group: ParameterGroup) -> None:
    """Raise ValueError for a group of parameters that says nothing, or two things that cannot both be."""
    if not group.pattern:
        raise ValueError('optim.groups: each group needs a pattern: got none: use pattern = "*.bias", or its like')
    name = f"optim.groups: {group.pattern!r}"
    if not (math.isfinite(group.lr) and group.lr > 0):
        remedy = "use frozen = true" if group.lr == 0 else "use 1.0"
        raise ValueError(f"{name}: lr is a factor, finite and above 0: got {group.lr}: {remedy}")
    decay = group.weight_decay
    if decay is not None and not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"{name}: weight_decay must be finite and at least 0: got {decay}: use 0.0")
    if group.frozen and (group.lr != 1 or decay is not None):
        said = f"lr {group.lr:g}" if group.lr != 1 else f"weight_decay {decay:g}"
        raise ValueError(f"{name}: what is frozen has no rate and no decay: got frozen and {said}: leave one out")


def check_model(model: ModelConfig) -> None:
    """Raise ValueError unless heads divide a model's width, and KV heads its heads."""
    d, heads, kv = model.hidden_size, model.num_heads, model.num_kv_heads
    if model.details.head_size % 2:
        raise ValueError(
            f"a head's size must be even: config.json has head_dim {model.details.head_size}: use another model"
        )
    if not model.details.head_size and (d % heads or model.head_size % 2):
        raise ValueError(
            f"hidden_size must be num_heads times an even head size: hidden_size {d}, num_heads {heads}: "
            f"use {nearest_multiples('hidden_size', d, 2 * heads)}, or "
            f"{nearest_of('num_heads', heads, legal_heads(model, 1))}"
        )
    if heads % kv:
        raise ValueError(
            f"num_heads must be divisible by num_kv_heads: num_heads {heads}, num_kv_heads {kv}: "
            f"use {nearest_of('num_kv_heads', kv, divisors(heads))}"
        )


def legal_heads(model: ModelConfig, tp: int) -> list[int]:
    """Return the numbers of query heads that width, KV heads and tp allow."""
    even = divisors(model.hidden_size // 2) if model.hidden_size % 2 == 0 else ()
    return [heads for heads in even if heads % model.num_kv_heads == 0 and heads % tp == 0]


def shares_heads(num_kv_heads: int, tp: int) -> bool:
    """Whether ranks of tp have whole KV heads each, or whole groups of ranks one head."""
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0
