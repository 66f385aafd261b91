"""Phases of a run: which steps each has, what it changes, and where its samples and its schedule begin.

    [[phase]]                   # of the file --phases
    until = 200                 # steps of the run, or "2e6 tokens", 2M; the last phase may leave it out: train.steps
    micro_batches = 4           # of a step, over all replicas
    train.seq_len = 256         # any of the settings in `_CHANGES`, under its own name
    optim.schedule = "linear"

A phase begins with the settings of the one before. Everything here follows from configuration and file alone, so that a
run that is resumed, in whatever layout, finds its place by the number of steps.

    samples    a phase with another seq_len or other data begins an order of its own; else the count goes on
    rate       a phase that names a setting of the learning rate begins a schedule of its own: without a warm-up, as
               long as the phase, from the rate that it finds, unless it says otherwise; else the schedule goes on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tpengine.config.lengths import Amount, amount_of, tokens_of, with_batch, with_steps
from tpengine.config.ranges import check_ranges
from tpengine.config.rules import resolve_layout, validate
from tpengine.config.settings import Config, DataConfig, OptimConfig, num_evaluated
from tpengine.config.toml import read_toml, updated
from tpengine.spelling import did_you_mean

_OF_RATE = ("lr", "schedule", "warmup_steps", "decay_steps", "decay_from", "min_lr_ratio")
_CHANGES: Mapping[str, tuple[str, ...]] = {
    "train": ("seq_len", "micro_batch_size"),
    "data": tuple(field.name for field in fields(DataConfig) if field.name != "held_out_fraction"),
    # What an optimizer keeps goes on from phase to phase.
    "optim": tuple(field.name for field in fields(OptimConfig) if field.name not in ("name", "moments")),
}


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        number: from 0.
        first_step, end_step: half-open range of steps.
        config: the run's, with what this phase and those before it change; train.num_micro_batches is of a replica.
        tokens_before: of all steps before it.
        order: number of the phase that began the order of its samples.
        consumed: samples of that order that steps before this phase have read.
        schedule: number of the phase that began its learning rate's schedule.
        keeps_rate: whether that schedule, if it begins here, has its peak at the rate that it finds.
    """

    number: int
    first_step: int
    end_step: int
    config: Config
    tokens_before: int = 0
    order: int = 0
    consumed: int = 0
    schedule: int = 0
    keeps_rate: bool = False

    @property
    def samples_per_step(self) -> int:
        """Of all replicas."""
        return samples_per_step(self.config)

    @property
    def tokens_per_step(self) -> int:
        """Of all replicas."""
        return self.samples_per_step * self.config.train.seq_len

    def samples_before(self, step: int) -> int:
        """Return how many samples of this phase's order were read before one of its steps, or before its end."""
        return self.consumed + (step - self.first_step) * self.samples_per_step


@dataclass(frozen=True)
class Phases:
    """The phases of a run, in their order."""

    all: tuple[Phase, ...]

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Phase:
        return self.all[number]

    def at(self, step: int) -> Phase:
        """Return the phase of a step; behind the end that of the last step."""
        return next((phase for phase in self.all if step < phase.end_step), self.all[-1])

    def tokens_before(self, step: int) -> int:
        """Return the tokens of all steps before a step."""
        phase = self.at(step)
        return phase.tokens_before + (step - phase.first_step) * phase.tokens_per_step


def samples_per_step(config: Config) -> int:
    """Return the samples of a step, of all replicas. The layout must be resolved."""
    return config.train.micro_batch_size * config.train.num_micro_batches * (config.parallel.dp or 1)


