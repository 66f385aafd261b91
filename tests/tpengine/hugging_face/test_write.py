"""Rung: pure. What is written is what the library and transformers read; what was read comes out the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import tpengine.hugging_face.write as write
from benchmarks.harness.resident_memory import forget_peak, peak_bytes, resident_bytes
from tpengine.files import new_directory
from tpengine.hugging_face.directory import INDEX, WEIGHTS, ModelDirectory, open_directory
from tpengine.hugging_face.read import BoxReader
from tpengine.hugging_face.write import (
    ReadParameter,
    TensorToWrite,
    tensors_to_write,
    write_weights,
)
from tpengine.layout.stored import Stored
from tpengine.torch_dtypes import TORCH_DTYPES

needs_a_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process"
)

SHAPES = {
    "conv": (24, 63),
    "conv_bias": (63,),
    "table": (33, 24),
    "head": (33, 24),
    "norm": (24,),
    "cube": (6, 5, 4),
    "scalar": (),
    "empty": (0, 4),
}
THIRDS = ((0, 21), (21, 42), (42, 63))
STORED = {
    **{f"conv{n}": Stored("conv", SHAPES["conv"], True, rows) for n, rows in enumerate(THIRDS)},
    **{f"conv_bias{n}": Stored("conv_bias", SHAPES["conv_bias"], rows=rows) for n, rows in enumerate(THIRDS)},
    **{name: Stored(name, shape) for name, shape in SHAPES.items() if not name.startswith("conv")},
}


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    tensors["norm"] = tensors["norm"].float()
    return tensors


def read_from(reader: BoxReader, stored: Stored, dtype: torch.dtype) -> ReadParameter:
    return lambda offset, size: reader.read(stored, offset, size, dtype)


def written_again(directory: ModelDirectory, out: Path, largest_file_bytes: int) -> None:
    """Read parameters, of a vocabulary padded to 40, and write them in the dtypes of their files."""
    dtypes = {name: tensor.dtype for name, tensor in directory.tensors.items()}
    with BoxReader(directory) as reader, new_directory(out, "an export directory") as beside:
        parts = [
            (stored, read_from(reader, stored, TORCH_DTYPES[dtypes[stored.name]]))
            for stored in reversed(STORED.values())
        ]
        write_weights(beside, tensors_to_write(parts, dtypes), largest_file_bytes)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_what_was_read_comes_out_the_same(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of two or three rows.
    monkeypatch.setattr(write, "BLOCK_ELEMENTS", 150)
    tensors = drawn(dtype)
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, str(tmp_path / WEIGHTS))
    out = tmp_path / "new" / "out"
    largest = 3500 if dtype.itemsize < 4 else 9000
    written_again(open_directory(tmp_path), out, largest)
    files = sorted(path.name for path in out.iterdir())
    assert len(files) > 2 and INDEX in files and WEIGHTS not in files
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    found: dict[str, Tensor] = {}
    for file in files:
        if file == INDEX:
            continue
        held = load_file(out / file)
        assert all(index["weight_map"][name] == file for name in held)
        one_tensor = len(held) == 1
        assert one_tensor or (out / file).stat().st_size <= largest
        with safe_open(str(out / file), framework="pt") as library:
            assert library.metadata() == {"format": "pt"}
        found |= held
    check_same(found, tensors)
    (out / "config.json").write_text("{}")
    assert set(open_directory(out).tensors) == set(tensors)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def whole(name: str, tensor: Tensor, dtype: str = "F32") -> TensorToWrite:
    return TensorToWrite(name, dtype, tuple(tensor.shape), lambda: [tensor])


def test_one_file_needs_no_index_and_is_aligned(tmp_path: Path) -> None:
    half, wide = torch.arange(3).bfloat16(), torch.arange(5.0).double()
    write_weights(tmp_path, [whole("a", half, "BF16"), whole("b", wide, "F64"), whole("c", wide, "F32")])
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    check_same(load_file(tmp_path / WEIGHTS), {"a": half, "b": wide, "c": wide.float()})
    (tmp_path / "config.json").write_text("{}")
    for tensor in open_directory(tmp_path).tensors.values():
        assert tensor.begin % (tensor.num_bytes // tensor.shape[0]) == 0


def test_two_names_of_one_memory_are_both_written(tmp_path: Path) -> None:
    table = torch.arange(6.0).view(3, 2)
    write_weights(tmp_path, [whole("embed_tokens", table), whole("lm_head", table), whole("turned", table.t())])
    expected = {"embed_tokens": table, "lm_head": table, "turned": table.t().contiguous()}
    check_same(load_file(tmp_path / WEIGHTS), expected)


def test_a_file_is_filled_to_its_last_byte_and_no_further(tmp_path: Path) -> None:
    tensors = [whole(f"layers.{n}", torch.full((100,), float(n))) for n in range(6)]
    alone = tmp_path / "alone"
    alone.mkdir()
    write_weights(alone, tensors)
    num_bytes = (alone / WEIGHTS).stat().st_size
    for limit, num_files in ((num_bytes - 1, 2), (num_bytes // 2, 3), (100, 6), (10**9, 1)):
        out = tmp_path / str(limit)
        out.mkdir()
        write_weights(out, tensors, limit)
        sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
        assert len(sizes) == num_files, (limit, sizes)
        # A tensor alone may exceed a limit, and has a file to itself.
        assert all(size <= max(limit, 600) for size in sizes)


def test_an_export_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def failing() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"), new_directory(out, "an export directory") as beside:
        write_weights(beside, [TensorToWrite("a", "F32", (2,), failing)])
    assert list(tmp_path.iterdir()) == [out] and list(out.iterdir()) == []
    with new_directory(out, "an export directory") as beside:
        write_weights(beside, [whole("a", torch.zeros(2))])
        assert list(out.iterdir()) == []
    assert [path.name for path in out.iterdir()] == [WEIGHTS] and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a",), "an export directory must be empty: {0} has a: empty it, or choose another"),
        (("c", "b"), "an export directory must be empty: {0} has b and 1 more: empty it, or choose another"),
        ((), "an export directory must be a directory: {0} is a file: choose another"),
    ],
)
def test_a_place_that_is_taken_is_refused(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if names:
        out.mkdir()
    else:
        out.touch()
    for name in names:
        (out / name).touch()
    with pytest.raises(ValueError) as refused, new_directory(out, "an export directory"):
        pytest.fail("a place that is taken was given")
    assert str(refused.value) == message.format(out)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (((0, 2), (3, 6)), "is asked to hold rows 3 to 6 behind row 2"),
        (((0, 4), (2, 6)), "is asked to hold rows 2 to 6 behind row 4"),
        (((0, 2), (2, 5)), "has rows to 5 only"),
    ],
)
def test_rows_that_are_nobodys_or_twos_are_refused(rows: tuple[tuple[int, int], ...], what: str) -> None:
    def read_nothing(offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        pytest.fail("nothing is read before the table is checked")

    with pytest.raises(ValueError) as refused:
        tensors_to_write([(Stored("qkv", (6, 2), rows=part), read_nothing) for part in rows], "F32")
    assert str(refused.value) == (
        f"a tensor's rows must each be one parameter's: qkv [6, 2] {what}: correct the architecture's table"
    )


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a tensor must be written once: a is named twice"):
        write_weights(tmp_path, [whole("a", torch.zeros(1)), whole("a", torch.ones(1))])
    assert list(tmp_path.iterdir()) == []


@needs_a_peak
def test_the_memory_of_an_export_is_a_block(tmp_path: Path) -> None:
    """100 MB, half of it transposed, of parameters that exist only where they are asked for."""
    shape = (4096, 6144)

    def read_parameter(offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return torch.full(size, float(offset[0] + offset[-1]))

    parts = [(Stored("plain", shape), read_parameter), (Stored("turned", shape, transposed=True), read_parameter)]
    forget_peak()
    before = resident_bytes()
    write_weights(tmp_path, tensors_to_write(parts, "BF16"))
    growth = peak_bytes() - before
    assert (tmp_path / WEIGHTS).stat().st_size > 100_000_000
    # Blocks of 2 MiB, as they were read, turned, converted, and what the heap keeps of earlier ones.
    assert growth <= 40 * 2**20, growth


@pytest.mark.slow
def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 99, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "source")
    directory = open_directory(tmp_path / "source")
    with BoxReader(directory) as reader, new_directory(tmp_path / "out", "an export directory") as beside:
        parts = [
            (stored, read_from(reader, stored, torch.float32))
            for stored in (Stored(name, tensor.shape) for name, tensor in directory.tensors.items())
        ]
        write_weights(beside, tensors_to_write(parts, directory.dtype), 20_000)
        (beside / "config.json").write_bytes((directory.path / "config.json").read_bytes())
    assert (tmp_path / "out" / INDEX).is_file()
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
