"""Rung: processes of its own. `tpengine certify` from the command line: verdicts, exit codes, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.mixtures import write_mixture
from support.ranks.progress import finish

from tpengine.cli import main
from tpengine.commands import certify
from tpengine.commands.certify import CertifiedLayout, CertifyOptions, parse_layout
from tpengine.config import shards_said
from tpengine.config.presets import PRESETS

HASH = r"[0-9a-f]{64}"


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> None:
    """The preset's features with a hundredth of its work."""
    config = PRESETS["certify"]()
    small = replace(
        config,
        model=replace(config.model, num_layers=2, hidden_size=64, ffn_size=96),
        train=replace(config.train, micro_batch_size=2, num_micro_batches=4),
    )
    monkeypatch.setattr(certify, "PRESETS", {**PRESETS, "certify": lambda: small})


@pytest.mark.slow
def test_the_preset_as_it_is_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--tp", "2", "--against", "tp=1,pp=2", "--steps", "1", "--schedule", "zbv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("8 heads, float32, zbv, seed 0, steps 1 of 16 micro-batches")
    assert lines[-1] == "certified: identical"


@pytest.mark.slow
@pytest.mark.usefixtures("small_preset")
def test_layouts_that_agree_are_certified(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "certify",
        "--tp",
        "2",
        "--against",
        "tp=1,pp=2",
        "--steps",
        "1",
        "--dtype",
        "bfloat16",
        "--schedule",
        "zb-h1",
    ]
    assert main([*argv, "--seed", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tp 2 x pp 1 x dp 1 against tp 1 x pp 2 x dp 1, exact mode"
    assert lines[1].endswith("8 heads, bfloat16, zb-h1, seed 7, steps 1 of 4 micro-batches")
    assert lines[2].startswith("step 1, loss ")
    shown = [re.fullmatch(rf"  (\w+) +({HASH})", line) for line in lines[3:6]]
    assert [match and match[1] for match in shown] == ["weights", "gradients", "optimizer"]
    assert lines[-1] == "certified: identical"


@pytest.mark.slow
@pytest.mark.usefixtures("small_preset")
def test_a_mixture_of_packed_documents_with_ignored_labels_is_certified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert PRESETS["certify"]().data.ignore_token is not None
    seq_len = PRESETS["certify"]().train.seq_len
    documents = [[1, seq_len, seq_len + 1, 10 * seq_len, *[37] * 60], [11] * 300]
    mixture = write_mixture(tmp_path, documents, [2, 1], vocab_size=250)
    argv = ["certify", "--tp", "2", "--dp", "2", "--against", "pp=2", "--steps", "2"]
    assert main([*argv, "--data.mixture", str(mixture), "--data.packing", "documents"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "certified: identical"
    assert main([*argv, "--data.mixture", str(mixture), "--data.path", "other"]) == 2
    assert "one text or one mixture" in capsys.readouterr().err


@pytest.mark.usefixtures("small_preset")
def test_a_difference_ends_in_its_name_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        certify, "certify", partial(certify.certify, witness="support.engine.broken_engine:LateWitness")
    )
    assert main(["certify", "--dp", "2", "--steps", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(" != " in line for line in lines) >= 2, "the second step's hashes"
    assert re.match(
        r"not identical: step 2: output of layers\.1\.mlp, micro-batch \d, shard \d; made by "
        r"tp 1 x pp 1 x dp 2: 0F\d on rank 1; one process: 0F\d on rank 0",
        lines[-1],
    ), lines[-1]


@pytest.mark.slow
def test_fast_mode_is_within_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--fast", "--tp", "2", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "layers.4.mlp.down_proj.weight" in out and "loss of each micro-batch" in out
    assert re.search(
        r"certified: fast mode is within its bounds, at most at \d+% of one \([a-z0-9_. -]+\)$", out.strip()
    )


@pytest.mark.slow
def test_fast_mode_beyond_a_bound_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        certify, "certify", partial(certify.certify, gradients="support.engine.broken_engine:WrongGradients")
    )
    assert main(["certify", "--fast", "--tp", "2", "--steps", "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "not certified: 1 of 48 tensors are beyond their bounds, the farthest layers.3.input_layernorm"
    )


@pytest.mark.slow
def test_replicas_that_differ_in_fast_mode_are_no_agreement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        certify, "certify", partial(certify.certify, gradients="support.engine.broken_engine:StaleReplica")
    )
    assert main(["certify", "--fast", "--dp", "2", "--steps", "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "not certified: step 1: ranks that hold the same part of layers.3.input_layernorm.weight hold other bits of it"
    )


@pytest.mark.usefixtures("small_preset")
def test_a_rank_that_fails_is_no_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        certify, "certify", partial(certify.certify, witness="support.engine.broken_engine:FailingWitness")
    )
    assert main(["certify", "--tp", "2"]) == 70
    captured = capsys.readouterr()
    assert "planted" in captured.err and "certified" not in captured.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    certify = [sys.executable, "-m", "tpengine.cli", "certify", "--tp", "2", "--steps", "1000"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(certify, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and "against one process" in process.stdout.readline()
    while not list(tmp_path.glob("tpengine-ranks-*/store")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = finish(process)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "tpengine: interrupted; no process and no unfinished file is left"
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("tpengine-ranks-*"))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--tp", "1"], ["needs two layouts", "one process"]),
        (["--tp", "2", "--against", "tp=2"], ["needs two layouts", "tp 2 x pp 1 x dp 1"]),
        (["--tp", "3"], ["tp must divide 8 with preset certify", "tp 3", "use 4"]),
        (["--tp", "16"], ["tp must divide 8", "use 8"]),
        (["--dp", "3"], ["dp must divide 8", "dp 3", "use 4"]),
        (["--pp", "6"], ["every pipeline stage needs a layer", "pp 6", "use 5"]),
        (["--tp", "2", "--against", "tp2"], ["tp=4,pp=1,dp=1", "'tp2'"]),
        (["--tp", "2", "--against", "tp=2,tp=2"], ["a layout names"]),
        (["--tp", "2", "--preset", "nosuch"], ["--preset", "certify", "'nosuch'"]),
        (["--tp", "2", "--dtype", "float16"], ["--dtype", "bfloat16", "'float16'", "use one of these"]),
        (["--tp", "2", "--schedule", "gpip"], ["schedule must be one of gpipe, 1f1b", "use gpipe"]),
        (["--pp", "2", "--schedule", "./none.txt"], ["none.txt"]),
        (["--tp", "2", "--seed", "-1"], ["--seed", "-1", "use 0"]),
        (["--tp", "2", "--tp-comm", "arena"], ["--tp-comm", "fused, plain"]),
        (["--tp", "2", "--fast", "--preset", "llama_1b"], ["--fast", "50,000,000", "llama_1b"]),
        (["--tp", "8", "--pp", "4", "--dp", "4"], ["at most 64", "128"]),
        (["--tp", "2", "--fast", "--against", "tp=4"], ["--fast", "leave it out"]),
        (["--tp", "2", "--fast", "--dtype", "float64"], ["--fast", "float32 or bfloat16"]),
        (["--tp", "0"], ["at least 1"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "Ranks", None)
    assert main(["certify", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tpengine: error: ") and all(part in line for part in parts), line


def test_layouts_are_read() -> None:
    assert parse_layout("tp=4,pp=1,dp=2") == CertifiedLayout(4, 1, 2) and parse_layout("dp=2") == CertifiedLayout(dp=2)
    assert parse_layout("tp=2,dp=2,ep=4") == CertifiedLayout(2, 1, 2, ep=4)
    assert str(CertifiedLayout(2, 1, 2, 1, ep=4)) == "tp 2 x pp 1 x dp 2, ep 4, zero 1"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_experts_that_ranks_share_are_certified(capsys: pytest.CaptureFixture[str]) -> None:
    """Of another preset, since that of other layouts has none; each expert is compared by itself."""
    argv = ["certify", "--ep", "2", "--against", "tp=2,ep=2", "--train.balance", "bias", "--steps", "1"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tp 1 x pp 1 x dp 2, ep 2 against tp 2 x pp 1 x dp 1, ep 2, exact mode"
    assert lines[1].startswith("preset tiny_moe: ") and lines[-1] == "certified: identical"


def test_ranks_that_share_experts_are_replicas_unless_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, layout in (("--ep 2", "dp=2,ep=2"), ("--tp 2 --ep 4", "tp=2,dp=2,ep=4"), ("--tp 2 --ep 2", "tp=2,ep=2")):
        assert main(["certify", *argv.split(), "--against", layout]) == 2
        assert f"two layouts: both are {parse_layout(layout)}" in capsys.readouterr().err
    assert main(["certify", "--dp", "1", "--ep", "2"]) == 2
    assert "ep must divide the tp * dp ranks of a stage" in capsys.readouterr().err


def test_a_model_without_experts_has_none_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--tp", "2", "--ep", "2", "--preset", "tiny"]) == 2
    assert "ep 2, and preset tiny has none: use ep 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--ep 3", "divide 4 with preset tiny_moe: got ep 3, which needs 3 with tp 1: use ep 2 or 4"),
        ("--ep 6 --tp 2", "divide 4 with preset tiny_moe: got ep 6, which needs 3 with tp 2: use ep 4 or 8"),
        ("--ep 16", "divide 4 with preset tiny_moe: got ep 16, which needs 16 with tp 1: use ep 4"),
        ("--ep 3 --tp 3", "tp must divide"),
        ("--ep 3 --dp 3", "dp must divide 4 with preset tiny_moe: got dp 3: use 4"),
    ],
)
def test_what_ep_cannot_be_is_said_of_ep_unless_dp_was_named(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", *argv.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_with_few_positions_and_odd_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences are no longer than its table of positions; one shard allows pp and dp, and is explained."""
    sizes = {"n_embd": 30, "n_head": 5, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **sizes}))
    options = CertifyOptions(
        CertifiedLayout(1, 2, 1),
        None,
        "certify",
        str(tmp_path),
        "float32",
        "1f1b",
        "fused",
        seed=0,
        steps=1,
        fast=False,
    )
    config = certify.config_of(options, options.layout)
    assert config.train.seq_len == 32
    assert shards_said(config) == "1 shard, so tp 1 alone, since 2 does not divide num_heads 5 and num_kv_heads 5"
    assert main(["certify", "--model.path", str(tmp_path), "--tp", "5"]) == 2
    said = f"tp must divide 1 with model {tmp_path} (1 shard, so tp 1 alone, since 2 does not divide num_heads 5"
    assert said in capsys.readouterr().err
