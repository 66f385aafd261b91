"""Rung: gloo ranks. What is exported, from any layout, transformers loads: same tensors, same logits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.parity import assert_exported
from support.architectures.runs import Pieces, beginning, saved, trained_pieces, trained_run
from support.architectures.transformers_models import Widened, ours
from support.architectures.transformers_models import config_json as config_json_of
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.registry import model_of
from tpengine.cli import main
from tpengine.commands.weights import config_json, export
from tpengine.config import Config

# What transformers 4 alone reads.
OF_4 = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
LAYOUTS = {"gpt2": (1, 2, 2), "qwen3": (2, 2, 1)}


def run_from(
    ranks: RankPool, theirs: Path, run: Path, layout: tuple[int, int, int], **train: Any
) -> tuple[Config, list[Pieces]]:
    """Begin a run with what is at `theirs`, train and save it; return what its ranks hold at its end."""
    run.mkdir()
    config = replace(beginning(theirs, layout, zero=3 if layout[0] > 1 else 0, **train), run_dir=str(run))
    return config, ranks.run(trained_pieces, math.prod(layout), config)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize(
    "architecture", [name if name in LAYOUTS else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_what_is_not_trained_comes_back_byte_for_byte(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """In 16 bits, trained in 16 bits: the same names, dtypes and bytes."""
    saved(architecture, tmp_path / "theirs", torch.bfloat16)
    layout = LAYOUTS.get(architecture, (1, 2, 1))
    run_from(ranks, tmp_path / "theirs", tmp_path / "run", layout, dtype="bfloat16", steps=1, checkpoint_every=2)
    export(tmp_path / "run", None, tmp_path / "out")
    got, want = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "theirs")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.equal(got[name], tensor), name


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize(
    "architecture", [name if name in LAYOUTS else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_transformers_loads_what_was_trained(ranks: RankPool, tmp_path: Path, architecture: str) -> None:

    saved(architecture, tmp_path / "theirs")
    layout = LAYOUTS.get(architecture, (1, 2, 1))
    config, held = run_from(ranks, tmp_path / "theirs", tmp_path / "run", layout, steps=2, checkpoint_every=2)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "float64"]) == 0

    theirs = assert_exported(tmp_path / "out", config.model, held)
    tokens = torch.arange(2 * config.train.seq_len).view(2, -1) % config.model.vocab_size
    with Widened():
        want = theirs(tokens).logits
    again = model_of(ConfigJson(json.loads((tmp_path / "out" / "config.json").read_text())))
    assert replace(again, path=config.model.path) == config.model
    net = ours(again, tensors_of(tmp_path / "out"))
    got = net(tokens.flatten(), config.train.seq_len)[:, : again.vocab_size].view(want.shape)
    # transformers rounds Gemma's scale of the embedding to float32, but not here, where it computes in float64.
    assert (got - want).abs().max() <= (1e-6 if architecture == "gemma3" else 1e-10) * want.abs().max()
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    assert not any(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_json_says_the_same_to_either_version(tmp_path: Path, architecture: str, seed: int) -> None:
    """What transformers 4 reads is there, equals what 5 reads, and is read here as what the run began from."""
    # Version 4 knows a pattern of windows, version 5 a list.
    kinds = ["full_attention", "sliding_attention"]
    types = [kinds[bool((layer + 1) % (seed + 1))] for layer in range(4)]
    given = {"num_hidden_layers": 4, "layer_types": types} if architecture == "gemma3" else {}
    source = config_json_of(drawn_config(architecture, seed, **given)).values
    (tmp_path / "config.json").write_text(json.dumps(source))
    model = model_of(ConfigJson(source))
    config = config_of(1, 1, 1, tied=True, kv_heads=2)
    written = config_json(replace(config, model=model), tmp_path)
    # Each version alone.
    # It knew lists of layers when OLMo 3 came.
    of_5_alone = ("rope_parameters",) if architecture == "olmo3" else ("rope_parameters", "layer_types")
    of_4 = {name: value for name, value in written.items() if name not in of_5_alone}
    of_5 = {name: value for name, value in written.items() if name not in OF_4}
    assert model_of(ConfigJson(written)) == model_of(ConfigJson(of_5)) == model
    assert model_of(ConfigJson(of_4)) == model
    if architecture != "gpt2":
        assert written["rope_theta"] == model.rope_theta


def test_a_run_from_drawn_weights_is_a_llama(ranks: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "run").mkdir()
    config = config_of(1, 2, 1, tied=True, kv_heads=2)
    config = replace(config, train=replace(config.train, steps=1, checkpoint_every=1), run_dir=str(tmp_path / "run"))
    ranks.run(trained_run, 2, config)
    assert len(export(tmp_path / "run", 1, tmp_path / "out", "float32")) == 2 + 9 * config.model.num_layers
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_what_cannot_be_exported_is_refused(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("qwen3", tmp_path / "theirs")
    run_from(ranks, tmp_path / "theirs", tmp_path / "run", (1, 1, 1), steps=1, checkpoint_every=1)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("")
    for arguments, said in (
        (["--out", str(full)], "an export directory must be empty"),
        (["--out", str(tmp_path / "out"), "--step", "4"], "has those of steps 1, not 4"),
        (["--out", str(tmp_path / "out"), "--dtype", "int8"], "--dtype: must be one of float64, float32"),
    ):
        assert main(["export", str(tmp_path / "run"), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "an export needs the directory of a run" in capsys.readouterr().err
    file = next((tmp_path / "run" / "checkpoints").rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "run" / "config.json").unlink()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "an export needs the config.json of its architecture" in capsys.readouterr().err
