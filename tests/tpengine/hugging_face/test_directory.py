"""Rung: pure. A model's directory is understood, or refused in one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tpengine.hugging_face.directory import INDEX, WEIGHTS, open_directory

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_config(directory: Path, **values: object) -> None:
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **values}))


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))


def in_two_files(directory: Path) -> None:
    """A directory with a, b in the first file and c in the second."""
    write_config(directory, dtype="bfloat16", torch_dtype="bfloat16")
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2)}, str(directory / FIRST))
    save_file({"c": torch.ones(40, 2).bfloat16()}, str(directory / SECOND))
    write_index(directory, {"a": FIRST, "b": FIRST, "c": SECOND})


def test_a_directory_of_several_files(tmp_path: Path) -> None:
    in_two_files(tmp_path)
    found = open_directory(tmp_path)
    assert {name: (t.path.name, t.dtype, t.shape, t.num_bytes) for name, t in found.tensors.items()} == {
        "a": (FIRST, "F32", (2, 3), 24),
        "b": (FIRST, "F32", (2,), 8),
        "c": (SECOND, "BF16", (40, 2), 160),
    }
    assert found.config["dtype"] == "bfloat16" and found.dtype == "BF16"


def test_a_directory_of_one_file_needs_no_index(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"a": torch.ones(2)}, str(tmp_path / WEIGHTS))
    assert list(open_directory(str(tmp_path)).tensors) == ["a"]


def pickled(directory: Path) -> None:
    (directory / FIRST).unlink()
    (directory / SECOND).unlink()
    (directory / INDEX).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"x")


def without_files(directory: Path) -> None:
    pickled(directory)
    (directory / "pytorch_model.bin").unlink()


def truncated(directory: Path) -> None:
    path = directory / SECOND
    path.write_bytes(path.read_bytes()[:-1])


def claimed_twice(directory: Path) -> None:
    save_file({"a": torch.ones(2, 3), "c": torch.ones(2)}, str(directory / SECOND))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "a model's directory must have a config.json: {0} has none: give the directory that save_pretrained wrote",
    ),
    "config not JSON": (
        lambda path: (path / "config.json").write_text("{"),
        "config.json must be valid JSON: {0}/config.json: 'Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)': copy it again",
    ),
    "config a list": (
        lambda path: (path / "config.json").write_text("[]"),
        "config.json must be an object: {0}/config.json: got list: copy it again",
    ),
    "quantized": (
        lambda path: write_config(path, quantization_config={"quant_method": "gptq"}),
        "weights must not be quantized: {0}/config.json has quantization_config {{'quant_method': 'gptq'}}: dequantize "
        "them first, with transformers' model.dequantize()",
    ),
    "dtype": (
        lambda path: write_config(path, dtype="float8_e4m3fn"),
        "dtype must be one of float64, float32, float16, bfloat16: {0}/config.json has 'float8_e4m3fn': save the model "
        "again in one of them",
    ),
    "torch_dtype": (
        lambda path: write_config(path, torch_dtype=["float32"]),
        "torch_dtype must be one of float64, float32, float16, bfloat16: {0}/config.json has \"['float32']\": save the "
        "model again in one of them",
    ),
    "pickle": (
        pickled,
        "weights must be safetensors, since a pickle runs code: {0} has pytorch_model.bin: convert with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)",
    ),
    "no weights": (
        without_files,
        "a model's directory must have model.safetensors or model.safetensors.index.json: {0} has neither: copy its "
        "weights",
    ),
    "no index": (
        lambda path: (path / INDEX).unlink(),
        f"weights in several files must have an index: {{0}} has {FIRST} but no {INDEX}: copy it too",
    ),
    "no map": (
        lambda path: write_index(path, []),
        f"an index must have a weight_map of names and files: {{0}}/{INDEX} has none: copy it again",
    ),
    "outside": (
        lambda path: write_index(path, {"a": "../other/model.safetensors"}),
        f"an index must name files beside it: {{0}}/{INDEX} has '../other/model.safetensors' for 'a': copy it again",
    ),
    "null byte": (
        lambda path: write_index(path, {"a": "m\0.safetensors"}),
        f"an index must name files beside it: {{0}}/{INDEX} has 'm\\x00.safetensors' for 'a': copy it again",
    ),
    "missing file": (
        lambda path: (path / SECOND).unlink(),
        f"weights must be readable: {{0}}/{SECOND}: No such file or directory: check the file",
    ),
    "missing tensor": (
        lambda path: write_index(path, {"a": FIRST, "d": SECOND}),
        f"an index must name what its files hold: {{0}}/{INDEX}: {SECOND} has no 'd': copy both again",
    ),
    "other file": (
        lambda path: write_index(path, {"a": SECOND, "b": FIRST}),
        f"an index must name what its files hold: {{0}}/{INDEX}: {SECOND} has no 'a': copy both again",
    ),
    "two files": (
        claimed_twice,
        f"one file must claim a tensor: {{0}}: 'a' is in {FIRST} and {SECOND}: copy them again",
    ),
    "two sets": (
        lambda path: save_file({"a": torch.ones(1)}, str(path / WEIGHTS)),
        f"one file must claim a tensor: {{0}} has {WEIGHTS} beside {INDEX}, which does not name it: remove one of the "
        "two",
    ),
    "truncated": (
        truncated,
        f"a safetensors file must be whole: {{0}}/{SECOND} has 231 bytes, its header speaks of 232: copy it again",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_directory_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[case]
    in_two_files(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError) as refused:
        open_directory(tmp_path)
    assert str(refused.value) == message.format(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({}, str(tmp_path / WEIGHTS))
    with pytest.raises(ValueError, match="weights must hold a tensor"):
        open_directory(tmp_path)
