"""Rung: gloo ranks. What is saved at one cut is loaded at any other; failures are the same line on all ranks.

What only a GPU checks: copying aside from a device.
"""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.distributed import distributed_c10d

import tpengine.checkpoint.storage as storage
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, FileEntry, read_index, write_index
from tpengine.checkpoint.load import load
from tpengine.checkpoint.save import Saver
from tpengine.checkpoint.storage import SavedBlock

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
SHAPES: tuple[tuple[int, ...], ...] = ((), (5,), (7, 5), (2, 3), (3, 1, 4), (64, 33))
CUTS = ("rows", "columns", "pairs", "whole")
Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def whole_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Every element another, as far as the dtype can tell; a third needs all bits of a float."""
    count = torch.Size(shape).numel()
    if dtype.is_floating_point:
        return (torch.arange(count, dtype=torch.float64) + 1 / 3).to(dtype).view(shape)
    return (torch.arange(count) + 2**53 + 1).to(dtype).view(shape)


def bounds_of(cut: str, shape: tuple[int, ...], world: int, rank: int) -> Bounds:
    """Offset and shape of a rank's block; unevenly cut, and empty where there are fewer elements than ranks."""
    if cut == "whole" or not shape:
        return (0,) * len(shape), shape
    dim = len(shape) - 1 if cut == "columns" else 0
    # Of "pairs" two neighbours hold the same.
    num_parts, part = ((world + 1) // 2, rank // 2) if cut == "pairs" else (world, rank)
    start, end = shape[dim] * part // num_parts, shape[dim] * (part + 1) // num_parts
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return offset, tuple(end - start if d == dim else size for d, size in enumerate(shape))


def block_of(values: Tensor, cut: str) -> SavedBlock:
    """This rank's block of the values, in every other element of a larger tensor; the last of its holders stores it."""
    world, rank, shape = dist.get_world_size(), dist.get_rank(), tuple(values.shape)
    offset, extent = bounds_of(cut, shape, world, rank)
    holders = [r for r in range(world) if bounds_of(cut, shape, world, r) == (offset, extent)]
    tensor = torch.zeros((*extent, 2), dtype=values.dtype)[..., 0]
    tensor.copy_(values[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))])
    return SavedBlock(tensor, offset, shape, stored=rank == holders[-1])


def all_tensors() -> Iterator[tuple[str, Tensor]]:
    for cut in CUTS:
        for name, dtype in DTYPES.items():
            for shape in SHAPES:
                yield f"{cut}.{name}.{'x'.join(map(str, shape))}", whole_tensor(dtype, shape)


def save_all(path: str) -> None:
    """Save every tensor, cut as its name begins."""
    saver = Saver(CheckpointDirectory(Path(path)), keep=2)
    blocks = {name: block_of(values, name.split(".")[0]) for name, values in all_tensors()}
    assert saver.save(1, blocks, {"saved by": dist.get_world_size()}) is None
    failure = saver.wait()
    assert failure is None, failure


def load_all(paths: list[str]) -> int:
    """Load every tensor of every checkpoint at each cut; return how many blocks were compared."""
    num_compared = 0
    for path in paths:
        directory = Path(path) / "step-00000001"
        index = read_index(directory)
        for cut in CUTS:
            wanted = {name: block_of(values, cut) for name, values in all_tensors()}
            blocks = {
                name: replace(block, tensor=torch.full((*block.tensor.shape, 2), 77, dtype=block.tensor.dtype)[..., 0])
                for name, block in wanted.items()
            }
            load(directory, index, blocks)
            for name, block in blocks.items():
                assert torch.equal(block.tensor, wanted[name].tensor), f"{path}: {name} loaded as {cut}"
                num_compared += 1
    return num_compared


