"""The command line of a training run: preset, then TOML file, then flags; every mistake is reported in one line.

tyro builds the flags from the dataclasses of config/settings.py. Its own error messages are boxes of several lines. So
when it has refused something, this file finds the wrong argument itself and reports it in our form: the rule, the
values, the nearest legal choice. No torch: this runs before torch is imported and before any process group exists.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import tyro

from tpengine import trust
from tpengine.architectures.model_path import model_at
from tpengine.architectures.registry import check_architecture
from tpengine.checkpoint.run.resume import continued_config, has_begun, saved_config, without_layout
from tpengine.commands.parsing import config_given, permit_settings
from tpengine.config import Config, decay_steps_of, resolve_layout, validate_run
from tpengine.config.lengths import last_said, with_batch, with_epochs
from tpengine.config.presets import PRESETS, preset_config
from tpengine.config.ranges import check_ranges
from tpengine.config.settings import ModelDetails
from tpengine.data import TextCorpus, open_corpus
from tpengine.distributed.launch import Launch
from tpengine.dtypes import Dtype, dtype_named
from tpengine.last_words import USER_ERROR, one_line, say, tell_torchrun
from tpengine.spelling import choose, meant

# The numbers of an architecture come from its config.json: they have no flags.
tyro.conf.configure(tyro.conf.Suppress)(ModelDetails)

PROGRAM = "tpengine train"

_DESCRIPTION = f"""Train a transformer on --nproc processes of this host, or on as many as torchrun or srun starts.

--nproc N            start N processes here; without it this is the only one
--preset NAME        start from a named run: {", ".join(PRESETS)}
--config FILE.toml   then apply a file, such as the config.toml of an earlier run
--trust              execute what a run's directory names: an architecture's Python file, train.after_checkpoint

--resume --run-dir DIR   continue that run, with its own configuration, on any number of processes

The flags below are applied last and override both."""

# Digits of a number that a message reckons with; characters of a wrong value that it shows.
_MOST_DIGITS, _MOST_SHOWN = 18, 60


class ConfigError(ValueError):
    """A mistake on the command line or in the configuration file, in one line."""


class HelpRequested(Exception):
    """`--help` was given; the text is the only argument."""


def parse_config(argv: Sequence[str], world_size: int) -> Config:
    """Build the validated configuration of a run.

    Args:
        argv: arguments without the program's name.
        world_size: number of processes.
    Returns: preset (default tiny), then --config file, then flags; layout, micro-batches, steps and optim.decay_steps
        resolved. With --resume and neither preset nor file: the configuration of the run in --run-dir, then flags. With
        --resume and one of them, once there is a checkpoint: the run's global batch and decay_steps, in a layout that
        fits the processes.

    Raises:
        ConfigError: any mistake, one line.
        HelpRequested: argv asks for help.
    """
    try:
        preset, path, flags = _take_base(argv)
        base = _base_config(preset, path)
        config = _override(base, flags)
        _permit_flags(flags, config)
        if config.resume and not config.run_dir:
            raise ValueError("--resume needs the directory of a run: got no --run-dir: use --run-dir DIR")
        is_alone = preset is None and path is None
        has_saved = config.resume and (is_alone or has_begun(config.run_dir))
        if config.model.path and not has_saved:
            config = replace(config, model=model_at(config.model, _given_of_model(flags)))
        if has_saved:
            saved = saved_config(config.run_dir, _own_architecture(flags, config))
            base = saved if is_alone else base
            config = continued_config(saved, _override(without_layout(base), flags), world_size, base.parallel)
        check_ranges(config)
        check_architecture(config.model)
        config = _with_epochs(config, world_size)
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
        for flag in flags:
            name = flag.partition("=")[0].replace("_", "-")
            if name in ("--model.path", "--run-dir", "--resume"):
                raise ValueError(
                    f"an import says where a run begins by tpengine import DIR --out RUN: got {name}: leave it out"
                )
        config = _override(_base_config(preset, path), flags)
        _permit_flags(flags, config)
        model = model_at(replace(config.model, path=source), _given_of_model(flags))
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


def _with_epochs(config: Config, world_size: int) -> Config:
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
    corpus = open_corpus(config)
    assert isinstance(corpus, TextCorpus), "neither phases nor a mixture"
    return with_epochs(config, corpus.train.num_windows)


def _base_config(preset: str | None, path: str | None) -> Config:
    base = preset_config(preset or "tiny")
    return base if path is None else config_given(path, base)


def _permit_flags(flags: Sequence[str], config: Config) -> None:
    """Permit what the flags themselves name (trust.py)."""
    commands = [flag for flag in flags if flag.partition("=")[0].replace("_", "-") == "--train.after-checkpoint"]
    permit_settings(config, architecture=bool(_own_architecture(flags, config)), after_checkpoint=bool(commands))


def _own_architecture(flags: Sequence[str], config: Config) -> str:
    """Return the Python file of --model.architecture; empty if the flags name none."""
    name = config.model.architecture
    return name if name.endswith(".py") and "architecture" in _given_of_model(flags) else ""


def _given_of_model(flags: Sequence[str]) -> list[str]:
    """Return the settings of the model's numbers that are among the flags."""
    return [name for name in _given_of("model", flags) if name != "path" and "dropout" not in name]


def _given_of(section: str, flags: Sequence[str]) -> list[str]:
    """Return the settings of a section that are among the flags."""
    names = [flag.partition("=")[0].replace("-", "_") for flag in flags if flag.startswith(f"--{section}.")]
    return [name.removeprefix(f"__{section}.").removeprefix("no_") for name in names]


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


