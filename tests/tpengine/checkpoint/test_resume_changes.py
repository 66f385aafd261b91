"""Rung: pure. What a run that continues may change, what it may not, and which changes are said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine.saved_runs import begin, of_experts, saved_run, write_checkpoint

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, Index, write_index
from tpengine.checkpoint.resume import changes_since, find_checkpoint, state_of
from tpengine.commands.arguments import parse_config


def test_a_bias_of_routers_comes_at_the_beginning_or_never(tmp_path: Path) -> None:
    without, now = of_experts(), "5 uint8 tokens below 6, SHA-256 00112233445566778899aabbccddeeff"
    wanted = of_experts(router_bias=True)
    for step in (0, 20):
        config = replace(wanted, run_dir=str(tmp_path / str(step)))
        directory = CheckpointDirectory(tmp_path / str(step) / "checkpoints")
        write_index(directory.begin(step), Index(step, {}, {}, state_of(without, now, step)))
        directory.complete(step)
        if step == 0:
            assert find_checkpoint(config, now) is not None
            continue
        with pytest.raises(
            CheckpointError, match=r"must keep model.details.router_bias: .* none or loss if it was saved with False"
        ):
            find_checkpoint(config, now)


def test_numbers_that_an_older_checkpoint_does_not_know_are_no_change() -> None:
    config = saved_run(1, 1, 1)
    state = state_of(config, "", 20)
    older = {name: value for name, value in state["config"]["model"]["details"].items() if "expert" not in name}
    state["config"]["model"]["details"] = older
    assert changes_since(Index(20, {}, {}, state), config) == []


def test_a_checkpoint_that_knows_only_the_ends_of_its_text_is_compared_by_them(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    write_checkpoint(tmp_path, config)
    now = "5 uint8 tokens below 6, SHA-256 00112233445566778899aabbccddeeff"
    assert find_checkpoint(config, now, fingerprint_of_ends=lambda: "f" * 64) is not None
    with pytest.raises(CheckpointError, match=r"must keep the text: .* with f{64}, this run has e{64}: use the text"):
        find_checkpoint(config, now, fingerprint_of_ends=lambda: "e" * 64)
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    write_index(directory.begin(20), Index(20, {}, {}, state_of(config, now, 20)))
    directory.complete(20)
    assert find_checkpoint(config, now, fingerprint_of_ends=lambda: "f" * 64) is not None
    with pytest.raises(CheckpointError, match=r"was saved with 5 uint8 .*eeff, this run has 6 uint8"):
        find_checkpoint(config, now.replace("5 uint8", "6 uint8"), fingerprint_of_ends=lambda: "f" * 64)


def test_layout_steps_and_learning_rate_may_change(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 2), run_dir=str(tmp_path))
    write_checkpoint(tmp_path, config)
    other = replace(saved_run(2, 2, 1, num_micro_batches=8), run_dir=str(tmp_path))
    other = replace(other, optim=replace(other.optim, lr=1e-5), train=replace(other.train, steps=9999))
    assert find_checkpoint(other, "f" * 64) is not None


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("model", "hidden_size", 64, "must keep model.hidden_size: {} was saved with 128, this run has 64: use model"),
        ("model", "tie_embeddings", True, "must keep model.tie_embeddings"),
        ("train", "seq_len", 64, "must keep train.seq_len"),
        ("train", "seed", 3, "must keep train.seed"),
        ("train", "dtype", "bfloat16", "must keep train.dtype"),
        (
            "train",
            "num_micro_batches",
            8,
            "must keep samples per step: {} was saved with 16, this run has 32: choose",
        ),
        ("data", "ignore_token", 7, "must keep data.ignore_token"),
        ("data", "held_out_fraction", 0.5, "must keep data.held_out_fraction"),
        ("data", "packing", "documents", "must keep data.packing: {} was saved with cut, this run has documents: use"),
    ],
)
def test_what_decides_later_numbers_may_not_change(
    tmp_path: Path, section: str, name: str, value: object, message: str
) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    directory = write_checkpoint(tmp_path, config)
    other = replace(config, **{section: replace(getattr(config, section), **{name: value})})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(other, "f" * 64)
    assert message.format(directory) in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_older_than_a_setting_has_its_default(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    state = state_of(config, "f" * 64, 10)
    for name in ("residual_dropout", "attention_dropout", "mlp_dropout"):
        del state["config"]["model"][name]
    del state["config"]["train"]["reduction"]
    del state["config"]["data"]["packing"]
    # Of tables in a table, too.
    details = state["config"]["model"]["details"]
    del details["logits_scaling"], details["rope"]["partial_rotary_factor"]
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    write_index(directory.begin(10), Index(10, {}, {}, state))
    directory.complete(10)
    assert find_checkpoint(config, "f" * 64) is not None
    dropping = replace(config, model=replace(config.model, mlp_dropout=0.1))
    with pytest.raises(CheckpointError, match=r"must keep model.mlp_dropout: .* with 0.0, this run has 0.1"):
        find_checkpoint(dropping, "f" * 64)
    scaled = replace(config, model=replace(config.model, details=replace(config.model.details, logits_scaling=2.0)))
    with pytest.raises(CheckpointError, match=r"must keep model.details.logits_scaling: .* with 1.0, this run has"):
        find_checkpoint(scaled, "f" * 64)


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [({}, False), ({"reduction": "exact"}, True), ({"dropout": 0.1}, True)],
    ids=["fast", "exact", "dropout"],
)
def test_micro_batches_keep_their_size_where_numbers_depend_on_it(
    tmp_path: Path, changes: dict[str, Any], is_kept: bool
) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    config = replace(
        config,
        train=replace(config.train, reduction=changes.get("reduction", "fast")),
        model=replace(config.model, attention_dropout=changes.get("dropout", 0.0)),
    )
    write_checkpoint(tmp_path, config)
    size, num = config.train.micro_batch_size, config.train.num_micro_batches
    other = replace(config, train=replace(config.train, micro_batch_size=size // 2, num_micro_batches=2 * num))
    if not is_kept:
        assert find_checkpoint(other, "f" * 64) is not None
        return
    with pytest.raises(
        CheckpointError, match=rf"must keep train.micro_batch_size: .* use train.micro_batch_size {size}"
    ):
        find_checkpoint(other, "f" * 64)


def test_another_text_is_refused(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    write_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"must keep the text.*use the text it was trained on"):
        find_checkpoint(config, "e" * 64)
    # Another packing is named, although an index may have come to the text with it.
    fitted = replace(config, data=replace(config.data, packing="fit"))
    with pytest.raises(CheckpointError, match=r"must keep data.packing: .* saved with cut, this run has fit"):
        find_checkpoint(fitted, "e" * 64)


def test_every_change_since_the_checkpoint_is_said(tmp_path: Path) -> None:
    before = begin(tmp_path, "--preset", "tiny", "--parallel.dp", "2", "--device", "cpu", world=2)
    now = parse_config(
        [
            *("--resume", "--run-dir", str(tmp_path), "--optim.lr", "0.5", "--train.steps", "300"),
            *("--train.profile-steps", "11:12", "--train.reduction", "exact", "--parallel.recompute", "block"),
        ],
        1,
    )
    index = Index(10, {}, {}, state_of(before, "f" * 64, 10))
    assert changes_since(index, before) == changes_since(index, replace(before, resume=True, run_dir="moved")) == []
    assert changes_since(index, now) == [
        "optim.lr from 0.003 to 0.5",
        "parallel.dp from 2 to 1",
        "parallel.recompute from none to block",
        "train.num_micro_batches from 4 to 8",
        "train.profile_steps from auto to 11:12",
        "train.reduction from fast to exact",
        "train.steps from 250 to 300",
    ]


def test_what_is_only_spelled_otherwise_is_no_change() -> None:
    config = saved_run(1, 1, 1)
    before = replace(config, parallel=replace(config.parallel, schedule="/elsewhere/mine.plan"))
    index = Index(10, {}, {}, state_of(before, "f" * 64, 10))
    kept = replace(before, parallel=replace(before.parallel, schedule="runs/1/mine.txt"), device="cuda")
    assert changes_since(index, kept) == []
    other = replace(before, parallel=replace(before.parallel, schedule="gpipe"))
    assert changes_since(index, other) == ["parallel.schedule from /elsewhere/mine.plan to gpipe"]
    index = Index(10, {}, {}, state_of(replace(config, device="cpu"), "f" * 64, 10))
    assert changes_since(index, replace(config, device="cuda")) == ["device from cpu to cuda"]
