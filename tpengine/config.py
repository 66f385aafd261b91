"""The configuration of a run: frozen dataclasses and their checks. No torch, no numpy.

Every rule a user can break is checked in `validate`, before any process group exists, and answers in one line with
the rule, the values and the nearest legal choice. Command-line parsing is in arguments.py, the TOML form in
config_toml.py, named runs in presets.py.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from tpengine.plan import Schedule, make_schedule
from tpengine.virtual_ranks import MOST_VIRTUAL_RANKS, virtual_dp, virtual_tp

# Label of a target that does not count in the loss: torch's convention.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style transformer."""

    hidden_size: int = 128
    """Model width D."""
    num_layers: int = 4
    """Blocks L."""
    num_heads: int = 4
    """Query heads H; divides hidden_size into heads of even size."""
    num_kv_heads: int = 4
    """Key/value heads G; divides num_heads."""
    ffn_size: int = 384
    """Feed-forward width F of the SwiGLU network."""
    vocab_size: int = 256
    """Vocabulary V; 256 for bytes. Padded to a multiple of lcm(8, tp), the padding masked out of the loss."""
    tie_embeddings: bool = False
    """Use the token embedding as output head."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    residual_dropout: float = 0.0
    """Share of elements dropped from what attention and feed-forward network add to the residual stream."""
    attention_dropout: float = 0.0
    """Share of attention probabilities dropped."""
    mlp_dropout: float = 0.0
    """Share of elements dropped inside the feed-forward network, before its second matrix."""

    @property
    def head_size(self) -> int:
        """Width E of a head."""
        return self.hidden_size // self.num_heads

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of lcm(8, tp)."""
        return _round_up(self.vocab_size, math.lcm(8, tp))


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out; tp * pp * dp is the number of processes, and of three sizes one may be left out."""

    tp: int | None = None
    """Tensor-parallel size: ranks that share every matrix."""
    pp: int | None = None
    """Pipeline stages."""
    dp: int | None = None
    """Data-parallel replicas."""
    schedule: str = "1f1b"
    """Order of forward and backward passes in the pipeline: gpipe, 1f1b, interleaved, zb-h1, zbv, or the path of a text
    file with one of your own."""
    chunks_per_rank: int = 2
    """Parts of the model that a pipeline rank holds with schedule interleaved; the other schedules fix it."""
    recompute: Literal["none", "attention", "block", "full"] = "none"
    """What backward computes again instead of keeping it: nothing, each block's attention, each block, all of a
    stage."""
    gathered: Literal["keep", "again"] = "keep"
    """Whether the tokens that tp ranks gather for a matmul are kept for its weight gradient, or gathered again."""
    tp_comm: Literal["fused", "plain"] = "fused"
    """How tensor-parallel ranks exchange activations: matmuls that read the peers' memory while it is written (ranks of
    one host, GPUs that reach each other), or collectives."""
    bucket_bytes: int = 25_000_000
    """Gradient bucket size in bytes: a bucket is reduced as soon as it is complete."""


@dataclass(frozen=True)
class TrainConfig:
    """Size and length of the run."""

    seq_len: int = 128
    """Tokens of a sequence."""
    micro_batch_size: int = 8
    """Sequences of a micro-batch."""
    num_micro_batches: int = 4
    """Micro-batches of a step and data-parallel replica."""
    steps: int = 250
    """Optimizer steps."""
    profile_steps: str = ""
    """Steps to record, as A:B for steps A to B-1, counted from 0: timelines, what they show, and costs to predict other
    schedules from go to the run directory. Empty records none."""
    seed: int = 0
    """Seed of initial weights, data order, dropout and sampling."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Dtype of weights and activations; gradients and moments are kept in at least float32."""
    reduction: Literal["fast", "exact"] = "fast"
    """Order of sums: fast takes what the layout gives; with exact all layouts give the same bits, tp and dp at most 8,
    one thread a process."""
    eval_micro_batches: int = 16
    """Micro-batches of the held-out loss at the end, over all replicas; 0 leaves it out."""
    sample_tokens: int = 200
    """Tokens of generated text at the end; 0 leaves it out."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step, and the step of an interrupt, are saved too. 0 saves none."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept, the newest."""
    nonfinite_steps: int = 3
    """A step whose loss or gradient is not finite is skipped: nothing is updated. So many in a row end the run."""
    check_replicas_every: int = 20
    """Steps after which ranks that hold the same weights compare a hash of them; 0 does so at checkpoints only."""
    timeout_seconds: float = 300.0
    """An action of a step, or the start, that takes longer ends the run, with a report of each rank. With 0, or more
    than its own limit (NCCL 600, gloo 1800), the communication library ends it, without one."""


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    path: str = "stdlib"
    """Token file (see `tpengine data`), or "stdlib": the top-level *.py files of Python's standard library."""
    held_out_fraction: float = 0.05
    """Share of the tokens, the last ones, that is never trained on."""
    ignore_token: int | None = None
    """Targets equal to this token do not count in the loss (padding, say)."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up, cosine decay and clipping by global norm."""

    lr: float = 3e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_steps: int = 0
    """Steps after which the learning rate is at its end, warm-up included; 0 is the steps that the run begins with. A
    resumed run keeps it, however long it becomes."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where there is one."""
    run_dir: str = ""
    """Where config.toml, metrics.jsonl and checkpoints go; empty means runs/<date>-<time>."""
    resume: bool = False
    """Continue the run in --run-dir from its newest checkpoint, in this or any other layout."""


