"""What a training run prints: the plan before it starts, one progress line, the result. Rank 0 only.

The progress line says how long the steps that are left will take, judged by those that have been taken (`Pace`).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tpengine.config import Config, Phase, Phases, num_blocks, shards_said
from tpengine.layout.parameters import num_parameters
from tpengine.layout.step_plan import Layout
from tpengine.observe.safe_console import SafeConsole
from tpengine.plan import Kind, Plan, clock

# The first steps of a start load kernels, prepare weights and fill caches: what they take says nothing of the others.
_STARTING_STEPS = 2
# An evaluation or a checkpoint that comes every so many steps has its share.
_RECENT_STEPS = 100
_SHORT_SECONDS = 100
_PLAIN_LINES = 40
# The progress line's tokens per second are those of so many steps.
_RECENT_ROWS = 20
# Times of one layer, in forwards.
_LAYER_TIMES: Mapping[Kind, float] = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


class HeldBytes(Protocol):
    """What one rank of a stage holds while it runs a plan, as whoever models it says.

    Attributes:
        peak: the most of everything at once, in bytes.
        action: what runs then.
    """

    @property
    def peak(self) -> int: ...

    @property
    def action(self) -> str: ...

    def kinds(self) -> Mapping[str, int]:
        """Return the bytes by kind, in words."""


class Pace:
    """Estimates the rest of a run from the wall time of its last steps."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a row of metrics; a step that was left out takes no time, and does not count."""
        seconds = record.get("wall_seconds", record.get("step_seconds"))
        if seconds is None:
            return
        self._num_seen += 1
        if self._num_seen > _STARTING_STEPS:
            self._recent.append(seconds)

    def left(self, num_steps: int) -> str:
        """Return how long so many steps will take, in words; empty while only first steps are known."""
        if not num_steps:
            return "0 s left"
        if not self._recent:
            return ""
        seconds = num_steps * sum(self._recent) / len(self._recent)
        return f"{seconds:.0f} s left" if seconds < _SHORT_SECONDS else f"{timedelta(seconds=round(seconds))} left"


def show_plan(
    console: Console,
    config: Config,
    layout: Layout,
    plan: Plan,
    device: torch.device,
    exchange: str,
    run_dir: Path,
    sizes: Sequence[tuple[int, int]],
    memory: Sequence[HeldBytes],
    shared_cores: int = 0,
    attention: str = "",
) -> None:
    """Print what the run will do: layout, parameters and bytes per rank, the pipeline's bubble, where output goes.

    Args:
        exchange: how the ranks exchange tensors, in words.
        sizes: parameters of a rank and bytes of its state, by stage.
        memory: what a rank holds by the plan, by stage.
        shared_cores: number of cores of this host, if the ranks divide them; 0 if the number of threads was given.
        attention: whose it is, in words; empty says nothing of it.
    """
    train, model = config.train, config.model
    tokens = train.micro_batch_size * train.seq_len
    lines = [
        ("model", f"{num_parameters(model):,} parameters, {model.num_layers} layers, hidden {model.hidden_size}"),
        (
            "layout",
            f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}{_experts(layout)} on {device.type}, "
            f"{train.dtype}{_sharing(layout)}",
        ),
        (
            "step",
            f"{train.num_micro_batches} micro-batches of {tokens:,} tokens x dp {layout.dp} = "
            f"{tokens * train.num_micro_batches * layout.dp:,} tokens; {train.steps} steps",
        ),
    ]
    for stage, (numel, num_bytes) in enumerate(sizes):
        what = " and ".join(_layers(first, last) for first, last in layout.layers_of(stage))
        size = f"{num_bytes / 1e6:.1f} MB per rank with gradients and moments"
        lines.append((f"stage {stage}", f"{what}: {numel:,} parameters, {size}"))
    for stage, held in enumerate(memory):
        lines.append(("memory", f"{f'stage {stage}: ' if layout.pp > 1 else ''}{_memory(held)}"))
    lines.append(("pipeline", f"{plan.schedule}, {_bubble(plan)}" if layout.pp > 1 else "one stage, no bubble"))
    if train.reduction == "exact":
        lines.append(("sums", f"exact, the bits of every other layout: {shards_said(config)}, {_blocks(config)}"))
    if device.type == "cpu":
        share = f", its share of {shared_cores} cores (OMP_NUM_THREADS sets another number)" if shared_cores else ""
        lines.append(("threads", f"{torch.get_num_threads()} per rank{share}"))
    if attention:
        lines.append(("attention", attention))
    lines.append(("exchange", exchange))
    lines.append(("output", str(run_dir)))
    if train.after_checkpoint:
        lines.append(("upload", f"{train.after_checkpoint!r} for each checkpoint, on rank 0"))
    for name, text in lines:
        console.print(f"{name:10}{text}", markup=False, highlight=False)