@pytest.mark.parametrize("worlds", [(2, 3), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)])
def test_any_cut_reads_what_any_other_wrote(ranks: RankPool, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    paths = [str(tmp_path / str(world)) for world in worlds]
    for world, path in zip(worlds, paths, strict=True):
        ranks.run(save_all, world, path)
        index = read_index(Path(path) / "step-00000001")
        assert index.state == {"saved by": world} and len(index.files) == world
        assert all(0 not in piece.shape for entry in index.tensors.values() for piece in entry.pieces)
    blocks_of_a_checkpoint = len(CUTS) * len(DTYPES) * len(SHAPES)
    for world in worlds:
        assert ranks.run(load_all, world, paths) == [len(paths) * len(CUTS) * blocks_of_a_checkpoint] * world


def test_the_files_are_plain_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    """Whoever has only the format and the index finds every element."""
    ranks.run(save_all, 3, str(tmp_path))
    directory = tmp_path / "step-00000001"
    shards = [f"rank-{rank:05}-of-00003.safetensors" for rank in range(3)]
    assert sorted(p.name for p in directory.iterdir()) == ["index.json", *shards]
    assert [p.name for p in tmp_path.iterdir()] == [directory.name]
    index = read_index(directory)
    named = set()
    for name, values in all_tensors():
        entry = index.tensors[name]
        found = torch.zeros_like(values)
        for piece in entry.pieces:
            with safe_open(directory / piece.file, framework="pt") as file:
                tensor = file.get_tensor(piece.key)
            assert DTYPES[entry.dtype] == tensor.dtype and tuple(tensor.shape) == piece.shape
            found[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))] = tensor
            named.add((piece.file, piece.key))
        assert torch.equal(found, values), name
    held = set()
    for shard in shards:
        assert (directory / shard).stat().st_mode == (directory / "index.json").stat().st_mode, "not for others to read"
        with safe_open(directory / shard, framework="pt") as file:
            held |= {(shard, key) for key in file.keys()}  # noqa: SIM118
    assert held == named


def save_fewer_rows_than_ranks(path: str) -> None:
    """An empty block lies at the offset of the next one, as if both were the same."""
    saver = Saver(CheckpointDirectory(Path(path)), keep=1)
    values = whole_tensor(torch.float32, (1, 3))
    saver.save(1, {"row": block_of(values, "rows")}, {})
    failure = saver.wait()
    assert failure is None, failure
    block = replace(block_of(values, "whole"), tensor=torch.zeros(1, 3))
    directory = Path(path) / "step-00000001"
    load(directory, read_index(directory), {"row": block})
    assert torch.equal(block.tensor, values)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_empty_block_does_not_stand_for_its_neighbour(ranks: RankPool, tmp_path: Path, world: int) -> None:
    ranks.run(save_fewer_rows_than_ranks, world, str(tmp_path))
    assert len(read_index(tmp_path / "step-00000001").tensors["row"].pieces) == 1


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, and set them back: the workers are shared by all tests."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def refuse_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("something was pickled or unpickled")


def save_and_load_without_pickle(path: str) -> int:
    """Neither files nor what ranks tell each other may be pickled, in either direction."""
    picklers = [(torch, "load"), (torch, "save"), *((pickle, name) for name in ("load", "loads", "dump", "dumps"))]
    # What torch's object collectives use.
    picklers += [(distributed_c10d, "_pickler"), (distributed_c10d, "_unpickler")]
    with replaced(*((owner, name, refuse_pickle) for owner, name in picklers)):
        save_all(path)
        return load_all([path])


def test_nothing_is_pickled(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(save_and_load_without_pickle, 2, str(tmp_path)))
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert len(files) == 3
    assert all(path.suffix == ".safetensors" or path.name == "index.json" for path in files)


def numbered(step: int) -> dict[str, SavedBlock]:
    """A matrix cut by rows and a whole vector that rank 0 stores, both full of the step."""
    num_rows = 4 // dist.get_world_size()
    matrix = torch.full((num_rows, 3), float(step))
    vector = SavedBlock.whole(torch.full((6,), -float(step)), stored=dist.get_rank() == 0)
    return {"matrix": SavedBlock(matrix, (num_rows * dist.get_rank(), 0), (4, 3)), "vector": vector}


def loaded_step(directory: CheckpointDirectory) -> int:
    """Load the newest; return its step, which all of its numbers must be."""
    newest = directory.newest()
    assert newest is not None
    index, blocks = read_index(newest), numbered(-1)
    load(newest, index, blocks)
    assert (blocks["matrix"].tensor == index.step).all() and (blocks["vector"].tensor == -index.step).all(), blocks
    return index.step


def change_while_writing(path: str) -> list[int]:
    """Change all tensors before a byte is written; return what is loaded after each save, and what is left."""
    directory = CheckpointDirectory(Path(path))
    saver = Saver(directory, keep=2)
    save_file = storage.save_file
    found = []
    for step in (1, 2, 3):
        gate = threading.Event()

        def gated(tensors: Any, file: str, gate: threading.Event = gate) -> FileEntry:
            assert gate.wait(60), "save() waits for the disk"
            return save_file(tensors, file)

        with replaced((storage, "save_file", gated)):
            blocks = numbered(step)
            assert saver.save(step, blocks, {}) is None
            for block in blocks.values():
                block.tensor.fill_(torch.nan)
            gate.set()
            assert saver.wait() is None
        found.append(loaded_step(directory))
    assert saver.wait() is None, "nothing is under way"
    return [*found, *directory.steps()]


