"""Rung: pure. Every flag arrives, every bad value ends in one line on rank 0 and exit code 2 on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpengine.commands.arguments import ConfigError, HelpRequested, exit_on_user_error, leave, parse_config
from tpengine.config import Config
from tpengine.config.presets import bench
from tpengine.config.toml import dump_toml

RANK_0, RANK_1 = (
    {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} for rank in "01"
)


def parse_or_exit(argv: list[str], environ: dict[str, str], *, wait_seconds: float = 10.0) -> Config:
    """What the training script does with its command line."""
    with exit_on_user_error(environ, wait_seconds=wait_seconds) as launch:
        return parse_config(argv, launch.world_size)


# flag, text, where it must arrive, as what, for how many processes.
FLAGS: list[tuple[str, str, str, Any, int]] = [
    ("--model.hidden-size", "256", "model.hidden_size", 256, 1),
    ("--model.num-layers", "3", "model.num_layers", 3, 1),
    ("--model.num-heads", "8", "model.num_heads", 8, 1),
    ("--model.num-kv-heads", "2", "model.num_kv_heads", 2, 1),
    ("--model.ffn-size", "512", "model.ffn_size", 512, 1),
    ("--model.vocab-size", "300", "model.vocab_size", 300, 1),
    ("--model.tie-embeddings", "", "model.tie_embeddings", True, 1),
    ("--parallel.tp", "4", "parallel.tp", 4, 4),
    ("--parallel.pp", "4", "parallel.pp", 4, 4),
    ("--parallel.dp", "4", "parallel.dp", 4, 4),
    ("--parallel.schedule", "gpipe", "parallel.schedule", "gpipe", 1),
    ("--parallel.zero", "0", "parallel.zero", 0, 1),
    ("--train.seq-len", "64", "train.seq_len", 64, 1),
    ("--train.micro-batch-size", "2", "train.micro_batch_size", 2, 1),
    ("--train.num-micro-batches", "3", "train.num_micro_batches", 3, 1),
    ("--train.steps", "7", "train.steps", 7, 1),
    ("--train.seed", "9", "train.seed", 9, 1),
    ("--train.dtype", "float64", "train.dtype", "float64", 1),
    ("--data.path", "tokens.bin", "data.path", "tokens.bin", 1),
    ("--optim.lr", "1e-3", "optim.lr", 1e-3, 1),
    ("--device", "cpu", "device", "cpu", 1),
    ("--run-dir", "out/run", "run_dir", "out/run", 1),
]

# flag, bad text, processes, what the line must contain besides. Paths and run directories have no bad spelling:
# theirs is the missing value.
BAD: list[tuple[str, str | None, int, list[str]]] = [
    ("--model.hidden-size", "0", 1, ["hidden_size must be at least 1", "got 0"]),
    ("--model.hidden-size", "wide", 1, ["--model.hidden-size must be an integer", "'wide'", "use 128"]),
    ("--model.num-layers", "1.5", 1, ["--model.num-layers must be an integer", "'1.5'", "use 2"]),
    ("--model.num-heads", "3", 1, ["num_heads", "128", "3", "use"]),
    ("--model.num-kv-heads", "3", 1, ["num_kv_heads", "4", "3", "use"]),
    ("--model.ffn-size", "-1", 1, ["ffn_size must be at least 1", "got -1"]),
    ("--model.vocab-size", "0", 1, ["vocab_size must be at least", "got 0"]),
    ("--model.tie-embeddings", "yes", 1, ["'yes'", "takes no value", "--model.no-tie-embeddings"]),
    ("--parallel.tp", "3", 4, ["number of processes", "3", "processes 4", "use tp"]),
    ("--parallel.tp", "two", 4, ["--parallel.tp must be an integer", "'two'", "use 1"]),
    ("--parallel.pp", "0", 1, ["pp must be at least 1", "got 0", "use 1"]),
    ("--parallel.pp", "3", 4, ["number of processes", "3", "processes 4", "pp"]),
    ("--parallel.dp", "3", 4, ["number of processes", "3", "processes 4", "dp"]),
    ("--parallel.schedule", "1f1", 1, ["schedule must be one of gpipe, 1f1b, interleaved", "'1f1'", "use 1f1b"]),
    ("--parallel.recompute", "blocks", 1, ["--parallel.recompute must be one of none,", "'blocks'", "use block"]),
    ("--parallel.zero", "4", 4, ["--parallel.zero must be one of 0, 1, 2, 3", "got '4'", "use 3"]),
    ("--train.seq-len", "0", 1, ["seq_len must be at least 1", "got 0"]),
    ("--train.micro-batch-size", "-3", 1, ["micro_batch_size must be at least 1", "got -3"]),
    ("--train.num-micro-batches", "0", 1, ["num_micro_batches must be at least 1", "got 0"]),
    ("--train.steps", "0", 1, ["steps must be at least 1", "got 0"]),
    ("--train.steps", "1e3", 1, ["--train.steps must be an integer", "'1e3'", "use 1000"]),
    ("--train.seed", "-1", 1, ["seed must be at least 0", "got -1"]),
    ("--train.dtype", "fp8", 1, ["--train.dtype must be one of", "'fp8'", "use one of these"]),
    ("--train.dtype", "bfloat61", 1, ["--train.dtype must be one of", "'bfloat61'", "use one of these"]),
    ("--train.dtype", "bflot16", 1, ["--train.dtype must be one of", "'bflot16'", "use bfloat16"]),
    ("--data.path", None, 1, ["--data.path needs a value", "use --data.path stdlib"]),
    ("--optim.lr", "fast", 1, ["--optim.lr must be a number", "'fast'", "use 0.003"]),
    ("--optim.lr", "-1", 1, ["lr must be", "got -1.0"]),
    ("--optim.lr", "nan", 1, ["lr must be", "finite", "nan"]),
    ("--device", "gpu", 1, ["--device must be one of auto, cpu, cuda", "'gpu'", "use cuda"]),
    ("--run-dir", None, 1, ["--run-dir needs a value", "nothing"]),
    ("--model.hiden-size", "3", 1, ["unknown option --model.hiden-size", "perhaps you meant --model.hidden-size"]),
    ("--lr", "3", 1, ["unknown option --lr", "perhaps you meant --optim.lr"]),
    ("--path", "x", 1, ["unknown option --path: perhaps you meant --model.path or --data.path"]),
    ("--model.paths", "x", 1, ["unknown option --model.paths: perhaps you meant --model.path"]),
    ("--data.pth", "x", 1, ["unknown option --data.pth: perhaps you meant --data.path"]),
    ("--data.lr", "x", 1, ["unknown option --data.lr: perhaps you meant --optim.lr"]),
    ("--parallel.cp", "2", 1, ["unknown option --parallel.cp: parallel has tp, pp, dp, ep, moe-load, schedule,"]),
    ("--model.num-experts", "8", 1, ["unknown option --model.num-experts: model has path, architecture,"]),
    ("--preset", "llama_7b", 1, ["llama_1b, llama_8b, llama_70b", "got 'llama_7b': use one of these"]),
    ("--zzzzzz", None, 1, ["unknown option --zzzzzz", "--help"]),
    ("steps", None, 1, ["--section.name value", "'steps'", "--help"]),
    ("--preset", "tinny", 1, ["--preset must be one of tiny, bench, llama_1b", "'tinny'", "use tiny"]),
    ("--preset", None, 1, ["--preset needs a value", "use --preset tiny"]),
    ("--config", None, 1, ["--config needs a value", "use --config FILE.toml"]),
    ("--config", "nowhere.toml", 1, ["nowhere.toml", "No such file"]),
]


def read(config: Config, key: str) -> Any:
    """The setting at a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("flag", "text", "key", "expected", "world_size"), FLAGS, ids=[f[0] for f in FLAGS])
