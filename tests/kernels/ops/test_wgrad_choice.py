"""Rung: pure, with a CPU that says it is a GPU, and torch's product in its place. Who adds a weight gradient, by rule.

That cuBLAS adds 16-bit products to float32, and that it is the faster one, only a GPU shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tpkernels.ops.matmul import tuned, wgrad, wgrad_choice
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.tuned import Tile, TunedFile, written
from tpkernels.ops.matmul.wgrad import accumulate_wgrad, wgrad_
from tpkernels.ops.matmul.wgrad_choice import is_torchs, refusal_of

TOKENS, OUT, IN = 64, 32, 48
SMALL = MatmulConfig(16, 16, 16, 2, 4, 1)
CPU = torch.device("cpu")


class OnCuda(Tensor):
    """A CPU's tensor that says it is a GPU's."""

    is_cuda = True


@pytest.fixture(autouse=True)
def _no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for files in an empty directory, and forget what was read, tried and said before and after."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.forget()
    wgrad_choice.forget()
    yield
    tuned.forget()
    wgrad_choice.forget()


def torch_adds(monkeypatch: pytest.MonkeyPatch, *, rounds: bool = False) -> list[tuple[int, ...]]:
    """Let torch.addmm have the overload that torch has on CUDA; return the list of the buffers that it adds to."""
    calls: list[tuple[int, ...]] = []

    def addmm(buffer: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is buffer and out_dtype == buffer.dtype == torch.float32 and a.dtype == b.dtype
        calls.append(tuple(buffer.shape))
        product = a.as_subclass(Tensor).float() @ b.as_subclass(Tensor).float()
        return buffer.add_(product.to(a.dtype) if rounds else product)

    monkeypatch.setattr(torch, "addmm", addmm)
    return calls


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(TOKENS, n, generator=generator).to(dtype).as_subclass(OnCuda) for n in (OUT, IN))
    return torch.zeros(OUT, IN), dy, x


def timed(us: float, torch_us: float | None, out: int = OUT) -> None:
    tile = Tile(out, IN, TOKENS, "bfloat16", False, True, True, SMALL, us, torch_us)
    (tuned.FOLDER / "cpu.json").write_bytes(written(TunedFile("cpu", "2026-11-26", None, "2.13", None, [tile], [])))
    tuned.forget()
    wgrad_choice.forget()


def test_torch_adds_by_default_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = torch_adds(monkeypatch)
    buffer, dy, x = operands()
    for _ in range(3):
        accumulate_wgrad(buffer, dy, x)
    # Once to see whether it can.
    assert calls == [(16, 16)] + 3 * [(OUT, IN)]
    expected = 3 * (dy.as_subclass(Tensor).double().T @ x.as_subclass(Tensor).double())
    assert float((buffer.double() - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tpkernels: weight gradients in bfloat16 are added to float32 by torch.addmm; torch.use_")


def test_the_public_operator_takes_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = torch_adds(monkeypatch)
    monkeypatch.setattr(wgrad, "_wgrad", accumulate_wgrad)
    wgrad_(*operands())
    assert calls == [(16, 16), (OUT, IN)]


@pytest.mark.parametrize(
    ("us", "torch_us", "is_faster"), [(10.0, 11.0, True), (11.0, 10.0, False), (10.0, None, False)]
)
def test_ours_is_taken_where_it_was_timed_faster(
    us: float,
    torch_us: float | None,
    is_faster: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch_adds(monkeypatch)
    timed(us, torch_us)
    buffer, dy, x = operands()
    assert is_torchs(buffer, dy, x) is not is_faster
    # Of another size it was not timed.
    assert is_torchs(torch.zeros(16, IN), dy[:, :16], x)
    (line,) = capsys.readouterr().err.splitlines()
    assert ("torch.addmm (1 that cpu.json has faster by our kernel);" in line) == is_faster


def test_never_where_torch_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = torch_adds(monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_torchs(*operands())
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls and is_torchs(*operands())


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer, dy, x: (buffer.double(), dy, x),
        lambda buffer, dy, x: (buffer, dy.float(), x.float()),
        lambda buffer, dy, x: (buffer.bfloat16(), dy, x),
        lambda buffer, dy, x: (buffer, dy[:0], x[:0]),
        lambda buffer, dy, x: (buffer, dy.as_subclass(Tensor), x.as_subclass(Tensor)),
    ],
    ids=["wide", "not_16_bits", "no_wider", "no_tokens", "cpu"],
)
def test_other_operands_are_left_as_they_were(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = torch_adds(monkeypatch)
    assert not is_torchs(*change(*operands())) and not calls


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_memory_that_is_short_decides_nothing(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "addmm", without_memory)
    with pytest.raises(type(error), match=str(error)):
        is_torchs(*operands())
    torch_adds(monkeypatch)
    assert is_torchs(*operands())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_torch_refuses_or_rounds_takes_ours_and_says_why(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("self and mat2 must have\nthe same dtype")

    monkeypatch.setattr(torch, "addmm", refuses)
    assert not is_torchs(*operands(dtype))
    (line,) = capsys.readouterr().err.splitlines()
    name = str(dtype).removeprefix("torch.")
    assert line.startswith(f"tpkernels: weight gradients in {name} are added to float32 by our kernel: torch ")
    assert line.endswith("self and mat2 must have the same dtype")
    wgrad_choice.forget()
    torch_adds(monkeypatch, rounds=True)
    assert refusal_of(CPU, dtype) == "it rounds sums to 16 bits" and not is_torchs(*operands(dtype))
    wgrad_choice.forget()
    torch_adds(monkeypatch)
    assert not refusal_of(CPU, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_adds_without_rounding(dtype: torch.dtype) -> None:
    """Whoever adds: the error from float64 is that of float32, also for a part of a wider dy's columns."""
    generator = torch.Generator("cuda").manual_seed(0)
    dy, x = (torch.randn(2048, n, generator=generator, device="cuda").to(dtype) for n in (768, 512))
    for piece in (dy, dy[:, 256:512]):
        start = torch.randn(piece.shape[1], 512, generator=generator, device="cuda")
        exact = start.double() + piece.double().T @ x.double()
        of_torch = start + piece.float().T @ x.float()
        buffer = start.clone()
        accumulate_wgrad(buffer, piece, x)
        allowed = max(2 * float((of_torch - exact).abs().max()), 2.0**-22 * float(exact.abs().max()))
        assert float((buffer - exact).abs().max()) <= allowed