def resolve_layout(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """Fill in the sizes that were left out, so that tp * pp * dp is the number of processes.

    Given any two the third follows. Of those left out besides, tp and then pp become 2 where what remains is even,
    and dp takes the rest: 4 processes are tp 2, pp 2, dp 1.

    Raises:
        ValueError: no choice fills the processes; names the nearest layouts.
    """
    if world_size < 1:
        raise ValueError(f"a run needs a process: the number of processes is {world_size}: start at least 1")
    given = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "dp")}
    for axis, size in given.items():
        if size is not None and size < 1:
            raise ValueError(f"{axis} must be at least 1: got {size}: use 1")
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
    processes = _round_up(world_size, known) if None in given.values() else known
    return (
        f"tp*pp*dp must equal the number of processes: {sizes}, processes {world_size}: start {processes} "
        f"processes, or use tp {default.tp} pp {default.pp} dp {default.dp}"
    )


def validate(config: Config, world_size: int) -> Config:
    """Check everything a user can get wrong and resolve the layout.

    Args:
        world_size: number of processes.

    Returns:
        The configuration with tp, pp and dp set.

    Raises:
        ValueError: the rule, the values and the nearest legal choice, in one line.
    """
    _check_ranges(config)
    profiled_steps(config)
    _check_model(config.model)
    config = replace(config, parallel=resolve_layout(config.parallel, world_size))
    _check_layout(config)
    _check_schedule(config)
    return config


def decay_steps_of(config: Config) -> int:
    """Length of the learning-rate schedule in steps."""
    return config.optim.decay_steps or config.train.steps


def schedule_of(config: Config) -> Schedule:
    """Generate, or read, the schedule of a configuration whose layout is resolved.

    Raises:
        ValueError: a file that is no schedule of these ranks and micro-batches.
    """
    parallel = config.parallel
    assert parallel.pp, "resolve the layout first: config.validate"
    return make_schedule(parallel.schedule, parallel.pp, config.train.num_micro_batches, parallel.chunks_per_rank)


def profiled_steps(config: Config) -> range:
    """Return the steps that are recorded, of train.profile_steps.

    Raises:
        ValueError: it is neither empty nor A:B with 0 <= A < B <= steps.
    """
    text, steps = config.train.profile_steps, config.train.steps
    if not text:
        return range(0)
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    first, end = map(int, match.groups()) if match else (0, 0)
    if not (first < end <= steps and end - first <= _MOST_PROFILED_STEPS):
        # What was meant where it says, else a late step: the first ones are no measure of the others.
        first = min(first if match else 3, steps - 1)
        end = min(max(end, first + 1), first + _MOST_PROFILED_STEPS, steps)
        raise ValueError(
            f"train.profile_steps must be A:B, for steps A to B-1 of 0 to {steps - 1}, at most {_MOST_PROFILED_STEPS}: "
            f"got {text!r}: use {first}:{end}"
        )
    return range(first, end)


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
            f"parallel.gathered {parallel.gathered} is for train.reduction fast: with exact all virtual ranks share "
            "what is gathered: use parallel.gathered keep"
        )
    if config.train.reduction == "exact" and not schedule.keeps_order:
        raise ValueError(
            "with train.reduction exact a schedule must add each chunk's gradients in the order of the micro-batches: "
            f"{parallel.schedule} does not: reorder its B and W, or use train.reduction fast"
        )


# Rank 0 keeps the records of all ranks until the last of them.
_MOST_PROFILED_STEPS = 100

# As many as a dropout mask can tell apart.
_MOST_MICRO_BATCHES = 2**24

# Open bounds, as the closed bounds next to them.
_POSITIVE, _BELOW_ONE = math.ulp(0.0), math.nextafter(1.0, 0.0)

