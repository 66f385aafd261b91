"""What tests of resuming share: a trainer that goes on from a run's newest checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from tpengine.checkpoint.resume import find_checkpoint
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import restore
from tpengine.training.elementwise import UpdateRule


def resumed(config: Config, run_dir: str, num_steps: int, optimizer: UpdateRule | None = None) -> Trainer:
    """This rank's trainer, after the `num_steps` steps of the checkpoint in `run_dir`."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"), optimizer=optimizer)
    config = trainer.planned.config
    checkpoint = find_checkpoint(replace(config, run_dir=run_dir), trainer.state.part.corpus.fingerprint())
    assert checkpoint is not None
    assert restore(trainer.state, checkpoint) == num_steps
    return trainer
