"""What a training run prints: the plan before it starts, one progress line, the result. Rank 0 only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tpengine.config import Config, Phase, Phases, num_blocks, shards_said
from tpengine.layout.parameters import num_parameters
from tpengine.layout.step_plan import Layout
from tpengine.plan import Kind, Plan, clock
from tpengine.simulate.modelled.costs import bytes_per_rank
from tpengine.simulate.modelled.memory import RankMemory, memory_of

_PLAIN_LINES = 40
# Times of one layer, in forwards.
_LAYER_TIMES: Mapping[Kind, float] = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def show_plan(
    console: Console,
    config: Config,
    layout: Layout,
    plan: Plan,
    device: torch.device,
    exchange: str,
    run_dir: Path,
    shared_cores: int = 0,
) -> None:
    """Print what the run will do: layout, parameters and bytes per rank, the pipeline's bubble, where output goes.

    Args:
        exchange: how the ranks exchange tensors, in words.
        shared_cores: number of cores of this host, if the ranks divide them; 0 if the number of threads was given.
    """
    train, model = config.train, config.model
    tokens = train.micro_batch_size * train.seq_len
    lines = [
        ("model", f"{num_parameters(model):,} parameters, {model.num_layers} layers, hidden {model.hidden_size}"),
        (
            "layout",
            f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} on {device.type}, {train.dtype}{_sharing(layout)}",
        ),
        (
            "step",
            f"{train.num_micro_batches} micro-batches of {tokens:,} tokens x dp {layout.dp} = "
            f"{tokens * train.num_micro_batches * layout.dp:,} tokens; {train.steps} steps",
        ),
    ]
    for stage, (numel, num_bytes) in enumerate(bytes_per_rank(config, layout)):
        what = " and ".join(_layers(first, last) for first, last in layout.layers_of(stage))
        size = f"{num_bytes / 1e6:.1f} MB per rank with gradients and moments"
        lines.append((f"stage {stage}", f"{what}: {numel:,} parameters, {size}"))
    for stage, memory in enumerate(memory_of(config, layout, plan)):
        lines.append(("memory", f"{f'stage {stage}: ' if layout.pp > 1 else ''}{_memory(memory)}"))
    lines.append(("pipeline", f"{plan.schedule}, {_bubble(plan)}" if layout.pp > 1 else "one stage, no bubble"))
    if train.reduction == "exact":
        lines.append(("sums", f"exact, the bits of every other layout: {shards_said(config)}, {_blocks(config)}"))
    if device.type == "cpu":
        share = f", its share of {shared_cores} cores (OMP_NUM_THREADS sets another number)" if shared_cores else ""
        lines.append(("threads", f"{torch.get_num_threads()} per rank{share}"))
    lines.append(("exchange", exchange))
    lines.append(("output", str(run_dir)))
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


def _memory(memory: RankMemory) -> str:
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
        self._begin = time.perf_counter()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("train", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> ProgressLine:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show a finished step; `record` is a metrics.step_record."""
        if record.get("left_out"):
            figures = "left out, as it was skipped before"
        else:
            figures = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
            figures += "  skipped" if record.get("skipped") else ""
        done = record["step"] + 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, figures=figures)
        elif done % self._every == 0 or done in (self._first + 1, self._num_steps):
            each = (time.perf_counter() - self._begin) / (done - self._first)
            left = each * (self._num_steps - done)
            self._console.print(f"step {done}/{self._num_steps}  {figures}  {left:.0f} s left", highlight=False)


def show_result(
    console: Console,
    held_out: float | None,
    tokens: list[int],
    num_prompt: int,
    vocab_size: int,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """Print the held-out loss, the prompt and the sampled text.

    Args:
        console: where to.
        held_out: the loss; None if there is none.
        tokens: the prompt, and what was sampled after it.
        num_prompt: length of the prompt.
        vocab_size: of the model; if it is that of bytes, tokens are shown as such.
        decode: gives the text of tokens; without it tokens that are no bytes are shown as numbers.
    """
    if held_out is not None:
        console.print(f"held-out loss {held_out:.4f} nats", highlight=False)
    if tokens:
        prompt, text = (_readable(part) for part in _texts(tokens, num_prompt, vocab_size, decode))
        console.print(f"sample, continuing {prompt!r}:", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)


def _texts(
    tokens: list[int], num_prompt: int, vocab_size: int, decode: Callable[[list[int]], str] | None
) -> tuple[str, str]:
    """Return prompt and continuation as text."""
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


class _PatientConsole(Console):
    """A console that goes silent when its reader has gone, so that training continues."""

    def on_broken_pipe(self) -> None:
        """Redirect further output to /dev/null."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console_for(rank: int) -> Console:
    """Return a console on standard output for rank 0, and a silent one for other ranks."""
    return _PatientConsole(file=sys.stdout, quiet=rank != 0, soft_wrap=True)
