"""What a run says and writes before its first step: plan, phases, attention, configuration, the writer of metrics.

Whose attention is taken is known before a process group exists. The layers choose for each call, by the same function
(tpkernels.ops.attention.choice).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from tpkernels.ops.attention.choice import Choice, Problem, Whose, choose

from tpengine.architectures.model_path import dropout_not_taken
from tpengine.architectures.registry import architecture_of, lacks_bias
from tpengine.checkpoint.resume import Checkpoint, changes_since
from tpengine.checkpoint.run_directory import write_config
from tpengine.config import Config, decay_steps_of, phases_of
from tpengine.config.lengths import amount_of
from tpengine.config.rules import zero_in_words
from tpengine.distributed.agreement import broadcast_json
from tpengine.files import write_beside
from tpengine.last_words import RANK_FAILED, USER_ERROR
from tpengine.layout.step_plan import Layout
from tpengine.observe.console import show_padding, show_phases, show_plan
from tpengine.observe.metrics import BackgroundWriter, MetricsWriter
from tpengine.observe.wandb_run import WandbRun
from tpengine.runs.job import Job, Wings
from tpengine.training.planned_run import PlannedPhase, PlannedRun, RunError
from tpengine.training.train_state import TrainState

_NAMES = {"cudnn": "cuDNN", "flash": "FlashAttention", "math": "unfused", "varlen": "varlen_attn"}


def attention_taken(config: Config, device: torch.device) -> str:
    """Return whose attention the layers of a run take, and why, in one line; phase by phase where phases differ.

    Args:
        config: validated.
        device: where this rank computes.

    Raises:
        ValueError: train.attention is torch, and torch does not compute the attention of a layer alike.
    """
    if config.train.reduction == "exact":
        return "ours: exact mode's bits repeat"
    said = [_of_phase(phase.config, config.train.attention, device) for phase in phases_of(config)]
    text = said[0] if len(set(said)) == 1 else "; ".join(f"phase {i}: {words}" for i, words in enumerate(said, 1))
    repeats = "torch's" not in text or config.train.attention == "torch"
    return text if repeats else f"{text}; gradients may differ from run to run: --train.attention ours repeats them"


def _of_phase(config: Config, whose: Whose, device: torch.device) -> str:
    """Return whose attention the layers of a phase take; with how many of them, where they differ."""
    counts: dict[str, int] = {}
    for problem, number in _problems(config, device).items():
        said = _words(choose(problem, whose))
        counts[said] = counts.get(said, 0) + number
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{text} ({number} of {sum(counts.values())} layers)" for text, number in counts.items())


def _words(choice: Choice) -> str:
    whose = "ours" if choice.backend is None else f"torch's {_NAMES[choice.backend]}"
    return f"{whose}: {choice.reason}"


def _problems(config: Config, device: torch.device) -> dict[Problem, int]:
    """Return what the layers ask for, and how many of them each."""
    model, train, tp = config.model, config.train, config.parallel.tp or 1
    architecture = architecture_of(model)
    sizes = model.num_heads // tp, max(1, model.num_kv_heads // tp), model.head_size
    dtype, packed = getattr(torch, train.dtype), config.data.packing != "cut"
    found: dict[Problem, int] = {}
    for layer in range(model.num_layers):
        for part in architecture.block(model, layer).values():
            if part.chooses_attention:
                windowed = part.narrow_window(train.seq_len) is not None
                one = Problem(device, dtype, train.seq_len, *sizes, windowed, packed, model.attention_dropout > 0)
                found[one] = found.get(one, 0) + 1
    return found


@contextlib.contextmanager
def open_writer(
    planned: PlannedRun, state: TrainState, job: Job, console: Console, checkpoint: Checkpoint | None
) -> Iterator[BackgroundWriter | None]:
    """Show the plan, write the resolved configuration, and yield the writer of metrics, closed at the end; collective.

    Raises:
        RunError: on all ranks alike: rank 0 cannot write into the run directory.
    """
    writer, problem = None, ""
    if job.run_dir is not None:
        _say_what_will_happen(planned, state, job, job.run_dir, console, checkpoint)
        first_step = checkpoint.index.step if checkpoint is not None else 0
        try:
            _write_config(planned.config, job.device, job.run_dir)
            _keep_beginning(job)
            picture = job.wings.draw_learning_rate(
                planned.rate, job.config.train.steps, [phase.first_step for phase in planned.phases][1:]
            )
            write_beside(job.run_dir / "learning_rate.svg", picture.encode())
            wandb = None
            if job.config.train.wandb:
                settings, continues = asdict(planned.config), bool(first_step)
                wandb = WandbRun(job.config.train.wandb, job.run_dir, settings, continues=continues)
            writer = MetricsWriter(job.run_dir, first_step or None, wandb)
        except OSError as error:
            problem = f"the run directory must take the run's files: {error}: fix that or use another --run-dir"
        except ValueError as error:
            problem = str(error)
    problem = broadcast_json(problem)
    if problem:
        raise RunError(problem)
    behind = None
    try:
        if writer is not None:
            _say_what_is_written(writer, console)
        behind = None if writer is None else BackgroundWriter(writer)
        yield behind
    except BaseException as error:
        if behind is not None:
            behind.exit_code = USER_ERROR if isinstance(error, RunError) else RANK_FAILED
        raise
    finally:
        if behind is not None:
            behind.close()


def _say_what_will_happen(
    planned: PlannedRun,
    state: TrainState,
    job: Job,
    run_dir: Path,
    console: Console,
    checkpoint: Checkpoint | None,
) -> None:
    config, device = state.part.config, state.rank.device
    exchange = "; ".join(filter(None, (state.rank.comms.describe(state.rank.mailbox), job.hosts.words())))
    attention = attention_taken(planned.config, device)
    # As it has come: GPUs that cannot address each other's memory have no buffers.
    layout, plan = replace(state.part.layout, row_load=state.rank.comms.row_load), state.part.plan
    by_plan = job.wings.bytes_per_rank(config, layout), job.wings.memory_of(config, layout, plan, device.type)
    show_plan(console, config, layout, plan, device, exchange, run_dir, *by_plan, job.shared_cores, attention)
    if said := zero_in_words(config.parallel):
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    for line in said_of_experts(config, layout, job.wings.most_load(config, layout, plan, device.type)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for part in planned.parts:
        show_padding(console, part.corpus.padding(), part.config.train.seq_len)
    show_phases(console, planned.phases, [_peak(job.wings, part, device) for part in planned.parts])
    if config.resume:
        # What a checkpoint has are the settings of its last step's phase.
        done = 0 if checkpoint is None else checkpoint.index.step
        phase_config = planned.at(max(done - 1, 0)).config
        used = replace(phase_config, device="cuda" if device.type == "cuda" else "cpu")
        _say_what_is_resumed(console, used, checkpoint)
    _say_where_learning_ends(console, planned)
    if job.beginning is not None and (left_out := dropout_not_taken(config.model)):
        console.print(left_out, markup=False, highlight=False, soft_wrap=True)


def said_of_experts(config: Config, layout: Layout, most_load: float) -> list[str]:
    """Return what a run with experts should know before it starts: nothing of most.

    Args: most_load: up to which load of a rank over the mean its memory is enough by the plan.
    """
    said = []
    if layout.ep > 1:
        until = "at every load" if most_load >= layout.ep else f"up to a load of {most_load:.2f}"
        of = f"buffers for {layout.row_load:g} times the mean of rows" if layout.row_load else "experts used evenly"
        ends = config.parallel.memory_limit and most_load < layout.ep
        said.append(
            f"memory by the plan is that of {of}, and is enough {until} (rows of the hottest rank over the mean: "
            f"expert_rank_load of metrics.jsonl){'; a step above it ends the run' if ends else ''}"
        )
    if config.parallel.moe_load and not layout.row_load:
        said.append(
            "--parallel.moe-load sizes no buffers here: kernels bring rows to experts between GPUs of one host alone, "
            "in 16 bits or float32, and not with --parallel.tp-comm plain"
        )
    if lacks_bias(config.model):
        said.append(
            f"no export: files of {config.model.architecture} have no place for the biases of --train.balance bias; "
            "a run that begins with --train.balance loss can be exported, by a config.json in its directory"
        )
    return said


def _peak(wings: Wings, part: PlannedPhase, device: torch.device) -> int:
    return max(rank.peak for rank in wings.memory_of(part.config, part.layout, part.plan, device.type))


def _say_what_is_written(writer: MetricsWriter, console: Console) -> None:
    if writer.kept is not None:
        with contextlib.suppress(OSError):  # stderr may be closed
            print(f"tpengine: an earlier run's metrics are kept as {writer.kept}", file=sys.stderr)
    if not writer.tensorboard:
        console.print(
            "TensorBoard events are off: pip install 'tpengine[tensorboard]' turns them on",
            markup=False,
            highlight=False,
        )


def _say_what_is_resumed(console: Console, config: Config, checkpoint: Checkpoint | None) -> None:
    """Say at which step the run continues, and which settings differ from those of the checkpoint."""
    if checkpoint is None:
        lines = ["no checkpoint yet: starting at step 1"]
    else:
        step = checkpoint.index.step
        lines = [f"continuing at step {step + 1}" if step < config.train.steps else f"all {step} steps are done"]
        changes = changes_since(checkpoint.index, config)
        threads, saved_threads = torch.get_num_threads(), checkpoint.index.state.get("threads")
        if config.train.reduction == "fast" and saved_threads not in (None, threads):
            changes.append(f"threads per rank from {saved_threads} to {threads}, which may change the last bits")
        lines += [f"changed since the checkpoint: {change}" for change in changes]
        lines += said_of_balance(checkpoint.index.state["config"]["train"].get("balance"), config)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def said_of_balance(saved: str | None, config: Config) -> list[str]:
    """Return what becomes of routers' biases that steps have moved until now, if they move them no more.

    Args: saved: the train.balance of the checkpoint's run; None of one that knew none. config: what goes on.
    """
    if saved != "bias" or config.train.balance == "bias" or not config.model.details.router_bias:
        return []
    return ["routers' biases stay as they are: choices follow them, and no step moves them any more"]


def _say_where_learning_ends(console: Console, planned: PlannedRun) -> None:
    """Warn if the learning-rate schedule ends before the run, as after resuming with more steps."""
    config = planned.config
    if planned.phases[-1].schedule:
        return  # a schedule of a later phase's own, which is as long as that
    steps, lowest = config.train.steps, config.optim.lr * config.optim.min_lr_ratio
    amounts = (decay_steps_of(config), config.optim.warmup_steps)
    end, warmup = (amount_of(amount, "a schedule") for amount in amounts)
    last = max(end.number, warmup.number + 2)
    if config.optim.schedule != "constant" and end.unit == warmup.unit == "steps" and last < steps:
        line = (
            f"the learning rate is at its end, {lowest:g}, from step {last} on: --optim.decay-steps {steps} would "
            "stretch its schedule over the whole run"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write_config(config: Config, device: torch.device, run_dir: Path) -> None:
    """Write config.toml, from which the run can be repeated or continued; keep a different earlier one aside."""
    resolved = replace(
        config,
        run_dir=str(run_dir),
        device="cuda" if device.type == "cuda" else "cpu",
        resume=False,
    )
    write_config(resolved, run_dir, keeps_equal=config.resume)


def _keep_beginning(job: Job) -> None:
    """Keep, beside the run, what goes with the weights it begins with."""
    if job.run_dir is None or job.checkpoint is not None or job.beginning is None:
        return
    job.beginning.keep(job.run_dir)
