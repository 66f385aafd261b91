"""Saving while training goes on: blocks are copied, then a thread writes the copies during the next steps.

A save has three phases:

    launch   save(), main thread: wait for the previous checkpoint; copy the blocks that this rank stores to host
             memory; start the thread
    write    the thread: every rank writes its file; rank 0 gathers the results, writes the index, renames the directory
             and tells all ranks whether it succeeded. The thread has a process group of its own, so that its
             collectives cannot mix with those of training
    wait     wait(), main thread: join the thread; return whether the checkpoint is on disk

Either all ranks write or none: if one fails (a full disk), all are told, what was written is removed, and the previous
checkpoint stays the newest. Training goes on, because a run is worth more than one checkpoint of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpengine.checkpoint.directory import CheckpointDirectory, Retention
from tpengine.checkpoint.storage import Blocks, SavedBlock, Writer, parts_of
from tpengine.distributed.agreement import broadcast_json, gather_bytes
from tpengine.last_words import one_line

# A block's name, offset and shape.
_Place = tuple[str, tuple[int, ...], tuple[int, ...]]


class Saver:
    """Saves the checkpoints of one run; the constructor is collective.

    Args:
        directory: the run's checkpoints, the same directory on all ranks.
        keep: how many complete checkpoints to keep.
        besides: which of them stay besides the newest; None for no others.
        told: see Writer.
        say: takes a line for the user; called by the thread, on rank 0.

    Attributes:
        directory: as given.

    Memory: a copy on the host of the blocks that this rank stores, reused from one checkpoint to the next.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        keep: int,
        besides: Retention | None = None,
        told: Callable[[int], Collection[int]] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory, self._keep, self._besides, self._told = directory, keep, besides, told
        self._say, self._said = say, ""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup), "every rank is a member"
        self._group = group
        self._copies: dict[_Place, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: str | None = None

    def save(self, step: int, blocks: Mapping[str, SavedBlock | Blocks], state: Mapping[str, Any]) -> str | None:
        """Copy what this rank stores, and start to write it; collective.

        Args:
            step: optimizer steps done.
            blocks: all blocks of this rank; only those marked `stored` that are not empty are copied and written.
            state: all that is not a tensor, as JSON; rank 0's is written.

        Returns:
            As `wait`, for the previous checkpoint.
        """
        # The previous checkpoint: its thread reads the copies that are overwritten below.
        failure = self.wait()

        # Copy. An empty block is skipped: it has the same offset as the next one, and files name a block by its offset.
        stored = {
            name: [part for part in parts_of(entry) if part.stored and part.tensor.numel()]
            for name, entry in blocks.items()
        }
        # A phase may have cut the model otherwise: let go of copies of other blocks.
        places = {_place(name, part) for name, parts in stored.items() for part in parts}
        self._copies = {place: copy for place, copy in self._copies.items() if place in places}
        copies = {
            name: Blocks(tuple(self._copy(name, part) for part in parts)) for name, parts in stored.items() if parts
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # The copies are asynchronous: after this the next step may change the weights.
            torch.cuda.synchronize()

        # Launch.
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(copies, state), name="tpengine-save", daemon=True)
        self._thread.start()
        return failure

    def wait(self, seconds: float | None = None) -> str | None:
        """Wait until the checkpoint that is being written is on disk, or has failed.

        Args:
            seconds: the longest wait; None for no limit.

        Returns:
            None if it is on disk, or if none was being written; else the reason in one line, the same on all ranks.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return f"{self.directory.of_step(self._step)}: still being written after {seconds} s"
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def is_writing(self, seconds: float = 0.0) -> bool:
        """Return whether this rank's thread still writes after at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def _copy(self, name: str, block: SavedBlock) -> SavedBlock:
        place = _place(name, block)
        if place not in self._copies:
            pinned = block.tensor.is_cuda
            self._copies[place] = torch.empty(block.tensor.shape, dtype=block.tensor.dtype, pin_memory=pinned)
        self._copies[place].copy_(block.tensor.detach(), non_blocking=True)
        return SavedBlock(self._copies[place], block.offset, block.global_shape)

    def _write(self, copies: Mapping[str, Blocks], state: Mapping[str, Any]) -> None:
        writer = Writer(self.directory, self._step, state, self._keep, self._besides, self._told)
        try:
            failure = self._write_together(writer, copies)
        except Exception as error:  # usually a peer is gone: the main thread notices that too, and reports it
            self._failure = f"{self.directory.of_step(self._step)}: {one_line(str(error))}"
            return
        if failure is not None:
            self._failure = f"{self.directory.of_step(self._step)}: {failure}"
            self.directory.abandon(self._step)

    def _write_together(self, writer: Writer, copies: Mapping[str, Blocks]) -> str | None:
        """Write this rank's file and, on rank 0, complete the checkpoint; return the failures of all ranks."""
        # Every rank: its own file. A failure is not raised here, because the other ranks wait in the gather.
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine: dict[str, Any] = {}
        try:
            mine["written"] = writer.write(f"rank-{rank:05}-of-{world:05}.safetensors", copies)
        except Exception as error:
            mine["failed"] = one_line(str(error))
        # Gather the results on rank 0; elsewhere the list is empty.
        everyone = [json.loads(of_rank) for of_rank in gather_bytes(json.dumps(mine).encode(), self._group)]
        failures = {of_rank["failed"] for of_rank in everyone if "failed" in of_rank}
        # Rank 0: the index and the rename, once all files are written.
        if everyone and not failures:
            try:
                problem = writer.finish([of_rank["written"] for of_rank in everyone])
                if problem and problem != self._said:
                    self._say(problem)
                self._said = problem
            except Exception as error:
                failures.add(one_line(str(error)))
        # Every rank: receive whether the checkpoint is on disk.
        failure: str | None = broadcast_json("; ".join(sorted(failures)) or None, self._group)
        return failure


def _place(name: str, block: SavedBlock) -> _Place:
    return name, block.offset, tuple(block.tensor.shape)