# Smallest and largest legal value by key; None for no bound.
_RANGES: Mapping[str, tuple[float | None, float | None]] = types.MappingProxyType(
    {
        "model.hidden_size": (1, 2**20),
        "model.num_layers": (1, 2**14),
        "model.num_heads": (1, 2**16),
        "model.num_kv_heads": (1, 2**16),
        "model.ffn_size": (1, 2**22),
        "model.vocab_size": (2, 2**32),
        "model.rope_theta": (1, None),
        "model.norm_eps": (0, None),
        "model.residual_dropout": (0, _BELOW_ONE),
        "model.attention_dropout": (0, _BELOW_ONE),
        "model.mlp_dropout": (0, _BELOW_ONE),
        "parallel.chunks_per_rank": (1, 2**10),
        "parallel.bucket_bytes": (1, None),
        "train.seq_len": (1, 2**24),
        "train.micro_batch_size": (1, 2**16),
        "train.num_micro_batches": (1, 2**14),
        "train.steps": (1, 2**40),
        "train.seed": (0, 2**63 - 1),
        "train.eval_micro_batches": (0, 2**14),
        "train.sample_tokens": (0, 2**20),
        "train.checkpoint_every": (0, 2**40),
        "train.keep_checkpoints": (1, 2**20),
        "train.nonfinite_steps": (1, 2**20),
        "train.check_replicas_every": (0, 2**40),
        "train.timeout_seconds": (0, None),
        "data.held_out_fraction": (0, 0.9),
        "optim.lr": (_POSITIVE, None),
        "optim.beta1": (0, _BELOW_ONE),
        "optim.beta2": (0, _BELOW_ONE),
        "optim.eps": (_POSITIVE, None),
        "optim.weight_decay": (0, None),
        "optim.warmup_steps": (0, None),
        "optim.decay_steps": (0, 2**40),
        "optim.min_lr_ratio": (0, 1),
        "optim.clip_norm": (0, None),
    }
)


