"""What a run leaves behind that others continue: its configuration, and checkpoints without tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import Index, write_index
from tpengine.checkpoint.resume import state_of
from tpengine.commands.arguments import parse_config
from tpengine.config import Config, ParallelConfig, TrainConfig, validate
from tpengine.config.settings import ModelDetails
from tpengine.config.toml import dump_toml


def saved_run(tp: int, pp: int, dp: int, num_micro_batches: int = 4) -> Config:
    config = Config(
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        train=TrainConfig(num_micro_batches=num_micro_batches, micro_batch_size=4),
    )
    return validate(config, tp * pp * dp)


def of_experts(**details: Any) -> Config:
    base = saved_run(1, 1, 4)
    numbers = ModelDetails(num_experts=8, experts_per_token=2, expert_ffn_size=64, **details)
    return replace(base, model=replace(base.model, architecture="qwen3_moe", details=numbers))


def write_checkpoint(run_dir: Path, config: Config, step: int = 10) -> Path:
    directory = CheckpointDirectory(run_dir / "checkpoints")
    write_index(directory.begin(step), Index(step, {}, {}, state_of(config, "f" * 64, step)))
    directory.complete(step)
    return directory.of_step(step)


def begin(run_dir: Path, *arguments: str, world: int = 4) -> Config:
    """What a run's first start leaves behind: config.toml and a checkpoint."""
    config = parse_config([*arguments, "--run-dir", str(run_dir)], world)
    (run_dir / "config.toml").write_text(dump_toml(config))
    write_checkpoint(run_dir, config)
    return config
