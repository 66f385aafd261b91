"""Rung: pure. Layouts are resolved, every rule refuses with rule, values and remedy, TOML reads back equal."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.config import Config, ModelConfig, ParallelConfig, resolve_layout, validate
from tpengine.config.settings import ModelDetails, RopeScaling
from tpengine.config.toml import dump_toml, load_toml

SECTIONS = ("model", "parallel", "train", "data", "optim")


def changed(**leaves: Any) -> Config:
    """The default configuration with some settings changed, by their last names."""
    config = Config()
    for name, value in leaves.items():
        owner = next((s for s in SECTIONS if hasattr(getattr(config, s), name)), None)
        if owner is None:
            config = replace(config, **{name: value})
        else:
            config = replace(config, **{owner: replace(getattr(config, owner), **{name: value})})
    return config


def setting_names(config: Any) -> list[str]:
    """The last names of all settings."""
    names: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, ModelDetails):
            continue  # numbers of an architecture, no settings
        names += setting_names(value) if dataclasses.is_dataclass(value) else [field.name]
    return names


def test_there_are_few_settings_with_distinct_names() -> None:
    """40, since then the order of sums, dropout (3), choices of a schedule (3), profiling, what ends a run (3), the
    length of the learning rate's schedule, what replicas shard (2) within what memory, where a model comes from
    (2), what the learning rate does after its warm-up (2), phases, how often a run is evaluated and sampled (2),
    which checkpoints stay (2), how documents lie in sequences, what is run for a checkpoint, who is told, mixtures,
    what is done about a step that leaps, a held-out text, on how many samples of it the loss is, the optimizer, the
    dtype of what it keeps, groups of parameters, what next-token loss has besides (2), columns of a text, who shares
    experts, how their load is balanced (2), and what room there is for their rows.
    """
    names = setting_names(Config())
    # A path is the data's and the model's, a schedule the pipeline's and the learning rate's.
    assert sorted(names) == sorted([*set(names), "path", "schedule"])
    assert len(names) <= 84


@pytest.mark.parametrize(
    ("world_size", "given_axes", "expected"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (2, 1, 1)),
        (3, {}, (1, 1, 3)),
        (4, {}, (2, 2, 1)),
        (6, {}, (2, 1, 3)),
        (8, {}, (2, 2, 2)),
        (16, {}, (2, 2, 4)),
        (8, {"tp": 4}, (4, 2, 1)),
        (8, {"pp": 1}, (2, 1, 4)),
        (8, {"dp": 4}, (2, 1, 4)),
        (12, {"tp": 3, "pp": 2}, (3, 2, 2)),
        (12, {"tp": 3, "dp": 2}, (3, 2, 2)),
        (12, {"pp": 3, "dp": 2}, (2, 3, 2)),
        (6, {"tp": 1, "pp": 2, "dp": 3}, (1, 2, 3)),
    ],
)
def test_open_axes_are_filled(world_size: int, given_axes: dict[str, int], expected: tuple[int, ...]) -> None:
    layout = resolve_layout(ParallelConfig(**given_axes), world_size)  # type: ignore[arg-type]
    assert (layout.tp, layout.pp, layout.dp) == expected


@pytest.mark.parametrize(
    ("world_size", "given_axes", "expected"),
    [
        (4, {"ep": 4}, (2, 1, 2)),
        (4, {"ep": 2}, (2, 2, 1)),
        (8, {"ep": 8}, (2, 1, 4)),
        (8, {"ep": 4}, (2, 2, 2)),
        (8, {"ep": 4, "pp": 2}, (2, 2, 2)),
        (8, {"ep": 8, "tp": 4}, (4, 1, 2)),
        (6, {"ep": 3}, (1, 2, 3)),
        (9, {"ep": 9}, (1, 1, 9)),
        # None fits: as without ep, and the rule of ep says so.
        (8, {"ep": 3}, (2, 2, 2)),
        (8, {"ep": 8, "pp": 2}, (2, 2, 2)),
    ],
)
def test_sizes_that_are_left_out_let_ranks_share_experts(
    world_size: int, given_axes: dict[str, int], expected: tuple[int, ...]
) -> None:
    layout = resolve_layout(ParallelConfig(**given_axes), world_size)  # type: ignore[arg-type]
    assert (layout.tp, layout.pp, layout.dp) == expected


@given(st.integers(1, 512), st.sets(st.sampled_from(("tp", "pp", "dp"))), st.data())
@settings(derandomize=True, deadline=None)
def test_every_layout_multiplies_to_the_number_of_processes(
    world_size: int, axes: set[str], data: st.DataObject
) -> None:
    rest, chosen = world_size, {}
    for axis in sorted(axes)[:2]:
        chosen[axis] = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        rest //= chosen[axis]
    layout = resolve_layout(ParallelConfig(**chosen), world_size)  # type: ignore[arg-type]
    assert layout.tp and layout.pp and layout.dp
    assert layout.tp * layout.pp * layout.dp == world_size
    assert all(getattr(layout, axis) == size for axis, size in chosen.items())


@pytest.mark.parametrize(
    ("world_size", "given_axes", "parts"),
    [
        (4, {"tp": 3, "pp": 2, "dp": 1}, ["number of processes", "processes 4", "tp 2 pp 2 dp 1", "6 processes"]),
        (4, {"tp": 3}, ["number of processes", "3", "processes 4", "use"]),
        (8, {"tp": 3, "pp": 2}, ["number of processes", "processes 8", "use"]),
        (4, {"tp": 0}, ["tp must be at least 1", "0", "use 1"]),
        (4, {"dp": -2}, ["dp must be at least 1", "-2", "use 1"]),
        (10**30, {}, ["at most 16777216 processes", f"got {10**30}", "start 16777216 or fewer"]),
    ],
)
def test_impossible_layouts_name_a_possible_one(world_size: int, given_axes: dict[str, int], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        resolve_layout(ParallelConfig(**given_axes), world_size)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


EXPERTS: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "details": ModelDetails(num_experts=8, experts_per_token=2, expert_ffn_size=64),
}
# settings, processes, what the message must contain: the rule, the values, the nearest legal choice.
BROKEN: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"hidden_size": 0}, 1, ["hidden_size must be at least 1", "0"]),
    ({"hidden_size": 130}, 1, ["hidden_size", "num_heads", "130", "4", "128", "136"]),
    ({"hidden_size": 20}, 1, ["hidden_size", "even", "20", "16", "24"]),
    ({"num_heads": 6, "num_kv_heads": 4, "hidden_size": 96}, 1, ["num_heads", "num_kv_heads", "6", "4"]),
    ({"tp": 3, "num_heads": 4}, 12, ["num_heads", "tp", "4", "3", "tp 2 or 4"]),
    ({"tp": 2, "ffn_size": 383}, 2, ["ffn_size", "tp", "383", "382", "384"]),
    (
        {"tp": 4, "num_heads": 12, "num_kv_heads": 3, "hidden_size": 96},
        4,
        ["num_kv_heads", "tp", "3", "4", "num_kv_heads 2 or 4"],
    ),
    ({"ep": 0}, 1, ["parallel.ep must be at least 1", "0"]),
    ({"ep": 2, "tp": 2}, 2, ["shares out the experts", "ep 2", "this model has none", "use ep 1"]),
    (
        {"ep": 2, "tp": 2, "reduction": "exact", **EXPERTS, "details": replace(EXPERTS["details"], expert_ffn_size=36)},
        2,
        [
            "whole blocks of 1024 elements",
            "8 experts / ep 2 x expert_ffn_size 36 / 4",
            "use ep 1, or",
            "reduction fast",
        ],
    ),
    ({"ep": 4, "dp": 4, "moe_load": 0.5, **EXPERTS}, 4, ["moe_load is for how many times the mean", "0.5", "use 1"]),
    ({"moe_load": 2.0, **EXPERTS}, 1, ["moe_load is of ranks that share experts", "got 2 with ep 1", "use moe_load 0"]),
    ({"ep": 3, "dp": 3, **EXPERTS}, 3, ["num_experts must be divisible by ep", "num_experts 8, ep 3", "use ep 1"]),
    ({"ep": 8, "tp": 2, "dp": 2, **EXPERTS}, 4, ["divide the tp * dp ranks", "ep 8, tp 2 * dp 2", "use ep 4"]),
    ({"ep": 2, "tp": 4, "dp": 2, **EXPERTS}, 8, ["tp times a divisor of dp", "ep 2, tp 4, dp 2", "use ep 1 or 4"]),
    ({"tp": 2, "micro_batch_size": 1, "seq_len": 127}, 2, ["micro_batch_size", "seq_len", "tp", "127", "126", "128"]),
    ({"pp": 4, "num_layers": 2}, 4, ["layer", "pp 4", "num_layers 2", "use pp 2"]),
    ({"schedule": "1f1c"}, 1, ["schedule must be one of", "1f1b", "gpipe", "1f1c"]),
    ({"balance": "losses"}, 1, ["balance must be one of", "none, loss, bias", "'losses'"]),
    ({"balance": "bias"}, 1, ["train.balance is of a model with experts", "got bias", "num_experts 0", "use none"]),
    ({"balance_rate": 0.0}, 1, ["train.balance_rate must be positive", "0.0", "use 0.001"]),
    ({"dtype": "float8"}, 1, ["dtype must be one of", "float8", "bfloat16"]),
    ({"zero": 4, "dp": 2}, 2, ["zero must be one of", "4", "3"]),
    ({"zero": 2, "residency": "use", "dp": 2}, 2, ["residency use with zero 2", "zero 3"]),
    ({"device": "gpu"}, 1, ["device must be one of", "gpu", "cuda"]),
    ({"bucket_bytes": 0}, 1, ["bucket_bytes must be at least 1", "0"]),
    ({"steps": 0}, 1, ["steps must be at least 1", "0"]),
    ({"seq_len": 0}, 1, ["seq_len must be at least 1", "0"]),
    ({"micro_batch_size": -1}, 1, ["micro_batch_size must be at least 1", "-1"]),
    ({"num_micro_batches": 0}, 1, ["num_micro_batches must be at least 1", "0"]),
    ({"seed": -1}, 1, ["seed must be", "-1"]),
    ({"eval_micro_batches": -1}, 1, ["eval_micro_batches must be at least 0", "-1"]),
    ({"sample_tokens": -1}, 1, ["sample_tokens must be at least 0", "-1"]),
    ({"eval_every": -1}, 1, ["eval_every must be at least 0", "-1"]),
    ({"eval_every": 5, "eval_micro_batches": 0}, 1, ["eval_every 5", "eval_micro_batches 0", "use", "16"]),
    ({"eval_samples": 9, "eval_micro_batches": 0}, 1, ["eval_samples 9", "eval_micro_batches 0", "use", "16"]),
    ({"held_out": "v", "held_out_fraction": 0.1}, 1, ["data.held_out v", "held_out_fraction 0.1", "leave one out"]),
    ({"eval_every": 5, "held_out_fraction": 0.0}, 1, ["eval_every 5", "held_out_fraction is 0", "use", "0.05"]),
    ({"after_checkpoint": "cp 'x {path}"}, 1, ["after_checkpoint", "cp 'x {path}", "No closing quotation", "quotes"]),
    ({"after_checkpoint": "cp x"}, 1, ["after_checkpoint", "'cp x'", "'cp x {path}'"]),
    ({"after_checkpoint": " "}, 1, ["after_checkpoint", "' '", "'COMMAND {path}'"]),
    ({"after_checkpoint": "cp {path}", "checkpoint_every": 0}, 1, ["after_checkpoint", "checkpoint_every is 0", "100"]),
    ({"spike": "skipp"}, 1, ["train.spike must be skip, rollback or stop", "'skipp'", "use skip"]),
    ({"spike": "rollback", "checkpoint_every": 0}, 1, ["rollback needs checkpoints", "use train.checkpoint_every 100"]),
    ({"keep_best": True, "checkpoint_every": 0, "eval_every": 5}, 1, ["checkpoint_every is 0", "use"]),
    ({"keep_best": True}, 1, ["eval_every is 0", "use train.eval_every 100"]),
    ({"keep_best": True, "eval_every": 30}, 1, ["multiple", "100 and 30", "checkpoint_every 90", "eval_every 10"]),
    ({"sample_every": 5, "sample_tokens": 0}, 1, ["sample_every 5", "sample_tokens 0", "use", "200"]),
    ({"held_out_fraction": 1.0}, 1, ["held_out_fraction must be", "1.0"]),
    ({"held_out_fraction": -0.1}, 1, ["held_out_fraction must be at least 0", "-0.1"]),
    ({"ignore_token": 256}, 1, ["ignore_token", "256", "255"]),
    ({"ignore_token": -1}, 1, ["ignore_token", "-1"]),
    ({"lr": 0.0}, 1, ["lr must be", "0.0"]),
    ({"lr": float("nan")}, 1, ["lr must be", "finite", "nan"]),
    ({"lr": float("inf")}, 1, ["lr must be", "finite", "inf"]),
    ({"beta1": 1.0}, 1, ["beta1 must be", "1.0"]),
    ({"beta2": -0.5}, 1, ["beta2 must be at least 0", "-0.5"]),
    ({"eps": 0.0}, 1, ["eps must be", "0.0"]),
    ({"weight_decay": -1.0}, 1, ["weight_decay must be at least 0", "-1.0"]),
    ({"warmup_steps": -1}, 1, ["warmup_steps must be at least 0", "-1"]),
    ({"min_lr_ratio": 1.5}, 1, ["min_lr_ratio must be", "1.5", "use 1"]),
    ({"clip_norm": -1.0}, 1, ["clip_norm must be at least 0", "-1.0", "use 0"]),
    *(
        case
        for name in ("residual_dropout", "attention_dropout", "mlp_dropout")
        for case in (
            ({name: 1.0}, 1, [f"model.{name} must be below 1", "got 1.0", "use 0.0"]),
            ({name: -0.1}, 1, [f"model.{name} must be at least 0", "got -0.1", "use 0"]),
            ({name: float("nan")}, 1, [f"model.{name} must be finite", "got nan", "use 0.0"]),
        )
    ),
    ({"reduction": "exakt"}, 1, ["train.reduction must be one of", "fast", "exact", "exakt"]),
    (
        {"reduction": "exact", "tp": 3, "hidden_size": 96, "num_heads": 12, "num_kv_heads": 12, "seq_len": 120},
        3,
        [
            "with train.reduction exact tp must divide the number of shards, 4,",
            "num_heads 12, num_kv_heads 12, ffn_size 384 and 8 * 120 tokens",
            "tp 3: use tp 2 or 4, or train.reduction fast",
        ],
    ),
    (
        {"reduction": "exact", "tp": 16, "hidden_size": 256, "num_heads": 16, "num_kv_heads": 16},
        16,
        ["tp must divide the number of shards, 8,", "tp 16: use tp 8, or train.reduction fast"],
    ),
    (
        {"reduction": "exact", "tp": 3, "hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "seq_len": 126},
        3,
        ["tp must divide the number of shards, 1,", "num_kv_heads 3", "tp 3: use tp 1, or train.reduction fast"],
    ),
    (
        {"reduction": "exact", "dp": 3},
        3,
        [
            "with train.reduction exact dp must divide the 4 blocks that the 4 * 3 micro-batches of a step",
            "dp 3: use dp 2 or 4",
            "or train.reduction fast",
        ],
    ),
    (
        {"reduction": "exact", "dp": 16, "num_micro_batches": 1},
        16,
        ["dp must divide the 8 blocks that the 1 * 16 micro-batches", "dp 16: use dp 8", "or train.reduction fast"],
    ),
]


@pytest.mark.parametrize(("leaves", "world_size", "parts"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_rule_says_rule_values_and_remedy(leaves: dict[str, Any], world_size: int, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate(changed(**leaves), world_size)
    message = str(error.value)
    assert "\n" not in message
    assert "use " in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("leaves", "world_size"),
    [
        ({}, 1),
        ({}, 4),
        ({"num_kv_heads": 1, "tp": 4}, 4),
        ({"num_kv_heads": 2, "tp": 4}, 4),
        ({"num_layers": 5, "pp": 4}, 4),
        ({"vocab_size": 250, "ignore_token": 249}, 2),
        ({"clip_norm": 0.0, "warmup_steps": 0, "weight_decay": 0.0}, 1),
        ({"eval_micro_batches": 0, "sample_tokens": 0, "held_out_fraction": 0.0}, 1),
        ({"residual_dropout": 0.0, "attention_dropout": 0.999, "mlp_dropout": 0.5}, 1),
        ({"reduction": "exact", "num_kv_heads": 1, "tp": 4}, 4),
        ({"reduction": "exact", "tp": 1, "pp": 1, "num_micro_batches": 1}, 8),
        ({"reduction": "exact", "tp": 1, "pp": 3, "dp": 2, "num_micro_batches": 3}, 6),
    ],
)
def test_what_is_legal_comes_back_with_its_layout(leaves: dict[str, Any], world_size: int) -> None:
    config = changed(**leaves)
    resolved = validate(config, world_size)
    assert resolved == replace(config, parallel=resolve_layout(config.parallel, world_size))


@pytest.mark.parametrize(("tp", "padded"), [(1, 256), (2, 256), (3, 264), (8, 256), (5, 280)])
def test_vocabulary_is_padded_to_eight_and_tp(tp: int, padded: int) -> None:
    assert ModelConfig(vocab_size=250).padded_vocab_size(tp) == padded


def test_toml_reads_back_equal(tmp_path: Path) -> None:
    config = changed(lr=1 / 3, eps=5e-324, norm_eps=1e-5, tie_embeddings=True, path='a "quoted" é \\ path', tp=2)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config), encoding="utf-8")
    assert load_toml(path, Config()) == config


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_toml_keeps_every_bit_of_a_float(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "float.toml"
    path.write_text(dump_toml(changed(lr=value)))
    assert load_toml(path, Config()).optim.lr.hex() == value.hex()


def test_toml_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('device = "cpu"\n[optim]\nlr = 1\n[parallel]\ntp = 2\n')
    read = load_toml(path, changed(steps=7))
    assert read == changed(steps=7, device="cpu", lr=1.0, tp=2)
    assert isinstance(read.optim.lr, float)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[model]\nhiden_size = 3", ["unknown", "hiden_size", "model.hidden_size"]),
        ("[modle]\nhidden_size = 3", ["unknown", "modle", "model"]),
        ('devize = "cpu"', ["unknown", "devize", "device"]),
        ("model = 3", ["model", "3", "[model]"]),
        ('[train]\nsteps = "many"', ["train.steps", "int", "many"]),
        ("[train]\nsteps = true", ["train.steps", "int", "true", "use 250"]),
        ("[train]\nsteps = 1.5", ["train.steps", "int", "1.5"]),
        ("[model]\ntie_embeddings = 1", ["tie_embeddings", "1"]),
        ('[train]\ndtype = "float8"', ["dtype", "float8", "bfloat16"]),
        ("[data]\npath = 3", ["data.path", "str", "3"]),
        ("[optim]\nlr = false", ["optim.lr", "float", "false"]),
        ("[optim\nlr = 1", ["TOML"]),
    ],
)
def test_bad_toml_is_refused_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_toml(path, Config())
    assert "\n" not in str(error.value)
    for part in [str(path), *parts]:
        assert part in str(error.value)


def test_a_missing_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml.*No such file"):
        load_toml(tmp_path / "nowhere.toml", Config())


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ({"head_size": 10**400}, f"head_size must be at most {2**31}: got 1{'0' * 39}...: use {2**31}"),
        ({"head_size": -2}, "head_size must be at least 0: got -2: use 0"),
        ({"max_positions": -5}, "max_positions must be at least 0: got -5: use 0"),
        ({"attention_scale": math.nan}, "attention_scale must be finite: got nan: use 0.0"),
        ({"attention_scale": math.inf}, "attention_scale must be finite: got inf: use 0.0"),
        ({"local_rope_theta": -1.0}, "local_rope_theta must be at least 0: got -1.0: use 0"),
        ({"local_rope_theta": 0.5}, "local_rope_theta must be at least 1, or 0: got 0.5: use 0 for model.rope_theta"),
        ({"windows": (1,)}, "windows must be one of each layer, or none: got 1 with num_layers 4: use [] or 4 of them"),
        ({"windows": (8, 0, -1, 0)}, "windows must be at least 0: got -1: use 0"),
        ({"windows": (2**31 + 1,) * 4}, f"windows must be at most {2**31}: got {2**31 + 1}: use {2**31}"),
        ({"rope": RopeScaling(factor=math.nan)}, "rope.factor must be finite: got nan: use 1.0"),
        (
            {"rope": RopeScaling("linear", factor=0.0)},
            "rope.factor must be positive with rope_type linear: got 0.0: use that of config.json",
        ),
        (
            {"rope": RopeScaling("yarn", factor=2.0)},
            "rope.original_max_position_embeddings must be positive with rope_type yarn: got 0: "
            "use that of config.json",
        ),
        (
            {"rope": RopeScaling("llama3", 2.0, 64, 4.0, 4.0)},
            "rope.low_freq_factor must be below high_freq_factor: got 4.0 and 4.0: use those of config.json",
        ),
    ],
    ids=str,
)
def test_a_detail_that_none_can_have_is_one_line(details: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        validate(Config(model=ModelConfig(details=ModelDetails(**details))), 1)
    assert str(error.value) == f"model.details.{said}"


def test_details_that_a_model_can_have_pass() -> None:
    rope = RopeScaling("yarn", 4.0, 64)
    details = ModelDetails(64, rope, (8, 0, 8, 0), 1.0, 2**31, True, True, 0.5)
    validate(Config(model=ModelConfig(details=details)), 1)
