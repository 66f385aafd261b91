"""A model's directory in Hugging Face's form: its open files, and whether it has a model's weights. No torch.

Only headers are read here: config.json, and what the weights' files hold. All names and shapes are checked before a
byte of a tensor is read, also whether an output head that the directory has beside a tied table says the same as the
table. What the numbers of config.json mean is said elsewhere, by the architectures.

The decision a reader will question: files are read with preadv into memory that the caller uses again, not mapped.
Pages of a mapped file count as resident memory of the rank, and stay until somebody needs them.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

from tpengine.architectures.config_json import quantization_of
from tpengine.dtypes import FILE_NAMES
from tpengine.layout.stored import Stored
from tpengine.tensor_file import FileTensor, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_.+-]+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUM_NAMED = 3
_COMPARED_BYTES = 4 * 2**20


class OpenFiles:
    """Open files, read at any place, by several threads; a context manager, which closes them.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, memory: memoryview, path: Path, begin: int) -> None:
        """Fill memory with the bytes of a file from `begin` on.

        Args:
            memory: of bytes.
            path: opened at its first use.
            begin: in the file.

        Raises:
            ValueError: the file cannot be read, or ends before the memory is full.
        """
        try:
            descriptor, done = self._descriptor(path), 0
            # One call reads at most 2 GiB, and may be interrupted.
            while done < len(memory):
                num_bytes = os.preadv(descriptor, [memory[done:]], begin + done)
                if num_bytes == 0:
                    raise ValueError(
                        f"a safetensors file must be whole: {path} ends at byte {begin + done}, its header speaks of "
                        f"{begin + len(memory)}: copy it again"
                    )
                done += num_bytes
            with self._lock:
                self.bytes_read += done
        except OSError as error:
            raise ValueError(f"weights must be readable: {path}: {error.strerror}: check the file") from None

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose headers have been read and found right.

    Attributes:
        path: the directory.
        config: the values of config.json.
        tensors: where each tensor lies, by its name in the files.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]

    @property
    def dtype(self) -> str:
        """The format's name of the dtype of the most bytes, in which the model is written again."""
        num_bytes: dict[str, int] = {}
        for tensor in self.tensors.values():
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
        return max(sorted(num_bytes), key=num_bytes.__getitem__)


def open_directory(path: str | Path) -> ModelDirectory:
    """Return what a model's directory has.

    Args:
        path: of a local directory.

    Raises:
        ValueError: no config.json, or one of quantized weights or an unknown dtype; weights that are missing, pickled
            or truncated; an index that its files contradict; two files that claim one tensor.

    Cost: the headers of all files are read.
    """
    directory = Path(path)
    config = _read_config(directory)
    index = directory / INDEX
    weight_map = _read_index(index) if index.is_file() else None
    _check_one_set(directory, weight_map)
    tensors = _read_headers(directory, [WEIGHTS] if weight_map is None else weight_map.values())
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            raise ValueError(
                f"an index must name what its files hold: {index}: {file} has no {name!r}: copy both again"
            )
    if not tensors:
        raise ValueError(f"weights must hold a tensor: {directory} holds none: copy the files again")
    return ModelDirectory(directory, config, tensors)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(
            f"a model's directory must have a {CONFIG}: {directory} has none: give the directory that "
            "save_pretrained wrote"
        )
    config = _read_object(path)
    if (method := quantization_of(config)) is not None:
        raise ValueError(
            f"weights must not be quantized: {path} has quantization_config {method}: dequantize them first, "
            "with transformers' model.dequantize()"
        )
    for key in ("dtype", "torch_dtype"):
        if (name := config.get(key)) is not None and name not in tuple(FILE_NAMES):
            raise ValueError(
                f"{key} must be one of {', '.join(FILE_NAMES)}: {path} has {str(name)[:40]!r}: save the model again in "
                "one of them"
            )
    return config


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"an index must have a weight_map of names and files: {path} has none: copy it again")
    for name, file in weight_map.items():
        # A plain name: an index must not lead out of its directory.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ValueError(
                f"an index must name files beside it: {path} has {str(file)[:80]!r} for {name[:80]!r}: copy it again"
            )
    return weight_map


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise ValueError(f"{path.name} must be readable: {path}: {error.strerror}: check the file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be valid JSON: {path}: {str(error)[:120]!r}: copy it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must be an object: {path}: got {type(values).__name__}: copy it again")
    return values


