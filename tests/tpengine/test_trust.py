"""Rung: pure. What a run's directory names is not executed unless the user has named it too.

The run is hostile: its Python file and its command leave a mark where they are executed, and so does a compiled file
beside it that claims to be the file's. A command that executes one of them unasked goes red here.
"""

from __future__ import annotations

import hashlib
import py_compile
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support.plans.synthetic_runs import Truth, write_run

from tpengine import trust
from tpengine.architectures.model_path import model_at
from tpengine.architectures.registry import architecture_of
from tpengine.checkpoint.index import Index, write_index
from tpengine.checkpoint.resume import checkpoints_of, saved_config, state_of
from tpengine.checkpoint.run_directory import write_config
from tpengine.checkpoint.upload import Uploads
from tpengine.cli import main
from tpengine.commands.arguments import parse_config
from tpengine.config import Config, ModelConfig, validate_run
from tpengine.config.presets import preset_config
from tpengine.config.toml import dump_toml
from tpengine.last_words import say_once
from tpengine.planner.diagnose import diagnose


class Hostile(NamedTuple):
    """A run's directory; where what it names leaves marks; the same file and command, as the user has them."""

    run: Path
    executed: Path
    own: Path
    command: str


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    """A run that was recorded, with a checkpoint to export and one to begin from."""
    own, run, executed = tmp_path / "mine" / "own.py", tmp_path / "run", tmp_path / "executed"
    own.parent.mkdir()
    own.write_text(f"open({str(executed)!r}, 'w')\nfrom tpengine.architectures.llama import ARCHITECTURE\n")
    config = validate_run(preset_config("tiny"), 1)
    write_run(run, config, Truth())
    command = f"touch {executed} {{path}}"
    train = replace(config.train, after_checkpoint=command)
    config = replace(config, model=ModelConfig(architecture=str(own)), train=train, run_dir=str(run))
    write_config(config, run, keeps_equal=False)
    (run / "config.json").write_text("{}")
    directory = checkpoints_of(run).of_step(4)
    directory.mkdir(parents=True)
    write_index(directory, Index(4, {}, {}, state_of(config, "", 4)))
    (run / "metrics.jsonl").touch()
    # What an import would take for the file's, and is not.
    (tmp_path / "worse.py").write_text(f"open({str(tmp_path / 'compiled')!r}, 'w')\n" + own.read_text())
    copy = run / "own.py"
    cached = run / "__pycache__" / Path(py_compile.compile(str(copy), doraise=True) or "").name
    py_compile.compile(
        str(tmp_path / "worse.py"),
        cfile=str(cached),
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return Hostile(run, executed, own, command)


# What loads the architecture of a run, as RUN, and what reads a run without it.
LOADING = {
    "generate": ["generate", "RUN", "--prompt", "a"],
    "generate of a step": ["generate", "RUN@4", "--prompt", "a"],
    "export": ["export", "RUN", "--out", "OUT"],
    "import": ["import", "RUN", "--out", "OUT"],
    "certify": ["certify", "--model.path", "RUN", "--tp", "2"],
    "diagnose": ["diagnose", "RUN"],
    "plan": ["plan", "--model", "RUN", "--ranks", "1", "--tp", "1", "--pp", "1", "--dp", "1"],
    "plan of a resume": ["plan", "--resume", "RUN", "--ranks", "1", "--tp", "1", "--pp", "1", "--dp", "1"],
    "advise": ["advise", "--model", "RUN", "--ranks", "1", "--seconds", "1"],
    "advise of a resume": ["advise", "--resume", "RUN", "--ranks", "1", "--seconds", "1"],
    "plan by a profile": ["plan", "--model", "tiny", "--profile", "RUN", *("--ranks", "1", "--tp", "1", "--pp", "1")],
    "schedule": ["schedule", "--model", "RUN", "--pp", "1"],
    "schedule by its config": ["schedule", "--model", "RUN/config.toml", "--pp", "1"],
}
READING = {
    "watch": ["watch", "RUN", "--once"],
    "schedule of a profile": ["schedule", "--profile", "RUN/profile.json", "--pp", "1", "--micro-batches", "8"],
    "checkpoint ls": ["checkpoint", "ls", "RUN"],
    "checkpoint verify": ["checkpoint", "verify", "RUN"],
    "checkpoint diff": ["checkpoint", "diff", "RUN", "RUN@4"],
}
TRAINING = {
    "resume": ["--resume", "--run-dir", "RUN"],
    "resume at once": ["--preset", "tiny", "--config", "RUN/config.toml", "--resume", "--run-dir", "RUN"],
    "its config": ["--config", "RUN/config.toml", "--run-dir", "OUT"],
    "its config that was kept aside": ["--config", "RUN/config.1.toml", "--run-dir", "OUT"],
    "its weights": ["--model.path", "RUN@4", "--run-dir", "OUT"],
}


def given(argv: list[str], hostile: Hostile, tmp_path: Path) -> list[str]:
    found = [word.replace("RUN", str(hostile.run)).replace("OUT", str(tmp_path / "out")) for word in argv]
    return found


def refusal_of(path: Path) -> str:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return (
        f"a Python file that a directory names is executed only if you say so: {path}, SHA-256 {sha256}: read it, then "
        f"add --trust, or --model.architecture {path}"
    )


@pytest.mark.parametrize("name", LOADING)
def test_a_command_refuses_the_file_of_a_run(
    hostile: Hostile, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given(LOADING[name], hostile, tmp_path)) == 2
    assert not hostile.executed.exists()
    assert capsys.readouterr().err == f"tpengine: error: {refusal_of(hostile.run / 'own.py')}\n"


@pytest.mark.parametrize("name", READING)
def test_what_needs_no_architecture_executes_none(hostile: Hostile, tmp_path: Path, name: str) -> None:
    assert main(given(READING[name], hostile, tmp_path)) == 0
    assert not hostile.executed.exists()


@pytest.mark.parametrize("name", TRAINING)
def test_training_refuses_the_file_of_a_run(hostile: Hostile, tmp_path: Path, name: str) -> None:
    shutil.copyfile(hostile.run / "config.toml", hostile.run / "config.1.toml")
    with pytest.raises(ValueError, match=re.escape(refusal_of(hostile.run / "own.py"))):
        parse_config(given(TRAINING[name], hostile, tmp_path), 1)
    assert not hostile.executed.exists()


@pytest.mark.parametrize("flags", [["--trust"], ["--model.architecture", "OWN"]])
@pytest.mark.parametrize("name", ["diagnose", "plan", "schedule", "schedule by its config", "export"])
def test_a_command_executes_what_the_user_names(
    hostile: Hostile, tmp_path: Path, name: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag.replace("OWN", str(hostile.own)) for flag in flags]
    main([*given(LOADING[name], hostile, tmp_path), *flags])
    said = capsys.readouterr().err
    assert hostile.executed.exists()
    assert said == "" or "has no model.embed_tokens.weight" in said, said
    # Of what is permitted only the source is executed, and nothing is permitted to the next command.
    assert not (tmp_path / "compiled").exists()
    shutil.copytree(hostile.run, tmp_path / "again")
    assert main(["schedule", "--model", str(tmp_path / "again"), "--pp", "1"]) == 2


@pytest.mark.parametrize("flags", [["--trust"], ["--model.architecture", "OWN", "--train.after-checkpoint", "COMMAND"]])
@pytest.mark.parametrize("name", TRAINING)
def test_training_executes_what_the_user_names(hostile: Hostile, tmp_path: Path, name: str, flags: list[str]) -> None:
    shutil.copyfile(hostile.run / "config.toml", hostile.run / "config.1.toml")
    flags = [flag.replace("OWN", str(hostile.own)).replace("COMMAND", hostile.command) for flag in flags]
    config = parse_config([*given(TRAINING[name], hostile, tmp_path), *flags], 1)
    assert config.model.architecture.endswith("own.py") and hostile.executed.exists()


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "its weights"])
def test_training_refuses_the_command_of_a_run(hostile: Hostile, tmp_path: Path, name: str) -> None:
    shutil.copyfile(hostile.run / "config.toml", hostile.run / "config.1.toml")
    argv = [*given(TRAINING[name], hostile, tmp_path), "--model.architecture", str(hostile.own)]
    with pytest.raises(ValueError) as error:
        parse_config(argv, 1)
    assert str(error.value) == (
        f"a command that a directory names is executed only if you say so: train.after_checkpoint {hostile.command!r}: "
        "add --trust, or give it with --train.after-checkpoint, or '' for none"
    )
    assert parse_config([*argv, "--train.after-checkpoint", ""], 1).train.after_checkpoint == ""
    hostile.executed.unlink()
    with pytest.raises(ValueError, match="executed only if you say so"):
        Uploads(hostile.command, checkpoints_of(hostile.run), hostile.run, print)
    assert not hostile.executed.exists()


