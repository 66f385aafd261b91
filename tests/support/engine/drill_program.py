"""The training program with accidents planned: `DRILL=<what>:<rank>:<steps>` in the environment.

The rank dies (SIGKILL) or hangs at a given place, a number of steps after the one it started or resumed with. Of
several, with commas between them, the second befalls torchrun's first restart, and so on; further restarts are left in
peace.

    F, B      halfway through a step's forward or backward passes
    reduce    right after it has started to sum a gradient bucket
    write     when half of its file of a checkpoint is written
    hang      in a forward pass, for ever
    busy      nothing happens, but a forward pass computes for 9 s
    node      in a forward pass, with torchrun and all its other ranks: whoever of this torchrun comes first ("any")
    damage    in a forward pass, after it has overwritten a byte of the newest checkpoint, once there are two
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tpengine.checkpoint.storage as storage
from tpengine.checkpoint.index import FileEntry
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.plan import Action, Kind
from tpengine.runs import loop as run
from tpengine.runs.trainer import Trainer
from tpengine.train import main


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_the_node() -> None:
    """SIGKILL to torchrun first, which could restart its ranks, then to its ranks, this one last."""
    node = os.getppid()
    assert b"torch.distributed.run" in Path(f"/proc/{node}/cmdline").read_bytes(), "torchrun has left this rank behind"
    os.kill(node, signal.SIGSTOP)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (name) state ppid: a name may hold blanks.
            pid, parent = int(status.parent.name), int(status.read_text().rpartition(")")[2].split()[1])
            if parent == node and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    os.kill(node, signal.SIGKILL)
    die()


def damage_newest(run_dir: str) -> None:
    checkpoints = checkpoints_of(run_dir)
    while len(checkpoints.steps()) < 2:  # threads of all ranks are still writing
        time.sleep(0.05)
    newest = checkpoints.newest()
    assert newest is not None
    shard = min(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


class Accident:
    """What happens to this rank, and when."""

    def __init__(self, what: str, rank: int, after_steps: int) -> None:
        self.what, self.after_steps = what, after_steps
        self.mine = rank == int(os.environ.get("RANK", "0"))
        self.first_step: int | None = None

    def due(self, trainer: Trainer) -> bool:
        step = trainer.state.rank.activity.step or 0
        if self.first_step is None:
            self.first_step = step
        return self.mine and step - self.first_step >= self.after_steps

    def prepare(self, trainer: Trainer) -> None:
        handlers = dict(trainer.step.executor.handlers)
        for kind in (Kind.F, Kind.B):
            handlers[kind] = self.around(trainer, handlers[kind], kind.value)
        trainer.step.executor.handlers = handlers
        reduce = trainer.state.buckets.reduce

        def reduce_and_die(index: int) -> Any:
            pending = reduce(index)
            if self.what == "reduce" and self.due(trainer):
                die()
            return pending

        trainer.state.buckets.reduce = reduce_and_die  # type: ignore[method-assign]

    def around(self, trainer: Trainer, handler: Any, kind: str) -> Any:
        def handle(action: Action) -> None:
            due = self.due(trainer) and action.microbatch == 1
            if due and self.what == "hang" and kind == "F":
                time.sleep(3600)
            if due and self.what == "busy" and kind == "F":
                end = time.monotonic() + 9
                while time.monotonic() < end:
                    torch.ones(100).exp_()
            if due and self.what == kind:
                die()
            if due and self.what == "damage" and kind == "F":
                damage_newest(trainer.state.part.config.run_dir)
                die()
            if due and self.what == "node" and kind == "F":
                die_with_the_node()
            handler(action)

        return handle


def main_with(accident: Accident) -> None:
    class Endangered(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            accident.prepare(self)

    save_file = storage.save_file

    def half_a_file(contents: Mapping[str, torch.Tensor], path: Path) -> FileEntry:
        entry = save_file(dict(contents), path)
        if accident.mine and accident.what == "write":
            os.truncate(path, path.stat().st_size // 2)
            die()
        return entry

    storage.save_file = half_a_file
    run.Trainer = Endangered  # type: ignore[attr-defined]
    main()


attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if os.environ.get("RANK") == "0":
    print(f"drill: attempt {attempt}", file=sys.stderr, flush=True)
drills = [*os.environ.get("DRILL", "").split(","), "none:0:0"]
what, rank, after_steps = (drills[min(int(attempt), len(drills) - 1)] or "none:0:0").split(":")
main_with(Accident(what, int(os.environ.get("RANK", "0") if rank == "any" else rank), int(after_steps)))
