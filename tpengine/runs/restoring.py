"""What a run begins with: the newest checkpoint that is whole on every rank, or the weights of `--model.path`.

Restoring means to agree on a checkpoint, to load it, and to report damaged ones. Damage is found at two places. A
damaged index or a wrong size is found by each rank before any process group exists (resume.py). Damaged bytes of a file
are found when it is loaded, by the one rank that hashes it. In both cases all ranks skip that checkpoint together. Once
an older one is loaded, the damaged one is renamed, not removed, since the run will save its step again.

Weights to begin with are handed in (`Beginning`); moments begin at zero and steps at 0.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint, Index, read_index
from tpengine.checkpoint.resume import Checkpoint, checkpoints_of, find_checkpoint
from tpengine.config import Config
from tpengine.distributed.agreement import all_gather_json, broadcast_json
from tpengine.last_words import one_line
from tpengine.layout.groups import frozen_of
from tpengine.training.checkpoint_blocks import restore
from tpengine.training.next_phase import enter_phase
from tpengine.training.planned_run import PlannedRun, RunError
from tpengine.training.train_state import TrainState


class Beginning(Protocol):
    """Weights that step 0 of a run starts from; whoever reads them has checked names and shapes on this rank."""

    def fill(self, state: TrainState) -> None:
        """Fill the weights of a state that is at step 0, of any layout; collective.

        Raises:
            RunError: on all ranks alike: a file cannot be read, or is damaged.
        """

    def keep(self, run_dir: Path) -> None:
        """Keep in a run's directory what goes with the weights.

        Raises:
            ValueError, OSError: it cannot be read or written.
        """


def checkpoint_of(run: Path, step: int | None) -> tuple[Path, Index]:
    """Return the checkpoint of a step, or the newest whole one, and its index."""
    checkpoints = checkpoints_of(str(run))
    steps = checkpoints.steps()
    if step is not None and step not in steps:
        raise ValueError(
            f"RUN@STEP names a checkpoint: {run} has those of steps {', '.join(map(str, steps)) or 'none'}, not "
            f"{step}: use one of them"
        )
    problem = "it has none"
    for number in [step] if step is not None else reversed(steps):
        directory = checkpoints.of_step(number)
        try:
            return directory, read_index(directory)
        except DamagedCheckpoint as error:
            problem = str(error)
    raise ValueError(f"a run to begin from must have a whole checkpoint: {run}: {problem}: use another run")


def on_all_ranks(fill: Callable[[], None]) -> None:
    """Run a function on every rank; if it fails on one, raise RunError on all."""
    problem = ""
    try:
        fill()
    except (ValueError, OSError) as error:
        # Not raised here: the other ranks wait for this rank's result.
        problem = one_line(str(error))
    if problems := [said for said in all_gather_json(problem) if said]:
        raise RunError(problems[0])


def restore_newest(state: TrainState, planned: PlannedRun, found: Checkpoint | None) -> Checkpoint | None:
    """Load the newest checkpoint of the run directory that is whole on every rank; collective.

    Rank 0 prints which checkpoints are damaged, and renames them.

    Args:
        state: of any layout.
        planned: the run; without its config.resume nothing is loaded.
        found: what find_checkpoint has returned on this rank.

    Returns:
        The loaded checkpoint, the same on all ranks; None if there is none.

    Raises:
        RunError: ranks see different checkpoints, none is whole, or the newest whole one is another model's.

    Cost: one exchange of a few hundred bytes per rank, and one more for each damaged checkpoint.
    """
    return _restored(state, planned, found, None) if planned.config.resume else None


def restore_older(state: TrainState, planned: PlannedRun, until: int) -> Checkpoint | None:
    """Load the newest whole checkpoint of at most `until` steps into a state that has gone further; collective.

    Its phase must be entered afterwards. Returns, raises: as restore_newest.
    """
    found, refusal = _find(planned, {}, until)
    return _restored(state, planned, found, until, refusal)


def restore_beginning(state: TrainState, beginning: Beginning | None) -> None:
    """Bring a state that is in the first phase back to step 0; collective.

    Args: beginning: the weights that the run began with; None for drawn ones.

    Raises:
        RunError: on all ranks alike: they cannot be read.
    """
    state.restart()
    if beginning is None:
        state.draw_weights()
    else:
        beginning.fill(state)


def _restored(
    state: TrainState, planned: PlannedRun, found: Checkpoint | None, until: int | None, refusal: str = ""
) -> Checkpoint | None:
    """Load a checkpoint that all ranks have found whole, of at most `until` steps."""
    while True:
        # Agree on a checkpoint, load it; if it proves damaged, note that and agree again.
        found = _agreed(planned, found, until, refusal)
        if found is None:
            return None
        # What its last step trained has moments, which a state that freezes it would leave out.
        part = planned.at(max(found.index.step - 1, 0))
        if frozen_of(part.config) != frozen_of(state.part.config):
            enter_phase(state, part)
        try:
            restore(state, found)
        except DamagedCheckpoint as error:
            found = replace(found, damaged={**found.damaged, found.index.step: str(error)})
        except CheckpointError as error:
            raise RunError(str(error)) from None
        else:
            _set_aside(planned.config, found)
            return found


def _agreed(planned: PlannedRun, found: Checkpoint | None, until: int | None, refusal: str) -> Checkpoint | None:
    """Return the newest checkpoint that no rank has found to be damaged."""
    if found is not None and found.index.step in found.damaged:
        found, refusal = _find(planned, found.damaged, until)
    while True:
        everyone = all_gather_json(_seen_by(planned.config, found, refusal, until))
        differing = [rank for rank, seen in enumerate(everyone) if seen["steps"] != everyone[0]["steps"]]
        refusals = [seen["refusal"] for seen in everyone if seen["refusal"]]
        # If ranks give different reasons for one step, that of the first rank counts.
        damaged = {int(step): reason for seen in reversed(everyone) for step, reason in seen["damaged"].items()}
        if not differing and refusals:
            raise RunError(refusals[0])
        if not differing and any(len(seen["damaged"]) < len(damaged) for seen in everyone):
            found, refusal = _find(planned, damaged, until)
            continue
        differing = differing or [rank for rank, seen in enumerate(everyone) if seen["files"] != everyone[0]["files"]]
        if differing:
            raise RunError(
                f"all ranks must resume from the same checkpoint: ranks {differing} have found another than rank 0: "
                "use a --run-dir that all nodes share"
            )
        return None if found is None else replace(found, damaged=damaged)


def _find(planned: PlannedRun, damaged: Mapping[int, str], until: int | None) -> tuple[Checkpoint | None, str]:
    """Return what find_checkpoint returns, or the message of what it raises: one rank must not raise alone."""
    try:
        fingerprints = [part.corpus.fingerprint() for part in planned.parts]
        ends = planned.parts[0].corpus.fingerprint_of_ends
        config = planned.config
        return find_checkpoint(config, fingerprints, damaged, fingerprint_of_ends=ends, until=until), ""
    except ValueError as error:
        # A checkpoint is refused, or the ends of the text cannot be read.
        return None, str(error)


def _seen_by(config: Config, found: Checkpoint | None, refusal: str, until: int | None) -> dict[str, Any]:
    """Return what this rank tells the others: hosts may see different directories under the same name."""
    files = "" if found is None else f"{found.index.step} {sorted(found.index.files.items())}"
    return {
        "steps": [step for step in checkpoints_of(config.run_dir).steps() if until is None or step <= until],
        "damaged": {} if found is None else dict(found.damaged),
        "files": hashlib.sha256(files.encode()).hexdigest(),
        "refusal": refusal,
    }


def _set_aside(config: Config, loaded: Checkpoint) -> None:
    """Rename the damaged checkpoints, whose steps the run will save again, and print a line for each."""
    if not loaded.damaged:
        return
    problem = ""
    if dist.get_rank() == 0:
        checkpoints = checkpoints_of(config.run_dir)
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
