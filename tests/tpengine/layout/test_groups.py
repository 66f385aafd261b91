"""Rung: pure. The first group whose pattern matches decides; groups that decide nothing are refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tpengine.config import Config, ParameterGroup, phases_of, validate, validate_run
from tpengine.config.toml import dump_toml, load_toml
from tpengine.layout.groups import frozen_of, updates_of
from tpengine.layout.step_plan import layout_of, phase_layouts


def grouped(*groups: ParameterGroup, tied: bool = False) -> Config:
    config = Config()
    model = replace(config.model, num_layers=2, tie_embeddings=tied)
    return replace(config, model=model, optim=replace(config.optim, groups=groups))


def test_without_groups_matrices_decay_and_nothing_is_frozen() -> None:
    updates, config = updates_of(grouped()), Config()
    assert {lr for lr, _ in updates.values()} == {1.0}
    assert updates["layers.0.mlp.up_proj.weight"][1] == config.optim.weight_decay
    assert updates["norm.weight"][1] == 0
    assert not frozen_of(grouped())


def test_the_first_match_decides() -> None:
    config = grouped(
        ParameterGroup("model.layers.1.*norm*", weight_decay=0.5),
        ParameterGroup("model.layers.1.*", frozen=True),
        ParameterGroup("*.q_proj.weight", lr=0.25),
    )
    updates, frozen = updates_of(config), frozen_of(config)
    assert updates["layers.1.input_layernorm.weight"] == (1.0, 0.5)
    assert [updates[f"layers.0.self_attn.{of}_proj.weight"][0] for of in "qk"] == [0.25, 1]
    assert "layers.1.self_attn.q_proj.weight" in frozen and len(frozen) == 7
    assert not frozen & updates.keys() and len(frozen | updates.keys()) == 2 * 9 + 3


def test_patterns_are_of_the_names_in_checkpoints() -> None:
    assert frozen_of(grouped(ParameterGroup("lm_head.weight", frozen=True))) == {"lm_head.weight"}
    assert frozen_of(grouped(ParameterGroup("model.norm.weight", frozen=True))) == {"norm.weight"}


FROZEN = {"frozen": True}


@pytest.mark.parametrize(
    ("groups", "tied", "parts"),
    [
        (
            (ParameterGroup("model.layers.*.self_atn.q_proj.weight"),),
            False,
            ["must match a parameter", "self_atn.q_proj", "model.layers.0.self_attn.q_proj.weight", "leave"],
        ),
        ((ParameterGroup("Model.*"),), False, ["must match", "'Model.*'", "nearest"]),
        ((ParameterGroup("lm_head.*", frozen=True),), True, ["tied", "use 'model.embed_tokens.weight'"]),
        (
            (ParameterGroup("*.q_proj.*", lr=2), ParameterGroup("*.1.self_attn.q*")),
            False,
            ["first pattern", "all 1 parameters of '*.1.self_attn.q*'", "by '*.q_proj.*' before it", "put it before"],
        ),
        (
            (ParameterGroup("lm_head.*", frozen=True), ParameterGroup("*", frozen=True)),
            False,
            ["leave something to train", "'lm_head.*', '*' freeze all 21", "name fewer"],
        ),
    ],
)
def test_groups_that_decide_nothing_are_one_line(
    groups: tuple[ParameterGroup, ...], tied: bool, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        layout_of(validate(grouped(*groups, tied=tied), 1))
    assert "\n" not in str(error.value)
    for part in ["optim.groups", *parts]:
        assert part in str(error.value), error.value


@pytest.mark.parametrize(
    ("group", "parts"),
    [
        (ParameterGroup(""), ["needs a pattern", "got none"]),
        (ParameterGroup("*", lr=0.0), ["'*'", "above 0", "got 0.0", "use frozen = true"]),
        (ParameterGroup("*", lr=float("nan")), ["finite", "nan", "use 1.0"]),
        (ParameterGroup("*", weight_decay=-1.0), ["weight_decay", "-1.0", "use 0.0"]),
        (ParameterGroup("*", lr=2.0, frozen=True), ["frozen and lr 2", "leave one out"]),
        (ParameterGroup("*", weight_decay=0.0, frozen=True), ["frozen and weight_decay 0", "leave one out"]),
    ],
)
def test_a_group_that_contradicts_itself_is_one_line(group: ParameterGroup, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate(grouped(group), 1)
    for part in ["optim.groups", *parts]:
        assert part in str(error.value), error.value


def test_groups_are_tables_and_read_back_equal(tmp_path: Path) -> None:
    config = grouped(ParameterGroup("*.bias", 0.5, 0.0), ParameterGroup("model.embed*", frozen=True))
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_toml(tmp_path / "config.toml", Config()) == config
    assert "groups" not in dump_toml(Config())
    (tmp_path / "own.toml").write_text('[[optim.groups]]\npattern = "*.bias"\nlr = 2\n')
    assert load_toml(tmp_path / "own.toml", Config()).optim.groups == (ParameterGroup("*.bias", 2.0),)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[optim]\ngroups = "*.bias"', ["optim.groups must be tables", "[[optim.groups]]"]),
        ('[[optim.groups]]\npatern = "*"', ["unknown key optim.groups.patern", "optim.groups.pattern"]),
        ('[[optim.groups]]\npattern = "*"\nfrozen = 1', ["optim.groups.frozen", "bool", "use true"]),
    ],
)
def test_bad_tables_are_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError) as error:
        load_toml(tmp_path / "bad.toml", Config())
    for part in parts:
        assert part in str(error.value), error.value


def test_phases_have_groups_of_their_own(tmp_path: Path) -> None:
    text = '[[phase]]\nuntil = 2\n[[phase.optim.groups]]\npattern = "{}"\nfrozen = true\n[[phase]]\noptim.groups = []\n'
    file = tmp_path / "phases.toml"
    file.write_text(text.format("model.norm.weight"))
    phases = phases_of(validate_run(replace(grouped(), phases=str(file)), 1))
    assert [frozen_of(phase.config) for phase in phases] == [{"norm.weight"}, frozenset()]
    file.write_text(text.format("nothing"))
    with pytest.raises(ValueError, match=r"in phase 1 optim\.groups: a pattern must match"):
        phase_layouts(phases_of(validate_run(replace(grouped(), phases=str(file)), 1)))
