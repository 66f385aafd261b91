"""Rung: GPU. The same engine on CUDA: one card, and several ranks on one card through the host.

Checkpoints from and to a card, and the parallelism of any module on one, are here too.

Skips only for want of a GPU. NCCL between cards needs two of them and is not checked here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import DType, Found, alone, assert_same_bits, exact_config, merge, train_steps
from support.engine.parity import Outcome, compare, config_of, outcome_of
from support.ranks.progress import run_program
from support.ranks.rank_pool import RankPool
from torch import nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.random import normal_block

from tpengine.checkpoint.resume import checkpoints_of, find_checkpoint, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config, validate
from tpengine.config.presets import llama_1b
from tpengine.data import open_corpus
from tpengine.layers import torch_attention
from tpengine.modules import DataParallel, Pipeline
from tpengine.observe.metrics import step_record
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of, restore

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


def train_exactly_on_a_card(config: Config) -> Found:
    trainer = Trainer(config, open_corpus(config), torch.device("cuda"))
    return train_steps(trainer, 0, config.train.steps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1)])
def test_exact_mode_gives_the_bits_of_one_process_on_one_card(
    ranks: RankPool, dtype: DType, dp: int, tp: int, pp: int
) -> None:
    config = exact_config(dp, tp, pp, dtype=dtype)
    want = merge(alone(config), ranks.run(train_exactly_on_a_card, 1, alone(config)))
    assert_same_bits(merge(config, ranks.run(train_exactly_on_a_card, dp * tp * pp, config)), want)


def losses_in_bfloat16(config: Config, whose: Literal["ours", "torch"]) -> tuple[list[float], int]:
    """The losses of some steps on a card, and how many calls were torch's attention."""
    calls = []
    kept = torch_attention.attention_by_torch

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(given[3])
        return kept(*given, **options)

    config = replace(config, train=replace(config.train, dtype="bfloat16", attention=whose))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "attention_by_torch", counted)
        trainer = Trainer(config, open_corpus(config), torch.device("cuda"))
        return [trainer.step.run(step).loss for step in range(config.train.steps)], len(calls)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ((1, 1, 1), {}),
        ((1, 2, 1), {"recompute": "attention"}),
        ((1, 1, 2), {"schedule": "zb-h1"}),
        ((2, 2, 1), {"zero": 3}),
    ],
    ids=str,
)
def test_torchs_attention_trains_as_ours(
    ranks: RankPool, layout: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """Both round to 16 bits, each where it does: their losses are within a rounding of either."""
    (want, none), *_ = ranks.run(losses_in_bfloat16, 1, config_of(1, 1, 1, tied=False, kv_heads=2), "ours")
    dp, tp, pp = layout
    config = config_of(*layout, tied=False, kv_heads=2, **settings)
    found = ranks.run(losses_in_bfloat16, dp * tp * pp, config, "torch")
    assert none == 0 and all(number > 0 for _, number in found)
    within = 2 * torch.finfo(torch.bfloat16).eps
    assert all(abs(got - loss) < within * loss for losses, _ in found for got, loss in zip(losses, want, strict=True))


def evaluate_on(config: Config, device: str) -> tuple[float, list[int]]:
    trainer = Trainer(config, open_corpus(config), torch.device(device))
    return held_out_loss(trainer.state), sample(trainer.state, [100, 101], 20)


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


def save_from(config: Config, run_dir: str, device: str) -> list[float]:
    """Train two steps, save, train on; return the losses after the save."""
    trainer = Trainer(config, open_corpus(config), torch.device(device))
    for step in range(2):
        trainer.step.run(step)
    saver = Saver(checkpoints_of(run_dir), keep=1)
    saver.save(2, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), 2))
    losses = [trainer.step.run(step).loss for step in (2, 3)]
    assert saver.wait() is None
    return losses


def resume_on(config: Config, run_dir: str, device: str) -> list[float]:
    trainer = Trainer(config, open_corpus(config), torch.device(device))
    checkpoint = find_checkpoint(replace(config, run_dir=run_dir), trainer.state.part.corpus.fingerprint())
    assert checkpoint is not None and restore(trainer.state, checkpoint) == 2
    return [trainer.step.run(step).loss for step in (2, 3)]


@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_run_moves_between_card_and_host(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    """What is copied aside is what was there at the save, though the card goes on computing."""
    config = config_of(1, 2, 1, tied=True, kv_heads=1)
    want = ranks.run(save_from, 2, config, str(tmp_path), source)[0]
    got = ranks.run(resume_on, 2, config_of(1, 1, 2, tied=True, kv_heads=1), str(tmp_path), target)[0]
    assert all(abs(a - b) <= 1e-9 * b for a, b in zip(got, want, strict=True)), (got, want)


def any_module(how: str, device: str) -> float:
    """The loss after three steps of a small net, data-parallel or in stages."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)).double().to(device)
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=generator).to(device)
    targets = torch.randn(8, 2, dtype=torch.float64, generator=generator).to(device)
    comm = Communicator(dist.group.WORLD)
    pipe = Pipeline(model, inputs[:2], nn.functional.mse_loss, num_micro_batches=4) if how == "stages" else None
    replicas = DataParallel(model, comm) if pipe is None else None
    parameters = list(model.parameters() if pipe is None else pipe.stage.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2) if parameters else None
    loss = 0.0
    for _ in range(3):
        if pipe is not None:
            loss = pipe.step(inputs, targets)
        else:
            assert replicas is not None
            mine = nn.functional.mse_loss(model(inputs[comm.rank :: comm.size]), targets[comm.rank :: comm.size])
            mine.backward()
            replicas.finish()
            loss = float(comm.all_reduce_(mine.detach().clone())) / comm.size
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("how", ["replicas", "stages"])
def test_any_module_trains_on_a_card_as_on_the_cpu(ranks: RankPool, how: str) -> None:
    cpu, cuda = (ranks.run(any_module, 2, how, device)[0] for device in ("cpu", "cuda"))
    assert abs(cuda - cpu) <= 1e-9 * cpu


def train_one_billion(config: Config) -> tuple[list[float], dict[str, float]]:
    device = torch.device("cuda", 0)
    trainer = Trainer(config, open_corpus(config), device)
    losses = [trainer.step.run(step).loss for step in range(config.train.steps)]
    record = step_record(
        config, device, step=0, loss=losses[-1], grad_norm=1.0, lr=1.0, step_seconds=1.0, peak_memory_bytes=0
    )
    return losses, record


def test_a_billion_parameters_train_in_bfloat16_on_one_card(ranks: RankPool) -> None:
    base = llama_1b()
    small_batch = replace(base.train, micro_batch_size=1, num_micro_batches=2, steps=10)
    config = validate(replace(base, train=small_batch, optim=replace(base.optim, warmup_steps=2)), 1)
    (losses, record), *_ = ranks.run(train_one_billion, 1, config)
    assert losses[-1] < losses[0] - 1
    assert record["mfu_attention_full"] > record["mfu_attention_causal"] > 0


def test_the_training_script_runs_over_nccl_on_one_card(tmp_path: Path) -> None:
    # The command line needs them, the engine does not.
    pytest.importorskip("tyro")
    pytest.importorskip("tomli_w")
    command = [sys.executable, "-m", "tpengine.train", "--device", "cuda", "--train.steps", "20", "--run-dir", "out"]
    done = run_program(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1