def _check_ranges(config: Config) -> None:
    for key, (low, high) in _RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        default = getattr(getattr(Config(), section), name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite: got {value}: use {default}")
        if low is not None and value < low:
            rule, nearest = ("positive", default) if low == _POSITIVE else (f"at least {low}", low)
            raise ValueError(f"{key} must be {rule}: got {value}: use {nearest}")
        if high is not None and value > high:
            rule, nearest = ("below 1", default) if high == _BELOW_ONE else (f"at most {high}", high)
            raise ValueError(f"{key} must be {rule}: got {value}: use {nearest}")
    for owner, section, name in (
        (config.parallel, "parallel.", "tp_comm"),
        (config.parallel, "parallel.", "recompute"),
        (config.parallel, "parallel.", "gathered"),
        (config.train, "train.", "dtype"),
        (config.train, "train.", "reduction"),
        (config, "", "device"),
    ):
        key, value = section + name, getattr(owner, name)
        choices = typing.get_args(typing.get_type_hints(type(owner))[name])
        if value not in choices:
            raise ValueError(f"{key} must be one of {', '.join(choices)}: got {value!r}: use {choices[0]}")
    token, vocab = config.data.ignore_token, config.model.vocab_size
    if token is not None and not 0 <= token < vocab:
        raise ValueError(
            f"data.ignore_token must be a token of the vocabulary: got {token}, vocab_size {vocab}: "
            f"use 0 to {vocab - 1}"
        )


def _check_model(model: ModelConfig) -> None:
    d, heads, kv = model.hidden_size, model.num_heads, model.num_kv_heads
    if d % heads or model.head_size % 2:
        raise ValueError(
            f"hidden_size must be num_heads times an even head size: hidden_size {d}, num_heads {heads}: "
            f"use {_nearest_multiples('hidden_size', d, 2 * heads)}, or "
            f"{_nearest_where('num_heads', heads, partial(_can_have_heads, d, kv, 1), d)}"
        )
    if heads % kv:
        raise ValueError(
            f"num_heads must be divisible by num_kv_heads: num_heads {heads}, num_kv_heads {kv}: "
            f"use {_nearest_where('num_kv_heads', kv, lambda g: heads % g == 0, heads)}"
        )


def _check_layout(config: Config) -> None:
    model, train = config.model, config.train
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.dp
    assert tp is not None and pp is not None and dp is not None
    world_size = tp * pp * dp
    if pp > model.num_layers:
        raise ValueError(
            f"every pipeline stage needs a layer: pp {pp}, num_layers {model.num_layers}: "
            f"use pp {model.num_layers} or fewer, or num_layers {pp} or more"
        )
    if model.num_heads % tp:
        legal_heads = partial(_can_have_heads, model.hidden_size, model.num_kv_heads, tp)
        raise ValueError(
            f"num_heads must be divisible by tp: num_heads {model.num_heads}, tp {tp}: use "
            f"{_nearest_where('tp', tp, partial(_divides, math.gcd(model.num_heads, world_size)), world_size)}, or "
            f"{_nearest_where('num_heads', model.num_heads, legal_heads, model.hidden_size)}"
        )
    if model.ffn_size % tp:
        raise ValueError(
            f"ffn_size must be divisible by tp: ffn_size {model.ffn_size}, tp {tp}: use "
            f"{_nearest_where('tp', tp, partial(_divides, math.gcd(model.ffn_size, world_size)), world_size)}, or "
            f"{_nearest_multiples('ffn_size', model.ffn_size, tp)}"
        )
    kv = model.num_kv_heads
    if kv % tp and tp % kv:
        raise ValueError(
            f"num_kv_heads must divide tp or be divisible by it: num_kv_heads {kv}, tp {tp}: use "
            f"{_nearest_where('num_kv_heads', kv, lambda g: g % tp == 0 or tp % g == 0, 2 * kv * tp)}"
        )
    tokens = train.micro_batch_size * train.seq_len
    if tokens % tp:
        raise ValueError(
            f"the tokens of a micro-batch must be divisible by tp: micro_batch_size {train.micro_batch_size} * "
            f"seq_len {train.seq_len} = {tokens}, tp {tp}: use {_nearest_multiples('seq_len', train.seq_len, tp)}, "
            f"or {_nearest_multiples('micro_batch_size', train.micro_batch_size, tp)}"
        )
    if train.num_micro_batches * dp > _MOST_MICRO_BATCHES:
        raise ValueError(
            f"a step has at most {_MOST_MICRO_BATCHES} micro-batches: num_micro_batches {train.num_micro_batches} * dp "
            f"{dp}: use num_micro_batches {_MOST_MICRO_BATCHES // dp} or fewer"
        )
    if train.reduction == "exact":
        _check_exact(config, tp, dp)


def virtual_tp_of(config: Config) -> int:
    """Virtual tensor-parallel ranks of exact mode; see virtual_ranks."""
    model, train = config.model, config.train
    tokens = train.micro_batch_size * train.seq_len
    return virtual_tp(model.num_heads, model.num_kv_heads, model.ffn_size, tokens)


def num_blocks(config: Config) -> int:
    """Blocks of micro-batches that exact mode sums; see virtual_ranks. The layout is resolved."""
    return virtual_dp(config.train.num_micro_batches * (config.parallel.dp or 1))


def _check_exact(config: Config, tp: int, dp: int) -> None:
    model, train = config.model, config.train
    virtual = virtual_tp_of(config)
    if virtual % tp:
        raise ValueError(
            f"with train.reduction exact tp must divide the number of virtual ranks, {virtual}, that num_heads "
            f"{model.num_heads}, num_kv_heads {model.num_kv_heads}, ffn_size {model.ffn_size} and "
            f"{train.micro_batch_size} * {train.seq_len} tokens allow: tp {tp}: use "
            f"{_nearest_where('tp', tp, partial(_divides, virtual), virtual)}, or train.reduction fast"
        )
    blocks = virtual_dp(train.num_micro_batches * dp)
    if blocks % dp:
        # Whatever the micro-batches: a power of two up to 8 divides its own multiples' blocks, and nothing else does.
        raise ValueError(
            f"with train.reduction exact dp must divide the {blocks} blocks that the {train.num_micro_batches} * {dp} "
            f"micro-batches of a step are summed in: dp {dp}: use "
            f"{_nearest_where('dp', dp, partial(_divides, MOST_VIRTUAL_RANKS), MOST_VIRTUAL_RANKS)}, "
            "or train.reduction fast"
        )


def _can_have_heads(hidden_size: int, num_kv_heads: int, tp: int, num_heads: int) -> bool:
    return hidden_size % (2 * num_heads) == 0 and num_heads % num_kv_heads == 0 and num_heads % tp == 0


def _divides(number: int, divisor: int) -> bool:
    return number % divisor == 0


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _nearest_multiples(name: str, number: int, multiple: int) -> str:
    """Say the multiples on both sides of `number`: "seq_len 126 or 128"."""
    up = _round_up(number, multiple)
    return f"{name} {up}" if up == multiple else f"{name} {up - multiple} or {up}"


def _nearest_where(name: str, number: int, legal: Callable[[int], bool], largest: int) -> str:
    """Say the nearest legal values on both sides of `number`, between 1 and `largest`."""
    below = next((n for n in range(min(number, largest), 0, -1) if legal(n)), None)
    above = next((n for n in range(number, largest + 1) if legal(n)), None)
    found = [str(n) for n in (below, above) if n is not None]
    return f"{name} {' or '.join(found)}" if found else f"another {name}"
