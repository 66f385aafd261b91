"""One rank of a contestant of the import benchmark, in a process of its own.

    ours            a model's shards in their modules, filled as a run's beginning fills them
    transformers    AutoModelForCausalLM.from_pretrained, one process, the whole model

Each loads into new memory: what an earlier load had is given back to the system first. Two times are taken: until the
call returns, and until every page of the weights is the process's own. from_pretrained maps files whose dtype is asked
for and returns at once; the bytes are read when they are touched, and copied when a weight changes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from benchmarks.harness import resident_memory
from tpengine.architectures.model_path import model_at
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig, validate
from tpengine.distributed.mesh import Shape, build_mesh
from tpengine.hugging_face.beginning import check_beginning
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.hugging_face.names import stored_of
from tpengine.hugging_face.read import BoxReader
from tpengine.layout.step_plan import layout_of
from tpengine.model.meta_modules import Uninitialized
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer

_PAGE_BYTES = 4096

# What a rank holds of a file's tensor: its name, the box in it, the values.
Held = tuple[str, tuple[slice, ...], Tensor]


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks.

    Args:
        name: ours or transformers.
        directory: the model's.
        tp: ours is cut over as many ranks.
        pp: and its layers over as many stages.
        threads: that this rank may use.
    """

    def __init__(self, name: str, directory: str, tp: int, pp: int, threads: int) -> None:
        torch.set_num_threads(threads)
        # New memory is mapped and given back, as in a process that has just started.
        resident_memory.follow_what_lives()
        self._directory, self._threads = directory, threads
        self._load = self._ours if name == "ours" else self._transformers
        self._model: Any = None
        if name == "ours":
            model = model_at(ModelConfig(path=directory))
            parallel, train = ParallelConfig(tp=tp, pp=pp, dp=1), TrainConfig(seq_len=128, num_micro_batches=4)
            config = validate(Config(model=model, parallel=parallel, train=train), tp * pp)
            mesh = build_mesh(Shape.of(config.parallel), "cpu")
            self._config, self._tp = config, Communicator(mesh.tp)
            self._chunks = layout_of(config).layers_of(mesh.at.pp)
        else:
            import transformers

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            # What it imports late.
            self._load()

    def load(self) -> tuple[float, float, int]:
        """Load, beginning on all ranks at once; return seconds until it returns and until all is ready, bytes of disk.

        The bytes are those that this process had the disk read.
        """
        self.release()
        dist.barrier()
        disk, begin = _disk_bytes(), time.perf_counter()
        self._load()
        returned = time.perf_counter()
        for weight in self._weights():
            # A write, after which the page is no longer the file's.
            weight.detach().view(-1)[:: _PAGE_BYTES // weight.element_size()].mul_(1.0)
        return returned - begin, time.perf_counter() - begin, _disk_bytes() - disk

    def release(self) -> None:
        """Give back what was loaded."""
        self._model = None
        gc.collect()

    def drop_pages(self) -> None:
        """Have the system forget the files' pages, so that the disk is read again; nobody may have them mapped."""
        for path in Path(self._directory).glob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def wrong(self) -> str:
        """Load, and compare with what the library safetensors reads; return what differs, or nothing."""
        self.release()
        self._load()
        num_elements = 0
        files = sorted(Path(self._directory).glob("*.safetensors"))
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(str(path), framework="pt")) for path in files]
            holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
            for name, box, values in self._held():
                if not torch.equal(values, holder[name].get_slice(name)[box].to(values.dtype)):
                    return f"{name} {box} differs from the file"
                num_elements += values.numel()
        return "" if num_elements else "nothing was loaded"

    def num_elements(self) -> int:
        """Return the number of elements that this rank holds."""
        return sum(weight.numel() for weight in self._weights())

    def _ours(self) -> None:
        model = self._config.model
        found = check_beginning(model)
        assert isinstance(found, ModelDirectory)
        with Uninitialized():
            self._model = Transformer(FastParts(model, self._tp, dtype=torch.float32), chunks=self._chunks)
        places = stored_of(model)
        with BoxReader(found) as reader:
            reader.fill_all(
                [
                    (places[piece.spec.name][1], piece.block[0], self._model.held[name])
                    for name, piece in self._model.pieces.items()
                ],
                self._threads,
            )

    def _transformers(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)

    def _weights(self) -> Iterator[Tensor]:
        yield from self._model.parameters()

    def _held(self) -> Iterator[Held]:
        if not isinstance(self._model, Transformer):
            for name, weight in self._model.named_parameters():
                yield name, tuple(slice(0, size) for size in weight.shape), weight.detach()
            return
        places = stored_of(self._config.model)
        for name, piece in self._model.pieces.items():
            offset, size = piece.block
            box = tuple(slice(first, first + num) for first, num in zip(offset, size, strict=True))
            yield places[piece.spec.name][1].name, box, self._model.held[name].detach()


def _disk_bytes() -> int:
    """Return the bytes that this process has had the disk read."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))
