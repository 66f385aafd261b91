"""Rung: gloo ranks. A step that is not finite updates nothing, is named and written down, and is left out by a restart.

What only a GPU checks: that the fused AdamW's kernel leaves everything as it is there too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import (
    CPU,
    Found,
    assert_same_bits,
    digests_of,
    exact_config,
    merge,
    num_ranks,
    train_steps,
)
from support.engine.parity import config_of
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine import journal, train
from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config, phases_of
from tpengine.data import open_corpus
from tpengine.observe.activity import Activity
from tpengine.runs import loop as run
from tpengine.runs import skipped_steps
from tpengine.runs.skipped_steps import FirstNonFinite, SkippedSteps
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.planned_run import RunError
from tpengine.training.spikes import StepResult

# What goes wrong where: (step, micro-batch over all replicas) -> what of the loss.
Poison = Mapping[tuple[int, int], str]
SAVED, STEPS = 3, 6
POISON: Poison = {(2, 1): "gradient", (4, 3): "loss"}


def poisoned(trainer: Trainer, poison: Poison) -> Trainer:
    """Spoil the gradient that comes from a loss, or what is reported of it and nothing else."""

    def spoil(loss: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def spoilt(logits: Tensor, microbatch: int) -> Tensor:
            value, number = loss(logits, microbatch), trainer.step.batch.number_of(microbatch)
            what = poison.get((trainer.state.model.position.step, number))
            if what == "loss":
                trainer.step.batch.losses[number] = torch.nan
            return value * torch.inf if what == "gradient" else value

        return spoilt

    trainer.step.batch.loss = spoil(trainer.step.batch.loss)  # type: ignore[method-assign]
    return trainer


def config_for(dp: int, tp: int, pp: int) -> Config:
    config = exact_config(dp, tp, pp, layers=2, steps=STEPS, dropout=0.0)
    return replace(config, model=replace(config.model, residual_dropout=0.1))


def one_run(config: Config) -> tuple[Found, list[int], bool]:
    """All steps; also the updates done after each, and whether a skipped step leaves weights and moments."""
    trainer = poisoned(Trainer(config, open_corpus(config), CPU), POISON)
    numbers, updates, is_left = [], [], True
    for step in range(STEPS):
        before = digests_of(trainer)
        found, after = train_steps(trainer, step, step + 1)
        numbers += found
        updates.append(trainer.state.num_updates)
        if step in (2, 4):
            is_left &= all(after[key] == before[key] for key in after if key[2] != "gradient")
    return (numbers, digests_of(trainer)), updates, is_left


def first_part(config: Config, run_dir: str) -> None:
    trainer = poisoned(Trainer(config, open_corpus(config), CPU), POISON)
    train_steps(trainer, 0, SAVED)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    state = state_of(config, trainer.state.part.corpus.fingerprint(), SAVED, trainer.state.num_updates)
    saver.save(SAVED, blocks_of(trainer.state), state)
    assert saver.wait() is None


def second_part(config: Config, run_dir: str, leaves_out: bool) -> Found:
    trainer = poisoned(resumed(config, run_dir, SAVED), POISON)
    numbers = []
    for step in range(SAVED, STEPS):
        if not (leaves_out and step == 4):
            numbers += train_steps(trainer, step, step + 1)[0]
    return numbers, digests_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [((1, 1, 1), (1, 1, 2)), pytest.param((2, 1, 1), (1, 2, 1), marks=pytest.mark.slow)]
)
def test_skipping_has_the_same_bits_in_every_layout_and_across_a_resume(
    ranks: RankPool, tmp_path: Path, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    """Weights, moments, norms and losses; a step that is left out has done as little as one that is computed."""
    config = config_for(1, 1, 1)
    ((found, updates, is_left),) = ranks.run(one_run, 1, config)
    assert updates == [1, 2, 2, 3, 3, 4] and is_left
    want = merge(config, [found])
    assert want.numbers[2][1] == want.numbers[4][0] == "nan" and "nan" not in (want.numbers[2][0], want.numbers[4][1])
    run_dir = str(tmp_path / "run")
    config = config_for(*first)
    ranks.run(first_part, num_ranks(config), config, run_dir)
    config = config_for(*second)
    for leaves_out in (False, True):
        rest = merge(config, ranks.run(second_part, num_ranks(config), config, run_dir, leaves_out))
        numbers = [number for step, number in enumerate(want.numbers) if not (leaves_out and step == 4)]
        assert_same_bits(rest, replace(want, numbers=numbers[SAVED:]))


def spoil_layer(trainer: Trainer, number: str, forward: bool) -> None:
    """Micro-batch 2's output of a layer, or the gradient of it."""
    if number not in trainer.state.model.layers:
        return

    def see(_: Any, __: Any, output: Tensor) -> Tensor:
        if trainer.state.model.position.microbatch != 2:
            return output
        if forward:
            return output * torch.nan
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    trainer.state.model.layers[number].register_forward_hook(see)


