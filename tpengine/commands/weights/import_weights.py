"""`tpengine import`: a directory of Hugging Face weights, or a run's checkpoint, as a run that has not begun.

What is written is a run's directory with a checkpoint of step 0: weights alone, in the source's dtypes, padding left
out, each parameter one box. Any layout begins from it, `--model.path RUN` takes it, and `tpengine export` gives every
tensor back byte for byte.

The decision a reader will question: no moments are written. At step 0 they are zeros in any layout and dtype, and would
make the directory three times as large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tpengine.checkpoint.index import (
    CheckpointError,
    FileEntry,
    Index,
    Piece,
    TensorEntry,
    check_file,
    hash_file,
    write_index,
)
from tpengine.checkpoint.run.resume import checkpoints_of, state_of
from tpengine.checkpoint.run.run_directory import write_config
from tpengine.commands.weights.export import read_weight
from tpengine.commands.weights.progress import shown
from tpengine.config import Config, ModelConfig
from tpengine.files import new_directory, sync_directory
from tpengine.hugging_face.check import check_tied
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.hugging_face.kept import hand_on, keep_source
from tpengine.hugging_face.names import stored_of, tied_names
from tpengine.hugging_face.read import BoxReader
from tpengine.hugging_face.write import ReadParameter, TensorToWrite, plan_files, tensors_to_write, write_file
from tpengine.layout.stored import Stored
from tpengine.torch_dtypes import TORCH_DTYPES
from tpengine.training.state.beginning import check_beginning
from tpengine.training.state.training_state import MASTER, hf_name

# Each file is hashed by one rank when a run begins: several files occupy several ranks.
LARGEST_FILE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class _Weight:
    """A parameter of the source: its name and shape in checkpoints, its dtype, and how a box of it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: ReadParameter


def import_weights(config: Config, out: Path) -> list[str]:
    """Write the directory of a run that begins with the weights of config.model.path.

    Args:
        config: what the run will be, from `commands.arguments.parse_imported`.
        out: a directory that is not there yet, or is empty.

    Returns:
        The names of the tensors of its checkpoint.

    Raises:
        ValueError: weights that are not those of the model, or that cannot be read; an output directory that is not
            empty.
        OSError: the directory cannot be written.

    Cost: the source is read once and the checkpoint written once, and read again for its hashes. Memory: one block of
    rows, at most 4 MiB of float64, and the reader's buffer.
    """
    model, found = config.model, check_beginning(config.model)
    begins = replace(config, model=replace(model, path=f"{out}@0"), run_dir=str(out))
    with new_directory(out, "a run's directory") as beside:
        if isinstance(found, ModelDirectory):
            with BoxReader(found) as reader:
                if (tied := tied_names(model)) is not None:
                    check_tied(found, reader.source, *tied)
                names = _write_checkpoint(beside, begins, list(_of_files(model, found, reader)))
            keep_source(found, beside)
        else:
            names = _write_checkpoint(beside, begins, list(_of_run(model, *found)))
            # A checkpoint lies two folders below its run.
            hand_on(found[0].parent.parent, beside)
        write_config(begins, beside, keeps_equal=False)
    return names


def _of_files(model: ModelConfig, directory: ModelDirectory, reader: BoxReader) -> Iterator[_Weight]:
    for name, (spec, stored) in stored_of(model).items():
        dtype = directory.tensors[stored.name].dtype
        read = partial(_read_file, reader, stored, dtype)
        yield _Weight(hf_name(name), spec.stored_shape, dtype, read)


def _read_file(reader: BoxReader, stored: Stored, dtype: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return reader.read(stored, offset, size, TORCH_DTYPES[dtype])


def _of_run(model: ModelConfig, directory: Path, index: Index) -> Iterator[_Weight]:
    """Yield the weights of a checkpoint; the wider ones, of a run of 16 bits."""
    for name, entry in sorted(index.files.items()):
        check_file(directory, name, entry)
    for name, (spec, _) in stored_of(model).items():
        saved, shape = hf_name(name), spec.stored_shape
        found = index.tensors.get(MASTER + saved) or index.tensors.get(saved)
        if found is None or found.shape != shape:
            raise CheckpointError(
                f"a checkpoint must be of the model that its run says: {directory} has {saved} as "
                f"{None if found is None else list(found.shape)}, not {list(shape)}: use another checkpoint"
            )
        yield _Weight(saved, shape, found.dtype, partial(read_weight, directory, index, saved, shape))


def _write_checkpoint(run_dir: Path, config: Config, weights: list[_Weight]) -> list[str]:
    """Write a checkpoint of step 0, in files of at most LARGEST_FILE_BYTES; return its tensors' names."""
    checkpoints = checkpoints_of(run_dir)
    directory = checkpoints.of_step(0)
    directory.mkdir(parents=True)
    parts = [(Stored(weight.name, weight.shape), weight.read) for weight in weights]
    tensors = tensors_to_write(parts, {weight.name: weight.dtype for weight in weights})
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    with shown(tensors, f"importing {config.run_dir}") as counted:
        held = plan_files(counted, LARGEST_FILE_BYTES)
        for number, of_file in enumerate(held, start=1):
            file = f"weights-{number:05}-of-{len(held):05}.safetensors"
            write_file(directory / file, of_file)
            files[file] = hash_file(directory / file)
            entries |= {tensor.name: _entry(tensor, file) for tensor in of_file}
    write_index(directory, Index(0, entries, files, state_of(config, "", 0)))
    for folder in (directory, checkpoints.path):
        sync_directory(folder)
    return list(entries)


def _entry(tensor: TensorToWrite, file: str) -> TensorEntry:
    whole = Piece((0,) * len(tensor.shape), tensor.shape, file, tensor.name)
    return TensorEntry(tensor.dtype, tensor.shape, (whole,))
