"""Rung: GPU. The same engine on CUDA: one card, and several ranks on one card through the host.

Skips only for want of a GPU. NCCL between cards needs two of them and is not checked here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import Outcome, compare, config_of, outcome_of
from rank_pool import RankPool
from tpkernels.random import normal_block

from tpengine.config import Config, validate
from tpengine.data import open_corpus
from tpengine.forward_pass import held_out_loss, sample
from tpengine.metrics import step_record
from tpengine.presets import llama_1b
from tpengine.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def train_on(config: Config, device: str) -> Outcome:
    """Train on `device`; return the outcome on the host."""
    trainer = Trainer(config, open_corpus(config), torch.device(device))
    numbers, parameters = outcome_of(trainer)
    return numbers, {name: (offset, value.cpu()) for name, (offset, value) in parameters.items()}


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1)])
def test_ranks_on_one_card_train_to_the_cpus_parameters(ranks: RankPool, dp: int, tp: int, pp: int) -> None:
    """In float64, over gloo with several ranks on one card: every loss, norm and parameter as on one CPU process."""
    (reference,) = ranks.run(train_on, 1, config_of(1, 1, 1, tied=True, kv_heads=1), "cpu")
    outcomes = ranks.run(train_on, dp * tp * pp, config_of(dp, tp, pp, tied=True, kv_heads=1), "cuda")
    compare(outcomes, reference)


def evaluate_on(config: Config, device: str) -> tuple[float, list[int]]:
    trainer = Trainer(config, open_corpus(config), torch.device(device))
    return held_out_loss(trainer), sample(trainer, [100, 101], 20)


def test_held_out_loss_and_sample_match_the_cpus(ranks: RankPool) -> None:
    config = config_of(1, 2, 2, tied=False, kv_heads=1)
    cpu, cuda = (ranks.run(evaluate_on, 4, config, device)[0] for device in ("cpu", "cuda"))
    assert abs(cuda[0] - cpu[0]) <= 1e-9 * cpu[0]
    assert cuda[1] == cpu[1]


def test_initial_weights_have_the_cpus_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        arguments = (3, "w", (300, 257), (10, 20), (200, 100))
        cpu = normal_block(*arguments, std=0.02, dtype=dtype)
        assert torch.equal(normal_block(*arguments, std=0.02, dtype=dtype, device="cuda").cpu(), cpu)


def train_one_billion(config: Config) -> tuple[list[float], dict[str, float]]:
    device = torch.device("cuda", 0)
    trainer = Trainer(config, open_corpus(config), device)
    losses = [trainer.train_step(step).loss for step in range(config.train.steps)]
    record = step_record(
        config, device, step=0, loss=losses[-1], grad_norm=1.0, lr=1.0, step_seconds=1.0, peak_memory_bytes=0
    )
    return losses, record


def test_a_billion_parameters_train_in_bfloat16_on_one_card(ranks: RankPool) -> None:
    base = llama_1b()
    small_batch = replace(base.train, micro_batch_size=1, num_micro_batches=2, steps=10)
    config = validate(replace(base, train=small_batch, optim=replace(base.optim, warmup_steps=2)), 1)
    (losses, record), *_ = ranks.run(train_one_billion, 1, config, seconds=500)
    assert losses[-1] < losses[0] - 1
    assert record["mfu_attention_full"] > record["mfu_attention_causal"] > 0


def test_the_training_script_runs_over_nccl_on_one_card(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpengine.train", "--device", "cuda", "--train.steps", "20", "--run-dir", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1
