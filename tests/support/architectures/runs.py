"""Runs that begin with a drawn model's weights, saved as transformers saves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.architectures.drawn import CONFIGS, LONGROPE, drawn_config
from support.architectures.transformers_models import built
from support.engine.parity import config_of, whole_weights
from tpengine.architectures.model_path import model_at
from tpengine.config import Config, ModelConfig, validate
from tpengine.config.toml import dump_toml
from tpengine.data import open_corpus
from tpengine.hugging_face.beginning import begin_from, check_beginning
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.hugging_face.tokenizer_files import keep_source
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.trainer import Trainer

SIZES: dict[str, dict[str, Any]] = {
    name: dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=40, num_hidden_layers=4, intermediate_size=48)
    for name in CONFIGS
} | {"gpt2": dict(n_layer=4, n_head=4, n_embd=24, n_positions=32)}
SIZES["gemma3"]["layer_types"] = ["sliding_attention", "full_attention"] * 2
SIZES["olmo3"]["layer_types"] = ["sliding_attention", "full_attention"] * 2
SIZES["smollm3"]["no_rope_layers"] = [1, 0, 1, 0]
# Texts are longer than the length from which queries grow.
SIZES["ministral3"] |= {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.3,
    },
    "sliding_window": 5,
}
# transformers changes the factors of longrope when a text reaches the original length; here it is never that long.
SIZES["phi3"] |= {
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}
CPU = torch.device("cpu")


# Name -> (offset, values) of what a rank holds of it.
Pieces = dict[str, tuple[tuple[int, ...], Tensor]]


def saved(architecture: str, directory: Path, dtype: torch.dtype = torch.float64, **given: Any) -> Any:
    """Save a drawn model as transformers does, in several files; return it. `given` are not drawn."""
    entries = {"vocab_size": 256, **SIZES[architecture], **given}
    model = built(drawn_config(architecture, 1, **entries)).to(dtype)
    model.save_pretrained(directory, max_shard_size="100KB")
    return model


def beginning(path: Path, layout: tuple[int, int, int] = (1, 1, 1), zero: int = 0, **train: Any) -> Config:
    """The configuration of a run that begins with what is at `path`."""
    base = config_of(*layout, tied=False, kv_heads=4, num_layers=4, zero=zero)
    settings = replace(base.train, **train)
    model = model_at(ModelConfig(path=str(path)))
    return validate(replace(base, model=model, train=settings), layout[0] * layout[1] * layout[2])


def begun(config: Config, draws: bool = True) -> Trainer:
    """A trainer with those weights; with drawn ones where there is no path."""
    trainer = Trainer(config, open_corpus(config), CPU, draws=draws)
    if config.model.path:
        begin_from(trainer.state, check_beginning(config.model))
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    """Train all steps; return the losses."""
    return [trainer.step.run(step).loss for step in range(trainer.state.part.config.train.steps)]


def pieces_of(trainer: Trainer) -> Pieces:
    """What this rank holds of each parameter, gathered where replicas own slices."""
    with whole_weights(trainer):
        return {
            name: (trainer.state.model.pieces[name].block[0], weight.detach().clone())
            for name, weight in trainer.state.model.held.items()
        }


def trained_run(config: Config) -> dict[str, Tensor]:
    """Make a run; return its masters, or its weights where they are the same."""
    trainer = saved_run(config)
    return {
        name: trainer.state.optimizer.state_of(name).get("master", weight).detach().clone()
        for name, weight in trainer.state.weights.items()
    }


def trained_pieces(config: Config) -> Pieces:
    """Make a run; return what this rank holds at its end."""
    return pieces_of(saved_run(config))


def saved_run(config: Config) -> Trainer:
    """Begin, train and save: a run of ours. With checkpoint_every above the number of steps nothing is trained."""
    trainer = begun(config)
    if dist.get_rank() == 0:
        (Path(config.run_dir) / "config.toml").write_text(dump_toml(config))
        if config.model.path:
            source = check_beginning(config.model)
            assert isinstance(source, ModelDirectory)
            keep_source(source, Path(config.run_dir))
    steps = config.train.steps if config.train.checkpoint_every <= config.train.steps else 0
    for step in range(steps):
        trainer.step.run(step)
    with RunCheckpoints(trainer.state, trainer.planned, Path(config.run_dir)) as checkpoints:
        checkpoints.after_step(config.train.steps)
        checkpoints.wait()
    return trainer