def show_phases(console: Console, phases: Phases, peaks: Sequence[int]) -> None:
    """Print a line for each phase, if there are several.

    Args:
        peaks: the most bytes that a rank holds by the plan, by phase.
    """
    for phase, peak in zip(phases, peaks, strict=True):
        if len(phases) > 1:
            console.print(f"{f'phase {phase.number + 1}':10}{phase_words(phase, peak)}", markup=False, highlight=False)


def show_padding(console: Console, padding: Mapping[str, float], seq_len: int) -> None:
    """Print how much of fitted samples is padding, by source; nothing if no documents are fitted."""
    if padding:
        shares = ", ".join(f"{name} {share:.2%}".lstrip() for name, share in padding.items())
        text = f"documents fitted into samples of {seq_len:,} tokens, padding {shares}"
        console.print(f"{'packing':10}{text}", markup=False, highlight=False)


def phase_words(phase: Phase, peak: int) -> str:
    """Return what a phase is: steps, tokens, batch, sequence length, memory."""
    train, num_steps = phase.config.train, phase.end_step - phase.first_step
    in_all = train.num_micro_batches * (phase.config.parallel.dp or 1)
    own = ", samples from the first" if phase.order == phase.number and phase.number else ""
    return (
        f"steps {phase.first_step + 1} to {phase.end_step}, {num_steps * phase.tokens_per_step:,} tokens: "
        f"{in_all} micro-batches of {train.micro_batch_size} x {train.seq_len} tokens per step{own}; "
        f"at most {peak / 1e6:.1f} MB per rank"
    )


def _blocks(config: Config) -> str:
    number = num_blocks(config)
    return f"{number} block{'s' if number > 1 else ''} of micro-batches"


def _sharing(layout: Layout) -> str:
    """Return what the replicas shard, in words."""
    stays = f" residency {layout.residency}" if layout.zero == 3 else ""
    return f", zero {layout.zero}{stays}" if layout.zero else ""


def _experts(layout: Layout) -> str:
    """Return how many ranks share experts, in words."""
    return f", ep {layout.ep}" if layout.ep > 1 else ""


def _memory(memory: HeldBytes) -> str:
    kinds = ", ".join(f"{name} {num_bytes / 1e6:.1f}" for name, num_bytes in memory.kinds().items())
    return f"MB per rank by the plan: {kinds}; at most {memory.peak / 1e6:.1f} at once, in {memory.action}"


def _bubble(plan: Plan) -> str:
    """Return the plan's idle share in words, with the layers split as they are, which may be uneven."""
    durations = {
        (kind, number): length * (chunk.layers[1] - chunk.layers[0])
        for kind, length in _LAYER_TIMES.items()
        for number, chunk in enumerate(plan.chunks)
    }
    return f"bubble {clock(plan.actions, durations).bubble:.1%} of the step (a layer's backward = 2 forward)"


def _layers(first: int, last: int) -> str:
    return f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"


