"""`--model.path`: the weights that a run begins with, out of Hugging Face's files or of a run of ours.

`check_beginning` refuses, before a process group exists, what cannot be loaded; `begin_from` fills a state, each
rank with what it holds. Moments begin at zero and steps at 0: only weights are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint, Index, read_index
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.checkpoint.storage import Block
from tpengine.config import ModelConfig
from tpengine.distributed.agreement import all_gather_json
from tpengine.hugging_face.directory import ModelDirectory, check_tensors, check_tied, open_directory
from tpengine.hugging_face.names import ignorable, stored_of, tied_names, wanted, with_prefix
from tpengine.hugging_face.read import BoxReader
from tpengine.last_words import one_line
from tpengine.training.planned_run import RunError
from tpengine.training.state.training_state import load_weights, masters_of
from tpengine.training.train_state import TrainState

Beginning = ModelDirectory | tuple[Path, Index]


def check_beginning(model: ModelConfig) -> Beginning:
    """Return what model.path has, with all names and shapes checked; no weight is read.

    Raises:
        ValueError: weights that are not those of the model, or that cannot be read.
    """
    if (run := run_of(model.path)) is not None:
        return checkpoint_of(*run)
    directory = with_prefix(open_directory(model.path), model)
    check_tensors(directory, wanted(model), ignorable(model))
    return directory


def checkpoint_of(run: Path, step: int | None) -> tuple[Path, Index]:
    """Return the checkpoint of a step, or the newest whole one, and its index."""
    checkpoints = checkpoints_of(str(run))
    steps = checkpoints.steps()
    if step is not None and step not in steps:
        raise ValueError(
            f"RUN@STEP names a checkpoint: {run} has those of steps {', '.join(map(str, steps)) or 'none'}, not "
            f"{step}: use one of them"
        )
    problem = "it has none"
    for number in [step] if step is not None else reversed(steps):
        directory = checkpoints.of_step(number)
        try:
            return directory, read_index(directory)
        except DamagedCheckpoint as error:
            problem = str(error)
    raise ValueError(f"a run to begin from must have a whole checkpoint: {run}: {problem}: use another run")


def begin_from(state: TrainState, found: Beginning) -> None:
    """Fill the weights of a state; collective.

    Args:
        state: at step 0, of any layout.
        found: what check_beginning has returned on this rank.

    Raises:
        RunError: on all ranks alike: a file cannot be read, or is damaged.
    """
    if isinstance(found, ModelDirectory):
        on_all_ranks(lambda: _fill_from_files(state, found))
        return
    try:
        load_weights(state, *found)
    except CheckpointError as error:
        raise RunError(str(error)) from None


def _fill_from_files(state: TrainState, directory: ModelDirectory) -> None:
    fill_from_files(state.part.config.model, directory, masters_of(state))
    state.optimizer.round_masters()


def fill_from_files(model: ModelConfig, directory: ModelDirectory, blocks: Iterable[tuple[str, Block]]) -> None:
    """Fill blocks of parameters, each by the parameter's name; the tied head is compared, a share of it on each rank.

    Raises:
        ValueError: on this rank: a file cannot be read, or the tied head differs.
    """
    places, found = stored_of(model), list(blocks)
    # On a GPU copies over the bus take turns.
    num_threads = torch.get_num_threads() if all(block.tensor.device.type == "cpu" for _, block in found) else 1
    with BoxReader(directory) as reader:
        if (tied := tied_names(model)) is not None:
            check_tied(directory, reader.source, *tied, (dist.get_rank(), dist.get_world_size()))
        reader.fill_all([(places[name][1], block.offset, block.tensor) for name, block in found], num_threads)


def on_all_ranks(fill: Callable[[], None]) -> None:
    """Run a function on every rank; if it fails on one, raise RunError on all."""
    problem = ""
    try:
        fill()
    except (ValueError, OSError) as error:
        # Not raised here: the other ranks wait for this rank's result.
        problem = one_line(str(error))
    if problems := [said for said in all_gather_json(problem) if said]:
        raise RunError(problems[0])
