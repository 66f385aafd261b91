"""Rung: pure. The rivals of a training step, with state in float32 and in the weights' dtype, and what is compared.

How fast they are, only a GPU shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.cases import training
from benchmarks.gpu.cases.steps import TorchStep
from benchmarks.harness.journal import read
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.config.rules import validate

CPU = torch.device("cpu")


def config_of(dtype: str) -> Config:
    """A tiny model of one layer, three micro-batches a step, gradients clipped."""
    base = preset_config("tiny")
    train = replace(base.train, dtype=dtype, seq_len=16, micro_batch_size=2, num_micro_batches=3, steps=50)
    return validate(replace(base, model=replace(base.model, num_layers=1), train=train), 1)


def test_float32_state_trains_to_the_bits_of_plain_float32() -> None:
    """There the masters' copies are the masters, and a sum that begins with the first gradient is autograd's."""
    sides = [TorchStep(config_of("float32"), CPU, compiles=False, in_float32=wide) for wide in (False, True)]
    losses = [[(side.seconds(), side.loss)[1] for _ in range(3)] for side in sides]
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2]


def test_the_second_rival_keeps_what_ours_keeps() -> None:
    side = TorchStep(config_of("bfloat16"), CPU, compiles=False, in_float32=True)
    weights, state = list(side._model.parameters()), side._state
    before = [weight.detach().clone() for weight in weights]
    side.seconds()
    side.seconds()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    kept = [t for master in state.masters for t in (master, master.grad, *side._optimizer.state[master].values())]
    assert {t.dtype for t in kept if t is not None} == {torch.float32} and None not in kept
    for weight, master, old in zip(weights, state.masters, before, strict=True):
        assert weight.grad is None and torch.equal(weight, master.bfloat16()) and not torch.equal(weight, old)
    # Masters hold what their copies round off, and sums begin anew in every step: nothing of these is left.
    assert any(not torch.equal(master, master.bfloat16().float()) for master in state.masters)
    sums = [master.grad for master in state.masters if master.grad is not None]
    for total in sums:
        total.fill_(torch.nan)
    side.seconds()
    assert all(total.isfinite().all() for total in sums)


def test_a_row_holds_ours_against_both_rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Side:
        """A step that learns a little each time."""

        def __init__(self, name: str, seconds: float) -> None:
            self.name, self._seconds, self.loss, self.first_loss = name, seconds, 5.6, 0.0

        def seconds(self) -> float:
            taken.append(self.name)
            self.loss -= 0.01
            return self._seconds

    config = config_of("float32")
    monkeypatch.setattr(training, "_started", lambda *_: (config, CPU))
    monkeypatch.setattr(training, "OwnStep", lambda *_: Side("ours", 3.0))
    monkeypatch.setattr(
        training, "TorchStep", lambda *_, in_float32, **__: Side("float32" if in_float32 else "torch", 4.0 + in_float32)
    )
    assert training.against_torch(tmp_path / "rows.jsonl", "tiny", steps=5) == 0
    (row,) = read(tmp_path / "rows.jsonl")
    assert row["ours_over_torch_median_ratio"] == pytest.approx(3 / 4)
    assert row["ours_over_torch_float32_median_ratio"] == pytest.approx(3 / 5)
    assert (row["attention"], row["attention_taken"]) == ("auto", "ours: on cpu")
    assert row["rival_attention"] == "torch's default"
    assert row["model_attention_whole_flops_per_second"] > row["model_attention_half_flops_per_second"] > 0
    # Behind the first steps of each they take turns.
    rounds = [taken[i : i + 3] for i in range(9, 24, 3)]
    assert len(taken) == 24 and all(sorted(names) == ["float32", "ours", "torch"] for names in rounds)
