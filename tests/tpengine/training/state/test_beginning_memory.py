"""Rung: gloo ranks. A run that begins with 1 GB of weights: what a rank's memory grows by, and how much is read.

Resident memory counts pages of this process and pages of files that it maps (RssAnon, RssFile), at their peak, from
before there is a model to the end of reading.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.architectures.runs import CPU, beginning
from support.architectures.sparse import sparse_model
from support.ranks.rank_pool import RankPool

from benchmarks.harness.resident_memory import follow_what_lives, forget_peak, peak_bytes, resident_bytes
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.dtypes import FILE_BITS
from tpengine.hugging_face import beginning as beginning_module
from tpengine.hugging_face.beginning import begin_from, check_beginning
from tpengine.hugging_face.directory import OpenFiles
from tpengine.hugging_face.read import REGION_BYTES, BoxReader
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import masters_of


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of each read."""
    read_into, counts = OpenFiles.read_into, []

    def counted(source: OpenFiles, memory: memoryview, path: Path, begin: int) -> None:
        read_into(source, memory, path, begin)
        counts.append(len(memory))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFiles, "read_into", counted)
        yield counts


def measured(config: Config, with_whole_pieces: bool) -> dict[str, int]:
    """What one rank's beginning takes."""
    follow_what_lives()
    found = check_beginning(config.model)
    forget_peak()
    before = resident_bytes()
    trainer = Trainer(config, open_corpus(config), CPU, draws=False)
    with counting() as counts, pytest.MonkeyPatch.context() as patch:
        if with_whole_pieces:
            patch.setattr(beginning_module, "BoxReader", WholeTensors)
        begin_from(trainer.state, found)
    growth = peak_bytes() - before
    elements = sum(block.tensor.numel() for _, block in masters_of(trainer.state))
    # Parameters, their wider copies, gradients and moments: all in place before the first weight is read.
    itemsize = 4 + 4 + 8 if config.train.dtype == "float32" else 2 + 4 + 4 + 8
    return {"growth": growth, "held": elements * itemsize, "elements": elements, "read": sum(counts)}


class WholeTensors(BoxReader):
    """Makes a tensor of each box before it is copied, as the library does; too much for an embedding."""

    def fill_all(self, boxes: Any, num_threads: int = 1) -> None:
        # The largest last, when all others are in place: new memory counts once something is written to it.
        for stored, offset, target in sorted(boxes, key=lambda box: box[2].nbytes):
            target.detach().copy_(self.read(stored, offset, tuple(target.shape), target.dtype))


def measured_ranks(config: Config, with_whole_pieces: bool = False) -> list[dict[str, int]]:
    # Ranks of its own, with no memory that an earlier test has freed.
    with contextlib.closing(RankPool()) as ranks:
        found: list[dict[str, int]] = ranks.run(measured, 4, config, with_whole_pieces)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("F32", "float32"), ("F32", "bfloat16"), ("BF16", "float32")],
    ids=["straight", "rounded", "converted"],
)
def test_a_rank_grows_by_its_parameters_and_reads_its_share(tmp_path: Path, stored: str, dtype: str) -> None:
    files = sparse_model(tmp_path, stored)
    assert files > (1e9 if stored == "F32" else 0.5e9)
    config = beginning(tmp_path, (1, 2, 2), dtype=dtype)
    found = measured_ranks(config)
    for rank in found:
        bound = rank["held"] + 64 * 2**20 + REGION_BYTES
        assert 0.95 * rank["held"] < rank["growth"] <= bound, (rank, bound)
    read = sum(rank["read"] for rank in found)
    # Norms are on both ranks of tp, and read by both.
    assert read == sum(rank["elements"] for rank in found) * FILE_BITS[stored] // 8
    assert files < read <= 1.05 * files


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process")
def test_whole_tensors_on_the_way_are_noticed(tmp_path: Path) -> None:
    sparse_model(tmp_path, "F32")
    for rank in measured_ranks(beginning(tmp_path, (1, 2, 2), dtype="float32"), True):
        assert rank["growth"] > rank["held"] + 64 * 2**20 + REGION_BYTES
