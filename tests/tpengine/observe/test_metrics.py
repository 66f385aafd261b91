"""Rung: pure. Records, and the flop count against a count by torch. MFU itself needs a GPU."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.matmul import host as host_gemm

from tpengine.config import Config, validate
from tpengine.layers import vocab_parallel_cross_entropy
from tpengine.layout.flops import step_flops
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.observe.metrics import (
    MetricsWriter,
    peak_flops_per_second,
    peak_memory_bytes,
    step_record,
)

CONFIG = validate(
    replace(Config(), train=replace(Config().train, micro_batch_size=2, num_micro_batches=1, seq_len=64)), 1
)


def test_step_flops_equal_what_torch_counts_in_forward() -> None:
    """Forward only: backward is 2 forward by the convention, and our wgrad lies outside what torch can see."""
    alone = Communicator(None)
    model = Transformer(FastParts(CONFIG.model, alone))
    tokens = torch.zeros(128, dtype=torch.int64)
    # Nor does torch count oneDNN's products, which some processors multiply faster by.
    by_torch_mm = patch.object(host_gemm, "has_onednn", lambda: False)
    with by_torch_mm, FlopCounterMode(display=False) as counter, torch.no_grad():
        vocab_parallel_cross_entropy(model(tokens, 64), tokens, 256, alone)
    full, half = step_flops(CONFIG, causal_half=False), step_flops(CONFIG, causal_half=True)
    # Before 2.15 torch counted no flops for the CPU's attention kernel, so they are counted here: forward and backward
    # of 4 layers, 2 sequences, 4 heads, two products of 64 x 64 x 32.
    attention = 3 * 4 * 2 * 4 * 2 * (2 * 64 * 64 * 32)
    counts = counter.get_flop_counts()["Global"]
    without_attention = sum(flops for op, flops in counts.items() if "scaled_dot_product" not in str(op))
    assert full == 3 * without_attention + attention
    assert half == full - attention // 2


def test_a_record_has_every_field_unrounded() -> None:
    record = step_record(
        CONFIG,
        torch.device("cpu"),
        step=3,
        loss=1.23456789012,
        grad_norm=0.1,
        lr=1e-3,
        step_seconds=0.5,
        peak_memory_bytes=7,
    )
    assert (record["step"], record["loss"]) == (4, 1.23456789012)
    assert record["tokens_per_second"] == 2 * 64 / 0.5
    assert record["model_flops_per_second"] == step_flops(CONFIG, causal_half=False) / 0.5
    assert set(record) == {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "tokens_per_second",
        "model_flops_per_second",
        "peak_memory_bytes",
        "skipped",
        "skipped_steps",
    }


def test_a_row_has_the_bubble_of_a_pipeline_and_a_leap_is_an_event() -> None:
    numbers = {"step": 3, "loss": 9.0, "grad_norm": 7.0, "lr": 1e-3, "step_seconds": 0.5, "peak_memory_bytes": 7}
    row = step_record(CONFIG, torch.device("cpu"), **numbers, stage_waits=[0.1, 0.3])  # type: ignore[arg-type]
    assert row["bubble"] == pytest.approx(0.4)
    row = step_record(CONFIG, torch.device("cpu"), **numbers, skipped=True, spiked=True)  # type: ignore[arg-type]
    assert (row["event"], row["spike_loss"], row["spike_grad_norm"]) == ("skip", 9.0, 7.0)
    assert "loss" not in row and "grad_norm" not in row and "bubble" not in row


def test_a_row_has_how_even_experts_were_used() -> None:
    numbers = {"step": 3, "loss": 9.0, "grad_norm": 7.0, "lr": 1e-3, "step_seconds": 0.5, "peak_memory_bytes": 7}
    loads = {"balance_loss": 2.5, "expert_load/1": 1.25, "expert_tokens/1": 40}
    row = step_record(CONFIG, torch.device("cpu"), **numbers, loads=loads)  # type: ignore[arg-type]
    assert row == step_record(CONFIG, torch.device("cpu"), **numbers) | loads  # type: ignore[arg-type]


def test_a_writer_goes_back_and_keeps_rollbacks(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 5):
        writer.write({"step": step, "loss": 1.0})
    writer.write({"step": 4, "event": "skip", "spike_loss": math.nan})
    writer.go_back(2)
    writer.write({"step": 6, "event": "rollback", "to": 2})
    writer.write({"step": 3, "loss": 0.5})
    writer.close()
    again = MetricsWriter(tmp_path, 1)
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 6, "event": "rollback", "to": 2}]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float64", 19.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("NVIDIA T4", "float32", None),
        ("", "float32", None),
    ],
)
def test_peaks_are_told_by_the_devices_name(name: str, dtype: str, peak: float | None) -> None:
    assert peak_flops_per_second(name, dtype) == peak


def test_the_writer_appends_lines_and_keeps_an_earlier_file(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    first.write({"step": 1, "loss": 1.5})
    first.write({"step": 2, "loss": 1.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: nothing is lost by a crash
    assert [json.loads(line)["loss"] for line in lines] == [1.5, 1.25]
    first.close()
    second = MetricsWriter(tmp_path)
    second.close()
    assert second.kept == tmp_path / "metrics.1.jsonl"
    assert (tmp_path / "metrics.1.jsonl").read_text().splitlines() == lines
    assert first.tensorboard and list(tmp_path.glob("events.out.tfevents.*"))


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + 25_000_000)
    assert peak_memory_bytes(torch.device("cpu")) >= before + 50_000_000, held.shape


@pytest.mark.parametrize("half", [False, True])
def test_flops_scale_with_the_batch(half: bool) -> None:
    double = replace(CONFIG, train=replace(CONFIG.train, num_micro_batches=2))
    assert step_flops(double, causal_half=half) == 2 * step_flops(CONFIG, causal_half=half)


@pytest.mark.parametrize("first", [1, 0])
def test_records_of_a_resumed_run_follow_those_before_it(tmp_path: Path, first: int) -> None:
    """What it repeats goes. Earlier versions counted steps from 0."""
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(first, first + 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    writer = MetricsWriter(tmp_path, num_steps=3)
    writer.write({"step": 4, "loss": 2.0})
    writer.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert writer.kept is None and not (tmp_path / "metrics.1.jsonl").exists()


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path)
    path, numbers = str((tmp_path / "metrics.jsonl").resolve()), os.listdir("/proc/self/fd")
    (number,) = [number for number in numbers if os.path.realpath(f"/proc/self/fd/{number}") == path]
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), int(number))
    for step in range(3):
        writer.write({"step": step})
    writer.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tpengine: metrics cannot be written:") and "No space left on device" in line


def test_a_row_is_completed_in_place(tmp_path: Path) -> None:
    """The row is whole before, too: a run that dies while it is evaluated has it. Nothing stands in it twice."""
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write({"step": step, "loss": 1.5})
    writer.complete(2, {"held_out_loss": 2.5})
    writer.complete(2, {"held_out_loss": 3.5})
    writer.complete(1, {"held_out_loss": 4.5})
    writer.write({"step": 3, "loss": 1.25})
    writer.complete(3, {"held_out_loss": math.inf})
    writer.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [
        {"step": 1, "loss": 1.5},
        {"step": 2, "loss": 1.5, "held_out_loss": 2.5},
        {"step": 3, "loss": 1.25, "held_out_loss": None},
    ]


def test_a_row_that_cannot_be_completed_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes half of what is added."""
    writer, write = MetricsWriter(tmp_path), os.pwrite
    writer.write({"step": 0, "loss": 1.5})
    monkeypatch.setattr(os, "pwrite", lambda file, text, at: write(file, text[: max(2, len(text) // 2)], at))
    writer.complete(0, {"held_out_loss": 2.5})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.5}\n'
    assert "No space left on device" in capsys.readouterr().err
