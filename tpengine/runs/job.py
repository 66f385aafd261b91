"""What a rank of a run is given: its work, and what others do for it; and what comes of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from tpengine.checkpoint.resume import Checkpoint
from tpengine.config import Config, ModelConfig
from tpengine.distributed.hosts import Hosts
from tpengine.distributed.launch import Launch
from tpengine.distributed.meeting import Meeting
from tpengine.layout.decided import Decided
from tpengine.layout.step_plan import Layout
from tpengine.observe.console import HeldBytes
from tpengine.observe.records import Recording
from tpengine.plan import Plan
from tpengine.runs.callbacks import Callback
from tpengine.runs.restoring import Beginning
from tpengine.training.elementwise import UpdateRule
from tpengine.training.objective import Objective
from tpengine.training.samples import Corpus


class ContentWatch(contextlib.AbstractContextManager["ContentWatch"], Protocol):
    """Watches, while a run goes on, that its texts keep their content; a context manager."""

    @property
    def flag(self) -> int:
        """0 while nothing is wrong; else a number for `explain`, of which the largest of all ranks may be taken."""

    def explain(self, flag: int) -> str:
        """Return in one line what a rank's flag means; the same line on every rank."""


@dataclass(frozen=True)
class Wings:
    """What a run has others do, which it does not import: train.py takes them from the rooms that have them.

    Attributes:
        bytes_per_rank: parameters of a rank and bytes of its state, by stage.
        memory_of: what a rank holds by a plan, by stage, of a phase on a device, cpu or cuda.
        most_load: up to which load of the rank whose experts get most it is enough, of the same phase.
        draw_learning_rate: the rate of a step, the number of steps, and the first steps of later phases, as an SVG.
        write_recording: write and draw recorded steps.
        find_beginning: the weights that model.path has; ValueError if they cannot be used.
        decoder_of: what makes text of tokens, by what a run's directory keeps of the weights that it began with; None
            where there is nothing, ValueError where it cannot be opened.
    """

    bytes_per_rank: Callable[[Config, Layout], Sequence[tuple[int, int]]]
    memory_of: Callable[[Config, Layout, Plan, str], Sequence[HeldBytes]]
    most_load: Callable[[Config, Layout, Plan, str], float]
    draw_learning_rate: Callable[[Callable[[int], float], int, Sequence[int]], str]
    write_recording: Callable[[Recording], None]
    find_beginning: Callable[[ModelConfig], Beginning]
    decoder_of: Callable[[Path], Callable[[list[int]], str] | None]


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        config: validated configuration.
        corpora: the text of each phase.
        launch, device: this rank, and the device where it computes.
        shared_cores: number of cores that the ranks of this host share as threads; 0 if the user set the threads.
        decided: what was decided by this rank's memory.
        meeting: where the ranks have met.
        wings: what others do for the run.
        content: whether the texts are still what they were when the run began.
        run_dir: existing directory for config.toml, the file of a schedule of the user's own, metrics.jsonl and
            TensorBoard events, on rank 0; None elsewhere.
        checkpoint: where to continue, unless a rank cannot use it; None starts at step 0.
        beginning: the weights that step 0 starts from; None for drawn ones.
        objective: the user's own loss and metrics; None for the next token's.
        optimizer: the user's own optimizer; None for what the configuration says.
        callbacks: the user's own, the same on all ranks.
        hosts: which rank is on which host.
    """

    config: Config
    corpora: tuple[Corpus, ...]
    launch: Launch
    device: torch.device
    shared_cores: int
    decided: Decided
    meeting: Meeting
    wings: Wings
    content: ContentWatch
    run_dir: Path | None
    checkpoint: Checkpoint | None
    beginning: Beginning | None = None
    objective: Objective | None = None
    optimizer: UpdateRule | None = None
    callbacks: tuple[Callback, ...] = ()
    hosts: Hosts = field(default_factory=Hosts)


@dataclass(frozen=True)
class RunResult:
    """What has come of a run that has ended with its last step, equal on all ranks.

    Attributes:
        run_dir: its directory on rank 0's host, as an absolute path.
        step: how many steps are done in all.
        loss: of the last step, in nats per valid target; None if this start computed no step.
        held_out_loss: of the last step's weights, in nats; None if there is none.
        checkpoint: the newest checkpoint; None if none is saved.
    """

    run_dir: Path
    step: int
    loss: float | None
    held_out_loss: float | None
    checkpoint: Path | None
