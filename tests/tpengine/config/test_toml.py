"""Rung: pure. Every setting of a TOML file has its own type: anything else is one line with a remedy that is legal."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpengine.config import Config, validate_run
from tpengine.config.toml import load_toml, read_toml, updated
from tpengine.data.mixture import read_table
from tpengine.planner.machine.file import machine_of_values, machine_values, read_machine
from tpengine.planner.machine.sheets import MACHINES

# A value of every type that TOML has: as Python reads it, by what TOML calls it.
VALUES: dict[str, Any] = {
    "boolean": True,
    "whole": 5,
    "decimal": 1.0,
    "text": "nonsense",
    "array": [1],
    "mixed array": [True],
    "table": {"a": 1},
}
# Which of them a type takes.
TAKES = {int: {"whole"}, float: {"whole", "decimal"}, bool: {"boolean"}, str: {"text"}, tuple: {"array"}}


def settings_of(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's key and type."""
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        value, key = getattr(owner, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.")
        else:
            yield key, hints[field.name]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def takes(hint: Any) -> set[str]:
    if typing.get_origin(hint) is typing.Literal:
        return set()  # none of the values above is a choice
    kinds = [typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,)]
    if typing.get_origin(hint) is tuple:
        # The arrays above are of a number, and of a truth; groups of parameters are tables.
        if dataclasses.is_dataclass(typing.get_args(hint)[0]):
            return set()
        return {"mixed array"} if typing.get_args(hint)[0] is bool else {"array"}
    return set().union(*(TAKES.get(kind, set()) for kind in kinds))


@pytest.mark.parametrize(("key", "hint"), list(settings_of(Config())), ids=lambda of: of if isinstance(of, str) else "")
def test_a_setting_takes_its_type_and_no_other(key: str, hint: Any) -> None:
    for name, value in VALUES.items():
        if name in takes(hint):
            updated(Config(), nested(key, value), "run.toml")
            continue
        with pytest.raises(ValueError, match=rf"^run\.toml: {key} must be .*: got .*: (use|leave) \S+") as error:
            updated(Config(), nested(key, value), "run.toml")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallel.zero", 5, "must be one of 0, 1, 2, 3: got 5: use 3"),
        ("parallel.zero", True, "got true: use one of these"),
        ("parallel.zero", 1.0, "got 1.0: use one of these"),
        ("train.steps", 5.0, "must be of type int: got 5.0: use 5"),
        ("train.steps", "7", "must be of type int: got '7': use 7"),
        ("optim.lr", "3e", "must be of type float: got '3e': use 0.003"),
        ("model.tie_embeddings", 1, "must be of type bool: got 1: use true"),
        ("model.tie_embeddings", "False", "must be of type bool: got 'False': use false"),
        ("train.dtype", "float8", "got 'float8': use one of these"),
        ("train.dtype", "bflot16", "got 'bflot16': use bfloat16"),
        ("parallel.tp", "x", "must be of type int: got 'x': leave it out"),
        ("model.details.windows", [1, True], "must be an array of int: got [1, True]: use []"),
        ("train.cp", 1, "unknown key train.cp: use one of seq_len, micro_batch_size"),
    ],
)
def test_the_remedy_is_the_same_value_where_it_is_only_written_otherwise(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        updated(Config(), nested(key, value), "run.toml")
    assert words in str(error.value)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("half", "float16"), ("fp32", "float32")])
def test_a_dtype_has_all_its_names(name: str, dtype: str) -> None:
    assert updated(Config(), {"train": {"dtype": name}}, "run.toml").train.dtype == dtype


WRONG_IN_PHASES = [
    ("until = true", "until of phase 1 must be a number of steps"),
    ("until = 5.0", "until of phase 1 must be a number of steps"),
    ("until = 2\nmicro_batches = true", "micro_batches must be a number"),
    ("until = 2\nmicro_batches = 4.0", "micro_batches must be a number"),
    ("until = 2\ntrain.seq_len = true", "train.seq_len must be of type int: got true"),
    ("until = 2\ntrain.seq_len = 64.0", "train.seq_len must be of type int: got 64.0: use 64"),
    ("until = 2\noptim.lr = true", "optim.lr must be of type float: got true"),
    ("until = 2\noptim.warmup_steps = 1.0", "optim.warmup_steps must be of type int or str: got 1.0: use 1"),
    ("until = 2\ntrain = 5", "a section must be a table: phase 1 has train = 5"),
    ('until = 2\n"train.seq_len" = 64', 'has no quotes: phase 1 has "train.seq_len": write train.seq_len = 64'),
    ("until = 2\ntrain.cp = 2", "unknown key train.cp in phase 1: use one of until, micro_batches, train.seq_len"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_IN_PHASES)
def test_a_phase_takes_the_types_of_its_settings(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "phases.toml"
    path.write_text(f"[[phase]]\n{text}\n[[phase]]\n")
    with pytest.raises(ValueError) as error:
        validate_run(dataclasses.replace(Config(), phases=str(path)), 1)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["true", "false", '"1"', "[1]", "{}", "nan", "-1", "-inf", "1979-05-27"])
@pytest.mark.parametrize("key", ["weight", "epochs"])
def test_a_mixtures_numbers_are_numbers(tmp_path: Path, key: str, value: str) -> None:
    numbers = {"weight": "0.5", "epochs": "2"} | {key: value}
    path = tmp_path / "mixture.toml"
    path.write_text(f'web = {{ path = "web", weight = {numbers["weight"]}, epochs = {numbers["epochs"]} }}\n')
    with pytest.raises(ValueError, match="web") as error:
        read_table(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("format", value) for value in (True, 1.0, "1")),
        *(("memory_bytes", value) for value in (True, "80GB", [1], -1.0, 10**400)),
        *(("ranks_per_node", value) for value in (True, 8.0, "8", 0)),
    ],
)
def test_a_machines_numbers_are_of_their_types(key: str, value: Any) -> None:
    values = machine_values(MACHINES["h200"])
    machine_of_values(values, "m.toml")
    with pytest.raises(ValueError, match=r"m\.toml") as error:
        machine_of_values(values | {key: value}, "m.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"a = " + b"[" * 5000, b"a = " + b"9" * 5000, b"\xff", b"a = ", b"a = 1\na = 2"])
def test_what_is_no_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    for read in (lambda: read_toml(path, "--x"), lambda: load_toml(path, Config()), lambda: read_table(path)):
        with pytest.raises(ValueError, match="needs") as error:
            read()
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="--machine needs"):
        read_machine(path)
