"""Rung: pure, GPU. A layer's attention by torch's: the same numbers as ours, and never where it computes otherwise.

On a CPU the backend is the one that a CPU has, by a file that says that it won, and varlen_attn is written out. That
cuDNN and FlashAttention are right, for the attention of every architecture, only a GPU shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.attention import choice
from tpkernels.ops.attention.choice import Problem, Whose
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.tuned import TunedAttention, TunedFile, written

from tpengine.architectures import describe
from tpengine.architectures.registry import BUILT_IN
from tpengine.config import ModelConfig
from tpengine.config.settings import ModelDetails
from tpengine.layers import attention
from tpengine.layers import torch_attention as layer
from tpengine.layers.attention import Attention, Scores
from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm
from tpengine.layers.rows import Documents, length_of
from tpengine.model.parts import FastParts

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


def results(comm: Communicator, seq: int | Documents = SEQ, **options: Any) -> list[Tensor]:
    """The output and every gradient of two sequences."""
    torch.manual_seed(0)
    made = Attention(HEADS * HEAD_SIZE, HEADS, KV_HEADS, comm, dtype=torch.float64, **options)
    num_tokens = 2 * length_of(seq)
    x = torch.randn(num_tokens, HEADS * HEAD_SIZE, dtype=torch.float64, requires_grad=True)
    y = made(x, seq)
    y.backward(torch.randn_like(y))
    return [y.detach(), *(of.grad for of in (x, *made.parameters()) if of.grad is not None)]


@pytest.mark.parametrize("norm", [None, RMSNorm, OffsetRMSNorm, LayerNorm])
@pytest.mark.parametrize("scores", [None, Scores(None), Scores(None, scale=0.3)], ids=["rotated", "plain", "scaled"])
def test_torchs_attention_has_the_same_numbers(
    scores: Scores | None, norm: type[Norm] | None, calls: list[str]
) -> None:
    """Heads normed and rotated in one pass, or a norm that this pass does not have before it."""
    by_backend = results(Communicator(None), scores=scores, head_norm=norm)
    assert calls == ["math"]
    ours = results(Communicator(None), scores=scores, head_norm=norm, whose="ours")
    num_norms = 0 if norm is None else 4 if norm is LayerNorm else 2
    assert calls == ["math"] and len(ours) == len(by_backend) == 6 + num_norms
    for got, want in zip(by_backend, ours, strict=True):
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


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What varlen_attn documents: left and right of a query's own key, -1 for all, in each document alone."""
    assert enable_gqa and starts is key_starts and starts.dtype == torch.int32
    assert longest == longest_keys >= int(starts.diff().max())
    found = []
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        of = [x[first:end].transpose(0, 1) for x in (q, k, v)]
        away = torch.arange(end - first)[:, None] - torch.arange(end - first)
        left, right = window_size
        mask = (away >= -right) & ((away <= left) | (left < 0))
        y = torch.nn.functional.scaled_dot_product_attention(*of, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(y.transpose(0, 1))
    return torch.cat(found)


PACKED = Documents.of([0, 5, 32, 40, 41, 64], SEQ)


@pytest.mark.parametrize("norm", [None, RMSNorm])
@pytest.mark.parametrize(
    ("rows", "scores"),
    [
        (SEQ, Scores(window=8)),
        (SEQ, Scores(None, window=1)),
        (PACKED, Scores()),
        (PACKED, Scores(None, scale=0.3)),
        (PACKED, Scores(window=6)),
    ],
    ids=["window", "own key", "documents", "not rotated", "both"],
)
def test_windows_and_documents_go_by_varlen_attn(
    rows: int | Documents, scores: Scores, norm: type[Norm] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_varlen", written_out)
    asked: list[Problem] = []

    def chosen(problem: Problem, whose: str) -> str:
        asked.append(problem)
        return "varlen"

    monkeypatch.setattr(attention, "chosen_backend", chosen)
    given = results(Communicator(None), rows, scores=scores, head_norm=norm)
    (problem,) = asked
    assert (problem.windowed, problem.packed) == (scores.window is not None, isinstance(rows, Documents))
    ours = results(Communicator(None), rows, scores=scores, head_norm=norm, whose="ours")
    for got, want in zip(given, ours, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_was_asked_for_and_cannot_be_is_refused_when_a_layer_is_made() -> None:
    with pytest.raises(ValueError, match="it is for GPUs of NVIDIA, and the device is cpu"):
        Attention(64, 4, 2, Communicator(None), whose="torch")
    with pytest.raises(ValueError, match="not for a shard of exact mode"):
        Attention(64, 4, 2, ShardCommunicator(0, 1, Communicator(None)), whose="torch")
    with pytest.raises(ValueError, match="attention must be one of auto, ours, torch: got 'theirs'"):
        Attention(64, 4, 2, Communicator(None), whose="theirs")  # type: ignore[arg-type]


GPU_SEQ = 512
ARCHITECTURES = [(name, packed) for name in BUILT_IN for packed in (False, True)]


def of_architecture(name: str, device: str, dtype: torch.dtype, whose: Whose, packed: bool) -> list[Tensor]:
    """The output and every gradient of the first layer; without groups, which torch 2.11's varlen_attn has not."""
    windows = (100, 0) if name == "gemma3" else ()
    details = ModelDetails(windows=windows, max_positions=GPU_SEQ * (name == "gpt2"))
    model = ModelConfig(architecture=name, hidden_size=256, num_heads=4, num_kv_heads=4, num_layers=2, details=details)
    (part,) = (of for of in BUILT_IN[name].block(model, 0).values() if isinstance(of, describe.Attention))
    made = FastParts(model, Communicator(None), attention=whose, dtype=dtype, device=device).layer(part, None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() / 16)
    x, dy = (torch.randn(2 * GPU_SEQ, 256, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
    rows = Documents.of([0, 100, GPU_SEQ, 2 * GPU_SEQ], GPU_SEQ, device) if packed else GPU_SEQ
    y = made(x.requires_grad_(), rows)
    y.backward(dy)
    return [of.double().cpu() for of in (y.detach(), x.grad, *(of.grad for of in made.parameters())) if of is not None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "packed"), ARCHITECTURES)
def test_on_a_gpu_errors_are_at_most_twice_ours(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is asked for, and by rule where the GPU has one, which must then be torch's."""
    seen: list[str] = []
    kept = layer.attention_by_torch

    def listed(q: Tensor, k: Tensor, v: Tensor, backend: str, *given: Any, **options: Any) -> Tensor:
        seen.append(backend)
        return kept(q, k, v, backend, *given, **options)

    monkeypatch.setattr(layer, "attention_by_torch", listed)
    right = of_architecture(name, "cpu", torch.float64, "ours", packed)
    ours = of_architecture(name, "cuda", torch.bfloat16, "ours", packed)
    gpu = choice.gpu_of(torch.device("cuda", 0))
    asked: list[Whose] = ["torch", "auto"] if gpu is not None and gpu.target.arch in (90, 100, 103) else ["torch"]
    for whose in asked:
        got = of_architecture(name, "cuda", torch.bfloat16, whose, packed)
        for of, own, want in zip(got, ours, right, strict=True):
            allowed = 2 * max(float((own - want).abs().max()), float((want.bfloat16().double() - want).abs().max()))
            assert float((of - want).abs().max()) <= allowed
    assert len(seen) == len(asked)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_one_token_gets_its_value_whichever_backend_was_chosen(backend: str) -> None:
    """cuDNN refuses it, and a CPU has neither."""
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 1, 2, 16)
    y = choice.attention_by_torch(q, k, v, backend, scale=0.25)
    assert torch.allclose(y, v.repeat_interleave(2, dim=2), rtol=2 * torch.finfo(y.dtype).eps, atol=0.0)