def test_flag_arrives(flag: str, text: str, key: str, expected: Any, world_size: int) -> None:
    assert read(parse_config([flag, text] if text else [flag], world_size), key) == expected
    if text:
        assert read(parse_config([f"{flag}={text}"], world_size), key) == expected


def test_every_flag_of_the_table_has_a_bad_value() -> None:
    assert {flag for flag, *_ in FLAGS} <= {flag for flag, *_ in BAD}


def test_the_wrong_one_of_several_flags_is_named() -> None:
    """Choices that are numbers are right as text too."""
    with pytest.raises(ValueError, match=r"--train\.steps must be an integer: got 'many'"):
        parse_config(["--parallel.zero", "2", "--train.steps", "many"], 4)


@pytest.mark.parametrize(
    ("flag", "text", "world_size", "parts"), BAD, ids=[f"{flag} {text or ''}".strip() for flag, text, *_ in BAD]
)
def test_bad_value_is_one_line_on_rank_0_and_exit_code_2(
    flag: str, text: str | None, world_size: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [flag] if text is None else [flag, text]
    with pytest.raises(SystemExit) as stop:
        parse_or_exit(argv, {**RANK_0, "WORLD_SIZE": str(world_size)})
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tpengine: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err, err


def test_other_ranks_wait_for_rank_0_and_speak_only_if_they_are_still_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[float, str]] = []
    monkeypatch.setattr("time.sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    with pytest.raises(SystemExit) as stop:
        parse_or_exit(["--train.steps", "0"], RANK_1, wait_seconds=3.0)
    assert stop.value.code == 2
    assert waited == [(3.0, "")]
    # torchrun has not ended it: rank 0 has no error, and nobody else would say this one.
    assert capsys.readouterr().err == "tpengine: error: train.steps must be at least 1: got 0: use 1\n"


def test_a_mistake_that_all_ranks_know_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without torchrun nobody ends the others, which would each say it again."""
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    with pytest.raises(SystemExit) as stop:
        leave("a rule", environ, speaks=False, wait_seconds=0.0, is_known=True)
    assert stop.value.code == 2 and capsys.readouterr().err == ""
    assert "a rule" in (tmp_path / "error.json").read_text(), "torchrun's report may end with this rank"


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({"RANK": "0", "WORLD_SIZE": "four"}, "'four'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "'2'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "'0'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "'-1'"),
        ({**RANK_0, "LOCAL_RANK": "abc"}, "'abc'"),
        ({**RANK_0, "LOCAL_WORLD_SIZE": "zz"}, "'zz'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR None"),
        ({**RANK_0, "MASTER_PORT": "70000"}, "MASTER_PORT 70000"),
    ],
)
def test_malformed_environment_is_refused(
    environ: dict[str, str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_or_exit([], environ, wait_seconds=0.0)
    assert stop.value.code == 2
    err = capsys.readouterr().err  # said on every rank: none can know that it is rank 0
    assert value in err and "torchrun" in err and err.count("\n") == 1


def test_without_an_environment_there_is_one_process() -> None:
    layout = parse_or_exit([], {}).parallel
    assert (layout.tp, layout.pp, layout.dp) == (1, 1, 1)


def test_errors_of_the_block_end_the_process_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, exit_on_user_error({}) as launch:
        assert launch.world_size == 1
        raise ValueError("two\nlines")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "tpengine: error: two lines\n"


def test_a_bug_is_not_mistaken_for_a_user_error() -> None:
    with pytest.raises(KeyError), exit_on_user_error({}):
        raise KeyError("a bug")


def test_preset_then_file_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 5\nseq_len = 32\n")
    for argv in (
        ["--preset", "bench", "--config", str(path), "--train.seq-len", "64"],
        ["--train.seq-len", "64", f"--config={path}", "--preset=bench"],
    ):
        config = parse_config(argv, 1)
        assert config.model == bench().model
        assert (config.train.steps, config.train.seq_len) == (5, 64)


def test_the_configuration_a_run_leaves_starts_the_same_run(tmp_path: Path) -> None:
    config = parse_config(["--preset", "bench", "--model.tie-embeddings", "--optim.lr", "0.1"], 4)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    assert parse_config(["--config", str(path)], 4) == config


def test_switch_has_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "tied.toml"
    path.write_text("[model]\ntie_embeddings = true\n")
    assert parse_config(["--config", str(path)], 1).model.tie_embeddings
    assert not parse_config(["--config", str(path), "--model.no-tie-embeddings"], 1).model.tie_embeddings
    for argv in (["--model.tie-embeddings=true"], ["--model.tie-embeddings", "true", "--train.steps", "5"]):
        with pytest.raises(ConfigError, match=r"--model\.tie-embeddings takes no value: got 'true': use"):
            parse_config(argv, 1)


def test_underscores_and_a_repeated_flag_are_fine() -> None:
    assert (
        parse_config(["--train.num_micro_batches", "2", "--train.num-micro-batches", "6"], 1).train.num_micro_batches
        == 6
    )


def test_the_culprit_is_named_not_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="unknown option --zzzzzz"):
        parse_config(["--parallel.tp", "None", "--data.path", "3", "--run-dir", "", "--zzzzzz", "1"], 1)


def test_help_is_printed_on_rank_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpRequested):
        parse_config(["--help"], 1)
    printed = {}
    for rank in ("0", "1"):
        with pytest.raises(SystemExit) as stop:
            parse_or_exit(["--help"], {**RANK_0, "RANK": rank})
        assert stop.value.code == 0
        printed[rank] = capsys.readouterr()
    for word in ("--preset", "--config", *(flag for flag, *_ in FLAGS)):
        assert word in printed["0"].out
    assert printed["1"] == ("", "")


@pytest.mark.parametrize(
    ("flag", "rule", "remedy"),
    [
        ("--parallel.zero", "must be one of 0, 1, 2, 3", "use one of these"),
        ("--train.steps", "must be an integer", "use "),
        ("--train.micro-batch-size", "must be an integer", "use "),
    ],
)
def test_a_number_of_any_length_is_one_short_line(flag: str, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config([flag, "9" * 5000], 1)
    said = str(error.value)
    assert said.startswith(f"{flag} {rule}") and f": got '{'9' * 60}'...: {remedy}" in said and len(said) < 300


@pytest.mark.parametrize("path", ["x@" + "9" * 5000, "x@" + "9" * 200, "x" * 5000], ids=len)
def test_a_path_of_any_length_is_no_run(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be a directory with a config\.json, or a run: x"):
        parse_config(["--model.path", path], 1)
