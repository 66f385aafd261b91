"""Rung: pure. Boxes of any layout hold what slices of the whole tensors hold; bytes and memory are bounded.

What only a GPU checks: filling a parameter on a device.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import tpengine.hugging_face.read as read
from benchmarks.harness.resident_memory import forget_peak, peak_bytes, resident_bytes
from tpengine.hugging_face.directory import ModelDirectory, open_directory
from tpengine.hugging_face.read import BoxReader
from tpengine.layout.stored import Stored

needs_a_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process"
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def directory_of(path: Path, tensors: dict[str, Tensor]) -> ModelDirectory:
    (path / "config.json").write_text("{}")
    save_file(tensors, str(path / "model.safetensors"))
    return open_directory(path)


def parameter_of(whole: Tensor, stored: Stored, shape: tuple[int, ...]) -> Tensor:
    """The specification: our global parameter, out of the file's whole tensor."""
    ours = whole.T if stored.transposed else whole
    if not shape:
        return ours
    begin, end = stored.rows or (0, ours.shape[0])
    parameter = ours.new_zeros(shape)
    parameter[: end - begin] = ours[begin:end]
    return parameter


CASES: dict[str, tuple[Stored, tuple[int, ...]]] = {
    "matrix": (Stored("a", (33, 65)), (33, 65)),
    "transposed": (Stored("a", (33, 65), transposed=True), (65, 33)),
    "packed": (Stored("a", (33, 65), rows=(7, 29)), (22, 65)),
    "packed transposed": (Stored("a", (33, 65), transposed=True, rows=(20, 60)), (40, 33)),
    "padded": (Stored("a", (33, 65), rows=(0, 33)), (40, 65)),
    "padded transposed": (Stored("a", (33, 65), True, (0, 65)), (72, 33)),
    "bias": (Stored("b", (63,), rows=(21, 42)), (21,)),
    "padded bias": (Stored("b", (63,)), (64,)),
    "cube": (Stored("c", (6, 5, 4)), (6, 5, 4)),
    "scalar": (Stored("s", ()), ()),
}
WHOLE = {"a": (33, 65), "b": (63,), "c": (6, 5, 4), "s": ()}


@pytest.mark.parametrize("region_bytes", [64, 4096])
@pytest.mark.parametrize("case", CASES)
def test_every_box_is_the_slice_of_the_whole(
    case: str, region_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "REGION_BYTES", region_bytes)
    stored, shape = CASES[case]
    drawn = random.Random(case)
    for dtype in DTYPES:
        whole = torch.randn(WHOLE[stored.name], dtype=torch.float64).to(dtype)
        expected = parameter_of(whole, stored, shape)
        with BoxReader(directory_of(tmp_path, {stored.name: whole})) as reader:
            for to in DTYPES:
                # Inner dims of more than a matrix are never cut.
                bounds = [sorted(drawn.sample(range(n + 1), 2)) for n in shape[:2]] + [[0, n] for n in shape[2:]]
                box = tuple(slice(a, b) for a, b in bounds)
                offset, size = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
                found = reader.read(stored, offset, size, to)
                assert torch.equal(found, expected[box].to(to)) and found.dtype is to
                # Into every other element of a larger tensor, which keeps what it had between.
                larger = torch.full((*size, 2), 7.0, dtype=to)
                reader.fill(stored, offset, larger[..., 0])
                assert torch.equal(larger[..., 0], found) and (larger[..., 1] == 7).all()
            assert torch.equal(reader.read(stored, (0,) * len(shape), shape, dtype), expected)


@pytest.mark.parametrize("to", [torch.float32, torch.float64])
def test_a_box_of_padding_alone_reads_nothing(tmp_path: Path, to: torch.dtype) -> None:
    with BoxReader(directory_of(tmp_path, {"a": torch.ones(3, 4)})) as reader:
        assert reader.read(Stored("a", (3, 4)), (4, 1), (2, 2), to).tolist() == [[0, 0], [0, 0]]
        assert reader.read(Stored("a", (3, 4)), (3, 0), (0, 4), to).shape == (0, 4)
        assert reader.source.bytes_read == 0


