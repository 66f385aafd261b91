"""Rung: pure. A misspelled name is recognised; another thing's name never is."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.dtypes import DTYPES, dtype_named
from tpengine.spelling import did_you_mean, meant, use

MODELS = ("tiny", "bench", "llama_1b", "llama_8b", "llama_70b", "certify")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma3")
MACHINES = ("h100", "h200", "b200", "b300", "a100_80gb", "mi300x", "cpu")
SIZES = ("tp", "pp", "dp", "schedule", "recompute", "zero", "num_heads", "num_layers", "num_micro_batches")


@pytest.mark.parametrize(
    ("text", "choices", "choice"),
    [
        ("tinny", MODELS, "tiny"),
        ("llama-1b", MODELS, "llama_1b"),
        ("lama_70b", MODELS, "llama_70b"),
        ("num_head", SIZES, "num_heads"),
        ("recomptue", SIZES, "recompute"),
        ("num_microbatches", SIZES, "num_micro_batches"),
        ("1f1", ("gpipe", "1f1b"), "1f1b"),
        ("zb_h1", ("zb-h1", "zbv"), "zb-h1"),
        ("bflot16", DTYPES, "bfloat16"),
        ("mi_300x", MACHINES, "mi300x"),
        ("a100_80b", MACHINES, "a100_80gb"),
        ("gpu", ("auto", "cpu", "cuda"), "cuda"),
    ],
)
def test_a_misspelled_name_is_recognised(text: str, choices: tuple[str, ...], choice: str) -> None:
    assert meant(text, choices) == choice
    assert use(text, choices) == f"use {choice}"
    assert did_you_mean(text, choices, "train.") == f"did you mean train.{choice}?"


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("fp8", DTYPES),
        ("float8", DTYPES),
        ("float23", DTYPES),
        ("bfloat32", DTYPES),
        *((name, MACHINES) for name in ("h300", "mi300a", "gh100", "gb200", "b100", "h100e")),
        # As near to float16 as to bfloat16.
        ("bloat16", DTYPES),
        *((name, SIZES) for name in ("cp", "ep", "sp", "experts", "num_experts")),
        *((name, MODELS) for name in ("llama_7b", "llama_13b", "llama", "tinyllama", "mistral_7b")),
        *((name, ARCHITECTURES) for name in ("mixtral", "qwen", "qwen3_moe", "gemma2", "gpt", "bert")),
        ("gpu", SIZES),
        ("", SIZES),
    ],
)
def test_another_things_name_suggests_none(text: str, choices: tuple[str, ...]) -> None:
    assert meant(text, choices) is None
    assert use(text, choices) == "use one of these"
    assert did_you_mean(text, choices) == f"use one of {', '.join(choices)}"


@given(st.text(string.ascii_lowercase + string.digits + "_-", max_size=20))
@settings(derandomize=True, deadline=None)
def test_what_is_suggested_has_the_digits_that_were_typed(text: str) -> None:
    for choices in (MODELS, ARCHITECTURES, DTYPES, SIZES):
        choice = meant(text, choices)
        if choice is not None:
            assert [c for c in choice if c.isdigit()] == [c for c in text if c.isdigit()]


@given(st.sampled_from([*SIZES, *MODELS]), st.data())
@settings(derandomize=True, deadline=None)
def test_two_letters_that_changed_places_are_seen(name: str, data: st.DataObject) -> None:
    places = [i for i in range(len(name) - 1) if name[i : i + 2].isalpha() and len(name) > 3]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    assert meant(name[:place] + name[place + 1] + name[place] + name[place + 2 :], [*SIZES, *MODELS]) == name


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("bf16", "BF16", "bfloat16", "torch.bfloat16"), "bfloat16"),
        (("fp16", "half", "float16", "f16", " FP16 "), "float16"),
        (("fp32", "float", "single", "torch.float32"), "float32"),
        (("fp64", "double", "float64"), "float64"),
    ],
)
def test_a_dtype_has_all_its_names(names: tuple[str, ...], dtype: str) -> None:
    assert {dtype_named(name) for name in names} == {dtype}


@pytest.mark.parametrize("name", ["fp8", "tf32", "int8", "", "bf61"])
def test_what_is_no_dtype_here_stays_as_it_is(name: str) -> None:
    assert dtype_named(name) == name