def _override(base: Config, flags: Sequence[str]) -> Config:
    """Apply flags with tyro."""
    flags = _with_dtypes(flags)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            config = tyro.cli(Config, prog=PROGRAM, description=_DESCRIPTION, default=base, args=flags)
        return last_said(config, _given_of("train", flags), "the command line")
    except SystemExit as stop:
        if not stop.code:
            raise HelpRequested(out.getvalue().rstrip()) from None
    _explain(flags)
    raise ValueError(_flatten_box(err.getvalue()))


def _with_dtypes(flags: Sequence[str]) -> list[str]:
    """Return the flags with dtypes by the names that they have here: bf16 is bfloat16."""
    dtypes = {name for name, setting in _settings().items() if setting.hint == Dtype}
    found: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if equals and name.replace("_", "-") in dtypes:
            flag = f"{name}={dtype_named(value)}"
        elif found and found[-1].replace("_", "-") in dtypes:
            flag = dtype_named(flag)
        found.append(flag)
    return found


@dataclass(frozen=True)
class _Setting:
    """One flag's type and default."""

    hint: Any
    default: object


def _settings() -> dict[str, _Setting]:
    """Return every flag by its name: the dataclasses' fields, as `--section.field-name`."""
    settings: dict[str, _Setting] = {}

    def add(owner: object, prefix: str) -> None:
        for name, hint in get_type_hints(type(owner)).items():
            value = getattr(owner, name)
            if isinstance(value, ModelDetails):
                continue
            if is_dataclass(value):
                add(value, f"{prefix}{name}.")
            else:
                settings[f"--{prefix}{name}".replace("_", "-")] = _Setting(hint, value)

    add(Config(), "")
    return settings


def _explain(flags: Sequence[str]) -> None:
    """Raise ValueError for the first wrong argument, if it can be found."""
    settings = _settings()
    arguments, before = iter(flags), ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before and not argument.startswith("--"):
            # Behind a switch: --train.keep-best true.
            name, equals, value = before, "=", argument
        before = ""
        name = name.replace("_", "-")
        switch = name.replace(".no-", ".").replace("--no-", "--")
        if switch in settings and settings[switch].hint is bool:
            if equals:
                no = switch.replace(".", ".no-") if "." in switch else switch.replace("--", "--no-")
                raise ValueError(f"{name} takes no value: got {value!r}: use {switch} or {no}")
            before = name
        elif name in settings:
            text = value if equals else next(arguments, None)
            if text is None or text.startswith("--"):
                example = settings[name].default or "VALUE"
                raise ValueError(f"{name} needs a value: got {text or 'nothing'}: use {name} {example}")
            _check_text(name, text, settings[name])
        else:
            raise ValueError(_unknown(name, settings))


def _unknown(name: str, settings: Mapping[str, _Setting]) -> str:
    """Return the message for a flag that does not exist, with a likely one: `--lr` is `--optim.lr`."""
    if not name.startswith("-"):
        return f"settings are given as --section.name value: got {name!r}, which is neither: see --help"
    section, _, last_part = name.lstrip("-").rpartition(".")
    by_last_part: dict[str, list[str]] = {}
    for flag in settings:
        by_last_part.setdefault(flag.rpartition(".")[2].lstrip("-"), []).append(flag)
    in_section = {part: [flag] for part, flags in by_last_part.items() for flag in flags if _section(flag) == section}
    # The section that was given counts first; without one, a last part that two sections have means either.
    near: list[str] = []
    for known in (in_section if section else {}, by_last_part):
        if not near and (part := meant(last_part, known)) is not None:
            near = known[part]
    remedy = f"perhaps you meant {' or '.join(near)}" if near else "see --help for all options"
    if section and not near and in_section:
        remedy = f"{section} has {', '.join(in_section)}"
    return f"unknown option {name}: {remedy}"


def _section(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[0]


def _check_text(name: str, text: str, setting: _Setting) -> None:
    """Raise ValueError if the text is not a value of the flag's type."""
    if get_origin(setting.hint) is Literal:
        choices = [str(choice) for choice in get_args(setting.hint)]
        if text not in choices:
            is_number = text.isdecimal() and len(text) <= _MOST_DIGITS
            remedy = choose(int(text) if is_number else text, get_args(setting.hint))
            raise ValueError(f"{name} must be one of {', '.join(choices)}: got {_shown(text)}: {remedy}")
        return
    kinds = get_args(setting.hint) or (setting.hint,)
    if str in kinds or (text == "None" and type(None) in kinds):
        return
    wanted = float if float in kinds else int
    if not _spells(text, wanted):
        noun = "a number" if wanted is float else "an integer"
        finite = _spells(text, float) and math.isfinite(float(text))
        near_value = round(float(text)) if finite else setting.default
        raise ValueError(f"{name} must be {noun}: got {_shown(text)}: use {1 if near_value is None else near_value}")


def _shown(text: str) -> str:
    """Return a value as it was given; a long one by its beginning."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."


def _spells(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _flatten_box(box: str) -> str:
    """Return tyro's box as one line: without title, frame and the reference to --help."""
    lines = [line.strip(" │|╭╮╰╯─-") for line in box.splitlines()]
    kept = [line for line in lines if line and not line.startswith("For full helptext")]
    return " ".join(kept[1:] or kept or ["the arguments must be legal: see --help"])
