"""Continuing a run: its configuration, its newest checkpoint, and whether they belong together. No torch.

A checkpoint's state holds everything that determines the numbers of later steps: model, dtype, seed, text, global
batch. A resumed run must keep these, and may change everything else: layout, number of steps, learning rate. The
position in the data and all random numbers are functions of the step (tpkernels.random), so they need no state of their
own; they are written all the same, and compared.

A checkpoint of step 0 is what `tpengine import` writes: weights alone, since at step 0 every moment is zero. Nothing
has been trained, so that a run that begins there must keep the model and nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpengine.architectures.model_path import architecture_of_run
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.fingerprint import change_of
from tpengine.checkpoint.index import CheckpointError, DamagedCheckpoint, Index, read_index
from tpengine.config import (
    Config,
    DataConfig,
    ParallelConfig,
    Phases,
    TrainConfig,
    decay_steps_of,
    num_evaluated,
    phases_of,
    resolve_layout,
    samples_per_step,
    validate_run,
)
from tpengine.config.ranges import divisors
from tpengine.config.rules import legal_ep
from tpengine.config.settings import share_held_out
from tpengine.config.toml import load_toml
from tpengine.plan import SCHEDULES

# The copies of a user's files of phases and of a mixture in the run's directory.
PHASES_FILE, MIXTURE_FILE = "phases.toml", "mixture.toml"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose index has been read and whose files are there.

    Attributes:
        directory, index: where it is, and its index.
        damaged: newer checkpoints that cannot be used, so that this one is used instead: by step, why.
    """

    directory: Path
    index: Index
    damaged: Mapping[int, str] = field(default_factory=dict)


def checkpoints_of(run_dir: str | Path) -> CheckpointDirectory:
    """Return the checkpoints of a run directory."""
    return CheckpointDirectory(Path(run_dir) / "checkpoints")


def saved_config(run_dir: str, own: str = "") -> Config:
    """Return the configuration that a run has written to its directory.

    Args:
        run_dir: the directory.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Raises:
        ValueError: the directory holds no run.
    """
    path = Path(run_dir) / "config.toml"
    if not path.is_file():
        raise ValueError(
            f"--resume needs the directory of a run: {run_dir} has no config.toml: check --run-dir, or start the run "
            "with --preset or --config beside --resume"
        )
    saved = load_toml(path, Config())
    if checkpoints_of(run_dir).steps() != [0]:
        # A configuration from before optim.decay_steps existed: the rate decayed over all steps of the run. A run that
        # was imported and has not begun leaves it open.
        saved = replace(saved, optim=replace(saved.optim, decay_steps=decay_steps_of(saved)))
    # Use the run's copies of the files of phases, a mixture, a schedule and an architecture, wherever the run directory
    # is now.
    if saved.phases and path.with_name(PHASES_FILE).is_file():
        saved = replace(saved, phases=str(path.with_name(PHASES_FILE)))
    if saved.data.mixture and path.with_name(MIXTURE_FILE).is_file():
        saved = replace(saved, data=replace(saved.data, mixture=str(path.with_name(MIXTURE_FILE))))
    architecture = architecture_of_run(path.parent, saved.model.architecture, own)
    saved = replace(saved, model=replace(saved.model, architecture=architecture))
    kept = path.with_name(Path(saved.parallel.schedule).name)
    if saved.parallel.schedule in SCHEDULES or not kept.is_file():
        return saved
    return replace(saved, parallel=replace(saved.parallel, schedule=str(kept)))


def has_begun(run_dir: str) -> bool:
    """Return whether a directory holds a run that must be continued: one that has trained and saved a checkpoint."""
    return any(checkpoints_of(run_dir).steps()) and (Path(run_dir) / "config.toml").is_file()


