"""`--model.path`: a directory that has a model, in Hugging Face's form or as a run of ours, and the numbers it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tpengine import trust
from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.registry import model_of
from tpengine.config import Config, ModelConfig
from tpengine.config.toml import load_toml
from tpengine.last_words import say_once

_OWN_SETTINGS = ("path", "residual_dropout", "attention_dropout", "mlp_dropout")
# Of the number of a step; of a path that a message shows.
_MOST_DIGITS, _MOST_SHOWN = 18, 1000


def run_of(path: str) -> tuple[Path, int | None] | None:
    """Return the run's directory and step that RUN or RUN@N names; None if the path is no run of ours."""
    directory, at, number = path.rpartition("@")
    if at and len(number) <= _MOST_DIGITS and number.isdecimal() and _is_run(Path(directory)):
        return Path(directory), int(number)
    return (Path(path), None) if _is_run(Path(path)) else None


def _is_run(directory: Path) -> bool:
    # A name that is too long for a file is an error to ask for: nothing is there.
    try:
        return (directory / "config.toml").is_file()
    except OSError:
        return False


def _is_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def architecture_of_run(run: Path, name: str, own: str = "") -> str:
    """Return the architecture of a run: of a file the user's own, else the run's copy, else where it was.

    A file that is not what the run recorded at its start is said, once.

    Args:
        run: its directory, wherever it is now.
        name: what its config.toml has.
        own: the file that the user gives; empty for none.

    Raises:
        ValueError: the user has not permitted the file (trust.py).
    """
    if not name.endswith(".py"):
        return own or name
    copy = run / Path(name).name
    path = Path(own or (copy if copy.is_file() else name))
    if path.is_file():
        # It is asked again where the file is executed; here a refusal comes before a rank is started.
        trust.permitted_file(path)
        if change := trust.changed_since(run, path, Path(name).name):
            say_once(change)
    return str(path)


# Entries of config.json that say how much is dropped, by the setting of a run; the last has none.
_DROPOUTS = {
    "attention_dropout": "attention_dropout",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "residual_dropout",
    "hidden_dropout": "residual_dropout",
    "embd_pdrop": "",
}


def dropout_not_taken(settings: ModelConfig) -> str:
    """Return in a line which dropout rates of model.path's config.json a run leaves out; empty if it leaves out none.

    Rates are settings of a run, as the directory's are those of its own training. A rate that a run has itself counts.
    """
    if not settings.path or run_of(settings.path) is not None:
        return ""
    config = ConfigJson.read(settings.path)
    left_out, flags = [], {}
    for name, setting in _DROPOUTS.items():
        rate = config.values.get(name)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate:
            continue
        if setting and getattr(settings, setting):
            continue
        left_out.append(f"{name} {rate}")
        if setting:
            flags[setting] = f"--model.{setting.replace('_', '-')} {rate}"
    if not left_out:
        return ""
    remedy = f"{' '.join(flags.values())} would train with it" if flags else "no setting has it"
    if flags and "embd_pdrop" in " ".join(left_out):
        remedy += ", but for embd_pdrop, which no setting has"
    return f"{config.path} has {', '.join(left_out)}, and this run drops nothing there: {remedy}"


def model_at(settings: ModelConfig, given: Iterable[str] = ()) -> ModelConfig:
    """Return the model of settings.path: its numbers, with the dropout rates of the settings.

    Args:
        settings: path, dropout rates, and the file of an architecture of one's own.
        given: names of the settings that the user gave besides; they must be what the directory says.

    Raises:
        ValueError: no such directory, an architecture that is not there, a setting that differs.
    """
    path = settings.path
    own = settings.architecture if settings.architecture.endswith(".py") else None
    if (run := run_of(path)) is not None:
        found = load_toml(run[0] / "config.toml", Config()).model
        found = replace(found, architecture=architecture_of_run(run[0], found.architecture, own or ""))
    else:
        if not _is_directory(path):
            shown = path if len(path) <= _MOST_SHOWN else f"{path[:_MOST_SHOWN]}..."
            raise ValueError(
                f"model.path must be a directory with a config.json, or a run: {shown} is none: check the path"
            )
        found = model_of(ConfigJson.read(path), own)
    found = replace(found, **{name: getattr(settings, name) for name in _OWN_SETTINGS})
    for name in given:
        said, asked = getattr(found, name), getattr(settings, name)
        if said != asked:
            raise ValueError(
                f"model.{name} must be what model.path says: {asked} beside {path}, which has {said}: leave "
                f"--model.{name.replace('_', '-')} out"
            )
    return found
