"""A model's directory in Hugging Face's form: config.json, and what its weights' files hold. No torch.

Only headers are read here. What the numbers of config.json mean is said elsewhere, by the architectures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.dtypes import FILE_NAMES
from tpengine.tensor_file import FileTensor, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_.+-]+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


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
    method = config.get("quantization_config")
    if method is not None:
        raise ValueError(
            f"weights must not be quantized: {path} has quantization_config {str(method)[:80]}: dequantize them first, "
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