def test_tensors_may_change_as_soon_as_save_returns(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(change_while_writing, 2, str(tmp_path)) == [[1, 2, 3, 2, 3]] * 2


def save_without_waiting(path: str, keep: int) -> list[int]:
    directory = CheckpointDirectory(Path(path))
    saver = Saver(directory, keep)
    for step in range(1, 6):
        assert saver.save(step, numbered(step), {}) is None
    assert saver.wait() is None
    assert loaded_step(directory) == 5
    return directory.steps()


@pytest.mark.parametrize(("keep", "steps"), [(1, [5]), (3, [3, 4, 5])])
def test_the_newest_are_kept(ranks: RankPool, tmp_path: Path, keep: int, steps: list[int]) -> None:
    """A save waits for the one before, so nobody has to."""
    assert ranks.run(save_without_waiting, 2, str(tmp_path), keep) == [steps] * 2


def refuse_to_remove(*_: Any) -> None:
    raise OSError(30, "Read-only file system", "checkpoints/step-00000001")


def save_where_nothing_can_be_removed(path: str) -> tuple[list[str | None], list[int], list[str]]:
    directory, said, lines = CheckpointDirectory(Path(path)), [], list[str]()
    saver = Saver(directory, 1, say=lines.append)
    with replaced((CheckpointDirectory, "_remove", refuse_to_remove)):
        for step in (1, 2, 3):
            saver.save(step, numbered(step), {})
            said.append(saver.wait())
    return said, directory.steps(), lines


def test_old_checkpoints_that_cannot_be_removed_are_no_failure_of_the_new_one(ranks: RankPool, tmp_path: Path) -> None:
    """Said once, by rank 0."""
    found = ranks.run(save_where_nothing_can_be_removed, 2, str(tmp_path))
    assert [(said, steps) for said, steps, _ in found] == [([None] * 3, [1, 2, 3])] * 2
    assert found[1][2] == [] and found[0][2] == [
        "old checkpoints cannot be removed: checkpoints/step-00000001: Read-only file system: remove them by hand; the "
        "run goes on"
    ]


def half_a_file(blocks: Any, path: str) -> None:
    """What a full disk leaves; the reason has two lines, as a library's may."""
    Path(path).write_bytes(b"half")
    raise OSError(28, "No space left\non device")


def refuse_to_write(*_: Any) -> None:
    raise OSError(5, "Input/output error")


FAILURES = {"save_file": half_a_file, "write_index": refuse_to_write}


def fail_then_go_on(path: str, broken_rank: int, what: str) -> tuple[list[str | None], list[list[int]]]:
    """Save 1, fail to save 2, save 3: what wait() said, and what was on disk after each."""
    directory = CheckpointDirectory(Path(path))
    saver = Saver(directory, keep=3)
    said, seen = [], []
    for step in (1, 2, 3):
        is_broken = step == 2 and dist.get_rank() == broken_rank
        with replaced(*([(storage, what, FAILURES[what])] if is_broken else [])):
            saver.save(step, numbered(step), {})
            said.append(saver.wait())
        dist.barrier()  # each rank removes what was written, once it knows
        seen.append(directory.steps())
        assert not [entry.name for entry in directory.path.iterdir() if entry.name.startswith(".")]
        assert loaded_step(directory) == seen[-1][-1]
    return said, seen


@pytest.mark.parametrize(
    ("broken_rank", "what", "reason"),
    [
        (0, "save_file", "No space left on device"),
        (1, "save_file", "No space left on device"),
        (0, "write_index", "Input/output error"),
    ],
)
def test_a_rank_that_cannot_write_is_heard_by_all(
    ranks: RankPool, tmp_path: Path, broken_rank: int, what: str, reason: str
) -> None:
    """One line on all ranks, nothing half-written, the checkpoint before still loads, the next is saved."""
    results = ranks.run(fail_then_go_on, 2, str(tmp_path), broken_rank, what)
    assert results[0] == results[1]
    (first, failure, third), seen = results[0]
    assert first is third is None and seen == [[1], [1], [1, 3]]
    assert failure is not None and "\n" not in failure
    assert failure.startswith(f"{tmp_path}/step-00000002: ") and failure.endswith(reason), failure


def save_one(path: str) -> None:
    saver = Saver(CheckpointDirectory(Path(path)), keep=1)
    saver.save(1, numbered(1), {})
    assert saver.wait() is None


SHARD_0, SHARD_1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
OF_ANOTHER_MODEL: dict[str, Callable[[], dict[str, SavedBlock]]] = {
    "a missing tensor": lambda: {"another": SavedBlock.whole(torch.zeros(2))},
    "another shape": lambda: {"vector": SavedBlock.whole(torch.zeros(7))},
    "other dims": lambda: {"vector": SavedBlock.whole(torch.zeros(1, 6))},
    "another dtype": lambda: {"vector": SavedBlock.whole(torch.zeros(6, dtype=torch.bfloat16))},
    # The other rank cannot notice, and must not wait.
    "another shape on rank 1": lambda: {"vector": SavedBlock.whole(torch.zeros(7))} if dist.get_rank() else {},
}


def refusals(paths: dict[str, str]) -> dict[str, str]:
    """What loading each checkpoint ends with, some of them into blocks of another model."""
    said = {}
    for case, path in paths.items():
        directory = Path(path)
        index = read_index(directory)
        dist.barrier()
        if case == "a shard gone since" and dist.get_rank() == 0:
            (directory / SHARD_1).unlink()
        dist.barrier()
        try:
            load(directory, index, {**numbered(0), **OF_ANOTHER_MODEL.get(case, dict)()})
            said[case] = "loaded"
        except CheckpointError as error:
            said[case] = f"{type(error).__name__}: {error}"
    return said


def damage(case: str, directory: Path) -> None:
    if case == "a flipped byte":
        content = bytearray((directory / SHARD_1).read_bytes())
        content[-1] ^= 1
        (directory / SHARD_1).write_bytes(content)
    key = {"an index that names no key": "no such", "an index that names another block": "matrix@0,0"}.get(case)
    if key is not None:
        index = read_index(directory)
        vector = index.tensors["vector"]
        vector = replace(vector, pieces=(replace(vector.pieces[0], file=SHARD_0, key=key),))
        write_index(directory, replace(index, tensors={**index.tensors, "vector": vector}))


REFUSALS = {
    "a flipped byte": ("must match their hashes", f"/{SHARD_1}: altered"),
    "a shard gone since": ("needs all its files", f"/{SHARD_1}: No such file"),
    "an index that names no key": ("must hold what its index says", SHARD_0),
    "an index that names another block": ("must hold what its index says", f"{SHARD_0}: matrix@0,0 is not F32[6]"),
    "a missing tensor": ("must hold every tensor of the model", "has no another"),
    "another shape": ("must be of the same model", "vector as F32 [6], this model as F32 [7]"),
    "other dims": ("must be of the same model", "vector as F32 [6], this model as F32 [1, 6]"),
    "another dtype": ("must be of the same model", "vector as F32 [6], this model as BF16 [6]"),
    "another shape on rank 1": ("must be of the same model", "vector as F32 [6], this model as F32 [7]"),
}


def test_what_cannot_be_loaded_is_the_same_line_on_all_ranks(
    ranks: RankPool, tmp_path: Path, count_mutations: Callable[[str, int, int], None]
) -> None:
    ranks.run(save_one, 2, str(tmp_path / "whole"))
    paths = {}
    for number, case in enumerate(["no damage", *REFUSALS]):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole" / "step-00000001", directory)
        damage(case, directory)
        paths[case] = str(directory)
    said, on_rank_1 = ranks.run(refusals, 2, paths)
    assert said == on_rank_1
    assert said.pop("no damage") == "loaded"
    survivors = [case for case, message in said.items() if message == "loaded"]
    count_mutations("checkpoints (reader)", len(REFUSALS) - len(survivors), len(REFUSALS))
    assert not survivors
    for case, (rule, value) in REFUSALS.items():
        message = said[case]
        kind, _, message = message.partition(": ")
        assert message.startswith("a checkpoint") and rule in message and value in message, f"{case}: {message}"
        assert paths[case] in message and "\n" not in message, f"{case}: {message}"
        # An older one is the remedy for damage, and for nothing else.
        is_damage = rule not in ("must hold every tensor of the model", "must be of the same model")
        assert kind == ("DamagedCheckpoint" if is_damage else "CheckpointError"), f"{case}: {kind}"
        assert is_damage or ": resume with " in message, f"{case}: {message}"
