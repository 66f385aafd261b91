"""Rung: pure. Torch's attention is taken where a file says that it won, said once, and never where bits must repeat.

That it is faster, and that cuDNN and flash run, only a GPU shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tpkernels.ops.attention import choice
from tpkernels.ops.attention.choice import chosen_backend
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.host import has_onednn
from tpkernels.ops.matmul.tuned import TunedAttention, TunedFile, written

SIZES = (64, 4, 2, 16)


@pytest.fixture(autouse=True)
def _no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for files in an empty directory, and forget what was read and said before and after."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.forget()
    choice._say.cache_clear()
    yield
    tuned.forget()
    choice._say.cache_clear()


def won(winner: str) -> None:
    one = TunedAttention(*SIZES, "float32", winner, 310.0, 420.0, "2026-11-23", None)
    (tuned.FOLDER / "cpu.json").write_bytes(written(TunedFile("cpu", "2026-11-23", None, "2.13", None, [], [one])))
    tuned.forget()


def test_without_a_file_attention_is_ours() -> None:
    assert chosen_backend(torch.empty(1), *SIZES) is None


def test_a_winner_is_taken_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    won("flash")
    assert [chosen_backend(torch.empty(1), *SIZES) for _ in range(3)] == ["flash"] * 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "is torch's (flash): 310 us instead of 420 by cpu.json of 2026-11-23" in line
    assert chosen_backend(torch.empty(1), 64, 2, 2, 16) is None


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_ours_is_taken_where_it_won_and_where_torch_must_be_deterministic(
    is_deterministic: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    won("cudnn" if is_deterministic else "ours")
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        assert chosen_backend(torch.empty(1), *SIZES) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert not capsys.readouterr().err


def test_a_damaged_file_is_refused() -> None:
    (tuned.FOLDER / "cpu.json").write_text("{}")
    with pytest.raises(ValueError, match="tuned tiles must have format 4"):
        chosen_backend(torch.empty(1), *SIZES)


def test_a_compiler_is_given_the_choice_and_traces_no_file() -> None:
    """Whole in one graph: had the look-up been traced, Path.exists would break it."""
    won("flash")

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if chosen_backend(x, *SIZES) == "flash" else 2) + has_onednn()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dynamic in (False, True):
            compiled = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=dynamic)
            assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 1.0 + has_onednn()))
            torch._dynamo.reset()
