"""Rung: pure. config.json is read as transformers reads it: published ones, and with entries missing or changed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.published import PUBLISHED

from tpengine.architectures.describe import ConfigJson
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
    for entry in values.keys() - unread - {"architectures"}:
        for other in _others(values[entry]):
            assert read({**values, entry: other}) != read(values), f"{entry}: {values[entry]} and {other} are one"


def test_mistral_has_one_window_for_all_layers() -> None:
    """As transformers computes it, whatever layer_types says."""
    values = {**PUBLISHED["Mistral 7B v0.1"][0], "layer_types": ["full_attention"] * 32}
    assert read(values) == read(PUBLISHED["Mistral 7B v0.1"][0])


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
