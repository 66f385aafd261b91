"""`tpengine export` and `tpengine import`: a run's checkpoint as a directory for transformers, and back.

Export: one process reads the checkpoint, whatever layout trained it, block by block and writes tensor by tensor: never
a whole tensor is in memory. Weights come from the wider copies of a run of 16 bits, where it has them.

Import: a directory of Hugging Face weights, or a run's checkpoint, becomes a run that has not begun. What is written is
a run's directory with a checkpoint of step 0: weights alone, in the source's dtypes, padding left out, each parameter
one box. Any layout begins from it, `--model.path RUN` takes it, and `tpengine export` gives every tensor back byte for
byte.

Both say how far they have come: one line that updates in place, on standard error. Where standard error is no terminal,
a line every half minute. Work that is done sooner says nothing.

The decision a reader will question: an import writes no moments. At step 0 they are zeros in any layout and dtype, and
would make the directory three times as large.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import Tensor

from tpengine.architectures.config_json import ConfigJson, written_rope
from tpengine.architectures.registry import BUILT_IN, architecture_of, lacks_bias, model_of
from tpengine.checkpoint.index import (
    CheckpointError,
    FileEntry,
    Index,
    SavedPiece,
    TensorEntry,
    check_file,
    hash_file,
    write_index,
)
from tpengine.checkpoint.resume import checkpoints_of, saved_config, state_of
from tpengine.checkpoint.run_directory import write_config
from tpengine.checkpoint.storage import SavedBlock, fill
from tpengine.config import Config, ModelConfig
from tpengine.config.settings import NUMBERS_OF_EXPERTS
from tpengine.dtypes import FILE_BITS, FILE_NAMES
from tpengine.files import new_directory, sync_directory
from tpengine.hugging_face.beginning import check_beginning
from tpengine.hugging_face.directory import CONFIG, ModelDirectory, check_tied
from tpengine.hugging_face.names import name_of, stored_of, tied_names
from tpengine.hugging_face.read import BoxReader
from tpengine.hugging_face.tokenizer_files import copy_companions, hand_on, keep_source, kept_dtypes
from tpengine.hugging_face.write import (
    ReadParameter,
    TensorToWrite,
    plan_files,
    tensors_to_write,
    write_file,
    write_weights,
)
from tpengine.layout.parameters import EMBEDDING, HEAD, hf_name
from tpengine.layout.stored import Stored
from tpengine.runs.restoring import checkpoint_of
from tpengine.terminal import escaped, raw
from tpengine.torch_dtypes import FILE_NAME_OF, TORCH_DTYPES
from tpengine.training.checkpoint_blocks import MASTER

# Between two lines: on a terminal, where they replace each other, and elsewhere.
_TERMINAL_SECONDS, _PLAIN_SECONDS = 0.5, 30.0
# Each file is hashed by one rank when a run begins: several files occupy several ranks.
LARGEST_FILE_BYTES = 1_000_000_000


class ByteProgress:
    """Says how many bytes are done, and how long the rest will take.

    Args:
        what: is done, in words.
        num_bytes: in all.
        stream: to write to.
        clock: seconds that only grow.
    """

    def __init__(self, what: str, num_bytes: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._num_bytes, self._stream, self._clock = what, num_bytes, stream, clock
        self._done, self._width = 0, 0
        self._begin = self._said = clock()
        self._replaces = stream.isatty()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done, and say so if it is time."""
        self._done += num_bytes
        now = self._clock()
        if now - self._said < (_TERMINAL_SECONDS if self._replaces else _PLAIN_SECONDS):
            return
        self._said = now
        left = (now - self._begin) * (self._num_bytes - self._done) / max(1, self._done)
        line = f"{self._what}: {self._done / 1e9:.1f} of {self._num_bytes / 1e9:.1f} GB, {left:.0f} s left"
        if self._replaces:
            self._stream.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()


