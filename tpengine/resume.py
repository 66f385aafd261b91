"""Continuing a run: its configuration, its newest checkpoint, and whether the two belong together. No torch.

A checkpoint's state says what decides the numbers of every later step: model, dtype, seed, text, global batch. A run
that resumes must keep these, and may change everything else: layout, steps, learning rate. The position in the data is
a function of the step, and so is every random number (tpkernels.random), so that neither needs a state of its own; both
are written all the same, and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint, Index, read_index
from tpengine.config import Config, ModelConfig, resolve_layout
from tpengine.config_toml import load_toml
from tpengine.plan import SCHEDULES


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose index has been read and whose files are there.

    Attributes:
        directory, index: where it is; what it holds.
        damaged: newer ones, which it stands in for: by step, why they cannot be used.
    """

    directory: Path
    index: Index
    damaged: Mapping[int, str] = field(default_factory=dict)


def checkpoints_of(run_dir: str | Path) -> CheckpointDirectory:
    """The checkpoints of a run directory."""
    return CheckpointDirectory(Path(run_dir) / "checkpoints")


def saved_config(run_dir: str) -> Config:
    """The configuration that a run left in its directory.

    Raises:
        ValueError: it holds no run.
    """
    path = Path(run_dir) / "config.toml"
    if not path.is_file():
        raise ValueError(
            f"--resume needs the directory of a run: {run_dir} has no config.toml: check --run-dir, or start the run "
            "with --preset or --config beside --resume"
        )
    saved = load_toml(path, Config())
    # The run's copy of a schedule file, wherever its directory is now.
    kept = path.with_name(Path(saved.parallel.schedule).name)
    if saved.parallel.schedule in SCHEDULES or not kept.is_file():
        return saved
    return replace(saved, parallel=replace(saved.parallel, schedule=str(kept)))


def without_layout(saved: Config) -> Config:
    """What command-line flags are applied to when a run continues: a size that they give is then known to be theirs.

    The number of micro-batches becomes 0, which no flag may say.
    """
    return replace(
        saved,
        parallel=replace(saved.parallel, tp=None, pp=None, dp=None),
        train=replace(saved.train, num_micro_batches=0),
    )


def continued_config(saved: Config, wanted: Config, world_size: int) -> Config:
    """The layout and micro-batches a run continues with, on any number of processes.

    Args:
        saved: of the run so far, layout resolved.
        wanted: `without_layout(saved)` with the new command line's flags applied.
        world_size: number of processes.

    Returns:
        `wanted` with the saved sizes where they fill the processes, else those that resolve_layout finds, and with the
        micro-batches of a step shared over the new replicas, unless the flags say how many each runs.

    Raises:
        ValueError: no layout fills the processes; the micro-batches of a step do not divide over the replicas.
    """
    sizes = {axis: getattr(wanted.parallel, axis) or getattr(saved.parallel, axis) for axis in ("tp", "pp", "dp")}
    if sizes["tp"] * sizes["pp"] * sizes["dp"] == world_size:
        parallel = replace(wanted.parallel, **sizes)
    else:
        parallel = resolve_layout(wanted.parallel, world_size)
    train = wanted.train
    if train.num_micro_batches == 0:
        in_all = saved.train.num_micro_batches * (saved.parallel.dp or 1)
        each, rest = divmod(in_all, parallel.dp or 1)
        if rest:
            legal = [dp for dp in range(1, world_size + 1) if in_all % dp == 0 and world_size % dp == 0]
            nearest = min(legal, key=lambda dp: abs(dp - (parallel.dp or 1)))
            raise ValueError(
                f"the micro-batches of a step must divide over the replicas: the run has {in_all} a step, "
                f"dp {parallel.dp}: use --parallel.dp {nearest}, or, in fast mode without dropout, another "
                "--train.micro-batch-size and --train.num-micro-batches of the same product with dp"
            )
        train = replace(train, num_micro_batches=each)
    return replace(wanted, parallel=parallel, train=train)


def state_of(
    config: Config, fingerprint: str, step: int, num_updates: int | None = None, threads: int | None = None
) -> dict[str, Any]:
    """What a checkpoint after `step` steps holds besides tensors, as JSON.

    Args:
        num_updates: how many of the steps were applied; default all of them.
        threads: that rank 0 computes with on a CPU. Sums are cut over them, so that in fast mode bits depend on it.
    """
    return {
        "updates": step if num_updates is None else num_updates,
        "threads": threads,
        "config": asdict(replace(config, resume=False)),
        "data": {"fingerprint": fingerprint, "next_sample": step * _samples_per_step(config)},
        "random": {"generator": "philox4x32-10, counter-based: no state besides the seed", "seed": config.train.seed},
    }


