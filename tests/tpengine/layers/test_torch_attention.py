"""Rung: pure. A layer's attention by torch's, where a file says that it won: the same numbers, and never elsewhere.

The backend is the one that a CPU has; that cuDNN and flash are right is checked where they are timed, on a GPU
(benchmarks/gpu/cases/kernels/attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tpkernels.ops.attention import choice
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.tuned import TunedAttention, TunedFile, written

from tpengine.layers import torch_attention as layer
from tpengine.layers.attention import Attention, Rotation, Scores
from tpengine.layers.collectives import Communicator, ShardCommunicator
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm

HEADS, KV_HEADS, HEAD_SIZE, SEQ = 4, 2, 16, 32


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The backends that are called; a file says that "math" is the fastest here."""
    one = TunedAttention(SEQ, HEADS, KV_HEADS, HEAD_SIZE, "float64", "math", 1.0, 2.0, "2026-11-23", None)
    (tmp_path / "cpu.json").write_bytes(written(TunedFile("cpu", "2026-11-23", None, "2.13", None, [], [one])))
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.forget()
    choice.forget()
    called: list[str] = []
    kept = layer.attention_by_torch

    def listed(q: Tensor, k: Tensor, v: Tensor, backend: str, *given: Any, **options: Any) -> Tensor:
        called.append(backend)
        return kept(q, k, v, backend, *given, **options)

    monkeypatch.setattr(layer, "attention_by_torch", listed)
    yield called
    tuned.forget()
    choice.forget()


def results(comm: Communicator, seq: int = SEQ, **options: Any) -> list[Tensor]:
    """The output and every gradient of two sequences."""
    torch.manual_seed(0)
    made = Attention(HEADS * HEAD_SIZE, HEADS, KV_HEADS, comm, dtype=torch.float64, **options)
    x = torch.randn(2 * seq, HEADS * HEAD_SIZE, dtype=torch.float64, requires_grad=True)
    y = made(x, seq)
    y.backward(torch.randn_like(y))
    return [y.detach(), *(of.grad for of in (x, *made.parameters()) if of.grad is not None)]


@pytest.mark.parametrize("norm", [None, RMSNorm, OffsetRMSNorm, LayerNorm])
@pytest.mark.parametrize("scores", [None, Scores(None), Scores(None, scale=0.3)], ids=["rotated", "plain", "scaled"])
def test_torchs_attention_has_the_same_numbers(
    scores: Scores | None, norm: type[Norm] | None, calls: list[str]
) -> None:
    """Heads normed and rotated in one pass, or a norm that this pass does not have before it."""
    by_torch = results(Communicator(None), scores=scores, head_norm=norm)
    assert calls == ["math"]
    ours = results(Communicator(None), scores=scores, head_norm=norm, whose="ours")
    num_norms = 0 if norm is None else 4 if norm is LayerNorm else 2
    assert calls == ["math"] and len(ours) == len(by_torch) == 6 + num_norms
    for got, want in zip(by_torch, ours, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_it_is_never_taken_where_it_computes_something_else_or_bits_must_repeat(calls: list[str]) -> None:
    results(Communicator(None), scores=Scores(None, window=8))
    results(Communicator(None), dropout=Dropout(0.1, 0, "scores", Position(training=True)))
    results(ShardCommunicator(0, 1, Communicator(None)))
    results(Communicator(None), seq=16)
    torch.use_deterministic_algorithms(True)
    try:
        results(Communicator(None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls
    # A window that is no shorter than the sequence is none.
    results(Communicator(None), scores=Scores(None, window=SEQ))
    assert calls == ["math"]