def validate_run(config: Config, world_size: int) -> Config:
    """Check a configuration and all its phases, and resolve the layout and the number of steps.

    Returns:
        As config.validate, and with the steps that train.tokens asks for; with phases, train.steps is where the last
        one ends.

    Raises:
        ValueError: in one line; what a phase breaks, under its number.
    """
    check_ranges(config)
    config = with_batch(replace(config, parallel=resolve_layout(config.parallel, world_size)))
    if not config.phases:
        return validate(with_steps(config), world_size)
    phases = phases_of(config)
    train = replace(config.train, steps=phases[-1].end_step, tokens=0)
    config = validate(replace(config, train=train), world_size)
    for phase in phases_of(config):
        try:
            validate(phase.config, world_size)
        except ValueError as error:
            raise ValueError(f"{config.phases}: in phase {phase.number + 1} {error}") from None
    return config


def phases_of(config: Config) -> Phases:
    """Return the phases of a configuration whose layout is resolved: one, if it names no file.

    Raises:
        ValueError: the file cannot be read, or is no list of phases; in one line.
    """
    if not config.phases:
        return Phases((Phase(0, 0, config.train.steps, config),))
    entries = _entries(config.phases)
    found: list[Phase] = []
    before = Phase(0, 0, 0, config)
    for number, entry in enumerate(entries):
        try:
            before = _phase(number, entry, before, is_last=number == len(entries) - 1, end=_end_of_run(config))
        except ValueError as error:
            raise ValueError(f"{config.phases}: {error}") from None
        found.append(before)
    steps = found[-1].end_step
    return Phases(
        tuple(replace(p, config=replace(p.config, train=replace(p.config.train, steps=steps))) for p in found)
    )


def _entries(path: str) -> list[dict[str, Any]]:
    values = read_toml(path, "--phases")
    for key in values:
        if key != "phase":
            raise ValueError(f"{path}: unknown key {key}: did you mean [[phase]]?")
    entries = values.get("phase", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"--phases needs a list of phases: {path} has none: begin each with [[phase]]")
    return entries


def _end_of_run(config: Config) -> Amount:
    """Return where a last phase ends that does not say it."""
    tokens = tokens_of(config.train.tokens, "train.tokens")
    return Amount(tokens, "tokens") if tokens else Amount(config.train.steps, "steps")


def _phase(number: int, entry: Mapping[str, Any], before: Phase, *, is_last: bool, end: Amount) -> Phase:
    """Return a phase.

    Args: number: of it. entry: of the file. before: the phase before, or the run without phases. end: of the run.
    """
    config, given = _changed(number, entry, before.config)
    first, tokens_before = (
        before.end_step,
        before.tokens_before + (before.end_step - before.first_step) * (before.tokens_per_step),
    )
    phase = replace(before, number=number, first_step=first, config=config, tokens_before=tokens_before)
    phase = replace(phase, end_step=_end(phase, entry, is_last, end))
    begins_order = number and (
        config.train.seq_len != before.config.train.seq_len
        or replace(config.data, ignore_token=None) != replace(before.config.data, ignore_token=None)
    )
    phase = replace(
        phase,
        order=number if begins_order else before.order,
        consumed=0 if begins_order else before.samples_before(before.end_step),
    )
    of_rate = [name for name in given.get("optim", ()) if name in _OF_RATE]
    if not of_rate or not number:
        return phase
    own: dict[str, Any] = {"warmup_steps": 0, "decay_from": 0, "decay_steps": phase.end_step - phase.first_step}
    own = {name: value for name, value in own.items() if name not in of_rate}
    config = replace(config, optim=replace(config.optim, **own))
    return replace(phase, config=config, schedule=number, keeps_rate="lr" not in of_rate)


