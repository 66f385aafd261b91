"""Rung: pure. Files of tensors are the library's, byte for byte, and their hash is that of what was written."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file as save_by_library

from tpengine.checkpoint.storage import save_file
from tpengine.torch_dtypes import FILE_NAME_OF


def drawn_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of every dtype, of any shape, under names in any order and with any letters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (3,), (2, 5), (0,), (7, 1, 3), (300, 1000)]
    drawn = {}
    for number, dtype in enumerate(FILE_NAME_OF):
        first, second = (int(torch.randint(99, (), generator=generator)) for _ in range(2))
        values = 9 * torch.rand(shapes[first % len(shapes)], generator=generator)
        drawn[f'{second}.ö"\\{number}@0,1'] = values.to(dtype)
    return drawn


def test_files_are_the_librarys_and_hashed_while_they_are_written(tmp_path: Path) -> None:
    for seed in range(20):
        tensors = drawn_tensors(seed) if seed else {}
        save_by_library(tensors, str(tmp_path / "theirs"))
        entry = save_file(tensors, tmp_path / "ours")
        content = (tmp_path / "ours").read_bytes()
        assert content == (tmp_path / "theirs").read_bytes()
        assert (entry.num_bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError) as error:
        save_file({"x": torch.ones(5)}, Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC
