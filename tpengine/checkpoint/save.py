"""Saving beside training: blocks are copied aside, then written by a thread while the next steps run.

    save(step)   main thread: wait for the checkpoint before; copy this rank's share to host memory; start the thread
    the thread   every rank writes its file; rank 0 hears of all, writes the index, and tells all whether it is on disk;
                 over a group of its own, so that no collective meets training's
    wait()       main thread: join; say whether it is on disk

All ranks write or none: when one fails (a full disk) all hear of it, what was written is removed, and the checkpoint
before stays the newest. Training goes on: a run is worth more than a checkpoint of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpengine.checkpoint.block import Block, Blocks, parts_of
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.storage import Writer
from tpengine.distributed.messages import broadcast_json, gather_bytes
from tpengine.last_words import one_line


class Saver:
    """Saves checkpoints of one run; the constructor is collective.

    Args:
        directory: the run's checkpoints, the same directory on all ranks.
        keep: how many complete checkpoints to keep.

    Attributes:
        directory: the one given.

    Memory: a copy, on the host, of the blocks this rank stores, kept from one checkpoint to the next.
    """

    def __init__(self, directory: CheckpointDirectory, keep: int) -> None:
        self.directory, self._keep = directory, keep
        self._group: ProcessGroup = dist.new_group(backend="gloo")
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: str | None = None

    def save(self, step: int, blocks: Mapping[str, Block | Blocks], state: Mapping[str, Any]) -> str | None:
        """Copy aside what this rank stores and begin to write it; collective.

        Args:
            step: optimizer steps done.
            blocks: all blocks of this rank; only those marked `stored` that are not empty are copied and written.
            state: what is no tensor, as JSON.

        Returns:
            As `wait`, of the checkpoint before.
        """
        failure = self.wait()
        # An empty block lies where the next one does, and files know a block by its place.
        stored = {
            name: [part for part in parts_of(entry) if part.stored and part.tensor.numel()]
            for name, entry in blocks.items()
        }
        copies = {
            name: Blocks(tuple(self._copy(name, part) for part in parts)) for name, parts in stored.items() if parts
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(copies, state), name="tpengine-save", daemon=True)
        self._thread.start()
        return failure

    def wait(self, seconds: float | None = None) -> str | None:
        """Wait for what is being written.

        Args:
            seconds: at most so long; None for as long as it takes.

        Returns:
            None if it is on disk, or nothing was under way; else why it is not, in one line, on all ranks alike.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return f"{self.directory.of_step(self._step)}: still being written after {seconds} s"
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _copy(self, name: str, block: Block) -> Block:
        place = name, block.offset
        if place not in self._copies:
            pinned = block.tensor.is_cuda
            self._copies[place] = torch.empty(block.tensor.shape, dtype=block.tensor.dtype, pin_memory=pinned)
        self._copies[place].copy_(block.tensor.detach(), non_blocking=True)
        return Block(self._copies[place], block.offset, block.global_shape)

    def _write(self, copies: Mapping[str, Blocks], state: Mapping[str, Any]) -> None:
        writer = Writer(self.directory, self._step, state, self._keep)
        try:
            failure = self._write_together(writer, copies)
        except Exception as error:  # mostly a peer is gone: the main thread finds out too, and reports
            self._failure = f"{self.directory.of_step(self._step)}: {one_line(str(error))}"
            return
        if failure is not None:
            self._failure = f"{self.directory.of_step(self._step)}: {failure}"
            self.directory.abandon(self._step)

    def _write_together(self, writer: Writer, copies: Mapping[str, Blocks]) -> str | None:
        """Write this rank's file, and on rank 0 what makes a checkpoint of all; return what failed on any rank."""
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine: dict[str, Any] = {}
        try:
            mine["written"] = writer.write(f"rank-{rank:05}-of-{world:05}.safetensors", copies)
        except Exception as error:
            mine["failed"] = one_line(str(error))
        everyone = [json.loads(of_rank) for of_rank in gather_bytes(json.dumps(mine).encode(), self._group)]
        failures = {of_rank["failed"] for of_rank in everyone if "failed" in of_rank}
        if everyone and not failures:
            try:
                writer.finish([of_rank["written"] for of_rank in everyone])
            except Exception as error:
                failures.add(one_line(str(error)))
        failure: str | None = broadcast_json("; ".join(sorted(failures)) or None, self._group)
        return failure
