"""Rung: pure. Headers as the library writes them are understood; any other bytes are refused in a line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tpengine.tensor_file import FileTensor, read_header


def file_of(directory: Path, header: Any, data: bytes = b"", name: str = "model.safetensors") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / name
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_the_library_writes_is_understood(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.arange(5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "d": torch.tensor([True, False]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    found = read_header(path)
    assert {name: tensor.shape for name, tensor in found.items()} == {k: tuple(v.shape) for k, v in tensors.items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": "F32",
        "b": "I64",
        "c": "BF16",
        "empty": "F32",
        "d": "BOOL",
    }
    held = path.read_bytes()
    for name, tensor in found.items():
        expected = bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) if tensors[name].numel() else b""
        assert held[tensor.begin : tensor.begin + tensor.num_bytes] == expected


REFUSED = {
    "not an object": ([], b"", "its header is not an object but list"),
    "entry": ({"a": 3}, b"", "'a' is not an object"),
    "dtype": ({"a": entry("F7")}, bytes(8), "'a' has dtype 'F7', which the format does not have"),
    "negative": ({"a": entry(shape=[-2])}, bytes(8), "'a' has shape [-2] and data_offsets [0, 8]"),
    "true": ({"a": entry("U8", [True], [0, 1])}, bytes(1), "'a' has shape [True] and data_offsets [0, 1]"),
    "reversed": ({"a": entry(offsets=[8, 0])}, bytes(8), "'a' has shape [2] and data_offsets [8, 0]"),
    "size": ({"a": entry(shape=[3])}, bytes(8), "'a' F32[3] does not take the 8 bytes that it has"),
    "half a byte": ({"a": entry("F4", [3], [0, 2])}, bytes(2), "'a' F4[3] does not take the 2 bytes that it has"),
    "huge": ({"a": entry(shape=[2**62] * 9)}, bytes(8), "does not take the 8 bytes that it has"),
    "gap": ({"a": entry(offsets=[4, 12])}, bytes(12), "'a' begins at byte 74, where 70 is due without gap or overlap"),
    "overlap": (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        bytes(12),
        "'b' begins at byte 135, where 139 is due without gap or overlap",
    ),
    "more": ({"a": entry()}, bytes(9), "it has 78 bytes, of which its tensors take only 77"),
    "twice": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        "its header is not valid JSON (\"'a' twice\")",
    ),
    "deep": (b"[" * 100_000, b"", "its header is not valid JSON ('nested too deeply')"),
    "no text": (b"\xff\xfe{}", b"", "its header is not valid JSON ("),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_forbids_is_refused(case: str, tmp_path: Path) -> None:
    header, data, what = REFUSED[case]
    path = file_of(tmp_path, header, data)
    with pytest.raises(ValueError) as refused:
        read_header(path)
    message = str(refused.value)
    assert message.startswith(f"a safetensors file must be as its format demands: {path}: ")
    assert what in message and message.endswith(": copy it again") and "\n" not in message


@pytest.mark.parametrize(
    ("num_bytes", "what"),
    [
        (0, "0 bytes, of which a header's length takes 8"),
        (7, "7 bytes, of which a header's length takes 8"),
        (30, "30 bytes, its header alone takes 69"),
        (76, "76 bytes, its header speaks of 77"),
    ],
)
def test_a_truncated_file_is_refused(num_bytes: int, what: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a": entry()}, bytes(8))
    assert path.stat().st_size == 77
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError) as refused:
        read_header(path)
    assert str(refused.value) == f"a safetensors file must be whole: {path} has {what}: copy it again"


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="its header would be 9223372036854775808 bytes long, the format allows"):
        read_header(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    with pytest.raises(ValueError) as refused:
        read_header(path)
    assert str(refused.value) == f"weights must be readable: {path}: No such file or directory: check the file"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
counts = st.lists(st.integers(-1, 6), max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F6_E2M3", "X"]) | json_values,
        "shape": counts | json_values,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=4), entries, max_size=3) | json_values
drawn = given(header=headers, data=st.binary(max_size=24), lie=st.integers(-3, 3))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder for all draws: a function's own would be refused by hypothesis."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def found_in(path: Path) -> dict[str, FileTensor] | None:
    """What the header says; None if it was refused, in one line."""
    try:
        return read_header(path)
    except ValueError as error:
        assert type(error) is ValueError and "\n" not in str(error) and "copy it again" in str(error), error
        return None


def check_drawn(scratch: Path, header: Any, data: bytes, lie: int) -> None:
    text = json.dumps(header).encode()
    path = scratch / "drawn.safetensors"
    path.write_bytes(max(0, len(text) + lie).to_bytes(8, "little") + text + data)
    for tensor in (found_in(path) or {}).values():
        assert 8 <= tensor.begin <= tensor.begin + tensor.num_bytes <= path.stat().st_size


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@drawn
def test_drawn_headers_are_read_within_the_file_or_refused(scratch: Path, header: Any, data: bytes, lie: int) -> None:
    check_drawn(scratch, header, data, lie)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@drawn
def test_many_drawn_headers_are_read_within_the_file_or_refused(
    scratch: Path, header: Any, data: bytes, lie: int
) -> None:
    check_drawn(scratch, header, data, lie)


@settings(max_examples=150)
@given(place=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_changed_byte_is_refused_or_the_library_reads_the_same(
    scratch: Path, place: int, value: int, cut: int
) -> None:
    header = {"a": entry("F32", [2, 3], [0, 24]), "b": entry("BF16", [4], [24, 32])}
    path = file_of(scratch, header, bytes(range(32)))
    held = bytearray(path.read_bytes())
    held[place % len(held)] = value
    path.write_bytes(held[: len(held) - max(0, cut - 20)])
    found = found_in(path)
    if found is None:
        return
    try:
        with safe_open(str(path), framework="pt") as library:
            seen = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118
            shapes = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in seen.items()}
    except SafetensorError as error:
        pytest.fail(f"the library refuses what we read: {error}")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == shapes