@contextmanager
def byte_progress(tensors: Sequence[TensorToWrite], what: str) -> Iterator[list[TensorToWrite]]:
    """Give the same tensors, whose blocks are counted as they are asked for.

    Args:
        tensors: to write.
        what: is done with them, in words.
    """
    progress = ByteProgress(escaped(what), sum(tensor.num_bytes for tensor in tensors), cast(TextIO, raw(sys.stderr)))
    try:
        yield [replace(tensor, blocks=partial(_counted, tensor, progress)) for tensor in tensors]
    finally:
        progress.end()


def _counted(tensor: TensorToWrite, progress: ByteProgress) -> Iterable[Tensor]:
    for block in tensor.blocks():
        yield block
        progress.add(block.numel() * FILE_BITS[tensor.dtype] // 8)


def export(run: Path, step: int | None, out: Path, dtype: str | None = None, own: str = "") -> list[str]:
    """Write a checkpoint of a run as a directory of Hugging Face's form.

    Args:
        run: directory of the run.
        step: which checkpoint; None for the newest whole one.
        out: a directory that is not there yet, or is empty.
        dtype: float64, float32, float16 or bfloat16; None for those of the directory that the run began from, or the
            run's own.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Returns:
        The names of the tensors that were written.

    Raises:
        ValueError: no such checkpoint, or a damaged one; an output directory that is not empty; an architecture whose
            config.json the run does not have.
    """
    if dtype is not None and dtype not in FILE_NAMES:
        raise ValueError(f"--dtype must be one of {', '.join(FILE_NAMES)}: got {dtype!r}: use float32")
    if not (run / "config.toml").is_file():
        raise ValueError(f"an export needs the directory of a run: {run} has no config.toml: check the path")
    config = saved_config(str(run), own)
    if lacks_bias(config.model):
        raise ValueError(
            f"files of {config.model.architecture} have no bias of a router, without which tokens go to other experts: "
            f"{run} was trained with one (--train.balance bias), which stays: begin anew with --train.balance loss"
        )
    directory, index = checkpoint_of(run, step)
    values = config_json(config, run)
    _check_experts(config.model, values, run)
    for name, entry in sorted(index.files.items()):
        check_file(directory, name, entry)
    with new_directory(out, "an export directory") as beside:
        tensors = tensors_to_write(_parts(config.model, directory, index, run), _dtypes(config, run, dtype))
        with byte_progress(tensors, f"writing {out}") as counted:
            write_weights(beside, counted)
        most = Counter[str]()
        for tensor in tensors:
            most[tensor.dtype] += tensor.num_bytes
        name = next(name for name, short in FILE_NAMES.items() if short == most.most_common(1)[0][0])
        values |= {"dtype": name, "torch_dtype": name}
        (beside / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        copy_companions(run, beside)
    return [tensor.name for tensor in tensors]


def _check_experts(model: ModelConfig, values: Mapping[str, Any], run: Path) -> None:
    """Refuse a config.json that says other experts than a run has: their tensors may have the same shapes."""
    if not model.details.num_experts or model.architecture not in BUILT_IN:
        return
    said = model_of(ConfigJson(dict(values), str(run / CONFIG)), model.architecture).details
    for name in NUMBERS_OF_EXPERTS:
        there, ours = getattr(said, name), getattr(model.details, name)
        if there != ours:
            raise ValueError(
                f"config.json must say what the run's experts are: {run / CONFIG} makes {name} {there}, the run has "
                f"{ours}: correct it, or export nothing that files of {model.architecture} have no place for"
            )


def _parts(model: ModelConfig, directory: Path, index: Index, run: Path) -> Any:
    """Yield as what each parameter is stored, and how a box of it is read; a tied head if its source had one."""
    stored = stored_of(model)
    for name, (spec, place) in stored.items():
        yield place, partial(read_weight, directory, index, hf_name(name), spec.stored_shape)
    head = name_of(model, HEAD)
    if model.tie_embeddings and head in (kept_dtypes(run) or {}):
        spec, place = stored[EMBEDDING]
        read = partial(read_weight, directory, index, hf_name(EMBEDDING), spec.stored_shape)
        yield replace(place, name=head), read


def read_weight(
    directory: Path, index: Index, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """Return a box of a weight of a checkpoint, of its wider copy where there is one; float32, or float64 if it is.

    Args:
        directory: of the checkpoint.
        index: the checkpoint's; its files have been checked.
        name: the weight's, as checkpoints have it.
        shape: of the whole weight, without padding.
        offset: of the box.
        size: of the box.

    Raises:
        DamagedCheckpoint: a file cannot be read, or does not hold what the index says.
        CheckpointError: the checkpoint has no such weight.
    """
    name = MASTER + name if MASTER + name in index.tensors else name
    if name not in index.tensors:
        raise CheckpointError(
            f"a checkpoint must be of the model that its run says: {directory} has no {name}: use another checkpoint"
        )
    values = torch.empty(size, dtype=torch.float64 if index.tensors[name].dtype == "F64" else torch.float32)
    fill(directory, index, {name: SavedBlock(values, offset, shape, False)})
    return values


def _dtypes(config: Config, run: Path, dtype: str | None) -> Mapping[str, str] | str:
    """Return the dtype of each tensor by its name in the files, or that of all."""
    kept = kept_dtypes(run)
    if dtype is not None or kept is None:
        return FILE_NAMES[dtype or config.train.dtype]
    return kept


def config_json(config: Config, run: Path) -> dict[str, Any]:
    """Return config.json: the one that the run began from, with what transformers 4 and 5 each want to read.

    Raises:
        ValueError: the run began from none, and its architecture is not Llama.
    """
    model, path = config.model, run / CONFIG
    if path.is_file():
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    elif model.architecture == "llama":
        values = _llama(config)
    else:
        raise ValueError(
            f"an export needs the config.json of its architecture: {run} began from none, and has architecture "
            f"{model.architecture}: put one of this model's sizes into {run}"
        )
    blocks = (architecture_of(model).block(model, layer) for layer in range(model.num_layers))
    if any(part.is_rotary() for block in blocks for part in block.values()):
        local = model.details.local_rope_theta
        written = written_rope(model.rope_theta, model.details.rope, local, values.get("max_position_embeddings"))
        # Entries of the source that are not read here, such as yarn's, stay.
        values |= written | {"rope_parameters": {**written["rope_parameters"], **(values.get("rope_parameters") or {})}}
        if local and (every := _full_every(model.details.windows, model.num_layers)):
            # What transformers reads before 4.53, which has layer_types.
            values["sliding_window_pattern"] = every
    return values | {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_embeddings}


def _full_every(windows: Sequence[int], num_layers: int) -> int:
    """Return the number n if every n-th layer, and no other, has no window; 0 if there is none."""
    return next(
        (
            every
            for every in range(1, num_layers + 2)
            if [bool(window) for window in windows or [0] * num_layers]
            == [bool((layer + 1) % every) for layer in range(num_layers)]
        ),
        0,
    )


def _llama(config: Config) -> dict[str, Any]:
    """Return the config.json of a Llama that was trained from nothing."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.train.seq_len,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.details.attention_bias,
        "mlp_bias": model.details.mlp_bias,
        # The ids of a byte vocabulary mean nothing of the kind.
        "bos_token_id": None,
        "eos_token_id": None,
    }


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
        dtype = _widest({directory.tensors[part.name].dtype for part in stored.apart()})
        read = partial(_read_file, reader, stored, dtype)
        yield _Weight(hf_name(name), spec.stored_shape, dtype, read)


def _widest(names: set[str]) -> str:
    """Return the dtype that holds the values of all; those of one parameter are one, but for stacked ones."""
    return FILE_NAME_OF[functools.reduce(torch.promote_types, (TORCH_DTYPES[name] for name in names))]


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
    with byte_progress(tensors, f"importing {config.run_dir}") as counted:
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
    whole = SavedPiece((0,) * len(tensor.shape), tensor.shape, file, tensor.name)
    return TensorEntry(tensor.dtype, tensor.shape, (whole,))
