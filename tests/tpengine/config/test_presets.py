"""Rung: pure. Presets are legal configurations of the size they claim."""

from __future__ import annotations

import re

import pytest

from tpengine.config import Config, validate
from tpengine.config.presets import PRESETS, llama_1b, llama_8b, tiny
from tpengine.layout.parameters import num_parameters


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_preset_is_legal_for_common_numbers_of_processes(name: str, world_size: int) -> None:
    validate(PRESETS[name](), world_size)


@pytest.mark.parametrize("name", PRESETS)
def test_docstring_states_the_exact_number_of_parameters(name: str) -> None:
    stated = re.search(r"([\d,]+) parameters", PRESETS[name].__doc__ or "")
    assert stated is not None
    assert int(stated[1].replace(",", "")) == num_parameters(PRESETS[name]().model)


def test_tiny_is_the_default() -> None:
    assert tiny() == Config()


def test_llama_8b_is_llama_3_8b() -> None:
    """The sizes of its config.json."""
    model, train = llama_8b().model, llama_8b().train
    assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads) == (4096, 32, 32, 8)
    assert (model.ffn_size, model.vocab_size, model.rope_theta, model.norm_eps) == (14336, 128256, 500000.0, 1e-5)
    assert (train.seq_len, train.dtype, model.tie_embeddings) == (8192, "bfloat16", False)


def test_llama_1b_is_what_its_name_says() -> None:
    config = llama_1b()
    assert 1.0e9 <= num_parameters(config.model) < 1.2e9
    assert config.train.dtype == "bfloat16"
    assert not config.model.tie_embeddings
