"""Rung: pure. Lengths in steps and tokens are read with their units, to the last digit.

A step by its sequences and a run by its tokens or epochs, decided once and kept in every layout.

Steps in files: how they are named, and which are none.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpengine.checkpoint.resume import saved_config
from tpengine.checkpoint.rollbacks import Rollback, rollback_of
from tpengine.commands.arguments import ConfigError, parse_config, parse_imported
from tpengine.config import samples_per_step, validate_run
from tpengine.config.lengths import Amount, amount_of, tokens_of
from tpengine.config.presets import preset_config
from tpengine.config.toml import dump_toml
from tpengine.data import open_corpus
from tpengine.planner.profiles.ranks import StepSeconds, WrongProfile, parse_step


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        (2000, 2000, "steps"),
        ("2000", 2000, "steps"),
        ("2e3", 2000, "steps"),
        ("2k steps", 2000, "steps"),
        ("2e9 tokens", 2 * 10**9, "tokens"),
        ("500M tokens", 5 * 10**8, "tokens"),
        ("2B", 2 * 10**9, "tokens"),
        ("1.1b", 11 * 10**8, "tokens"),
        ("0.3T Tokens", 3 * 10**11, "tokens"),
        ("20 m", 2 * 10**7, "tokens"),
        ("1 token", 1, "tokens"),
        ("4611686018427387903 tokens", 2**62 - 1, "tokens"),
    ],
)
def test_a_length_is_read(text: int | str, number: int, unit: str) -> None:
    assert amount_of(text, "until") == Amount(number, unit)
    if unit == "tokens":
        assert tokens_of(text, "train.tokens") == number


@pytest.mark.parametrize(
    "wrong",
    [
        True,
        1.0,
        2.5,
        None,
        [2],
        {"a": 1},
        "",
        "many",
        "1.5",
        "1.0000001k tokens",
        "2e99",
        "-3",
        "3 epochs",
        "2 GB",
        "1e-3",
    ],
)
def test_what_is_no_length_is_one_line(wrong: object) -> None:
    for read in (amount_of, tokens_of):
        with pytest.raises(ValueError, match=r"^until must be .*: use 2000") as error:
            read(wrong, "until")
        assert "\n" not in str(error.value)


def test_thousands_must_say_of_what_they_are() -> None:
    """2k steps are a warm-up, 2k tokens are not one step; a million steps nobody trains."""
    with pytest.raises(ValueError, match='use "2k tokens" or "2k steps"'):
        amount_of("2k", "optim.warmup_steps")
    assert tokens_of("2k", "train.tokens") == 2000
    with pytest.raises(ValueError, match="number of tokens"):
        tokens_of("2000 steps", "train.tokens")


@given(st.integers(0, 2**62))
@settings(derandomize=True, deadline=None)
def test_every_digit_counts(number: int) -> None:
    assert amount_of(f"{number} tokens", "until") == Amount(number, "tokens")
    assert tokens_of(str(number), "train.tokens") == tokens_of(number, "train.tokens") == number


def parsed(*flags: str, world: int = 1, config: Path | None = None) -> tuple[int, int, int]:
    """The sequences and tokens of a step, and the steps, that a command line asks for."""
    read = parse_config([*(["--config", str(config)] if config else []), *flags], world)
    assert not (read.train.global_batch or read.train.tokens or read.train.epochs), "decided"
    batch = samples_per_step(read)
    return batch, batch * read.train.seq_len, read.train.steps


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 400))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_batch_is_what_was_asked_for_or_refused_with_those_that_divide(dp: int, size: int, batch: int) -> None:
    config = preset_config("tiny")
    train = dataclasses.replace(config.train, global_batch=batch, micro_batch_size=size)
    parallel = dataclasses.replace(config.parallel, tp=1, pp=1, dp=dp)
    config = dataclasses.replace(config, train=train, parallel=parallel)
    if batch % (dp * size) == 0:
        assert samples_per_step(validate_run(config, dp)) == batch
        return
    with pytest.raises(ValueError, match=r"train\.global_batch must be divisible") as error:
        validate_run(config, dp)
    words = str(error.value).split("use train.global_batch ")[1]
    for legal in words.split(",")[0].split(" or "):
        remedied = dataclasses.replace(config, train=dataclasses.replace(train, global_batch=int(legal)))
        assert samples_per_step(validate_run(remedied, dp)) == int(legal)
    if "train.micro_batch_size" in words:
        smaller = dataclasses.replace(train, micro_batch_size=int(words.split()[-1]))
        assert samples_per_step(validate_run(dataclasses.replace(config, train=smaller), dp)) == batch


def test_the_last_step_completes_the_tokens() -> None:
    batch = ("--train.global-batch", "64")
    assert parsed(*batch, "--train.tokens", "2M") == (64, 8192, -(-2_000_000 // 8192))
    assert parsed(*batch, "--train.tokens", "1") == (64, 8192, 1)
    assert parsed(*batch, "--train.tokens=8192 tokens", "--parallel.dp", "2", world=2) == (64, 8192, 1)
    assert parsed(*batch, "--train.tokens", "8193") == (64, 8192, 2)


def test_an_epoch_reads_every_sequence_that_is_trained_on() -> None:
    windows = open_corpus(parse_config([], 1)).train.num_windows
    batch, _, steps = parsed("--train.epochs", "1.5")
    assert (steps - 1) * batch < 1.5 * windows <= steps * batch


def test_a_later_place_wins_and_one_place_says_it_once(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\ntokens = "1M"\nglobal_batch = 64\n')
    assert parsed(config=file) == (64, 8192, 123)
    assert parsed("--train.steps", "7", config=file) == (64, 8192, 7)
    assert parsed("--train.num-micro-batches", "2", "--train.steps", "7", config=file) == (16, 2048, 7)
    file.write_text("[train]\nsteps = 9\nnum_micro_batches = 3\n")
    assert parsed("--train.tokens", "1M", "--train.global-batch", "64", config=file) == (64, 8192, 123)
    for words, text in (
        ("train.steps 9 and train.tokens 1M", 'steps = 9\ntokens = "1M"'),
        ("train.tokens 5 and train.epochs 2.0", "tokens = 5\nepochs = 2"),
        ("train.num_micro_batches 3 and train.global_batch 24", "num_micro_batches = 3\nglobal_batch = 24"),
    ):
        file.write_text(f"[train]\n{text}\n")
        flags = [f"--train.{line.replace('_', '-').replace(' = ', '=')}".replace('"', "") for line in text.splitlines()]
        for argv in (["--config", str(file)], flags):
            with pytest.raises(ConfigError, match=f"one setting says it: .*{words}: leave one out"):
                parse_config(argv, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.tokens", "2 GB"], "train.tokens must be a number of tokens"),
        (["--train.tokens", "4e18"], "a run has at most 1099511627776 steps"),
        (["--train.epochs", "nan"], "train.epochs must be finite"),
        (["--train.epochs=-1"], "train.epochs must be at least 0"),
        (["--train.epochs", "1e300"], "train.epochs must be at most"),
        (["--train.epochs", "2", "--data.mixture", "mix.toml"], "epochs are of one text.*data.mixture mix.toml"),
        (["--train.epochs", "2", "--phases", "phases.toml"], "epochs are of one text.*--phases phases.toml"),
        (["--train.global-batch", "7"], "use train.global_batch 8, or train.micro_batch_size 1"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(flags, 1)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(10**5, 10**7))
@settings(derandomize=True, deadline=None, max_examples=6)
def test_a_resume_in_another_layout_keeps_batch_and_end(
    tmp_path_factory: pytest.TempPathFactory, world: int, then: int, tokens: int
) -> None:
    assume(world != then)
    run = tmp_path_factory.mktemp("run")
    asked = ["--train.global-batch", "64", "--train.tokens", str(tokens), "--train.micro-batch-size", "4"]
    first = parse_config([*asked, "--run-dir", str(run)], world)
    (run / "config.toml").write_text(dump_toml(first))
    assert saved_config(str(run)) == first
    resumed = parse_config(["--resume", "--run-dir", str(run)], then)
    assert samples_per_step(resumed) == samples_per_step(first) == 64
    assert resumed.train.steps == first.train.steps == -(-tokens // (64 * first.train.seq_len))
    assert resumed.optim.decay_steps == first.optim.decay_steps == first.train.steps


def test_what_an_import_leaves_open_is_decided_where_the_run_begins(tmp_path: Path) -> None:
    """Before dp is known neither micro-batches nor steps are, and config.toml has what was said."""
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    (run / "checkpoints").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes})
    )
    asked = ["--train.global-batch", "32", "--train.tokens", "1M", "--parallel.zero", "3"]
    imported = parse_imported(str(model), str(run), asked)
    text = dump_toml(imported)
    assert "steps = 250" not in text and "num_micro_batches" not in text and 'tokens = "1M"' in text
    (run / "config.toml").write_text(text)
    for world in (1, 4):
        begun = parse_config(["--resume", "--run-dir", str(run), "--parallel.tp", "1", "--parallel.pp", "1"], world)
        assert (samples_per_step(begun), begun.train.steps) == (32, -(-1_000_000 // (32 * 128)))
        assert (begun.parallel.zero, begun.parallel.zero_in_effect) == (3, 3 if world > 1 else 0)


def test_a_last_phase_ends_where_the_tokens_do(tmp_path: Path) -> None:
    file = tmp_path / "phases.toml"
    file.write_text('[[phase]]\nuntil = "1M tokens"\n[[phase]]\ntrain.seq_len = 256\n')
    flags = ["--phases", str(file), "--train.global-batch", "32", "--train.tokens", "3M"]
    first = -(-1_000_000 // 4096)
    assert parse_config(flags, 1).train.steps == first + -(-(3_000_000 - first * 4096) // 8192)
    file.write_text('[[phase]]\nuntil = "1M tokens"\n[[phase]]\nuntil = 2M\n'.replace("2M", '"2M"'))
    with pytest.raises(ConfigError, match=r"one setting says where a run ends: phase 2.*leave one out"):
        parse_config(flags, 1)


@pytest.mark.parametrize("earlier", [False, True])
def test_rollbacks_and_profiles_are_read_as_they_were_written(earlier: bool) -> None:
    rollback, step = Rollback(14, 8, 1, ((32, 40),), 9.5, 3.0), StepSeconds(14, 2.0, 1.5)
    for known, parse in ((rollback, rollback_of), (step, parse_step)):
        content = json.loads(json.dumps(known.to_json()))
        assert content["step"] == 15
        if earlier:
            del content["counted_from"]
            content["step"] = 14
        assert parse(content) == known


def test_a_profile_names_steps_that_are_there() -> None:
    with pytest.raises(WrongProfile, match="counted from 2: got step 1"):
        parse_step({"step": 1, "counted_from": 2, "seconds": 2.0, "plan_seconds": 1.5})