def test_several_threads_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight and through buffers, cut by rows and by columns; every byte is counted once."""
    monkeypatch.setattr(read, "REGION_BYTES", 64)
    tensors = {f"t{n}": torch.randn(40, 33 + n) for n in range(30)}
    boxes = [
        (Stored(name, tuple(whole.shape)), (8 * (n % 2), n % 3), torch.empty(30, 30, dtype=DTYPES[n % 2]))
        for n, (name, whole) in enumerate(tensors.items())
    ]
    with BoxReader(directory_of(tmp_path, tensors)) as reader:
        before = torch.get_num_threads()
        reader.fill_all(boxes, 3)
        assert torch.get_num_threads() == before
        assert reader.source.bytes_read == 30 * 30 * 30 * 4
        for stored, (row, column), target in boxes:
            assert torch.equal(target, tensors[stored.name][row : row + 30, column : column + 30].to(target.dtype))
        os.truncate(tmp_path / "model.safetensors", 2000)
        with pytest.raises(ValueError, match="a safetensors file must be whole"):
            reader.fill_all(boxes, 3)
        assert torch.get_num_threads() == before


def test_a_parameter_that_wants_its_gradient_is_filled(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    with BoxReader(directory_of(tmp_path, {"a": torch.arange(3.0)})) as reader:
        reader.fill(Stored("a", (3,)), (0,), parameter)
    assert parameter.tolist() == [0, 1, 2] and parameter.grad_fn is None


def test_a_third_dim_is_not_cut(tmp_path: Path) -> None:
    with BoxReader(directory_of(tmp_path, {"a": torch.zeros(2, 3, 4)})) as reader, pytest.raises(ValueError) as refused:
        reader.read(Stored("a", (2, 3, 4)), (0, 0, 2), (2, 3, 2), torch.float32)
    assert str(refused.value) == (
        "a layout cuts a parameter's first two dims only: a [2, 3, 4], box of [2, 3, 2] at [0, 0, 2]: leave the others "
        "whole"
    )


def test_a_file_that_shrank_since_is_refused(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, {"a": torch.zeros(100)})
    path = tmp_path / "model.safetensors"
    num_bytes = path.stat().st_size
    os.truncate(path, num_bytes - 3)
    with BoxReader(directory) as reader, pytest.raises(ValueError) as refused:
        reader.read(Stored("a", (100,)), (0,), (100,), torch.float32)
    assert str(refused.value) == (
        f"a safetensors file must be whole: {path} ends at byte {num_bytes - 3}, its header speaks of {num_bytes}: "
        "copy it again"
    )


def test_ranks_together_read_each_byte_once(tmp_path: Path) -> None:
    """Columns, rows, packed and transposed, cut over 4: nothing is read that no rank holds, nothing twice."""
    tensors = {name: torch.zeros(96, 64, dtype=torch.bfloat16) for name in ("column", "row", "packed", "conv")}
    directory = directory_of(tmp_path, tensors)
    with BoxReader(directory) as reader:
        for rank in range(4):
            reader.read(Stored("column", (96, 64)), (24 * rank, 0), (24, 64), torch.float32)
            reader.read(Stored("row", (96, 64)), (0, 16 * rank), (96, 16), torch.float32)
            for first in (0, 32, 64):
                part = Stored("packed", (96, 64), rows=(first, first + 32))
                reader.read(part, (8 * rank, 0), (8, 64), torch.float32)
            reader.read(Stored("conv", (96, 64), transposed=True), (16 * rank, 0), (16, 96), torch.float32)
        assert reader.source.bytes_read == sum(tensor.num_bytes for tensor in directory.tensors.values())


def sparse_model(path: Path, num_layers: int, width: int) -> ModelDirectory:
    """A directory as large as it says, which takes no place on disk."""
    num_bytes = 2 * width * width
    header = {
        f"layers.{n}": {"dtype": "BF16", "shape": [width, width], "data_offsets": [n * num_bytes, (n + 1) * num_bytes]}
        for n in range(num_layers)
    }
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_layers * num_bytes)
    (path / "config.json").write_text("{}")
    return open_directory(path)


def check_memory(path: Path, num_layers: int) -> None:
    width = 3072
    directory = sparse_model(path, num_layers, width)
    forget_peak()
    before = resident_bytes()
    # Not out of what this process has freed before, which is resident already.
    memory = [mmap.mmap(-1, 4 * width * (width // 2)) for _ in range(num_layers)]
    parameters = [torch.frombuffer(room, dtype=torch.float32).view(width, width // 2) for room in memory]
    with BoxReader(directory) as reader:
        for layer, parameter in enumerate(parameters):
            # Every second layer is cut by columns of its transpose, that is, by rows of the file.
            reader.fill(Stored(f"layers.{layer}", (width, width), layer % 2 == 1), (0, width // 2), parameter)
        assert reader.source.bytes_read == num_layers * width * width
    growth = peak_bytes() - before
    parameter_bytes = sum(parameter.nbytes for parameter in parameters)
    bound = parameter_bytes + 64 * 2**20 + read.REGION_BYTES
    assert parameter_bytes * 0.9 < growth <= bound, (growth, bound)
    # The measure sees mapped files: the library's reader exceeds what is left.
    forget_peak()
    before = resident_bytes()
    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        for layer, parameter in enumerate(parameters):
            parameter.copy_(file.get_slice(f"layers.{layer}")[:, : width // 2])
    assert peak_bytes() - before > bound - parameter_bytes


@needs_a_peak
def test_the_memory_of_a_rank_is_its_parameters(tmp_path: Path) -> None:
    check_memory(tmp_path, 11)  # 200 MB


@pytest.mark.slow
@needs_a_peak
def test_the_memory_of_a_rank_is_its_parameters_at_1_gb(tmp_path: Path) -> None:
    check_memory(tmp_path, 53)
