"""The configuration of a run: dataclasses of settings, nothing else.

rules.py says which values are legal, toml.py how they are written as TOML, and commands/arguments.py parses the command
line. What an architecture adds to the sizes of a model (ModelDetails) are numbers out of its config.json, which are no
settings: they stand in config.toml under [model.details], so that a run continues without the directory it began from.

`train.spike` says what is done about a step whose loss or gradient norm leaps, and what counts as a leap:

    skip | rollback | stop, then how many spreads above the median are a leap, then the steps that median and spread are
    of: "skip", "rollback 20", "stop 10 64"

How steps are judged is in training/spikes.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, cast, get_args

from tpengine.dtypes import Dtype
from tpengine.spelling import meant

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
# The label of a target that is not counted in the loss: torch's convention.
IGNORED_LABEL = -100
# data.held_out_fraction, where nothing else is held out.
DEFAULT_SHARE_HELD_OUT = 0.05
Action = Literal["skip", "rollback", "stop"]
_ACTIONS: tuple[str, ...] = get_args(Action)
_FORM = re.compile(r"([a-z]+)(?: +([0-9]{1,6}(?:\.[0-9]{1,6})?))?(?: +([0-9]{1,6}))?")
# Fewer steps have no spread to speak of; the window is in every checkpoint.
_FEWEST_STEPS, _MOST_STEPS = 4, 10_000


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for sequences longer than those of the first training.

    The names are those of config.json; each kind reads its own.

    Attributes:
        rope_type: default changes nothing.
        factor: how many times as long sequences become.
        original_max_position_embeddings: tokens of the sequences of the first training.
        low_freq_factor, high_freq_factor: of llama3: turns over such a sequence below and above which a frequency is
            divided by the factor, and kept.
        beta_fast, beta_slow: the same of yarn, high and low.
        attention_factor: of yarn and longrope: multiplies cos and sin; 0 for 0.1 ln(factor) + 1 of yarn, and for
            sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) of longrope.
        truncate: of yarn: the borders between frequencies are whole numbers.
        short_factor, long_factor: of longrope: what each frequency is divided by, in sequences of at most
            original_max_position_embeddings tokens, and in longer ones.
        llama_4_scaling_beta: of yarn: queries are multiplied by 1 + beta ln(1 + floor(position /
            original_max_position_embeddings)); 0 for none.
        partial_rotary_factor: of every kind: how much of a head is rotated, its first elements.
    """

    rope_type: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class ModelDetails:
    """Numbers of an architecture beside the sizes.

    Attributes:
        head_size: E; 0 for hidden_size / num_heads.
        rope: scaling of the rotary frequencies.
        windows: of each layer, how many tokens back a query sees, its own included; 0 for all. Empty for all layers 0.
        local_rope_theta: base of the frequencies, unscaled, of layers with a window; 0 for that of the others.
        max_positions: rows of a table of learned positions; 0 without one.
        attention_bias, mlp_bias: whether the projections of attention, or of the feed-forward network, have biases,
            where an architecture leaves that open.
        attention_scale: of the scores; 0 for E^(-1/2).
        rotates: of each layer, whether queries and keys are rotated by their positions. Empty for all layers true.
        embedding_multiplier, residual_multiplier: of the embedding's rows; of what a block's halves add.
        logits_scaling: logits are divided by it.
        num_experts: E, of each layer that has experts; 0 for a dense model.
        experts_per_token: k, how many of them each token chooses.
        expert_ffn_size: width F of an expert.
        has_experts: of each layer, whether it has experts, not a feed-forward network. Empty for all layers true.
        router_scores: what the router makes of its logits: a softmax over all experts, or a sigmoid of each.
        normalizes_scores: whether a token's k weights are divided by their sum.
        router_scale: multiplies the weights.
        expert_groups, groups_per_token: a token chooses within so many of so many groups of experts.
        shared_expert_size: width of a network that every token passes besides; 0 for none.
        gates_shared_expert: whether its output is multiplied by a sigmoid of a product of its own.
        router_bias: whether choices, but not weights, follow scores to which a bias of each expert is added.
    """

    head_size: int = 0
    rope: RopeScaling = RopeScaling()
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 0.0
    max_positions: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 0.0
    rotates: tuple[bool, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    has_experts: tuple[bool, ...] = ()
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalizes_scores: bool = False
    router_scale: float = 1.0
    expert_groups: int = 1
    groups_per_token: int = 1
    shared_expert_size: int = 0
    gates_shared_expert: bool = False
    router_bias: bool = False


# Those of ModelDetails that a dense model has not.
NUMBERS_OF_EXPERTS = tuple(
    name
    for name in (of.name for of in fields(ModelDetails))
    if "expert" in name or name.startswith("router_") or name in ("normalizes_scores", "groups_per_token")
)


@dataclass(frozen=True)
class ModelConfig:
    """A transformer."""

    path: str = ""
    """Directory of a model to begin from: its sizes and weights, in Hugging Face's form (config.json, safetensors), or
    a run of ours, RUN or RUN@STEP. Empty begins with drawn weights."""
    architecture: str = "llama"
    """Which kind of transformer: llama, qwen2, qwen3, mistral, gpt2, gemma3, granite, smollm3, phi3, olmo3, ministral3,
    qwen3_moe, mixtral, or a Python file of your own."""

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
    """Share of elements dropped from what attention and the feed-forward network add to the residual stream."""
    attention_dropout: float = 0.0
    """Share of attention probabilities dropped."""
    mlp_dropout: float = 0.0
    """Share of elements dropped inside the feed-forward network, before its second matrix."""

    details: ModelDetails = field(default_factory=ModelDetails)
    """Numbers that an architecture adds, from its config.json; no flags."""

    @property
    def head_size(self) -> int:
        """Width E of a head."""
        return self.details.head_size or self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated, the first ones."""
        return int(self.head_size * self.details.rope.partial_rotary_factor)

    @property
    def ffn_widths(self) -> dict[str, int]:
        """The widths that tp cuts, by the names that messages have: of feed-forward networks, of an expert."""
        details = self.details
        if not details.num_experts:
            return {"ffn_size": self.ffn_size}
        dense = {} if all(details.has_experts) else {"ffn_size": self.ffn_size}
        shared = {"shared_expert_size": details.shared_expert_size} if details.shared_expert_size else {}
        return {**dense, "expert_ffn_size": details.expert_ffn_size, **shared}

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of lcm(8, tp)."""
        return round_up(self.vocab_size, math.lcm(8, tp))


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out; tp * pp * dp is the number of processes. One of the three sizes may be left out."""

    tp: int | None = None
    """Tensor-parallel size: ranks that share every matrix."""
    pp: int | None = None
    """Pipeline stages."""
    dp: int | None = None
    """Data-parallel replicas."""
    ep: int = 1
    """Neighbouring ranks of a stage that share a model's experts, each holding as many whole ones: tp, or tp times a
    divisor of dp. With 1 every expert is cut over tp, as any other matrix is."""
    moe_load: float = 0.0
    """With ep on GPUs of one host, in fast mode: for how many times the mean number of rows a rank's experts have room.
    Kernels bring rows without a wait for the host; a step in which more come is computed again, with a wait in each
    layer. 0 makes room for all rows if memory allows, else for twice the mean, else for none: then every layer
    waits."""
    schedule: str = "1f1b"
    """Order of forward and backward passes in the pipeline: gpipe, 1f1b, interleaved, zb-h1, zbv, or the path of a text
    file with one of your own."""
    chunks_per_rank: int = 2
    """Chunks of the model on each pipeline rank with schedule interleaved; the other schedules fix it."""
    recompute: Literal["none", "attention", "block", "full"] = "none"
    """What backward recomputes instead of keeping it: nothing, each block's attention, each block, or all of a
    chunk."""
    gathered: Literal["keep", "again"] = "keep"
    """Whether the tokens that tp ranks gather for a matmul are kept for its weight gradient, or gathered again."""
    tp_comm: Literal["fused", "plain"] = "fused"
    """How tensor-parallel ranks exchange activations: by matmuls that read the peers' memory while it is written (ranks
    of one host, GPUs that can access each other), or by collectives."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data-parallel replicas shard, instead of each holding all of it (ZeRO): 1 moments and masters, 2
    gradients too, 3 weights too. One replica has nothing to shard: there each stage is 0 in effect."""
    residency: Literal["auto", "step", "use"] = "auto"
    """With zero 3, how long gathered weights stay: from first to last use in a step, or for one use each; auto chooses
    what is fastest and fits."""
    memory_limit: int = 0
    """Bytes that a rank may hold, by the plan: more is refused before the run starts, and ends it behind a step where
    routers send a rank's experts too many rows. 0 for what its GPU has, or its share of the host's free memory."""
    bucket_bytes: int = 25_000_000
    """Gradient bucket size in bytes: a bucket is reduced as soon as it is complete."""

    @property
    def zero_in_effect(self) -> int:
        """The stage of ZeRO that is run: that of the setting, and 0 with one replica. The layout must be resolved."""
        return self.zero if self.dp != 1 else 0


@dataclass(frozen=True)
class TrainConfig:
    """Size and length of the run."""

    seq_len: int = 128
    """Tokens per sequence."""
    micro_batch_size: int = 8
    """Sequences per micro-batch."""
    num_micro_batches: int = 4
    """Micro-batches per step and data-parallel replica."""
    global_batch: int = 0
    """Sequences per step, of all replicas, instead of num_micro_batches, which follows from it; 0 leaves that as it
    is."""
    steps: int = 250
    """Optimizer steps."""
    tokens: int | str = 0
    """Length of the run in tokens, instead of steps: 2000000, 2B, "500M tokens"; 0 leaves steps as they are."""
    epochs: float = 0.0
    """Length of the run in passes over the text that is trained on, instead of steps; 0 leaves steps as they are."""
    profile_steps: str = "auto"
    """Steps to record, as A:B for those after A finished steps until B are: `tpengine diagnose` then says why a step
    takes as long as it does. Timelines, and the costs to predict other schedules from, are written to the run
    directory. auto records 8 once a run has warmed up; empty records none."""
    seed: int = 0
    """Seed of initial weights, data order, dropout and sampling."""
    dtype: Dtype = "float32"
    """Dtype of weights and activations (bf16, fp32, half and their like are understood); gradients, moments and masters
    are kept in at least float32. With float16 the loss is scaled: a step whose gradient overflows is skipped, and the
    scale halves."""
    reduction: Literal["fast", "exact"] = "fast"
    """Order of sums: fast depends on the layout; with exact all layouts give the same bits, with tp and dp at most 8
    and one thread per process."""
    attention: Literal["auto", "ours", "torch"] = "auto"
    """Whose attention trains: our kernels (ours), whose bits repeat; torch's (torch), whose gradients may differ from
    run to run, or an error where it does not compute the same; auto takes torch's on GPUs where it is faster. Exact
    mode and deterministic torch take ours."""
    label_smoothing: float = 0.0
    """Share of each label's weight that the next-token loss spreads over the vocabulary, held-out loss included."""
    z_loss: float = 0.0
    """Weight of the square of each valid token's log-sum-exp of the logits, added to the next-token loss: it keeps
    logits near 0 (1e-4, say). The held-out loss has it too."""
    balance: Literal["none", "loss", "bias"] = "none"
    """What keeps experts evenly used: nothing; an auxiliary loss of each layer and micro-batch (loss), added to the
    training loss; or a bias of each expert that choices follow and weights do not (bias), moved once a step by counts
    of all its tokens, with no gradient."""
    balance_rate: float = 0.001
    """With balance loss, what the auxiliary loss is multiplied by; with bias, how far a step moves it."""
    eval_micro_batches: int = 16
    """Micro-batches of the held-out loss, over all replicas; 0 for no held-out loss."""
    eval_samples: int = 0
    """Samples of the held-out loss, whatever the size of a micro-batch; 0 for those of eval_micro_batches, of the size
    that the run begins with. A resume or a phase with another size keeps their number here."""
    eval_every: int = 0
    """Steps between held-out losses; 0 for the last step's alone."""
    sample_tokens: int = 200
    """Tokens of a sample of generated text; 0 for none."""
    sample_every: int = 0
    """Steps between samples of generated text; 0 for that of the end alone."""
    checkpoint_every: int = 100
    """Steps between checkpoints. The last step, and the step at which the run is interrupted, are saved too. 0 saves
    none."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept: the newest ones."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept besides, for ever. 0 keeps none besides the newest."""
    after_checkpoint: str = ""
    """Command that rank 0 runs for each complete checkpoint, such as 'rclone copy {path} bucket:run': {path} is its
    directory. One runs at a time, beside training; its failure is said and ends nothing. Empty runs none."""
    wandb: str = ""
    """Project of Weights & Biases that rank 0 reports to, through its own library (`pip install 'tpengine[wandb]'`) and
    as its own variables say (WANDB_MODE, WANDB_ENTITY). Empty reports nothing there."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest held-out loss besides, of each held-out text."""
    spike: str = ""
    """What is done about a step whose loss or gradient norm leaps above those before: skip its update; rollback to a
    checkpoint from before, without the step's samples; stop. "skip 10 128", the default numbers: above the median by 10
    spreads of the last 128 steps. Empty judges nothing."""
    nonfinite_steps: int = 3
    """A step whose loss or gradient is not finite is skipped: it updates nothing. This many in a row end the run."""
    check_replicas_every: int = 20
    """Steps after which ranks that hold the same weights compare a hash of them; 0 does so at checkpoints only."""
    timeout_seconds: float = 300.0
    """If an action of a step, or of the start (meeting the other ranks, connecting, building the model), takes longer,
    the run ends with a report of each rank. Disk access, above all of checkpoints, has no limit. With 0 the
    communication library ends the run after its own limit (NCCL 600, gloo 1800), without a report; else it waits for at
    least twice this time."""


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    path: str = "stdlib"
    """Token files (see `tpengine data`): a file, a directory, a glob, or several with commas between; or "stdlib":
    the top-level *.py files of Python's standard library."""
    mixture: str = ""
    """TOML file of a mixture, instead of one text: a table of sources, each with path, weight, and epochs at most."""
    held_out: str = ""
    """Token files, named as data.path names them, that the held-out loss is of and that are never trained on. Empty
    holds out the end of the text; the sources of a mixture may name their own."""
    held_out_fraction: float | None = None
    """Share of the tokens, at the end of the text, that is never trained on; with a mixture, of each source. By default
    0.05, and 0 of a text that has a held-out text of its own."""
    packing: Literal["cut", "documents", "fit"] = "cut"
    """How documents lie in a sequence: cut, one behind the other as if they were one text; documents, the same, but
    attention does not cross from one to the next, positions begin anew, and no token is predicted across a border; fit,
    as documents, but none of at most seq_len tokens is cut, for some padding (first: `tpengine data --fit`)."""
    ignore_token: int | None = None
    """Targets equal to this token are not counted in the loss (padding, say)."""
    columns: str = ""
    """Columns beside the tokens that a loss of your own is given, with commas between; every text must have them. The
    column `weights` is read wherever a text has it, and multiplies each target's loss: "no-weights" leaves it out."""

    @property
    def held_out_share(self) -> float:
        """The share of the text that is held out."""
        return share_held_out(self.held_out, self.held_out_fraction)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained in another way than the rest, or not at all: [[optim.groups]] in TOML.

    Attributes:
        pattern: glob of their names as checkpoints have them: "model.embed_tokens.*", "*.bias". A parameter belongs to
            the first group whose pattern it matches (layout/groups.py).
        lr: factor of the learning rate.
        weight_decay: of all of them, vectors too; None for optim.weight_decay, of matrices.
        frozen: whether they stay as they are.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, with warm-up, decay and clipping by global norm."""

    name: str = "adamw"
    """Optimizer: adamw, lion, sgd, or a class of torch that works element by element, as torch.RMSprop
    (config/optimizers.py lists them, with what the numbers below are to each)."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of what the optimizer keeps of each weight: float32 (float64 where gradients are), or bfloat16, rounded up
    or down at random, so that small changes add up; by a weight's name, element and update, so in any layout alike."""
    lr: float = 3e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment, or the momentum."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices; decoupled, but for sgd and most of torch's."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What the learning rate does after its warm-up: it falls as a cosine or linearly, stays, or (wsd) stays, and falls
    as 1 - sqrt at the end."""
    warmup_steps: int | str = 20
    """Steps of linear warm-up, or tokens: "2e9 tokens"."""
    decay_steps: int | str = 0
    """Steps, or tokens, after which the learning rate has reached its end, warm-up included; 0 for the number of steps
    that the run begins with. A resumed run keeps it, even if it is made longer."""
    decay_from: int | str = 0
    """Steps, or tokens, after which the learning rate falls; 0 for the end of the warm-up, with wsd for four fifths of
    decay_steps."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another rate or weight decay, or frozen; tables [[optim.groups]], no flags."""


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
    """Continue the run in --run-dir from its newest checkpoint, in the same or another layout."""
    phases: str = ""
    """TOML file of phases: from which step on batch, sequence length, data or learning rate are others. Empty for
    none."""