class ProgressLine:
    """One line that updates in place; if the output is not a terminal, plain lines from time to time.

    Args:
        console: where to write.
        num_steps: length of the run.
        first_step: number of steps done before, by the run that this one continues.
    """

    def __init__(self, console: Console, num_steps: int, first_step: int = 0) -> None:
        self._console, self._num_steps, self._first = console, num_steps, first_step
        self._every = max(1, num_steps // _PLAIN_LINES)
        self._pace = Pace()
        self._done, self._figures, self._held_out = first_step, "", ""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_ROWS)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TextColumn("{task.fields[left]}"),
                console=console,
            )
            self._task = self._progress.add_task("train", total=num_steps, completed=first_step, figures="", left="")

    def __enter__(self) -> ProgressLine:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show a finished step; `record` is a metrics.step_record."""
        self._done = record["step"]
        if record.get("left_out"):
            self._figures = "left out, as it was skipped before"
        else:
            self._figures = self._figures_of(record)
        self._pace.add(record)
        if self._progress is None and (
            self._done % self._every == 0 or self._done in (self._first + 1, self._num_steps)
        ):
            line = f"step {self._done}/{self._num_steps}  {self._figures}  {self._left()}"
            self._console.print(line.rstrip(), highlight=False)
        self._show()

    def _left(self) -> str:
        return self._pace.left(self._num_steps - self._done)

    def go_back(self, num_steps: int) -> None:
        """Go on from an earlier step."""
        self._first, self._done, self._held_out = num_steps, num_steps, ""
        self._recent.clear()
        self._show()

    def evaluated(self, loss: float) -> None:
        """Show the held-out loss that follows the step that was shown last.

        It is said once: in a line, or in the progress line until the next one. That of the last step is the run's
        result, which `show_held_out` says.
        """
        is_last = self._done == self._num_steps
        self._held_out = "" if is_last else f"  held-out {loss:.4f} (step {self._done})"
        if self._progress is None and not is_last:
            self._console.print(f"step {self._done}/{self._num_steps}  held-out loss {loss:.4f}", highlight=False)
        self._show()

    def _show(self) -> None:
        if self._progress is not None and self._task is not None:
            figures = self._figures + self._held_out
            self._progress.update(self._task, completed=self._done, figures=figures, left=self._left())

    def _figures_of(self, record: dict[str, Any]) -> str:
        """Return a step's figures; tokens per second are over the wall time of the last rows."""
        wall = record.get("wall_seconds", record["step_seconds"])
        self._recent.append((record["tokens_per_second"] * record["step_seconds"], wall))
        tokens, seconds = (sum(part) for part in zip(*self._recent, strict=True))
        loss, norm = (
            record.get("loss", record.get("spike_loss")),
            record.get("grad_norm", record.get("spike_grad_norm")),
        )
        figures = f"loss {loss:.4f}  lr {record['lr']:.2e}  norm {norm:.3g}"
        figures += f"  {tokens / seconds:,.0f} tokens/s"
        if "mfu_attention_causal" in record:
            # Attention counts half, as a causal kernel computes it; many papers count it whole.
            share = record["step_seconds"] / wall
            half, whole = (share * record[f"mfu_attention_{how}"] for how in ("causal", "full"))
            figures += f"  MFU {half:.1%} (attention whole {whole:.1%})"
        figures += f"  {record['peak_memory_bytes'] / 1e9:.2f} GB"
        if loads := [load for name, load in record.items() if name.startswith("expert_load/")]:
            figures += f"  hottest expert {max(loads):.2f}x"
        why = ", it leaps" if "event" in record else ""
        return figures + (f"  skipped{why}" if record.get("skipped") else "")


def show_held_out(console: Console, loss: float | None) -> None:
    """Print the held-out loss of the end."""
    none = "held-out loss: none, no target of the held-out text is valid"
    console.print(none if loss is None else f"held-out loss {loss:.4f} nats", highlight=False)


def show_next(console: Console, run_dir: Path, saved: Path | None) -> None:
    """Print where a run that has ended left its weights, and what can be asked of it.

    Args: run_dir: of the run. saved: its last checkpoint; None if it saves none.
    """
    given = shlex.quote(str(run_dir))
    lines = [f"the run is in {run_dir}, and saves no checkpoint" if saved is None else f"saved in {saved}"]
    if saved is not None:
        lines.append(f"tpengine generate {given} --prompt TEXT    what its model says")
    lines.append(f"tpengine watch {given}    what it has reported, drawn")
    if (run_dir / "profile.json").exists():
        lines.append(f"tpengine diagnose {given}    why its steps take as long as they do")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_sample(console: Console, prompt: str, text: str) -> None:
    """Print a prompt and the text that was sampled after it."""
    console.print(f"sample, continuing {_readable(prompt)!r}:", markup=False, highlight=False)
    console.print(_readable(text), markup=False, highlight=False)


def texts_of(
    tokens: list[int], num_prompt: int, vocab_size: int, decode: Callable[[list[int]], str] | None
) -> tuple[str, str]:
    """Return prompt and continuation as text.

    Args:
        tokens: the prompt, and what was sampled after it.
        num_prompt: length of the prompt.
        vocab_size: of the model; if it is that of bytes, tokens are shown as such.
        decode: gives the text of tokens; without it tokens that are no bytes are shown as numbers.
    """
    first, rest = tokens[:num_prompt], tokens[num_prompt:]
    if decode is None and vocab_size > 256:
        return " ".join(map(str, first)), " ".join(map(str, rest))
    if decode is None:
        return bytes(first).decode("utf-8", "replace"), bytes(rest).decode("utf-8", "replace")
    # Alone the continuation might lose the space that it begins with.
    prompt, whole = decode(first), decode(tokens)
    return prompt, whole.removeprefix(prompt) if whole.startswith(prompt) else decode(rest)


def _readable(text: str) -> str:
    """Return a text without characters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class _PatientConsole(SafeConsole):
    """A console that goes silent when its reader has gone, so that training continues."""

    def on_broken_pipe(self) -> None:
        """Redirect further output to /dev/null."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console_for(rank: int) -> Console:
    """Return a console on standard output for rank 0, and a silent one for other ranks."""
    return _PatientConsole(file=sys.stdout, quiet=rank != 0, soft_wrap=True)
