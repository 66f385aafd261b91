"""What a rank of a run is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tpengine.checkpoint.resume import Checkpoint
from tpengine.config import Config
from tpengine.data import Corpus
from tpengine.distributed.launch import Launch
from tpengine.distributed.meeting import Meeting
from tpengine.plan import Residency
from tpengine.runs.restoring import Beginning


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        config: validated configuration.
        corpora: the text of each phase.
        launch, device: this rank, and the device where it computes.
        shared_cores: number of cores that the ranks of this host share as threads; 0 if the user set the threads.
        meeting: where the ranks have met.
        run_dir: existing directory for config.toml, the file of a schedule of the user's own, metrics.jsonl and
            TensorBoard events, on rank 0; None elsewhere.
        checkpoint: where to continue, unless a rank cannot use it; None starts at step 0.
        beginning: the weights that step 0 starts from; None for drawn ones.
    """

    config: Config
    corpora: tuple[Corpus, ...]
    launch: Launch
    device: torch.device
    shared_cores: int
    residency: Residency
    meeting: Meeting
    run_dir: Path | None
    checkpoint: Checkpoint | None
    beginning: Beginning | None = None