def without_layout(base: Config) -> Config:
    """Return the base for the command-line flags of a continued run, so that a size given by a flag can be recognised.

    The number of micro-batches and ep become 0, and an open optim.decay_steps -1; no flag may give these values.
    """
    return replace(
        base,
        parallel=replace(base.parallel, tp=None, pp=None, dp=None, ep=0),
        train=replace(base.train, num_micro_batches=0),
        optim=replace(base.optim, decay_steps=base.optim.decay_steps or -1),
    )


def continued_config(saved: Config, wanted: Config, world_size: int, base: ParallelConfig | None = None) -> Config:
    """Return the configuration to continue with, on any number of processes: global batch and learning rates stay.

    Args:
        saved: the configuration of the run so far, layout resolved.
        wanted: `without_layout` of the command line's preset and file, or of `saved`, with its flags applied.
        world_size: number of processes.
        base: the sizes that preset and file give; flags override them; they are used if they fit the processes.

    Returns:
        `wanted` with the legal layout for the processes that is nearest to the saved one (tp is kept before pp, and pp
        before dp), the samples of a step divided among its replicas, and the saved optim.decay_steps and number of
        held-out samples, unless flags give other values.

    Raises:
        ValueError: no layout fits the processes; the micro-batches of a step do not divide over the replicas.
    """
    flags = wanted.parallel
    if wanted.optim.decay_steps == -1:
        wanted = replace(wanted, optim=replace(wanted.optim, decay_steps=saved.optim.decay_steps))
    wanted = replace(wanted, train=_evaluated_alike(wanted.train, saved.train))
    given = flags
    if base is not None:
        # An ep of 1 is what a base says that says nothing: then as many as before.
        ep = flags.ep or (base.ep if base.ep > 1 else 0)
        given = replace(flags, tp=flags.tp or base.tp, pp=flags.pp or base.pp, dp=flags.dp or base.dp, ep=ep)
    layouts = _layouts(given, saved, world_size) + _layouts(flags, saved, world_size)
    if not layouts:
        return replace(wanted, parallel=resolve_layout(flags, world_size))  # raises, and says which sizes would do
    in_all = _micro_batches_in_all(saved, wanted.train)
    dividing = [layout for layout in layouts if wanted.train.num_micro_batches or in_all % (layout.dp or 1) == 0]
    if not dividing:
        dp = layouts[0].dp or 1
        legal = [number for number in divisors(world_size) if in_all % number == 0]
        nearest = min(legal, key=lambda number: abs(number - dp))
        raise ValueError(
            f"the micro-batches of a step must divide over the replicas: the run has {in_all} per step, dp {dp}: use "
            f"--parallel.dp {nearest}, or, in fast mode without dropout, another --train.micro-batch-size and "
            "--train.num-micro-batches of the same product with dp"
        )
    continued = [_laid_out(wanted, layout, in_all, saved.parallel.ep) for layout in dividing]
    # If none is legal, validating the nearest reports why.
    return next((config for config in continued if _is_legal(config, world_size)), continued[0])


def _evaluated_alike(wanted: TrainConfig, saved: TrainConfig) -> TrainConfig:
    """Return settings whose held-out loss is of as many samples as the run's, unless another number was asked for."""
    if wanted.eval_samples not in (0, saved.eval_samples):
        return wanted
    if wanted.eval_micro_batches != saved.eval_micro_batches:
        return replace(wanted, eval_samples=0)
    keeps = num_evaluated(wanted) == num_evaluated(saved)
    return wanted if keeps else replace(wanted, eval_samples=num_evaluated(saved))


_AXES = ("tp", "pp", "dp")