def _end(phase: Phase, entry: Mapping[str, Any], is_last: bool, end: Amount) -> int:
    name = f"phase {phase.number + 1}"
    if "until" not in entry and not is_last:
        raise ValueError(
            f'every phase but the last must say where it ends: {name} does not: give until = STEPS or "N tokens"'
        )
    if "until" in entry and is_last and end.unit == "tokens":
        raise ValueError(
            f"one setting says where a run ends: {name}, the last one, has until {entry['until']!r}, beside "
            f"train.tokens: leave one out"
        )
    until = amount_of(entry["until"], f"until of {name}") if "until" in entry else end
    if until.unit == "steps":
        if until.number <= phase.first_step:
            raise ValueError(
                f"phases must ascend: {name} ends at step {until.number} and begins at step {phase.first_step}: use "
                f"{'train.steps' if 'until' not in entry else 'until'} {phase.first_step + 1} or more"
            )
        return until.number
    left = until.number - phase.tokens_before
    if left <= 0:
        raise ValueError(
            f"phases must ascend: {name} ends at {until} and begins at {phase.tokens_before} tokens: use until "
            f'"{phase.tokens_before + phase.tokens_per_step} tokens" or more'
        )
    if left < phase.tokens_per_step:
        raise ValueError(
            f"a phase must have a step: {name} has {left} tokens, its steps {phase.tokens_per_step}: use until "
            f'"{phase.tokens_before + phase.tokens_per_step} tokens" or more'
        )
    return phase.first_step + -(-left // phase.tokens_per_step)


def _changed(number: int, entry: Mapping[str, Any], config: Config) -> tuple[Config, dict[str, dict[str, Any]]]:
    """Return the configuration with a phase's changes, and the changes by section."""
    name = f"phase {number + 1}"
    given: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        if key in ("until", "micro_batches"):
            continue
        _check_key(name, key, value)
        given[key] = value
    before = config.train
    config = updated(_reading(config, given.get("data", {})), given, name)
    if number and config.train.micro_batch_size != before.micro_batch_size:
        config = replace(config, train=replace(config.train, eval_samples=num_evaluated(before)))
    in_all = entry.get("micro_batches", samples_per_step(config) // max(1, config.train.micro_batch_size))
    dp = config.parallel.dp or 1
    if type(in_all) is not int or in_all < 1:
        raise ValueError(f"micro_batches must be a number of at least 1: {name} has {in_all!r}: use {dp}")
    if in_all % dp:
        raise ValueError(
            f"the micro-batches of a step must divide over the replicas: {name} has {in_all} per step, dp {dp}: use "
            f"micro_batches {-(-in_all // dp) * dp}, or another dp"
        )
    return replace(config, train=replace(config.train, num_micro_batches=in_all // dp)), given


def _reading(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration without what a phase reads something else for: mixture or text, a share held out."""
    data = config.data
    if changes.get("held_out"):
        data = replace(data, held_out_fraction=None)
    if changes.get("mixture") and "path" not in changes:
        data = replace(data, path=DataConfig().path)
    elif "path" in changes and "mixture" not in changes:
        data = replace(data, mixture="")
    return replace(config, data=data)


def _check_key(name: str, key: str, value: object) -> None:
    """Raise ValueError if a phase has a key that it may not have."""
    legal = ["until", "micro_batches", *(f"{section}.{one}" for section, ones in _CHANGES.items() for one in ones)]
    sections = {one.partition(".")[0] for one in legal if "." in one}
    if key in sections and not isinstance(value, dict):
        raise ValueError(f"a section must be a table: {name} has {key} = {value!r}: write {key}.NAME = VALUE")
    if "." in key:
        raise ValueError(f'a setting\'s name has no quotes: {name} has "{key}": write {key} = {value!r}')
    for full in [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]:
        if full in legal:
            continue
        if full == "train.num_micro_batches":
            raise ValueError(f"a phase counts the micro-batches of all replicas: {name} has {full}: use micro_batches")
        section, _, last = full.rpartition(".")
        settings = asdict(Config())
        if last in (settings.get(section, {}) if section else settings):
            raise ValueError(
                f"a phase cannot change {full}, which is the whole run's: {name} does: a phase may change "
                f"{', '.join(legal[1:4])}, ..."
            )
        raise ValueError(f"unknown key {full} in {name}: {did_you_mean(full, legal)}")