def find_checkpoint(
    config: Config,
    fingerprint: str,
    damaged: Mapping[int, str] | None = None,
    *,
    fingerprint_of_ends: Callable[[], str] | None = None,
) -> Checkpoint | None:
    """Read the index of the newest checkpoint in config.run_dir that is whole; check that this run may continue it.

    One that is damaged is passed over for the one before. One that is whole and does not belong to this run is refused:
    that is a mistake of the command line, and an older one is no remedy.

    Args:
        config: validated.
        fingerprint: of the text (Corpus.fingerprint).
        damaged: checkpoints that are known to be damaged: by step, why.
        fingerprint_of_ends: makes the one that older checkpoints have (Corpus.fingerprint_of_ends).

    Returns:
        The checkpoint, with every damaged one that was passed over; None if the run was stopped before its first.

    Raises:
        CheckpointError: none is whole, or the newest that is has another model, dtype, seed, text or batch.
    """
    checkpoints = checkpoints_of(config.run_dir)
    passed = dict(damaged or {})
    for step in reversed(checkpoints.steps()):
        if step in passed:
            continue
        directory = checkpoints.of_step(step)
        try:
            index = _index_of_step(directory, step)
        except DamagedCheckpoint as error:
            passed[step] = str(error)
            continue
        if fingerprint_of_ends is not None and _is_of_ends(index):
            fingerprint = fingerprint_of_ends()
        _check_continues(directory, index, config, fingerprint)
        return Checkpoint(directory, index, passed)
    if passed:
        reasons = "; ".join(
            f"{checkpoints.of_step(step).name}: {passed[step]}" for step in sorted(passed, reverse=True)
        )
        raise CheckpointError(
            f"--resume needs a whole checkpoint: {checkpoints.path} has none: {reasons}: put one back from a copy, or "
            "start anew with another --run-dir"
        )
    return None


def _index_of_step(directory: Path, step: int) -> Index:
    index = read_index(directory)
    if index.step != step:
        # It would stand where that step is to be saved.
        raise DamagedCheckpoint(f"a checkpoint must have the name of its step: {directory} is of step {index.step}")
    return index


def _is_of_ends(index: Index) -> bool:
    """Whether a checkpoint is of the time when the text was told by a hash of its ends, in 64 hex digits."""
    data = index.state.get("data")
    saved = data.get("fingerprint") if isinstance(data, dict) else None
    return isinstance(saved, str) and re.fullmatch("[0-9a-f]{64}", saved) is not None


def _samples_per_step(config: Config) -> int:
    return config.train.micro_batch_size * config.train.num_micro_batches * (config.parallel.dp or 1)


def _check_continues(directory: Path, index: Index, config: Config, fingerprint: str) -> None:
    try:
        saved, now = (
            _decisive(state, index.step, config.train.reduction == "exact")
            for state in (index.state, state_of(config, fingerprint, index.step))
        )
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"a checkpoint must say what it is of: {directory} lacks {error}: move it away to resume from an older one"
        ) from None
    if config.train.steps < index.step:
        raise CheckpointError(
            f"a resumed run must not be shorter than it is: {directory} has {index.step} steps, train.steps is "
            f"{config.train.steps}: use --train.steps {index.step} or more"
        )
    for name, value in now.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"a resumed run must keep {name}: {directory} was saved with {saved.get(name)}, this run has {value}: "
                f"{_REMEDIES.get(name, f'use {name} {saved.get(name)}')}, or another --run-dir"
            )


_REMEDIES = {
    "the text": "use the text it was trained on",
    "samples per step": "choose --train.micro-batch-size and --train.num-micro-batches so that times dp they are that",
}


def _decisive(state: Mapping[str, Any], step: int, is_exact: bool) -> dict[str, Any]:
    """By name, what decides the numbers of later steps."""
    config = state["config"]
    train, data = config["train"], config["data"]
    # Settings that a checkpoint is too old to have were as they are by default.
    model = asdict(ModelConfig()) | config["model"]
    dropped = any(model[name] for name in ("residual_dropout", "attention_dropout", "mlp_dropout"))
    return {
        **{f"model.{name}": value for name, value in model.items()},
        **{f"train.{name}": train[name] for name in ("seq_len", "dtype", "seed")},
        # Masks are functions of the micro-batch, and exact mode's order of sums is one of its size.
        **({"train.micro_batch_size": train["micro_batch_size"]} if dropped or is_exact else {}),
        **{f"data.{name}": data[name] for name in ("ignore_token", "held_out_fraction")},
        "samples per step": state["data"]["next_sample"] / step if step else None,
        "the text": state["data"]["fingerprint"],
        "the seed of its random numbers": state["random"]["seed"],
    }