def decay_steps_of(config: Config) -> int | str:
    """Return the length of the learning-rate schedule, in steps or tokens."""
    return config.optim.decay_steps or config.train.steps


def num_evaluated(train: TrainConfig) -> int:
    """Return how many held-out samples the held-out loss is of, if there are as many; 0 for no held-out loss."""
    return (train.eval_samples or train.eval_micro_batches * train.micro_batch_size) if train.eval_micro_batches else 0


def share_held_out(held_out: str, fraction: float | None) -> float:
    """Return the share of a text that data.held_out and data.held_out_fraction hold out of it."""
    return (0.0 if held_out else DEFAULT_SHARE_HELD_OUT) if fraction is None else fraction


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple


class SpikeRule(NamedTuple):
    """What train.spike says.

    Attributes:
        action: what is done about a step that leaps.
        spreads: a loss or norm that is more than this many spreads above the median is a leap.
        window: median and spread are of so many steps before. Half of them must be there, or nothing is judged.
    """

    action: Action
    spreads: float = 10.0
    window: int = 128


def spike_rule_of(text: str) -> SpikeRule | None:
    """Read a value of train.spike; None for the empty one, which judges nothing.

    Raises:
        ValueError: anything else, in one line.
    """
    if not text:
        return None
    match = _FORM.fullmatch(text.strip())
    action = match.group(1) if match else text.split(" ")[0]
    if match is None or action not in _ACTIONS:
        near = meant(action, _ACTIONS) or "skip"
        raise ValueError(
            f"train.spike must be skip, rollback or stop, then maybe a number of spreads and of steps: got {text!r}: "
            f'use {near}, or "{near} {SpikeRule("skip").spreads:g} {SpikeRule("skip").window}"'
        )
    rule = SpikeRule(cast(Action, action))
    if match.group(2):
        rule = rule._replace(spreads=float(match.group(2)))
    if match.group(3):
        rule = rule._replace(window=int(match.group(3)))
    if rule.spreads < 1:
        raise ValueError(
            f"train.spike must allow at least one spread: got {text!r}: use {action} {SpikeRule('skip').spreads:g}"
        )
    if not _FEWEST_STEPS <= rule.window <= _MOST_STEPS:
        raise ValueError(
            f"train.spike takes the median of {_FEWEST_STEPS} to {_MOST_STEPS} steps: got {text!r}: use {action} "
            f"{rule.spreads:g} {min(max(rule.window, _FEWEST_STEPS), _MOST_STEPS)}"
        )
    return rule
