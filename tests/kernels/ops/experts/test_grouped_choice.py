"""Rung: pure, with a CPU that says it is a GPU of sm_90. Whether torch's grouped_mm multiplies, by rule.

torch's own function runs, on the CPU. That it is the faster one on a GPU, and leaves rows unwritten there, only a GPU
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpkernels.launch import Target
from tpkernels.ops.experts import grouped, grouped_choice
from tpkernels.ops.experts.grouped import grouped_matmul_forward, grouped_matmul_reference
from tpkernels.ops.experts.grouped_choice import is_torchs, multiply_by_torch, refusal_of

CPU = torch.device("cpu")
OFFSETS = torch.tensor([0, 10, 10, 30], dtype=torch.int32)


class OnCuda(Tensor):
    """A CPU's tensor that says it is a GPU's."""

    is_cuda = True


def zero_rows(y: Tensor, offsets: Tensor) -> None:
    y[int(offsets[-1]) :] = 0


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was tried and said before and after; let a host write the zeros that a kernel writes on a GPU."""
    monkeypatch.setattr(grouped_choice, "launch_zero_rows", zero_rows)
    grouped_choice.forget()
    yield
    grouped_choice.forget()


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (32, 24), generator=generator).to(dtype).as_subclass(OnCuda)
    return x, torch.randint(-2, 3, (3, 16, 24), generator=generator).to(dtype)


def count_calls(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor] = lambda y: y) -> list[int]:
    """Let torch's grouped_mm go on, with its results changed; return the list of the rows that it multiplies."""
    calls: list[int] = []
    real = F.grouped_mm

    def watched(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(len(a))
        return change(real(a.as_subclass(Tensor), b.as_subclass(Tensor), offs=offs))

    monkeypatch.setattr(F, "grouped_mm", watched)
    return calls


def test_torch_multiplies_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = count_calls(monkeypatch)
    x, w = operands()
    x[30:] = torch.nan
    rows = x.as_subclass(Tensor).nan_to_num(0.0)
    for _ in range(2):
        assert torch.equal(grouped_matmul_forward(x, w, OFFSETS), grouped_matmul_reference(rows, w, OFFSETS))
    back = w.mT.contiguous()
    want = grouped_matmul_reference(rows, back, OFFSETS, transposed=True)
    assert torch.equal(multiply_by_torch(x, back, OFFSETS, True), want)
    # Twice to see whether it can.
    assert calls == [16, 16, 32, 32, 32]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tpkernels: products of experts in bfloat16 on cpu are by torch's grouped_mm; torch.use_det")


def test_never_where_bits_are_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    assert not is_torchs(*operands(), fixed=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_torchs(*operands(), fixed=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls and is_torchs(*operands(), fixed=False)


def test_a_sum_of_two_products_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(grouped, "has_kernel", lambda x: False)
    x, w = operands()
    y = grouped_matmul_forward(x, w, OFFSETS, also=(x, w))
    assert not calls and y.shape == (32, 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (x.float(), w.float()),
        lambda x, w: (x.half(), w.half()),
        lambda x, w: (x[:0], w),
        lambda x, w: (x[:, 1:], w[:, :, 1:].contiguous()),
        lambda x, w: (x[:, :16], w[:, :, :16]),
        lambda x, w: (x, w[:, :15].contiguous()),
        lambda x, w: (x.T.contiguous().T, w),
        lambda x, w: (x.as_subclass(Tensor), w),
    ],
    ids=["float32", "float16", "no_rows", "not_aligned", "gaps", "odd_columns", "by_columns", "cpu"],
)
def test_other_operands_are_ours(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    assert not is_torchs(*change(*operands()), fixed=False) and not calls


@pytest.mark.parametrize("target", [Target("cuda", 80), Target("cuda", 100), Target("hip", "gfx942")], ids=str)
def test_other_gpus_take_ours_untried(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(grouped_choice, "target_of", lambda x: target)
    assert not is_torchs(*operands(), fixed=False) and not calls
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"grouped_mm is not taken: it is for sm_90, and this is {target.arch}")


def test_what_torch_refuses_or_gets_wrong_takes_ours_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("offs must\nbe something else")

    with monkeypatch.context() as patch:
        patch.setattr(F, "grouped_mm", refuses)
        assert not is_torchs(*operands(), fixed=False)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            f"by our kernel: torch {torch.__version__}'s grouped_mm is not taken: offs must be something else"
        )
    grouped_choice.forget()
    with monkeypatch.context() as patch:
        count_calls(patch, lambda y: y.roll(1, 0))
        assert refusal_of(CPU) == "it is wrong where an expert has no rows"
    grouped_choice.forget()
    with monkeypatch.context() as patch:
        patch.delattr(F, "grouped_mm")
        assert refusal_of(CPU) == "it has none"


def test_memory_that_is_short_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(F, "grouped_mm", without_memory)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            is_torchs(*operands(), fixed=False)
    assert is_torchs(*operands(), fixed=False)