def test_a_file_of_settings_is_the_users_word(hostile: Hostile, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[model]\narchitecture = {str(hostile.own)!r}\n[train]\nafter_checkpoint = 'cp {{path}} x'\n")
    config = parse_config(["--config", str(settings)], 1)
    assert hostile.executed.exists() and config.train.after_checkpoint == "cp {path} x"


def test_a_file_is_the_users_word_whatever_it_is_called(hostile: Hostile, tmp_path: Path) -> None:
    settings = hostile.own.parent / "config.toml"
    settings.write_text(f"[model]\narchitecture = {str(hostile.own)!r}\n")
    parse_config(["--config", str(settings)], 1)
    assert hostile.executed.exists()


@pytest.mark.parametrize("what", ["a copy", "a link", "a link from it", "a link to the directory"])
@pytest.mark.parametrize("mark", ["checkpoints", "metrics.jsonl", ".lock"])
def test_what_lies_in_a_run_is_data_whatever_it_is_called(
    hostile: Hostile, tmp_path: Path, what: str, mark: str
) -> None:
    run = hostile.run
    (run / "checkpoints").rename(tmp_path / "aside")
    (run / "metrics.jsonl").unlink()
    (run / mark).touch()
    path = run / "run.toml"
    if what == "a copy":
        shutil.copyfile(run / "config.toml", path)
    elif what == "a link":
        path = tmp_path / "mine.toml"
        path.symlink_to(run / "config.toml")
    elif what == "a link from it":
        shutil.copyfile(run / "config.toml", tmp_path / "elsewhere.toml")
        path.symlink_to(tmp_path / "elsewhere.toml")
    else:
        (tmp_path / "linked").symlink_to(run)
        path = tmp_path / "linked" / "config.toml"
    with pytest.raises(ValueError, match="executed only if you say so"):
        parse_config(["--config", str(path), "--run-dir", str(tmp_path / "out")], 1)
    assert not hostile.executed.exists()


def test_a_file_that_names_a_run_does_not_speak_for_it(hostile: Hostile, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[model]\npath = {str(hostile.run)!r}\n")
    with pytest.raises(ValueError, match="executed only if you say so"):
        parse_config(["--config", str(settings)], 1)
    assert not hostile.executed.exists()


LIBRARY: dict[str, Callable[[Path], object]] = {
    "the model of a path": lambda run: architecture_of(model_at(ModelConfig(path=str(run)))),
    "a saved configuration": lambda run: architecture_of(saved_config(str(run)).model),
    "a diagnosis": diagnose,
}


@pytest.mark.parametrize("name", LIBRARY)
def test_who_forgets_to_ask_gets_a_refusal(hostile: Hostile, name: str) -> None:
    with pytest.raises(ValueError, match="executed only if you say so"):
        LIBRARY[name](hostile.run)
    trust.permit_file(hostile.own)
    LIBRARY[name](hostile.run)
    assert hostile.executed.exists()


def test_a_permission_is_for_a_content(hostile: Hostile) -> None:
    trust.permit_file(hostile.run / "own.py")
    (hostile.run / "own.py").write_text(hostile.own.read_text() + "\n")
    with pytest.raises(ValueError, match=", not what the run began with: read it, then add --trust"):
        architecture_of(saved_config(str(hostile.run)).model)
    assert not hostile.executed.exists()


def test_a_file_that_is_not_what_the_run_recorded_is_said_once(
    hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = subprocess.run(["sha256sum", "-c", "own.py.sha256"], cwd=hostile.run, capture_output=True, check=True)
    assert checked.stdout == b"own.py: OK\n"
    before = hashlib.sha256(hostile.own.read_bytes()).hexdigest()
    trust.permit_file(hostile.own)
    saved_config(str(hostile.run), str(hostile.own))
    assert capsys.readouterr().err == ""
    hostile.own.write_text(hostile.own.read_text() + "\n")
    now = hashlib.sha256(hostile.own.read_bytes()).hexdigest()
    said = f"{hostile.own} is not what {hostile.run} began with: SHA-256 {now}, recorded {before}"
    say_once.cache_clear()
    for _ in range(2):
        assert main(["schedule", "--model", str(hostile.run), "--model.architecture", str(hostile.own)]) == 0
    assert capsys.readouterr().err == f"tpengine: {said}\n"


def test_a_command_says_how_a_run_is_trusted(hostile: Hostile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given(LOADING["plan of a resume"], hostile, hostile.run), "--trust"]) == 0
    assert f"--resume --run-dir {hostile.run} --trust" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "is_needed"),
    [("architecture = 'OWN'", False), ("path = 'RUN'", True), ("architecture = 'OWN'\npath = 'RUN'", False)],
    ids=["its own file", "a run", "a run and its own file"],
)
def test_a_command_asks_for_trust_only_where_it_is_needed(
    hostile: Hostile, tmp_path: Path, settings: str, is_needed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file, layout = tmp_path / "mine.toml", ["--ranks", "1", "--tp", "1", "--pp", "1", "--dp", "1"]
    text = settings.replace("OWN", str(hostile.own)).replace("RUN", str(hostile.run))
    file.write_text(f"[model]\n{text}\n[train]\nafter_checkpoint = 'cp {{path}} x'\n")
    assert main(["plan", "--model", str(file), *layout]) == 2 * is_needed
    assert main(["plan", "--model", str(file), *layout, "--trust"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines()[::-1] if line.startswith("run it:")][:1]
    assert ("--trust" in line) == is_needed
    assert parse_config(shlex.split(line.partition("tpengine.train ")[2]), 1).model.architecture.endswith("own.py")


@pytest.mark.parametrize("architecture", ["own.py", "llama"])
def test_the_settings_of_a_run_ask_for_trust(
    hostile: Hostile, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = hostile.run / "config.toml"
    if architecture == "llama":
        file.write_text(file.read_text().replace(str(hostile.run / "own.py"), "llama"))
    argv = ["--ranks", "1", "--tp", "1", "--pp", "1", "--dp", "1", "--trust"]
    assert main(["plan", "--model", str(file), *argv]) == 0
    assert " --trust" in capsys.readouterr().out


def test_a_started_rank_loads_nothing_from_where_the_user_is(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cd RUN; tpengine generate .` starts Python there."""
    config = replace(Config(), run_dir=str(hostile.run))
    (hostile.run / "config.toml").write_text(dump_toml(config))
    (hostile.run / "multiprocessing.py").write_text(f"open({str(hostile.executed)!r}, 'w')\n")
    monkeypatch.chdir(hostile.run)
    from tpengine.distributed.local_ranks import run_ranks

    assert run_ranks(1, "os:getpid") > 0
    assert not hostile.executed.exists()
