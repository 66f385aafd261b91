"""Rung: pure. Tables, config.json and the architectures' files: what is refused, and with which words."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.architectures.drawn import CONFIGS, drawn_config

import tpengine.architectures
from tpengine.architectures.config_json import read_rope, written_rope
from tpengine.architectures.describe import ConfigJson, column, heads, replicate, row, vocab
from tpengine.architectures.model_path import model_at
from tpengine.architectures.registry import BUILT_IN, architecture_of, check_architecture, model_of
from tpengine.architectures.table import check_table, find
from tpengine.cli import main
from tpengine.config import ModelConfig
from tpengine.config.settings import RopeScaling
from tpengine.layout.parameters import stage_specs
from tpengine.trust import permit_file

TABLE = {
    "h.*.attn.c_attn": column(heads).transposed.of("layers.*.self_attn.{q,k,v}_proj"),
    "layers.*.*_layernorm": replicate,
    "layers.*.mlp.{gate,up}_proj": column,
    "layers.*.mlp.down_proj": row,
    "wte": vocab.of("embed_tokens"),
}
# What config.json must have.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_a_packed_tensor_is_named_by_all_that_lie_in_it() -> None:
    (found,) = find(TABLE, "layers.3.self_attn.k_proj")
    assert found.name == "h.3.attn.c_attn"
    assert found.packed == tuple(f"layers.3.self_attn.{name}_proj" for name in "qkv")
    assert found.rule.by_heads
    assert found.rule.is_transposed


def test_braces_and_stars_on_both_sides_are_the_same_choice() -> None:
    assert find(TABLE, "layers.1.mlp.up_proj")[0].name == "layers.1.mlp.up_proj"
    assert find(TABLE, "layers.1.mlp.up_proj")[0].packed == ("layers.1.mlp.up_proj",)
    assert find(TABLE, "layers.0.input_layernorm")[0].rule.cut == "replicate"
    assert find(TABLE, "embed_tokens")[0].name == "wte"


def test_stacked_tensors_are_numbered_in_files_and_cut_within_each() -> None:
    table = {
        "layers.*.mlp.experts.#.{gate,up}_proj": column,
        "layers.*.moe.experts.#.w2": row.of("layers.*.mlp.experts.down_proj"),
    }
    up, down = (find(table, f"layers.7.mlp.experts.{name}_proj")[0] for name in ("up", "down"))
    assert (
        up.name == "layers.7.mlp.experts.#.up_proj" and up.is_stacked and up.packed == ("layers.7.mlp.experts.up_proj",)
    )
    assert down.name == "layers.7.moe.experts.#.w2" and down.is_stacked
    assert [rule.dim_of(3) for rule in (column, row, replicate)] == [1, 2, None]
    assert not find(TABLE, "layers.1.mlp.up_proj")[0].is_stacked


def test_a_rule_may_be_of_what_a_model_lacks() -> None:
    check_table(
        {**TABLE, "layers.*.mlp.gate": replicate.optional, "h.*.attn.c_attn": row.optional},
        [
            "layers.0.input_layernorm",
            "layers.0.mlp.up_proj",
            "layers.0.mlp.down_proj",
            "embed_tokens",
        ],
    )


@pytest.mark.parametrize(
    ("table", "module", "said"),
    [
        (TABLE, "layers.0.self_attn.q_norm", "layers.0.self_attn.q_norm has none"),
        ({**TABLE, "layers.*.mlp.*": row}, "layers.0.mlp.up_proj", "layers.0.mlp.up_proj has rules"),
        ({"norm": replicate, **TABLE}, "embed_tokens", "norm, h.*.attn.c_attn"),
    ],
)
def test_a_table_that_does_not_say_one_thing_is_refused(table: Any, module: str, said: str) -> None:
    with pytest.raises(ValueError, match="correct the table") as refused:
        check_table(table, [module])
    assert said in str(refused.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_file_of_an_architecture_is_short(name: str) -> None:
    """At most 40 lines that say something, GPT-2 60: without imports, documentation and blank lines."""
    path = Path(next(iter(tpengine.architectures.__path__))) / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = path.read_text(encoding="utf-8").splitlines()
    counted = [line for number, line in enumerate(lines, 1) if line.strip() and number not in silent]
    assert len(counted) <= (60 if name == "gpt2" else 40)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_covers_its_model(name: str) -> None:
    model = model_of(ConfigJson(values_of(drawn_config(name, 0))))
    check_architecture(model)
    names = [spec.name for spec in stage_specs(model, 1, 0, model.num_layers)]
    assert len(names) == len(set(names))
    assert architecture_of(model) is BUILT_IN[name]


def values_of(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    names = {"Gemma3TextConfig": "Gemma3ForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
    kind = type(config).__name__
    return {**values, "architectures": [names.get(kind, kind.replace("Config", "ForCausalLM"))]}


SCALINGS = [
    RopeScaling(),
    RopeScaling("linear", factor=2.0),
    RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeScaling("yarn", 4.0, 32768, attention_factor=0.8, truncate=False),
    RopeScaling("yarn", 4.0, 32768),
    RopeScaling("longrope", 4.0, 32768, short_factor=(1.0, 1.5), long_factor=(2.0, 3.5)),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_spellings_of_rotary_positions_are_written_equal(scaling: RopeScaling) -> None:
    written = written_rope(500000.0, scaling)
    assert read_rope(written, "config.json") == (500000.0, scaling)
    new = {"rope_parameters": written["rope_parameters"]}
    old = {name: value for name, value in written.items() if name != "rope_parameters"}
    assert read_rope(new, "config.json") == read_rope(old, "config.json") == (500000.0, scaling)


def test_gemmas_two_bases_are_read_in_either_spelling_and_in_neither() -> None:
    """Defaults are Gemma's own: 1,000,000, and 10,000 of layers with a window."""
    values = values_of(drawn_config("gemma3", 0))
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    written = {**values, **written_rope(500000.0, SCALINGS[1], 100.0)}
    without_old = {name: value for name, value in written.items() if name not in old}
    without_new = {name: value for name, value in written.items() if name != "rope_parameters"}
    for spelling in (written, without_old, without_new):
        model = model_of(ConfigJson(spelling))
        assert (model.rope_theta, model.details.local_rope_theta) == (500000.0, 100.0)
        assert model.details.rope == SCALINGS[1]
    sections = {**written["rope_parameters"], "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="rope_type of sliding_attention must be default: got 'linear'"):
        model_of(ConfigJson({**without_old, "rope_parameters": sections}))
    neither = model_of(ConfigJson({name: value for name, value in without_old.items() if name != "rope_parameters"}))
    assert (neither.rope_theta, neither.details.local_rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize("scaling", SCALINGS[1:])
@pytest.mark.parametrize("spelling", ["rope_theta", "rope_scaling"])
def test_spellings_that_differ_are_refused(scaling: RopeScaling, spelling: str) -> None:
    other = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    with pytest.raises(ValueError, match=r"must say the same.*remove the wrong one"):
        read_rope({**written_rope(10000.0, scaling), spelling: other[spelling]}, "config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "the architectures are LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "config.json names one architecture"),
        ({"hidden_size": None}, "must have hidden_size, an integer"),
        ({"hidden_size": "64"}, "hidden_size must be an integer: got '64'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not there yet"),
        (
            {"rope_scaling": {"type": "dynamic"}},
            "one of default, linear, llama3, yarn, longrope: got 'dynamic'",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8}}, "rope_type longrope needs short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0, "2"]}},
            "short_factor of rope_type longrope must be an array of numbers: got [1.0, '2']",
        ),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 7}},
            "model.details.rope.short_factor must be 8 positive numbers, one of each pair of the 16 rotated elements",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "no_rope_layers must be 1 or 0"),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.2},
            "must rotate an even number of a head's elements: got 0.2 with heads of 16, so 3",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor of rope_type linear must be a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "mscale of rotary positions"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of rope_type linear must be at least 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1}},
            "must be above 0 and finite",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
            "beta_slow of rope_type yarn must be below beta_fast: got 2.0 and 1.0",
        ),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 1: got nan"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window must be at least 1, a query's own key: got 0: use null for none",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights must not be quantized"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ],
)
def test_a_config_json_that_says_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 64, **changes}))
    with pytest.raises(ValueError) as refused:
        model_at(ModelConfig(path=str(tmp_path)))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_directory_without_a_readable_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path must be a directory"):
        model_at(ModelConfig(path=str(tmp_path / "absent")))
    with pytest.raises(ValueError, match=r"has a config\.json"):
        model_at(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="valid JSON"):
        model_at(ModelConfig(path=str(tmp_path)))