def _layouts(given: ParallelConfig, saved: Config, world_size: int) -> list[ParallelConfig]:
    """Return every layout with the given sizes that fits the processes, the nearest to the saved one first."""
    found = []
    for tp, pp in itertools.product(divisors(world_size), repeat=2):
        layout = replace(given, tp=tp, pp=pp, dp=world_size // (tp * pp))
        fills = world_size % (tp * pp) == 0
        if fills and all(getattr(given, axis) in (None, getattr(layout, axis)) for axis in _AXES):
            found.append(layout)
    return sorted(found, key=lambda layout: [_ratio(layout, saved.parallel, axis) for axis in ("tp", "pp")])


def _ratio(layout: ParallelConfig, saved: ParallelConfig, axis: str) -> float:
    """Return how many times larger or smaller an axis becomes, as a logarithm."""
    return abs(math.log((getattr(layout, axis) or 1) / (getattr(saved, axis) or 1)))


def _micro_batches_in_all(saved: Config, wanted: TrainConfig) -> int:
    """Return the number of micro-batches in the run's global batch, or in the one that is asked for.

    If another micro-batch size does not divide the global batch, return that of the saved size. It makes too many or
    too few samples, and find_checkpoint refuses it with a remedy.
    """
    number, rest = divmod(wanted.global_batch or samples_per_step(saved), max(1, wanted.micro_batch_size))
    return saved.train.num_micro_batches * (saved.parallel.dp or 1) if rest else number


def _laid_out(wanted: Config, layout: ParallelConfig, in_all: int, saved_ep: int) -> Config:
    num_micro_batches = wanted.train.num_micro_batches or in_all // (layout.dp or 1)
    train = replace(wanted.train, num_micro_batches=num_micro_batches)
    config = replace(wanted, parallel=layout, train=train)
    if layout.ep:
        return config
    nearest = min(legal_ep(config), key=lambda ep: abs(math.log(ep / saved_ep)))
    return replace(config, parallel=replace(layout, ep=nearest))


def _is_legal(config: Config, world_size: int) -> bool:
    try:
        validate_run(config, world_size)
    except ValueError:
        return False
    return True


# Settings that do not concern the run itself: where it is, and how it was started.
_SAYS_NOTHING = ("run_dir", "resume")


def changes_since(index: Index, config: Config) -> list[str]:
    """Return each setting that differs from the checkpoint's as "section.name from A to B", sorted.

    A setting that did not exist when the checkpoint was written had its default value. A setting that only the
    checkpoint has no longer exists and is ignored.
    """
    before, now = _flat(_over(_plain(Config()), index.state["config"])), _flat(_plain(config))
    for settings in (before, now):
        settings["optim.decay_steps"] = settings["optim.decay_steps"] or settings["train.steps"]
        share = share_held_out(settings["data.held_out"], settings["data.held_out_fraction"])
        settings["data.held_out_fraction"] = share
    return [
        f"{name} from {_spelled(before[name])} to {_spelled(value)}"
        for name, value in sorted(now.items())
        if name not in _SAYS_NOTHING and before[name] != value and not _is_the_same(name, before[name], value)
    ]


def _plain(config: Config) -> dict[str, Any]:
    """Return the settings as a checkpoint has them: what JSON makes of them."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting under its flag's name."""
    settings: dict[str, Any] = {}
    for section, value in config.items():
        if isinstance(value, Mapping):
            settings.update((f"{section}.{name}", inner) for name, inner in value.items())
        else:
            settings[section] = value
    return settings


def _is_the_same(name: str, before: object, now: object) -> bool:
    """Return whether two values mean the same: a device that was left open, the run's own copy of a user's file."""
    if name == "device":
        return "auto" in (before, now)
    if name == "parallel.schedule" and before not in SCHEDULES and now not in SCHEDULES:
        return Path(str(before)).stem == Path(str(now)).stem
    if name in ("phases", "data.mixture"):
        return bool(before) and bool(now)
    if name == "model.architecture":
        return Path(str(before)).name == Path(str(now)).name
    return False


def _spelled(value: object) -> str:
    return repr(value) if value == "" else str(value)


def state_of(
    config: Config,
    fingerprint: str,
    step: int,
    num_updates: int | None = None,
    threads: int | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint after `step` steps holds besides tensors, as JSON.

    Args:
        fingerprint: of the text of the last of these steps.
        num_updates: how many of the steps were applied; default all of them.
        threads: number of threads that rank 0 computes with on a CPU. In fast mode bits depend on it, because libraries
            cut sums over threads.
        phases: of the run; default what the configuration says. The state is that of the phase of the last step.
    """
    phase = (phases or phases_of(config)).at(max(step - 1, 0))
    config = replace(phase.config, device=config.device, resume=False)
    return {
        "updates": step if num_updates is None else num_updates,
        "threads": threads,
        "config": _plain(config),
        "data": {
            "fingerprint": fingerprint,
            "next_sample": phase.samples_before(step),
            "samples_per_step": phase.samples_per_step,
            "phase": phase.number,
            "order": phase.order,
        },
        "random": {"generator": "philox4x32-10, counter-based: no state besides the seed", "seed": config.train.seed},
    }


def find_checkpoint(
    config: Config,
    fingerprint: str | Sequence[str],
    damaged: Mapping[int, str] | None = None,
    *,
    fingerprint_of_ends: Callable[[], str] | None = None,
    until: int | None = None,
) -> Checkpoint | None:
    """Read the index of the newest whole checkpoint in config.run_dir, and check that this run may continue it.

    A damaged checkpoint is passed over, and the one before is tried. A whole checkpoint that does not belong to this
    run is refused: the command line is wrong, and an older checkpoint would not help.

    Args:
        config: validated.
        fingerprint: of the text (Corpus.fingerprint), or of each phase's.
        damaged: checkpoints known to be damaged: by step, why.
        fingerprint_of_ends: computes the fingerprint that older checkpoints have (Corpus.fingerprint_of_ends).
        until: the most steps that the checkpoint may have; None for any number.

    Returns:
        The checkpoint, with every damaged one that was passed over; None if the run ended before its first checkpoint.

    Raises:
        CheckpointError: none is whole, or the newest whole one has another model or, after the first step, another
            dtype, seed, text or batch.
    """
    checkpoints = checkpoints_of(config.run_dir)
    passed = dict(damaged or {})
    phases = phases_of(config)
    for step in reversed(checkpoints.steps()):
        if step in passed or (until is not None and step > until):
            continue
        directory = checkpoints.of_step(step)
        try:
            index = _index_of_step(directory, step)
        except DamagedCheckpoint as error:
            passed[step] = str(error)
            continue
        if fingerprint_of_ends is not None and _is_of_ends(index):
            fingerprint = fingerprint_of_ends()
        if not isinstance(fingerprint, str):
            fingerprint = fingerprint[phases.at(max(step - 1, 0)).number]
        _check_continues(directory, index, config, fingerprint, phases)
        return Checkpoint(directory, index, passed)
    if passed:
        reasons = "; ".join(
            f"{checkpoints.of_step(step).name}: {passed[step]}" for step in sorted(passed, reverse=True)
        )
        raise CheckpointError(
            f"--resume needs a whole checkpoint: {checkpoints.path} has none: {reasons}: put one back from a copy, or "
            "start a new run with another --run-dir"
        )
    return None


def _index_of_step(directory: Path, step: int) -> Index:
    index = read_index(directory)
    if index.step != step:
        # It would be in the place where that step is to be saved.
        raise DamagedCheckpoint(f"a checkpoint must have the name of its step: {directory} is of step {index.step}")
    return index


def _is_of_ends(index: Index) -> bool:
    """Return whether a checkpoint is from the time when a text was identified by a hash of its ends (64 hex digits)."""
    data = index.state.get("data")
    saved = data.get("fingerprint") if isinstance(data, dict) else None
    return isinstance(saved, str) and re.fullmatch("[0-9a-f]{64}", saved) is not None


def _check_continues(directory: Path, index: Index, config: Config, fingerprint: str, phases: Phases) -> None:
    try:
        saved, now = (
            _decisive(state, index.step, config.train.reduction == "exact")
            for state in (index.state, state_of(config, fingerprint, index.step, phases=phases))
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
    if index.step == 0 and now["model.details.router_bias"]:
        # A bias that weights of elsewhere have not begins at 0.
        saved["model.details.router_bias"] = True
    texts = saved.pop("the text", ""), now.pop("the text", "")
    # Another packing is said by its name, below: with it an index may have come to the data.
    if saved.get("data.packing") == now.get("data.packing"):
        _check_same_data(directory, *texts)
    for name, value in now.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"a resumed run must keep {name}: {directory} was saved with {saved.get(name)}, this run has {value}: "
                f"{_REMEDIES.get(name, f'use {name} {saved.get(name)}')}, or another --run-dir"
            )


def _check_same_data(directory: Path, saved: str, now: str) -> None:
    """Raise CheckpointError, naming what has changed, unless a run reads what the checkpoint's run has read."""
    change = change_of(saved, now)
    if change is None:
        return
    before, after = ("nothing" if value is None else value for value in (change.before, change.now))
    raise CheckpointError(
        f"a resumed run must keep {change.what}: {directory} was saved with {before}, this run has {after}: use the "
        "text it was trained on, begin a phase with this one (--phases), or use another --run-dir"
    )


_REMEDIES = {
    "model.details.router_bias": "routers have biases from the first step on, or never: use --train.balance none or "
    "loss if it was saved with False, bias if with True",
    "the number of samples read": "give the phases until then the steps and batches that they had",
    "the phase that began its order of samples": "give it the phases until then that it had",
    "samples per step": "choose --train.micro-batch-size and --train.num-micro-batches so that times dp they are that",
}


def _over(defaults: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved, and the defaults of what it does not have, in its tables too."""
    tables = {name for name, value in saved.items() if isinstance(value, dict) and isinstance(defaults.get(name), dict)}
    return {**defaults, **saved, **{name: _over(defaults[name], saved[name]) for name in tables}}


def _decisive(state: Mapping[str, Any], step: int, is_exact: bool) -> dict[str, Any]:
    """Return, by name, what determines the numbers of later steps."""
    config = state["config"]
    train, data = config["train"], config["data"]
    optim = _plain(Config())["optim"] | config.get("optim", {})
    # A setting that did not exist when the checkpoint was written had its default value.
    model = _over(_plain(Config())["model"], config["model"])
    # Where the run began does not matter any more, nor where an architecture's file lies.
    del model["path"]
    model["architecture"] = Path(model["architecture"]).name
    model |= {f"details.{name}": value for name, value in model.pop("details").items()}
    rates = "residual_dropout", "attention_dropout", "mlp_dropout"
    if step == 0:
        return {f"model.{name}": value for name, value in model.items() if name not in rates}
    dropped = any(model[name] for name in rates)
    return {
        **{f"model.{name}": value for name, value in model.items()},
        **{f"train.{name}": train[name] for name in ("seq_len", "dtype", "seed")},
        # What one optimizer keeps of the weights is of no use to another.
        **{f"optim.{name}": optim[name] for name in ("name", "moments")},
        # Dropout masks depend on the micro-batch, and exact mode's order of sums depends on its size.
        **({"train.micro_batch_size": train["micro_batch_size"]} if dropped or is_exact else {}),
        "data.ignore_token": data["ignore_token"],
        "data.held_out_fraction": share_held_out(data.get("held_out", ""), data["held_out_fraction"]),
        "data.packing": data.get("packing", DataConfig().packing),
        # Before there were phases all steps of a run had equally many.
        "samples per step": state["data"].get("samples_per_step", state["data"]["next_sample"] / step),
        "the number of samples read": state["data"]["next_sample"],
        "the phase that began its order of samples": state["data"].get("order", 0) + 1,
        "the text": state["data"]["fingerprint"],
        "the seed of its random numbers": state["random"]["seed"],
    }
