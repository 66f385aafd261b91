"""Rung: gloo ranks. The two engines of the training benchmark agree, and are not compared where they do not.

The model is a miniature, and no time is asserted. What only a GPU checks: nothing, the benchmark runs on CPUs.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.revision import ROOT
from benchmarks.training import command as train
from benchmarks.training.command import case_row, compare_contestants, in_layout, parse_layout, table
from benchmarks.training.contestants import Contestant, Entry, check_agreement
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig

MINIATURE = Config(
    model=ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48),
    train=TrainConfig(seq_len=16, micro_batch_size=2, num_micro_batches=2),
    device="cpu",
)
TOML = """
[model]
hidden_size = 32
num_layers = 2
ffn_size = 48
[train]
seq_len = 16
micro_batch_size = 2
num_micro_batches = 2
"""


def text_of(row: dict[str, object]) -> str:
    """The row as it is printed."""
    file = io.StringIO()
    Console(width=200, file=file).print(table([row]))
    return file.getvalue()


@pytest.fixture(scope="module")
def tp2() -> dict[str, Entry]:
    config = in_layout(MINIATURE, "tp2", 2)
    return {"tpengine": Entry("tpengine", config), "torch": Entry("torch", config)}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_tp2_agrees_and_is_compared_and_a_broken_weight_is_not(tp2: dict[str, Entry]) -> None:
    """One start of the processes for both: they are what takes long."""
    with Contestant(tp2["tpengine"]) as ours, Contestant(tp2["torch"]) as theirs:
        contestants = {"tpengine": ours, "torch": theirs}
        green = compare_contestants(contestants, steps=2)
        memory = {name: contestant.peak_memory_bytes() for name, contestant in contestants.items()}
        theirs.ranks.call("scale_parameter", "layers.1.mlp.up_proj.weight", 1.5)
        red = compare_contestants(contestants, steps=2)

    assert green.check == "passed"
    row = case_row("tp2", tp2, green, memory)
    assert row["tpengine_num_samples"] == row["torch_num_samples"] == 2
    assert row["tpengine_speedup_over_torch_median_ratio"] > 0
    assert row["tpengine_peak_memory_sum_bytes"] > row["tpengine_peak_memory_largest_rank_bytes"] > 1e7

    assert (
        red.check.startswith("failed: loss of checked step 0 differs by more than 0.0001: tpengine ")
        and red.exit_code == 1
    )
    row = case_row("tp2", tp2, red, {})
    for text in (json.dumps(row), text_of(row)):
        assert "failed: " in text
    assert not [name for name in row if name.endswith(("_ratio", "_seconds", "_per_second"))]


@pytest.mark.slow
def test_the_command_compares_pipelines_with_one_process_and_writes_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(TOML)
    out = tmp_path / "rows.jsonl"
    options = train.Options(against="one-process", layouts=("pp2",), steps=1, config=tmp_path / "small.toml", out=out)
    assert train.main(options) == 0
    row = json.loads(out.read_text())
    assert (row["layout"], row["tpengine_ranks"], row["one_process_ranks"]) == ("pp2", 2, 1)
    assert row["check"] == "passed" and row["tokens_per_step"] == 64
    assert "pp2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_revision_is_compared_with_its_own_sources(tmp_path: Path) -> None:
    """A copy of the working tree stands for the revision; in it the learning rate is another, which the check finds."""
    tree = tmp_path / "tree"
    for package in ("tpengine", "kernels/tpkernels", "benchmarks"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    source = tree / "tpengine/training/learning_rate.py"
    text, rate = source.read_text(), "return rate_before + (config.lr - rate_before) * after / warmup.number"
    assert text.count(rate) == 1
    source.write_text(text.replace(rate, rate.replace("return ", "return 9 * (") + ")"))
    entries = train.entries_of(MINIATURE, "tp1", train.Options(against="HEAD"), tree)
    assert list(entries) == ["tpengine", "revision"]
    with Contestant(entries["tpengine"]) as ours, Contestant(entries["revision"]) as theirs:
        difference = check_agreement({"tpengine": ours, "revision": theirs})
    assert "of checked step 1 differs" in difference and str(tree) not in sys.path


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ({}, "tp4", "num_kv_heads divisible by tp: num_kv_heads 2, tp 4"),
        ({"vocab_size": 250}, "tp1", "does not pad: vocab_size 250"),
        ({"tie_embeddings": True}, "pp2", "do not tie the ends"),
    ],
)
def test_what_torch_does_not_offer_is_said_before_any_process_starts(
    model: dict[str, int], layout: str, reason: str
) -> None:
    base = replace(MINIATURE, model=replace(MINIATURE.model, **model))
    with pytest.raises(ValueError, match=reason):
        train.entries_of(base, layout, train.Options())


@pytest.mark.parametrize(
    ("text", "sizes"), [("tp1", (1, 1, 1)), ("tp2pp4", (2, 4, 1)), ("dp3", (1, 1, 3)), ("pp2tp2dp2", (2, 2, 2))]
)
def test_layouts_are_read(text: str, sizes: tuple[int, int, int]) -> None:
    assert parse_layout(text) == ParallelConfig(tp=sizes[0], pp=sizes[1], dp=sizes[2])


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp2tp2", "ep2", "tp2-pp2", "xtp2"])
def test_other_text_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="a layout names tp, pp and dp"):
        parse_layout(text)


def test_both_sides_train_on_the_same_global_batch() -> None:
    options = train.Options(against="dp4")
    entries = train.entries_of(MINIATURE, "dp2", options)
    ours, theirs = entries.values()
    assert ours.tokens_per_step == theirs.tokens_per_step == 2 * 2 * 2 * 16
    assert theirs.config.train.num_micro_batches == 1
    with pytest.raises(ValueError, match="replicas that divide"):
        train.entries_of(MINIATURE, "dp2", train.Options(against="dp3"))
