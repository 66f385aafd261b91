"""What was timed on a GPU, tiles of the matmul and whose attention: one file per kind of GPU, read when first needed.

`python -m benchmarks.run gpu` writes `tuned/<gpu>.json`; without one the tables of configs.py hold, and
attention is ours; the same for a size that was not tuned. Nothing is timed in a training run, so all runs and ranks
that have the same file choose alike. What must not depend on sizes (`fixed`, exact mode) is never looked up.

The file comes from outside and decides what is compiled, so all of it is checked; a wrong one is an error and not left
out in silence.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import Target, target_of
from tpkernels.ops.matmul.configs import MatmulConfig, nearest_power_of_2

FOLDER = Path(__file__).resolve().parents[2] / "tuned"
_FORMAT = 4
_MOST_BYTES = 4 << 20
_DTYPES = ("bfloat16", "float16")
_SIZES = ("m", "n", "k")
_FLAGS = ("a_by_rows", "b_by_rows", "accumulates")
_BLOCKS = (16, 32, 64, 128, 256)
_ATTENTION_SIZES = ("seq", "heads", "kv_heads", "head_size")
_ATTENTION_DTYPES = (*_DTYPES, "float32", "float64")
OURS = "ours"
# Backends of torch's scaled_dot_product_attention. "math" is for tests on a CPU.
BACKENDS = ("cudnn", "flash", "math")


class Tile(NamedTuple):
    """The fastest tile of one product, C[m, n] = A[m, k] @ B[k, n], or C += A @ B with C in float32.

    Attributes:
        m, n, k: sizes at which it was timed.
        dtype: of the operands.
        a_by_rows, b_by_rows: whether an operand's rows have no gaps; else its columns.
        accumulates: whether the product is added to C.
        config: the tile.
        us, torch_us: microseconds of our product, and of torch's: of torch.mm, or where it accumulates of torch.addmm
            into float32; None if that was not timed.
    """

    m: int
    n: int
    k: int
    dtype: str
    a_by_rows: bool
    b_by_rows: bool
    accumulates: bool
    config: MatmulConfig
    us: float
    torch_us: float | None


class TunedAttention(NamedTuple):
    """The fastest causal attention of one shape, forward and backward with the rotation of q and k.

    Attributes:
        seq, heads, kv_heads, head_size: sizes at which it was timed, for one sequence.
        dtype: of the operands.
        winner: "ours", or one of BACKENDS.
        us, ours_us: microseconds of the winner and of our kernels.
        date, commit: when, and from which commit.
    """

    seq: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    winner: str
    us: float
    ours_us: float
    date: str
    commit: str | None


class TunedFile(NamedTuple):
    """The contents of a file: for which GPU, when, from which commit and versions, tiles, and attentions."""

    gpu: str
    date: str
    commit: str | None
    torch: str
    triton: str | None
    tiles: list[Tile]
    attentions: list[TunedAttention]


Key = tuple[int, int, int, str, bool, bool, bool]
AttentionKey = tuple[int, int, int, int, str]


def path_for(gpu: str) -> Path:
    """Return the file of a GPU, by the name that the driver gives it: "NVIDIA H200" has h200.json."""
    words = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_").removeprefix("nvidia_")
    return FOLDER / f"{words}.json"


def tile_key(tile: Tile) -> Key:
    """Return the key that finds a tile."""
    return key_of(tile.m, tile.n, tile.k, tile.dtype, tile.a_by_rows, tile.b_by_rows, tile.accumulates)


def key_of(m: int, n: int, k: int, dtype: str, a_by_rows: bool, b_by_rows: bool, accumulates: bool) -> Key:
    """Return the key of a product; m and k are rounded, as in `config_of`: they may be numbers of tokens."""
    return nearest_power_of_2(m), n, nearest_power_of_2(k), dtype, a_by_rows, b_by_rows, accumulates


def attention_key(seq: int, heads: int, kv_heads: int, head_size: int, dtype: str) -> AttentionKey:
    """Return the key of an attention; the sequence's length is rounded."""
    return nearest_power_of_2(seq), heads, kv_heads, head_size, dtype