def spoil_weight(trainer: Trainer) -> None:
    for name, parameter in trainer.state.model.held.items():
        if name == "layers.3.mlp.up_proj.weight":
            parameter.data[-1, -1] = torch.inf


def spoil_once(trainer: Trainer) -> None:
    """What happens in the first step's first gradient, and not when it is computed again."""
    finish, calls = trainer.state.gradients.finish, []

    def spoilt() -> None:
        finish()
        if not calls and "layers.0.mlp.up_proj.weight" in trainer.state.gradients.of:
            trainer.state.gradients.of["layers.0.mlp.up_proj.weight"].fill_(torch.nan)
        calls.append(None)

    trainer.state.gradients.finish = spoilt  # type: ignore[method-assign]


ACCIDENTS: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "forward": (
        lambda trainer: spoil_layer(trainer, "1", forward=True),
        "the output of model.layers.1, layer 1, micro-batch 2",
    ),
    "backward": (
        lambda trainer: spoil_layer(trainer, "1", forward=False),
        "the gradient of model.layers.1.mlp.down_proj.weight, layer 1, micro-batch 2",
    ),
    "weight": (spoil_weight, "weight model.layers.3.mlp.up_proj.weight, layer 3"),
    "loss": (lambda trainer: poisoned(trainer, {(0, 3): "loss"}), "the loss, micro-batch 3"),  # type: ignore[arg-type, return-value]
    "once": (
        spoil_once,
        "the norm of the gradient of model.layers.0.mlp.up_proj.weight, layer 0 "
        "(not when the step was computed again: suspect the machine)",
    ),
}


def name_them(config: Config) -> list[str]:
    return [name_it(config, accident) for accident in ACCIDENTS]


def name_it(config: Config, accident: str) -> str:
    trainer = Trainer(config, open_corpus(config), CPU)
    ACCIDENTS[accident][0](trainer)
    skipped = SkippedSteps(trainer.planned, trainer.state.rank.activity, None)
    result = trainer.step.run(0)
    assert result.skipped and trainer.state.num_updates == 0
    try:
        skipped.note(0, result, trainer.step)
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "layout", [(1, 1, 2), *(pytest.param(slow, marks=pytest.mark.slow) for slow in ((2, 1, 2), (1, 2, 2)))]
)
def test_the_first_tensor_layer_and_micro_batch_are_named_by_all(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    config = config_of(*layout, tied=False, kv_heads=2, num_layers=4, schedule="zb-h1" if layout[0] == 2 else "1f1b")
    config = replace(config, train=replace(config.train, nonfinite_steps=1))
    first, *others = ranks.run(name_them, num_ranks(config), config)
    assert others == [first] * len(others)
    for message, (_, expected) in zip(first, ACCIDENTS.values(), strict=True):
        assert message.startswith("updates must be finite: those of steps 1, --train.nonfinite-steps 1 in a row")
        assert f", first {expected}: lower --optim.lr" in message


def listed(run_dir: Path, what: str) -> list[Any]:
    """Skip steps 0 and 1, the first of which may find the disk full; return the lines of the list while the reason of
    each is sought, what the next start knows, and the tensors of the list.
    """
    config = replace(config_for(1, 1, 1), resume=True)
    planned: Any = SimpleNamespace(config=config, phases=phases_of(config))
    train_step = cast(Any, None)
    path, seen = run_dir / "skipped.jsonl", []

    def find(_: object, step: int) -> FirstNonFinite:
        seen.append(path.read_text().splitlines() if path.exists() else [])
        return FirstNonFinite(f"tensor {step}", None, None)

    def full(*_: object, durable: bool) -> None:
        assert durable
        raise OSError(28, "No space left on device")

    skipped = SkippedSteps(planned, Activity(), run_dir)
    with patch.object(skipped_steps, "find_first", find):
        for step in range(2):
            with patch.object(journal, "write", full) if what == "full in 0" and not step else nullcontext():
                skipped.note(step, StepResult(1.0, float("nan"), 0.0, skipped=True), train_step)
    tensors = [json.loads(line)["tensor"] for line in path.read_text().splitlines()]
    return [seen, sorted(SkippedSteps(planned, Activity(), run_dir).known), tensors]


def test_a_skipped_step_is_listed_before_its_reason_is_sought(ranks: RankPool, tmp_path: Path) -> None:
    """The run may end while the step is computed again. It has one line, which gets the reason."""
    ((seen, known, tensors),) = ranks.run(listed, 1, tmp_path, "")
    found = [[(entry["step"], entry["tensor"]) for entry in map(json.loads, lines)] for lines in seen]
    assert found == [[(1, None)], [(1, "tensor 0"), (2, None)]]
    assert known == [0, 1] and tensors == ["tensor 0", "tensor 1"]


def slow_disk(run_dir: Path) -> list[tuple[str, bool, int]]:
    """Skip a step: what this rank does one after another, whether it is timed, how often rank 0 has written by then."""
    rank, marks = dist.get_rank(), [run_dir / "written", run_dir / "written again"]
    done: list[tuple[str, bool, int]] = []

    class Noting(Activity):
        def begin(self, what: object, *, timed: bool = True) -> None:
            super().begin(what, timed=timed)
            done.append((str(what), timed, sum(mark.exists() for mark in marks)))

    config = config_for(1, 1, 1)
    planned: Any = SimpleNamespace(config=config, phases=phases_of(config))
    activity, train_step = Noting(), cast(Any, None)
    write, left = SkippedSteps.write, iter(marks)

    def slowly(self: SkippedSteps, record: dict[str, Any], without: str) -> None:
        write(self, record, without)
        if rank == 0:
            time.sleep(0.3)
            next(left).touch()

    skipped = SkippedSteps(planned, activity, run_dir if rank == 0 else None)
    with (
        patch.object(skipped_steps, "find_first", lambda *_: FirstNonFinite("a tensor", None, None)),
        patch.object(SkippedSteps, "write", slowly),
    ):
        skipped.note(0, StepResult(1.0, float("nan"), 0.0, skipped=True), train_step)
    activity.begin("the next step")
    return done


def test_the_time_that_the_list_takes_on_disk_is_limited_on_no_rank(ranks: RankPool, tmp_path: Path) -> None:
    for done in ranks.run(slow_disk, 2, tmp_path):
        (first, before_first), (second, before_second) = [(what, num) for what, timed, num in done if timed]
        assert (first, second) == ("finding what is not finite", "the next step")
        assert before_first >= 1 and before_second == 2


def test_a_full_disk_loses_the_line_and_ends_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ((_, known, _),) = ranks.run(listed, 1, tmp_path, "full in 0")
    assert known == [1]


SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
    *("--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--device", "cpu"),
    *("--train.steps", "12", "--train.checkpoint-every", "2", "--resume"),
)


def attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the training program in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, "--preset", "tiny", "--run-dir", str(run_dir), *arguments])
    try:
        train.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.slow
def test_every_restart_gets_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Five bad steps, of which two in a row end the run: it needs three starts, and no bad step is met twice."""
    computed: list[int] = []
    bad = {(step, 1): "gradient" for step in (1, 4, 5, 7, 8)}

    class Poisoned(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            poisoned(self, bad)
            compute = self.step.run

            def counted(step: int, *args: Any) -> StepResult:
                computed.append(step)
                return compute(step, *args)

            self.step.run = counted  # type: ignore[method-assign]

    monkeypatch.setattr(run, "Trainer", Poisoned)
    limit = ("--train.nonfinite-steps", "2")
    assert attempt(tmp_path, monkeypatch, *limit) == 2
    errors = capfd.readouterr().err
    assert "those of steps 5, 6, --train.nonfinite-steps 2 in a row, were not" in errors
    assert "step 2 is skipped, its update is not finite: loss " in errors
    with (tmp_path / "skipped.jsonl").open("a") as file:
        file.write('{"step": 11, "sam')  # a kill
    assert attempt(tmp_path, monkeypatch, *limit) == 2
    assert attempt(tmp_path, monkeypatch, *limit) == 0
    # From checkpoints after steps 4 and 8.
    assert computed == list(range(12))
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in listed] == [2, 5, 6, 8, 9]
    assert listed[1] == listed[1] | {
        "samples": [16, 20],
        "tensor": "the gradient of lm_head.weight",
        "layer": None,
        "micro_batch": 1,
        "grad_norm": "nan",
    }
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["step"] for record in records if record["skipped"]] == [2, 5, 6, 8, 9]
    assert [record["step"] for record in records if record.get("left_out")] == [5, 6, 9]
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 5, 5]
    assert records[1]["grad_norm"] is None and records[1]["loss"] > 0


def test_a_list_that_cannot_be_read_ends_the_run_and_a_new_run_puts_it_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "skipped.jsonl").write_text('{"step": 3}\n{"stop": 3}\n')
    assert attempt(tmp_path, monkeypatch) == 2
    assert "skipped.jsonl: line 2 names no step: mend or remove it" in capfd.readouterr().err
    assert attempt(tmp_path, monkeypatch, "--no-resume", "--train.steps", "1") == 0
    assert not (tmp_path / "skipped.jsonl").exists() and (tmp_path / "skipped.1.jsonl").exists()
