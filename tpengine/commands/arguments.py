"""The command line of a training run: preset, then TOML file, then flags; every mistake is reported in one line.

No torch: this runs before torch is imported and before any process group exists. How flags are read is in flags.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from tpengine import trust
from tpengine.architectures.model_path import model_at
from tpengine.architectures.registry import check_architecture
from tpengine.checkpoint.resume import continued_config, has_begun, saved_config, without_layout
from tpengine.commands.flags import flags_help, parse_flags, with_flags
from tpengine.commands.parsing import config_given, permit_settings
from tpengine.config import Config, decay_steps_of, resolve_layout, validate_run
from tpengine.config.lengths import last_said, with_batch, with_epochs
from tpengine.config.presets import PRESETS, preset_config
from tpengine.config.ranges import check_ranges
from tpengine.data import open_corpus
from tpengine.distributed.launch import Launch
from tpengine.last_words import USER_ERROR, one_line, say, tell_torchrun

_DESCRIPTION = f"""Train a transformer on --nproc processes of this host, or on as many as torchrun or srun starts.

--nproc N            start N processes here; without it this is the only one
--preset NAME        start from a named run: {", ".join(PRESETS)}
--config FILE.toml   then apply a file, such as the config.toml of an earlier run
--trust              execute what a run's directory names: an architecture's Python file, train.after_checkpoint

--resume --run-dir DIR   continue that run, with its own configuration, on any number of processes

The flags below are applied last and override both."""


class ConfigError(ValueError):
    """A mistake on the command line or in the configuration file, in one line."""


class HelpRequested(Exception):
    """`--help` was given; the text is the only argument."""


class Asked(NamedTuple):
    """What a user asks for, before the number of processes and an earlier run decide the rest.

    Attributes:
        base: preset, then file; or a Config.
        given: settings over it, by name as `train.seq_len`.
        is_alone: whether nothing but `given` was said: a run that is continued then keeps its own configuration.
    """

    base: Config
    given: dict[str, Any]
    is_alone: bool


def asked_by(argv: Sequence[str]) -> Asked:
    """Return what arguments ask for, without the program's name: preset (default tiny), then --config file, then flags.

    Raises:
        ValueError: any mistake in them.
        HelpRequested: they ask for help.
    """
    preset, path, flags = _take_base(argv)
    base = base_config(preset, path)
    return Asked(base, _given(flags, base), preset is None and path is None)


def parse_config(argv: Sequence[str], world_size: int) -> Config:
    """Build the validated configuration of a run from the arguments of a command line; see `resolved`.

    Raises:
        ConfigError: any mistake, one line.
        HelpRequested: argv asks for help.
    """
    return resolved(lambda: asked_by(argv), world_size)


def resolved(ask: Callable[[], Asked], world_size: int, own: object = None) -> Config:
    """Build the validated configuration of a run.

    Args:
        ask: returns what is asked for; a mistake in it is reported as all others are.
        world_size: number of processes.
        own: data of the user's own, as data.open_corpora takes them; None for none.
    Returns: the base, then what is given over it; layout, micro-batches, steps and optim.decay_steps resolved. With
        --resume and neither preset nor file: the configuration of the run in --run-dir, then flags. With --resume and
        one of them, once there is a checkpoint: the run's global batch and decay_steps, in a layout that fits the
        processes.

    Raises:
        ConfigError: any mistake, one line.
        HelpRequested: help is asked for.
    """
    try:
        base, given, is_alone = ask()
        config = _override(base, given)
        _permit_flags(given, config)
        if config.resume and not config.run_dir:
            raise ValueError("--resume needs the directory of a run: got no --run-dir: use --run-dir DIR")
        has_saved = config.resume and (is_alone or has_begun(config.run_dir))
        if config.model.path and not has_saved:
            config = replace(config, model=model_at(config.model, _given_of_model(given)))
        if has_saved:
            saved = saved_config(config.run_dir, _own_architecture(given, config))
            base = saved if is_alone else base
            config = continued_config(saved, _override(without_layout(base), given), world_size, base.parallel)
        check_ranges(config)
        check_architecture(config.model)
        config = _with_epochs(config, world_size, own)
        asked = config.train.steps
        config = validate_run(config, world_size)
        trust.permitted_command(config.train.after_checkpoint)
        if asked not in (config.train.steps, base.train.steps):
            raise ValueError(
                f"a run with phases ends with its last one: train.steps {asked}, {config.phases} ends at step "
                f"{config.train.steps}: change `until` of its last phase, or leave it out there"
            )
        return replace(config, optim=replace(config.optim, decay_steps=decay_steps_of(config)))
    except ValueError as error:
        raise ConfigError(one_line(str(error))) from None


def parse_imported(source: str, out: str, argv: Sequence[str]) -> Config:
    """Build the configuration of a run that is imported, and begins later on any number of processes.

    Args:
        source: the directory that is imported, as model.path.
        out: the run's directory.
        argv: settings of the run: as for parse_config, without where it begins and where it is.

    Returns:
        preset (default tiny), then --config file, then flags; what is left out of the layout and optim.decay_steps stay
        open. It is legal on the smallest number of processes that the given sizes make.

    Raises:
        ConfigError: any mistake, one line.
    """
    try:
        preset, path, flags = _take_base(argv)
        base = base_config(preset, path)
        given = _given(flags, base)
        for name, value in given.items():
            if name in ("model.path", "run_dir") or (name == "resume" and value):
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"an import says where a run begins by tpengine import DIR --out RUN: got {option}: leave it out"
                )
        config = _override(base, given)
        _permit_flags(given, config)
        model = model_at(replace(config.model, path=source), _given_of_model(given))
        config = replace(config, model=model, run_dir=out, resume=False)
        check_ranges(config)
        check_architecture(model)
        parallel = config.parallel
        validate_run(config, math.prod(size or 1 for size in (parallel.tp, parallel.pp, parallel.dp)))
    except HelpRequested:
        raise ConfigError("the settings of a run have a help of their own: see tpengine train --help") from None
    except ValueError as error:
        raise ConfigError(one_line(str(error))) from None
    return config


def _with_epochs(config: Config, world_size: int, own: object) -> Config:
    """Return the configuration with the steps that train.epochs asks for: the text is opened.

    Raises:
        ValueError: it has no one text, or a text that cannot be read.
    """
    if not config.train.epochs:
        return config
    check_ranges(config)
    reads = f"--phases {config.phases}" if config.phases else f"data.mixture {config.data.mixture}"
    if config.phases or config.data.mixture:
        raise ValueError(
            f"train.epochs are of one text: got train.epochs {config.train.epochs:g} and {reads}: use train.tokens or "
            "train.steps"
        )
    config = with_batch(replace(config, parallel=resolve_layout(config.parallel, world_size)))
    return with_epochs(config, open_corpus(config, own=own).train.num_windows)


def base_config(preset: str | None, path: str | None) -> Config:
    """Return a preset, default tiny, with a file over it.

    Raises:
        ValueError: no such preset; as config_given.
    """
    base = preset_config(preset or "tiny")
    return base if path is None else config_given(path, base)


def _given(flags: Sequence[str], base: Config) -> dict[str, Any]:
    """Return what flags give over a configuration, by the settings' names.

    Raises:
        HelpRequested: they ask for help.
        ValueError: the first that is wrong.
    """
    if "-h" in flags or "--help" in flags:
        raise HelpRequested(flags_help(base, "tpengine train", _DESCRIPTION))
    return parse_flags(flags, base)


def _override(config: Config, given: Mapping[str, Any]) -> Config:
    """Apply what flags give; of two that say the same, the last one decides."""
    said = [name.removeprefix("train.") for name in given if name.startswith("train.")]
    return last_said(with_flags(config, given), said, "the command line")


def _permit_flags(given: Collection[str], config: Config) -> None:
    """Permit what the flags themselves name (trust.py)."""
    permit_settings(
        config,
        architecture=bool(_own_architecture(given, config)),
        after_checkpoint="train.after_checkpoint" in given,
    )


def _own_architecture(given: Collection[str], config: Config) -> str:
    """Return the Python file of --model.architecture; empty if the flags name none."""
    name = config.model.architecture
    return name if name.endswith(".py") and "model.architecture" in given else ""


def _given_of_model(given: Collection[str]) -> list[str]:
    """Return the settings of the model's numbers that are among the flags."""
    names = [name.removeprefix("model.") for name in given if name.startswith("model.")]
    return [name for name in names if name != "path" and "dropout" not in name]


