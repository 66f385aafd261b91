"""Going on from the newest checkpoint that is whole on every rank: found by all of them, loaded, said.

Damage is found at two places: an index or a size, when a rank looks before any process group exists (resume.py); the
bytes of a file, when it is loaded, by the one rank that hashes it. Wherever it is found, all ranks pass over that
checkpoint together. It is renamed, not removed, once an older one is loaded: its step is going to be saved again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint
from tpengine.checkpoint.resume import Checkpoint, checkpoints_of, find_checkpoint
from tpengine.distributed.messages import all_gather_json, broadcast_json
from tpengine.last_words import one_line
from tpengine.training.state.training_state import restore
from tpengine.training.trainer import RunError, Trainer


def restore_newest(trainer: Trainer, found: Checkpoint | None) -> Checkpoint | None:
    """Load the newest checkpoint of the run directory that is whole on every rank; collective.

    Rank 0 says which are damaged and renames them.

    Args:
        trainer: of any layout; its config.run_dir is looked at only with config.resume.
        found: what find_checkpoint has given to this rank.

    Returns:
        What was loaded, the same on all ranks; None where there is no checkpoint.

    Raises:
        RunError: ranks see different checkpoints, none is whole, or the newest whole one is another model's.

    Cost: one exchange of a few hundred bytes a rank, and one more for each damaged checkpoint.
    """
    if not trainer.config.resume:
        return None
    while True:
        found = _agreed(trainer, found)
        if found is None:
            return None
        try:
            restore(trainer, found)
        except DamagedCheckpoint as error:
            found = replace(found, damaged={**found.damaged, found.index.step: str(error)})
        except CheckpointError as error:
            raise RunError(str(error)) from None
        else:
            _set_aside(trainer, found)
            return found


def _agreed(trainer: Trainer, found: Checkpoint | None) -> Checkpoint | None:
    """The newest checkpoint that no rank has found to be damaged."""
    refusal = ""
    if found is not None and found.index.step in found.damaged:
        found, refusal = _find(trainer, found.damaged)
    while True:
        everyone = all_gather_json(_seen_by(trainer, found, refusal))
        differing = [rank for rank, seen in enumerate(everyone) if seen["steps"] != everyone[0]["steps"]]
        refusals = [seen["refusal"] for seen in everyone if seen["refusal"]]
        # Where ranks give other reasons, the first one's is said.
        damaged = {int(step): reason for seen in reversed(everyone) for step, reason in seen["damaged"].items()}
        if not differing and refusals:
            raise RunError(refusals[0])
        if not differing and any(len(seen["damaged"]) < len(damaged) for seen in everyone):
            found, refusal = _find(trainer, damaged)
            continue
        differing = differing or [rank for rank, seen in enumerate(everyone) if seen["files"] != everyone[0]["files"]]
        if differing:
            raise RunError(
                f"all ranks must resume from the same checkpoint: ranks {differing} have found another than rank 0: "
                "use a --run-dir that all nodes share"
            )
        return None if found is None else replace(found, damaged=damaged)


def _find(trainer: Trainer, damaged: Mapping[int, str]) -> tuple[Checkpoint | None, str]:
    """What find_checkpoint gives or says: one rank may not raise alone."""
    try:
        corpus = trainer.corpus
        ends = corpus.fingerprint_of_ends
        return find_checkpoint(trainer.config, corpus.fingerprint(), damaged, fingerprint_of_ends=ends), ""
    except ValueError as error:
        # Of a checkpoint, or of the text, whose ends may have to be read.
        return None, str(error)


def _seen_by(trainer: Trainer, found: Checkpoint | None, refusal: str) -> dict[str, Any]:
    """What this rank tells the others: nodes may see other directories under the same name."""
    files = "" if found is None else f"{found.index.step} {sorted(found.index.files.items())}"
    return {
        "steps": checkpoints_of(trainer.config.run_dir).steps(),
        "damaged": {} if found is None else dict(found.damaged),
        "files": hashlib.sha256(files.encode()).hexdigest(),
        "refusal": refusal,
    }


def _set_aside(trainer: Trainer, loaded: Checkpoint) -> None:
    """Rename the damaged checkpoints, which the run will save again, and say so."""
    if not loaded.damaged:
        return
    problem = ""
    if dist.get_rank() == 0:
        checkpoints = checkpoints_of(trainer.config.run_dir)
        try:
            for step in sorted(loaded.damaged, reverse=True):
                aside = checkpoints.set_aside(step)
                print(
                    f"tpengine: {checkpoints.of_step(step)} is damaged, continuing from {loaded.directory.name}: "
                    f"{one_line(loaded.damaged[step])}; it is kept as {aside.name}",
                    file=sys.stderr,
                    flush=True,
                )
        except OSError as error:
            problem = (
                f"a damaged checkpoint must make room for a whole one of its step: {checkpoints.of_step(step)} cannot "
                f"be renamed, {error.strerror}: move it away"
            )
    problem = broadcast_json(problem)
    if problem:
        raise RunError(problem)
