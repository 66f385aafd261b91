"""Rung: pure. config.json is read as transformers reads it: published ones, and with entries missing or changed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.published import PUBLISHED

from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.model_path import dropout_not_taken
from tpengine.architectures.registry import model_of
from tpengine.config import ModelConfig
from tpengine.layout.parameters import stage_specs

# Entries that change no result of training: what generation, other heads and other programs read, and dropout rates,
# which are settings of a run. A padding token is the habit that architectures/README.md speaks of.
_UNREAD = {
    *("_name_or_path", "chunk_size_feed_forward", "dtype", "initializer_range", "is_encoder_decoder", "model_type"),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache"),
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("max_position_embeddings", "pretraining_tp", "reorder_and_upcast_attn"),
    # Of a loss that is a setting of a run: train.balance.
    *("output_router_logits", "router_aux_loss_coef"),
    # Read nowhere by transformers.
    *("attn_logit_softcapping", "id2label", "label2id"),
}
# Entries that layer_types stands for, which transformers writes beside them.
_BESIDE_LAYER_TYPES = {"max_window_layers", "use_sliding_window", "_sliding_window_pattern", "sliding_window"}


def read(values: dict[str, Any]) -> ModelConfig | None:
    """The model, its head size written out; None if it is refused, in one line."""
    try:
        model = model_of(ConfigJson(values))
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    return replace(model, details=replace(model.details, head_size=model.head_size))


def full(config: Any, architecture: str) -> dict[str, Any]:
    """Every entry of a configuration of transformers."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**values, "architectures": [architecture]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_read_as_by_transformers(name: str) -> None:
    """In the spelling of its directory and in that of transformers 5; it has as many parameters as it is known for."""
    from transformers import AutoConfig

    values, num_parameters = PUBLISHED[name]
    again = full(AutoConfig.for_model(**values), values["architectures"][0])
    model = read(values)
    assert model is not None
    assert model == read(again)
    specs = stage_specs(model, 1, 0, model.num_layers)
    assert sum(math.prod((spec.valid_rows or spec.shape[0], *spec.shape[1:])) for spec in specs) == num_parameters


@pytest.mark.by_default("gemma3-1", "gpt2-1", "llama-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_missing_entry_is_what_transformers_takes_it_for(architecture: str, seed: int) -> None:
    """Or it is refused. Null too, where transformers takes it."""
    config = drawn_config(architecture, seed)
    values = full(config, _name_of(config))
    assert read(values) is not None
    num_same = 0
    for entry in values.keys() - {"architectures"}:
        without = {name: value for name, value in values.items() if name != entry}
        for changed in (without, {**without, entry: None}):
            ours = read(changed)
            try:
                theirs = full(type(config)(**changed), values["architectures"][0])
            except Exception:
                continue  # such a file has no meaning
            if ours is not None:
                num_same += 1
                assert ours == read(theirs), entry
    assert num_same > len(values)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", CONFIGS)
def test_an_entry_that_changes_results_is_read_or_refused(architecture: str, seed: int) -> None:
    config = drawn_config(architecture, seed)
    values = full(config, _name_of(config))
    unread = _UNREAD | (_BESIDE_LAYER_TYPES if "layer_types" in values else set())
    # What no_rope_layers stands for.
    unread |= {"no_rope_layer_interval"} if "no_rope_layers" in values else set()
    # Either needs the other.
    unread |= {"use_sliding_window", "sliding_window"} if values.get("use_sliding_window") is False else set()
    # Of longrope.
    if values.get("rope_parameters", {}).get("rope_type") == "default":
        unread |= {"original_max_position_embeddings"}
    for entry in values.keys() - unread - {"architectures"}:
        for other in _others(values[entry]):
            assert read({**values, entry: other}) != read(values), f"{entry}: {values[entry]} and {other} are one"


def test_mistral_has_one_window_for_all_layers() -> None:
    """As transformers computes it, whatever layer_types says."""
    values = {**PUBLISHED["Mistral 7B v0.1"][0], "layer_types": ["full_attention"] * 32}
    assert read(values) == read(PUBLISHED["Mistral 7B v0.1"][0])


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_longrope_of_phi_has_old_names(old_name: str) -> None:
    values = {
        **PUBLISHED["Phi-3 mini 4k"][0],
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    }
    rope = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    old, new = (read({**values, "rope_scaling": {"type": name, **rope}}) for name in (old_name, "longrope"))
    assert old == new is not None


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [2 * value + 1]
        case str():
            return ["relu"]
        case None:
            return [0.5, 7]
    return []


def _name_of(config: Any) -> str:
    names = {"Gemma3TextConfig": "Gemma3ForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
    kind = type(config).__name__
    return names.get(kind, kind.replace("Config", "ForCausalLM"))


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_far_too_many_layers_are_refused_before_they_are_listed(name: str) -> None:
    values = next(of for of, _ in PUBLISHED.values() if name in of)
    with pytest.raises(ValueError, match=f"{name} must be at most 16384: got 1000000000: correct it"):
        model_of(ConfigJson({**values, name: 10**9}))


NUMBERS = (0, -1, True, "3", 1.5, 2**60, 10**5000, float("nan"), float("inf"), [], {})


@pytest.mark.parametrize("published", ["Mistral 7B v0.1", "GPT-2"])
def test_a_number_that_cannot_be_is_refused_by_its_file_and_its_name(published: str) -> None:
    """All sizes, with all kinds of wrong values; before, rules named a setting that nobody had given."""
    values = next(of for name, (of, _) in PUBLISHED.items() if name.startswith(published))
    names = [
        name for name in values if name.startswith(("n_", "num_", "hidden_size", "intermediate", "vocab", "rope_t"))
    ]
    names = [name for name in names if values[name] is not None and name not in ("n_ctx", "n_inner")]
    assert len(names) >= 4
    for name in names:
        for number in NUMBERS:
            if name.startswith("rope") and number in (1.5, 2**60):
                continue
            with pytest.raises(ValueError) as error:
                model_of(ConfigJson({**values, name: number}, "DIR/config.json"))
            said = str(error.value)
            assert said.startswith(f"DIR/config.json: {name} must be ") and "\n" not in said and len(said) < 200
    # What two numbers are together names the file.
    heads = next(name for name in names if name in ("n_head", "num_attention_heads"))
    with pytest.raises(ValueError, match=r"^DIR/config.json: .*num_heads 7"):
        model_of(ConfigJson({**values, heads: 7}, "DIR/config.json"))


def test_dropout_that_a_run_does_not_take_over_is_said(tmp_path: Path) -> None:
    def said(values: dict[str, Any], **rates: float) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return dropout_not_taken(ModelConfig(path=str(tmp_path), **rates))  # type: ignore[arg-type]

    has, gpt2 = f"{tmp_path}/config.json has", {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.3}
    assert said({}) == said({"attention_dropout": 0.0}) == said({"attention_dropout": None}) == ""
    assert said({"attention_dropout": 0.1}) == (
        f"{has} attention_dropout 0.1, and this run drops nothing there: "
        "--model.attention-dropout 0.1 would train with it"
    )
    assert said({"attention_dropout": 0.1}, attention_dropout=0.2) == ""
    assert said(gpt2) == (
        f"{has} attn_pdrop 0.1, resid_pdrop 0.2, embd_pdrop 0.3, and this run drops nothing there: "
        "--model.attention-dropout 0.1 --model.residual-dropout 0.2 would train with it, but for embd_pdrop, which no "
        "setting has"
    )
    assert said(gpt2, attention_dropout=0.1, residual_dropout=0.1).endswith("drops nothing there: no setting has it")