def _check_one_set(directory: Path, weight_map: Mapping[str, str] | None) -> None:
    """Refuse a directory without weights that can be read, and one with two sets of them."""
    if weight_map is not None:
        if (directory / WEIGHTS).is_file() and WEIGHTS not in weight_map.values():
            raise ValueError(
                f"one file must claim a tensor: {directory} has {WEIGHTS} beside {INDEX}, which does not name it: "
                "remove one of the two"
            )
        return
    if (directory / WEIGHTS).is_file():
        return
    names = sorted(entry.name for entry in directory.iterdir())
    if parts := [name for name in names if name.endswith(".safetensors")]:
        raise ValueError(
            f"weights in several files must have an index: {directory} has {parts[0]} but no {INDEX}: copy it too"
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise ValueError(
            f"weights must be safetensors, since a pickle runs code: {directory} has {pickles[0]}: convert with "
            "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
        )
    raise ValueError(f"a model's directory must have {WEIGHTS} or {INDEX}: {directory} has neither: copy its weights")


def _read_headers(directory: Path, files: Iterable[str]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for file in dict.fromkeys(files):
        for name, tensor in read_header(directory / file).items():
            if name in tensors:
                raise ValueError(
                    f"one file must claim a tensor: {directory}: {name!r} is in {tensors[name].path.name} and {file}: "
                    "copy them again"
                )
            tensors[name] = tensor
    return tensors


def check_tensors(directory: ModelDirectory, wanted: Iterable[Stored], ignorable: Sequence[str] = ()) -> None:
    """Check that a directory holds every tensor that is wanted, in its shape, and no other.

    Args:
        directory: from open_directory.
        wanted: what the model's parameters are stored as.
        ignorable: patterns of names, as a shell has them, of what may be there and is not read: "*.inv_freq".

    Raises:
        ValueError: missing, extra or misshapen tensors: the first three of each, and how many more; weights of a dtype
            that is no float of 16 bits or more.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for stored in wanted:
        if shapes.setdefault(stored.name, stored.shape) != stored.shape:
            raise ValueError(
                f"a tensor must have one shape: {stored.name} is {list(shapes[stored.name])} and "
                f"{list(stored.shape)}: correct the architecture's table"
            )
    held = directory.tensors
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in held]
    extra = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in held.items()
        if name not in shapes and not any(fnmatchcase(name, pattern) for pattern in ignorable)
    ]
    misshapen = [
        f"{name} {list(held[name].shape)} where {list(shape)} is due"
        for name, shape in shapes.items()
        if name in held and held[name].shape != shape
    ]
    problems = [
        _listed(kind, found)
        for kind, found in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if found
    ]
    if problems:
        raise ValueError(
            f"weights must be those of the model: {directory.path}: {'; '.join(problems)}: give a directory whose "
            "config.json and weights belong together"
        )
    for name in shapes:
        if held[name].dtype not in FILE_NAMES.values():
            raise ValueError(
                f"weights must not be quantized: {held[name].path} has {name} as {held[name].dtype}: dequantize them "
                f"first, to one of {', '.join(FILE_NAMES)}"
            )


def _listed(kind: str, found: Sequence[str]) -> str:
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return f"{len(found)} {kind}: {', '.join(found[:_NUM_NAMED])}{more}"


def check_tied(
    directory: ModelDirectory, source: OpenFiles, name: str, other: str, part: tuple[int, int] = (0, 1)
) -> None:
    """Check that two tensors of the directory have the same bytes; if either is not there, do nothing.

    Args:
        directory: from open_directory.
        source: its files.
        name: the output head, which a tied model does not read.
        other: the table that it is tied to.
        part: (i, n) compares the i-th of n shares; as many ranks compare all of it together.

    Raises:
        ValueError: they differ.

    Cost: the share of both is read once, 4 MiB at a time.
    """
    first, second = directory.tensors.get(name), directory.tensors.get(other)
    if first is None or second is None:
        return
    is_same = (first.dtype, first.shape) == (second.dtype, second.shape)
    buffers = bytearray(_COMPARED_BYTES), bytearray(_COMPARED_BYTES)
    share = range(part[0] * _COMPARED_BYTES, first.num_bytes, part[1] * _COMPARED_BYTES)
    for done in share if is_same else ():
        views = [memoryview(buffer)[: first.num_bytes - done] for buffer in buffers]
        for tensor, view in zip((first, second), views, strict=True):
            source.read_into(view, tensor.path, tensor.begin + done)
        if views[0] != views[1]:
            is_same = False
            break
    if not is_same:
        raise ValueError(
            f"a tied output head must be the embedding table: {directory.path}: {name} differs from {other}: set "
            '"tie_word_embeddings": false in config.json'
        )
