"""Loading a checkpoint into this rank's blocks, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint, Index, check_file
from tpengine.checkpoint.storage import Blocks, SavedBlock, fill, parts_of
from tpengine.distributed.agreement import all_gather_json
from tpengine.last_words import one_line
from tpengine.torch_dtypes import FILE_NAME_OF


def load(directory: Path, index: Index, blocks: Mapping[str, SavedBlock | Blocks], *, converts: bool = False) -> None:
    """Fill the blocks from a checkpoint; collective over all ranks.

    Every file is hashed before anything is read from it; each file by one rank.

    Args:
        directory: of the checkpoint, the same on all ranks.
        index: from `read_index`.
        blocks: this rank's blocks, under the names they were saved with; empty blocks read nothing.
        converts: blocks may have other dtypes than those saved.

    Raises:
        DamagedCheckpoint: on all ranks alike: an altered file. Blocks may have been filled partly.
        CheckpointError: on all ranks alike: a tensor is missing, or has another shape or dtype.

    Cost: each file is read once for its hash by one rank, and each block by the ranks that hold it.
    """
    _raise_everywhere(_first_problem(directory, index, blocks, converts))
    problem: CheckpointError | None = None
    try:
        fill(directory, index, blocks)
    except CheckpointError as error:
        problem = error
    except Exception as error:
        # Not raised here: the other ranks wait for this rank's result.
        problem = CheckpointError(f"{directory}: {one_line(str(error))}")
    _raise_everywhere(problem)


def _first_problem(
    directory: Path, index: Index, blocks: Mapping[str, SavedBlock | Blocks], converts: bool
) -> CheckpointError | None:
    try:
        for name, block in blocks.items():
            _check_tensor(directory, index, name, parts_of(block)[0], converts)
        names = sorted(index.files)
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            check_file(directory, name, index.files[name])
    except CheckpointError as error:
        return error
    return None


def _check_tensor(directory: Path, index: Index, name: str, block: SavedBlock, converts: bool) -> None:
    entry = index.tensors.get(name)
    remedy = "resume with the configuration it was saved with"
    if entry is None:
        raise CheckpointError(f"a checkpoint must hold every tensor of the model: {directory} has no {name}: {remedy}")
    want = entry.dtype if converts else FILE_NAME_OF[block.tensor.dtype], block.global_shape
    if (entry.dtype, entry.shape) != want:
        raise CheckpointError(
            f"a checkpoint must be of the same model: {directory} has {name} as {entry.dtype} {list(entry.shape)}, "
            f"this model as {want[0]} {list(want[1])}: {remedy}"
        )


def _raise_everywhere(problem: CheckpointError | None) -> None:
    """Raise the first problem of any rank on all of them; problems other than damage come first."""
    is_damage = isinstance(problem, DamagedCheckpoint)
    everyone = all_gather_json(None if problem is None else [is_damage, str(problem)])
    for is_damage, message in sorted((found for found in everyone if found is not None), key=lambda found: found[0]):
        raise (DamagedCheckpoint if is_damage else CheckpointError)(message)