@contextlib.contextmanager
def exit_on_user_error(environ: Mapping[str, str], *, wait_seconds: float = 10.0) -> Iterator[Launch]:
    """Turn a ValueError of the block into the end of the process: exit code 2 on every rank, one line on rank 0.

    Help is printed on rank 0 and ends every rank with 0. A malformed environment is reported on every rank, since none
    can know that it is rank 0.

    Args:
        environ: read by `Launch.of`; its result is passed to the block.
        wait_seconds: as for `leave`.
    Raises: SystemExit.
    """
    launch = None
    try:
        launch = Launch.of(environ)
        yield launch
    except HelpRequested as request:
        if launch is None or launch.rank == 0:
            _print_help(str(request))
        raise SystemExit(0) from None
    except ValueError as error:
        leave(str(error), environ, speaks=launch is None or launch.rank == 0, wait_seconds=wait_seconds)


def _print_help(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). The interpreter flushes at exit: send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(
    message: str, environ: Mapping[str, str], *, speaks: bool, wait_seconds: float = 10.0, is_known: bool = False
) -> NoReturn:
    """Leave with exit code 2; one rank prints the message, in one line, before that.

    Args:
        message: the rule, the values, the remedy.
        environ: TORCHELASTIC_ERROR_FILE is read.
        speaks: whether this rank prints the message at once.
        wait_seconds: how long the other ranks wait. torchrun ends all processes as soon as one has failed, so a rank
            that left first would have rank 0 killed before it has printed. A rank that is still alive after the wait
            is the only one with this error (a file that one node lacks, say), and prints it itself.
        is_known: all ranks have this error, so that one line is enough.
    """
    if not speaks:
        if is_known:
            tell_torchrun(message, environ)
        time.sleep(wait_seconds)
    if speaks or not is_known:
        say(message, environ, prefix="error: ")
    raise SystemExit(USER_ERROR)


def _take_base(argv: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Split off --preset and --config: (preset, file, the other arguments); --trust takes effect here."""
    taken: dict[str, str] = {}
    flags: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument == "--trust":
            trust.permit_all()
            continue
        if name not in ("--preset", "--config"):
            flags.append(argument)
            continue
        taken[name] = value if equals else next(arguments, "")
        if not taken[name] or taken[name].startswith("--"):
            example = "tiny" if name == "--preset" else "FILE.toml"
            raise ValueError(f"{name} needs a value: got {taken[name] or 'nothing'}: use {name} {example}")
    return taken.get("--preset"), taken.get("--config"), flags
