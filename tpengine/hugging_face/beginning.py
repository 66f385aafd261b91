"""The weights of `--model.path`, a model's directory or a run's checkpoint: what a run, or generating, begins with.

`check_beginning` refuses, before a process group exists, what cannot be loaded; `begin_from` fills a state, each
rank with what it holds. Only weights are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.index import CheckpointError, Index
from tpengine.checkpoint.storage import SavedBlock
from tpengine.config import Config, ModelConfig
from tpengine.hugging_face.directory import ModelDirectory, check_tensors, check_tied, open_directory
from tpengine.hugging_face.names import begun_at_zero, ignorable, stored_of, tied_names, wanted, with_prefix
from tpengine.hugging_face.read import BoxReader
from tpengine.hugging_face.tokenizer_files import hand_on, keep_source
from tpengine.layout.parameters import hf_name
from tpengine.model.transformer import Transformer
from tpengine.runs.restoring import checkpoint_of, on_all_ranks
from tpengine.training.checkpoint_blocks import load_blocks, load_weights, masters_of, weights_of_model
from tpengine.training.planned_run import RunError
from tpengine.training.train_state import TrainState

FoundWeights = ModelDirectory | tuple[Path, Index]


@dataclass(frozen=True)
class WeightsOfPath:
    """What a run begins with (runs/restoring.py: Beginning).

    Attributes:
        found: what check_beginning has returned on this rank.
    """

    found: FoundWeights

    @classmethod
    def of(cls, model: ModelConfig) -> WeightsOfPath:
        """Return what model.path has; raises as check_beginning."""
        return cls(check_beginning(model))

    def fill(self, state: TrainState) -> None:
        """See Beginning."""
        begin_from(state, self.found)

    def keep(self, run_dir: Path) -> None:
        """See Beginning."""
        if isinstance(self.found, ModelDirectory):
            keep_source(self.found, run_dir)
        else:
            # A checkpoint lies two folders below its run.
            hand_on(self.found[0].parent.parent, run_dir)


def check_beginning(model: ModelConfig) -> FoundWeights:
    """Return what model.path has, with all names and shapes checked; no weight is read.

    Raises:
        ValueError: weights that are not those of the model, or that cannot be read.
    """
    if (run := run_of(model.path)) is not None:
        return checkpoint_of(*run)
    directory = with_prefix(open_directory(model.path), model)
    check_tensors(directory, wanted(model, directory), ignorable(model))
    return directory


def begin_from(state: TrainState, found: FoundWeights) -> None:
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


def fill_from_files(model: ModelConfig, directory: ModelDirectory, blocks: Iterable[tuple[str, SavedBlock]]) -> None:
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
        begun = begun_at_zero(model, directory)
        for name, block in found:
            if name in begun:
                block.tensor.zero_()
        reader.fill_all(
            [(places[name][1], block.offset, block.tensor) for name, block in found if name not in begun], num_threads
        )


def fill_model(model: Transformer, config: Config) -> None:
    """Fill a model's weights from config.model.path; collective.

    Raises:
        RunError, CheckpointError: on all ranks alike: weights that are not those of the model, or a damaged file.
    """
    found: list[FoundWeights] = []
    on_all_ranks(lambda: found.append(check_beginning(config.model)))
    (beginning,) = found
    if isinstance(beginning, ModelDirectory):
        on_all_ranks(lambda: fill_from_files(config.model, beginning, weights_of_model(model)))
    else:
        load_blocks(((hf_name(name), block) for name, block in weights_of_model(model)), *beginning)