def is_allowed(config: MatmulConfig, item_bytes: int, target: Target) -> bool:
    """Return whether a tile may be compiled: legal blocks, warps and stages, and room in shared memory."""
    stage_bytes = (config.block_m + config.block_n) * config.block_k * item_bytes
    return (
        all(block in _BLOCKS for block in config[:3])
        and 1 <= config.group_m <= 64
        and config.num_warps in (4, 8)
        and 1 <= config.num_stages <= 8
        and config.num_stages * stage_bytes <= target.shared_memory_bytes
        # As many sums as a thread has registers for.
        and config.block_m * config.block_n <= 128 * 32 * config.num_warps
    )


def written(file: TunedFile) -> bytes:
    """Return a file's bytes: a line per tile and per attention."""
    head = {"format": _FORMAT} | {name: value for name, value in file._asdict().items() if not isinstance(value, list)}
    tiles = ",\n".join(json.dumps(tile._asdict() | {"config": list(tile.config[:6])}) for tile in file.tiles)
    attentions = ",\n".join(json.dumps(one._asdict()) for one in file.attentions)
    return f'{json.dumps(head)[:-1]}, "tiles": [\n{tiles}\n], "attentions": [\n{attentions}\n]}}\n'.encode()


def read_tuned(path: Path, gpu: str, target: Target) -> tuple[list[Tile], list[TunedAttention]]:
    """Return the tiles and the attentions of a file.

    Args:
        path: the file.
        gpu: name of the GPU that is here.
        target: of that GPU.

    Raises:
        ValueError: what must hold and does not, in one line.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    _require(len(raw) <= _MOST_BYTES, path, f"have at most {_MOST_BYTES} bytes", "more")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    _require(isinstance(content, dict), path, "be a JSON object", "something else")
    found = content.get("format"), content.get("gpu")
    _require(found == (_FORMAT, gpu), path, f"have format {_FORMAT} and be of {gpu!r}", repr(found))
    tiles, attentions = content.get("tiles"), content.get("attentions")
    for name, value in (("tiles", tiles), ("attentions", attentions)):
        _require(isinstance(value, list), path, f"have a list of {name}", repr(type(value).__name__))
    return (
        [_tile(path, place, entry, target) for place, entry in enumerate(tiles)],
        [_attention(path, place, entry) for place, entry in enumerate(attentions)],
    )


def tuned_config(a: Tensor, n: int, a_by_rows: bool, b_by_rows: bool, accumulates: bool) -> MatmulConfig | None:
    """Return the tile that was tuned for a's GPU and C[m, n] = a[m, k] @ B[k, n]; None if there is none.

    Raises:
        ValueError: the GPU's file is wrong.
    """
    if not a.is_cuda:
        return None
    known = _tiles_of(a.device)
    if not known:
        return None
    m, k = a.shape
    tile = known.get(key_of(m, n, k, str(a.dtype).removeprefix("torch."), a_by_rows, b_by_rows, accumulates))
    return None if tile is None else tile.config


def ours_was_faster(device: torch.device, key: Key) -> bool:
    """Return whether our kernel was timed faster than torch for a product on a device; not if it was not timed."""
    tile = _tiles_of(device).get(key)
    return tile is not None and tile.torch_us is not None and tile.us < tile.torch_us


def num_ours(device: torch.device, dtype: str) -> int:
    """Return for how many accumulating products of a dtype our kernel was timed faster than torch."""
    found = [key for key, tile in _tiles_of(device).items() if tile.dtype == dtype and tile.accumulates]
    return sum(ours_was_faster(device, key) for key in found)


def tuned_attention(
    device: torch.device, dtype: torch.dtype, seq: int, heads: int, kv_heads: int, head_size: int
) -> TunedAttention | None:
    """Return what was the fastest attention on a device for these sizes; None if that is not known.

    Args:
        device, dtype: of the operands; a CPU's file is of "cpu".

    Raises:
        ValueError: the device's file is wrong.
    """
    if device.type not in ("cuda", "cpu"):
        return None
    known = _attentions_of(device)
    if not known:
        return None
    return known.get(attention_key(seq, heads, kv_heads, head_size, str(dtype).removeprefix("torch.")))


def forget() -> None:
    """Read the files again when they are next needed."""
    for read in (_read, _tiles_of, _attentions_of):
        read.cache_clear()


@functools.cache
def _tiles_of(device: torch.device) -> Mapping[Key, Tile]:
    return {tile_key(tile): tile for tile in _read(device)[0]}


@functools.cache
def _attentions_of(device: torch.device) -> Mapping[AttentionKey, TunedAttention]:
    return {attention_key(*one[:5]): one for one in _read(device)[1]}


@functools.cache
def _read(device: torch.device) -> tuple[list[Tile], list[TunedAttention]]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    path = path_for(gpu)
    return read_tuned(path, gpu, target_of(torch.empty(0, device=device))) if path.exists() else ([], [])


def _tile(path: Path, place: int, entry: Any, target: Target) -> Tile:
    where = f"tile {place}"
    _require(
        isinstance(entry, dict) and set(entry) == set(Tile._fields), path, f"have every field in {where}", _short(entry)
    )
    for name in _SIZES:
        _require(_is_int(entry[name]) and 1 <= entry[name] < 2**31, path, f"have sizes in {where}", _short(entry[name]))
    _require(
        entry["dtype"] in _DTYPES, path, f"have a dtype of {', '.join(_DTYPES)} in {where}", _short(entry["dtype"])
    )
    for name in _FLAGS:
        _require(isinstance(entry[name], bool), path, f"say {name} in {where}", _short(entry[name]))
    numbers = entry["config"]
    legal = isinstance(numbers, list) and len(numbers) == 6 and all(map(_is_int, numbers))
    _require(
        legal and is_allowed(MatmulConfig(*numbers), 2, target),
        path,
        f"have a legal config in {where}",
        _short(numbers),
    )
    _require_times(path, where, entry["us"])
    if not (entry["accumulates"] and entry["torch_us"] is None):
        _require_times(path, where, entry["torch_us"])
    return Tile(**entry | {"config": MatmulConfig(*numbers)})


def _attention(path: Path, place: int, entry: Any) -> TunedAttention:
    where = f"attention {place}"
    fields = set(TunedAttention._fields)
    _require(isinstance(entry, dict) and set(entry) == fields, path, f"have every field in {where}", _short(entry))
    for name in _ATTENTION_SIZES:
        _require(_is_int(entry[name]) and 1 <= entry[name] < 2**31, path, f"have sizes in {where}", _short(entry[name]))
    heads, kv_heads = entry["heads"], entry["kv_heads"]
    _require(heads % kv_heads == 0, path, f"have groups of heads in {where}", f"{heads} and {kv_heads}")
    for name, allowed in (("dtype", _ATTENTION_DTYPES), ("winner", (OURS, *BACKENDS))):
        _require(entry[name] in allowed, path, f"have a {name} of {', '.join(allowed)} in {where}", _short(entry[name]))
    _require_times(path, where, entry["us"], entry["ours_us"])
    _require(isinstance(entry["date"], str), path, f"have a date in {where}", _short(entry["date"]))
    commit = entry["commit"]
    _require(commit is None or isinstance(commit, str), path, f"have a commit in {where}", _short(commit))
    return TunedAttention(**entry)


def _require_times(path: Path, where: str, *times_us: Any) -> None:
    for value in times_us:
        _require(_is_int(value) or isinstance(value, float), path, f"have numbers in {where}", _short(value))
        _require(0 < value < 1e12, path, f"have times in {where}", _short(value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return repr(value)[:80]


def _require(holds: bool, path: Path, rule: str, got: str) -> None:
    if not holds:
        raise ValueError(
            f"tuned tiles must {rule}: {path} has {got}: remove the file, or write it again with benchmarks.run gpu"
        )
