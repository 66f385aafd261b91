"""Rung: host, interpreter, GPU. Tiny models of every architecture have transformers' logits; a wrong one is a row.

The GPU checks all architectures with its own kernels, at sizes of several blocks; the interpreter runs the same kernels
at tiny sizes, by default of two architectures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import CountMutations
from support.architectures.drawn import CONFIGS
from support.architectures.mutations import broken
from support.ranks.rank_pool import RankPool

from benchmarks.gpu.cases import architectures
from benchmarks.gpu.command import parse
from benchmarks.gpu.plan import cases_for, published_models
from benchmarks.harness.journal import read

# mutation -> an architecture that shows it; each breaks every device's way
MUTATIONS = {
    "attention_factor_dropped": "qwen3",
    "default_theta_taken": "llama",
    "rope_scaling_dropped": "llama",
    "layer_norm_bias_missing": "gpt2",
    "learned_positions_shifted_by_one": "gpt2",
}


def check(rows: Path, name: str, seq: int, batch: int = 1) -> None:
    assert architectures.tiny(rows, [name], seq, batch) == 0, read(rows)
    of_float32, of_bfloat16 = read(rows)
    assert of_float32["case"] == f"architectures/{name}/float32" and of_float32["kl_over_limit_ratio"] < 1
    assert of_bfloat16["case"] == f"architectures/{name}/bfloat16"
    # A reference that is no wider than bfloat16 would make both errors 0, or equal.
    assert 1e-4 < of_bfloat16["transformers_error_ratio"] < 0.1


@pytest.mark.parametrize("seq", [500, 540])
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_logits_are_those_of_transformers(tmp_path: Path, name: str, seq: int) -> None:
    """By our attention; from 512 tokens on by torch's where the rule takes it, by its windows too."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check(tmp_path / "rows.jsonl", name, seq, batch=2)


@pytest.mark.by_default("gemma3")
@pytest.mark.parametrize(
    "name", [name if name in ("gpt2", "gemma3") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_kernels_have_the_logits_of_transformers(interpreters: RankPool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("triton")
    interpreters.run(check, 1, tmp_path / "rows.jsonl", name, 20)


@pytest.mark.slow
def test_every_mutation_is_a_wrong_row(tmp_path: Path, count_mutations: CountMutations) -> None:
    def num_wrong(mutation: str, name: str) -> int:
        rows = tmp_path / f"{mutation} of {name}"
        with broken(mutation):
            code = architectures.tiny(rows, [name], seq=40)
        wrong = [row for row in read(rows) if row["check"].startswith("failed: ")]
        assert code == bool(wrong)
        return len(wrong)

    controls = {name: num_wrong("control", name) for name in sorted(set(MUTATIONS.values()))}
    assert not any(controls.values()), controls
    unnoticed = [mutation for mutation, name in MUTATIONS.items() if num_wrong(mutation, name) != 2]
    count_mutations("architectures (a GPU's case)", len(MUTATIONS) - len(unnoticed), len(MUTATIONS))
    assert not unnoticed


def test_published_models_are_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "5a1b"
    other = tmp_path / "models--Qwen--Qwen3-14B" / "snapshots" / "77c2"
    own = tmp_path / "own"
    for path in (found, other, own):
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
    assert published_models(tmp_path) == [found]
    cases = {one.name: one for one in cases_for(tmp_path, [found, own])}
    assert cases["models/Qwen3-0.6B"].arguments["path"] == str(found)
    assert cases["models/own"].arguments == {"name": "own", "path": str(own)}
    assert parse(["--out", "x", "--models", str(own)]).models == (own,)
    with pytest.raises(ValueError, match=r"--models must be directories with a config\.json: .*none has none"):
        parse(["--out", "x", "--models", str(tmp_path / "none")])


def test_a_directory_is_compared(tmp_path: Path) -> None:
    architectures.save_tiny("qwen3", tmp_path / "model", 40)
    assert architectures.directory(tmp_path / "rows.jsonl", "Some", str(tmp_path / "model"), seq=40) == 0
    assert [row["case"] for row in read(tmp_path / "rows.jsonl")] == [
        "architectures/Some/float32",
        "architectures/Some/bfloat16",
    ]
