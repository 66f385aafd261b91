"""Whether a directory has a model's weights: all names and shapes, before a byte of a tensor is read. No torch.

Also whether an output head that the directory has beside a tied table says the same as the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tpengine.dtypes import FILE_NAMES
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.hugging_face.source import Source
from tpengine.layout.stored import Stored

_NUM_NAMED = 3
_COMPARED_BYTES = 4 * 2**20


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
    directory: ModelDirectory, source: Source, name: str, other: str, part: tuple[int, int] = (0, 1)
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
