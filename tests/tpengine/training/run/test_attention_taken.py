"""Rung: pure. Whose attention a run takes is one line at its start; what torch does not compute is refused before that.

The GPU is faked. tests/kernels/ops/attention/test_choice.py has the rule itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tpkernels.launch import Target
from tpkernels.ops.attention import choice
from tpkernels.ops.attention.choice import Gpu

from tpengine.config import Config, validate, validate_run
from tpengine.config.presets import preset_config
from tpengine.runs.opening import attention_taken

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H100 on which cuDNN takes heads of up to 128, and FlashAttention windows and documents; no file."""
    gpu = Gpu("NVIDIA H100", Target("cuda", 90), 91501)
    monkeypatch.setattr(choice, "gpu_of", functools.cache(lambda device: gpu))
    agrees = functools.cache(lambda backend, *of: backend == "cudnn" and of[-1] <= 128)
    monkeypatch.setattr(choice, "_torch_agrees", agrees)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(choice, "tuned_attention", lambda *of: None)
    choice.forget()
    yield
    choice._choose.cache_clear()


def configured(sections: dict[str, dict[str, Any]] | None = None, **train: Any) -> Config:
    base = preset_config("llama_1b")
    config = replace(base, train=replace(base.train, seq_len=2048, dtype="bfloat16", **train))
    for section, values in (sections or {}).items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def taken(config: Config) -> str:
    return attention_taken(validate(config, 1), GPU)


@pytest.mark.usefixtures("hopper")
def test_it_is_one_line() -> None:
    assert taken(configured()) == (
        "torch's cuDNN: by rule for sm_90; gradients may differ from run to run: --train.attention ours repeats them"
    )
    assert taken(configured(attention="torch")) == "torch's cuDNN: as asked for"
    assert taken(configured(attention="ours")) == "ours: as asked for"
    assert taken(configured({"model": {"attention_dropout": 0.1}})) == (
        "ours: it drops probabilities by a mask of its own, not by position"
    )
    assert taken(configured(reduction="exact")) == "ours: exact mode's bits repeat"


@pytest.mark.usefixtures("hopper")
def test_layers_of_several_kinds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with windows in some layers."""
    model = preset_config("llama_1b").model
    windows = tuple(512 if layer % 2 else 0 for layer in range(model.num_layers))
    details = replace(model.details, windows=windows)
    config = configured({"model": {"architecture": "mistral", "details": details}})
    assert taken(config).startswith("torch's cuDNN: by rule for sm_90 (8 of 16 layers), torch's varlen_attn: by rule")
    monkeypatch.setattr(choice, "varlen_attn", lambda query: query)
    choice._choose.cache_clear()
    assert "ours: varlen_attn of torch" in taken(config)
    with pytest.raises(ValueError, match=r"has no enable_gqa and no scale and no window_size: use attention auto"):
        taken(replace(config, train=replace(config.train, attention="torch")))


@pytest.mark.usefixtures("hopper")
def test_phases_that_differ_are_said_one_by_one(tmp_path: Path) -> None:
    """Their layers are not added up; phases that are alike are said once."""
    given, config = tmp_path / "phases.toml", replace(configured(), phases=str(tmp_path / "phases.toml"))
    given.write_text("[[phase]]\nuntil = 10\ntrain.seq_len = 256\n\n[[phase]]\ntrain.seq_len = 2048\n")
    assert attention_taken(validate_run(config, 1), GPU) == (
        "phase 1: ours: 256 tokens are fewer than 512; phase 2: torch's cuDNN: by rule for sm_90; "
        "gradients may differ from run to run: --train.attention ours repeats them"
    )
    given.write_text("[[phase]]\nuntil = 10\n\n[[phase]]\ntrain.seq_len = 1024\n")
    assert attention_taken(validate_run(config, 1), GPU) == taken(configured())


@pytest.mark.parametrize(
    ("sections", "train", "reason"),
    [
        ({}, {"reduction": "exact"}, "with train.reduction exact attention is ours, whose bits repeat"),
        ({"model": {"attention_dropout": 0.1}}, {}, "and model.attention_dropout is 0.1"),
        ({}, {"dtype": "float32"}, "it is for 16 bits, and train.dtype is float32"),
    ],
)
def test_what_torch_never_computes_alike_is_refused_with_the_settings(
    sections: dict[str, dict[str, Any]], train: dict[str, Any], reason: str
) -> None:
    config = configured(sections, attention="torch")
    config = replace(config, train=replace(config.train, **train))
    with pytest.raises(ValueError) as refused:
        validate(config, 1)
    message = str(refused.value)
    assert message.startswith("train.attention torch must be what torch computes alike: ") and reason in message
    assert message.endswith(": use train.attention auto, or ours")


def test_a_cpu_has_no_attention_of_torchs_to_ask_for() -> None:
    config = validate(configured(attention="torch"), 1)
    with pytest.raises(ValueError, match="it is for GPUs of NVIDIA, and the device is cpu"):
        attention_taken(config, torch.device("cpu"))


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.attention must be one of auto, ours, torch: got 'tensor'"):
        validate(configured(attention="tensor"), 1)