def test_a_setting_beside_the_path_must_be_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = ModelConfig(path=str(tmp_path), hidden_size=64, num_layers=3, residual_dropout=0.1)
    assert model_at(settings, ["hidden_size"]).residual_dropout == 0.1
    with pytest.raises(ValueError, match=r"num_layers must be what model\.path says: 3 beside .* has 2"):
        model_at(settings, ["num_layers"])
    with pytest.raises(ValueError, match=r"architecture must be what model\.path says: gpt2 beside .* has llama"):
        model_at(replace(settings, architecture="gpt2"), ["architecture"])


OWN = '''"""An architecture of one's own: a block whose halves both read the same norm."""

from tpengine.architectures.describe import (
    Architecture, Attention, FeedForward, Norm, column, heads, llama_sizes, replicate, row, vocab,
)


def parallel(block, x, seq):
    normed = block.norm(x)
    return x + block.attend(normed, seq) + block.feed(normed)


ARCHITECTURE = Architecture(
    "Parallel",
    {
        "embed": vocab.of("embed_tokens"),
        "head": vocab.of("lm_head"),
        "norm": replicate,
        "layers.*.norm": replicate,
        "layers.*.attn.{q,k,v}_proj": column(heads),
        "layers.*.attn.o_proj": row(heads),
        "layers.*.mlp.up_proj": column,
        "layers.*.mlp.down_proj": row,
    },
    lambda model, layer: {
        "norm": Norm("layer"), "attn": Attention(qkv_bias=True), "mlp": FeedForward("gelu", gated=False),
    },
    llama_sizes,
    parallel,
)
'''


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OWN.replace("ARCHITECTURE =", "OTHER ="), "must define ARCHITECTURE"),
        (OWN + "1 / 0\n", "must run: .* ZeroDivisionError"),
    ],
)
def test_a_file_without_an_architecture_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.py").write_text(text)
    permit_file(tmp_path / "own.py")
    with pytest.raises(ValueError, match=said):
        architecture_of(ModelConfig(architecture=str(tmp_path / "own.py")))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of llama, qwen2"):
        architecture_of(ModelConfig(architecture="lama"))


def test_a_file_of_ones_own_is_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    permit_file(tmp_path / "own.py")
    model = ModelConfig(architecture=str(tmp_path / "own.py"))
    check_architecture(model)
    assert "layers.3.attn.k_proj.bias" in [spec.name for spec in stage_specs(model, 2, 0, 4)]


@pytest.mark.parametrize(
    ("changes", "tp", "said"),
    [
        ({}, "3", "the model's heads must be divisible by tp: 4 heads, tp 3: use --tp 2 or 4"),
        ({"intermediate_size": 97}, "2", "ffn_size must be divisible by tp: ffn_size 97, tp 2: use tp 1"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            "2",
            "num_kv_heads must divide tp or be divisible by it: num_kv_heads 3, tp 2: use tp 1",
        ),
    ],
)
def test_a_remedy_leaves_a_directorys_sizes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], tp: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    assert main(["schedule", "--model", str(tmp_path), "--tp", tp, "--pp", "1"]) == 2
    assert capsys.readouterr().err == f"tpengine: error: {said}\n"


def test_a_plan_and_its_bytes_need_config_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    assert main(["schedule", "--model", str(tmp_path), "--tp", "2", "--pp", "4"]) == 0
    assert "bytes of rank 3: weights" in capsys.readouterr().out
