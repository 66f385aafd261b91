"""Rung: pure. Weights that are not the model's are refused before a byte of them is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tpengine.hugging_face.directory import ModelDirectory, OpenFiles, check_tensors, check_tied, open_directory
from tpengine.layout.stored import Stored

REMEDY = "give a directory whose config.json and weights belong together"


def directory_of(path: Path, **tensors: Tensor) -> ModelDirectory:
    (path / "config.json").write_text("{}")
    save_file(tensors, str(path / "model.safetensors"))
    return open_directory(path)


def test_the_models_weights_pass(tmp_path: Path) -> None:
    held = directory_of(tmp_path, qkv=torch.ones(6, 2), norm=torch.ones(2), inv_freq=torch.ones(3))
    wanted = [Stored("qkv", (6, 2), rows=(a, a + 2)) for a in (0, 2, 4)] + [Stored("norm", (2,))]
    check_tensors(held, wanted, ["*inv_freq"])
    with pytest.raises(ValueError) as refused:
        check_tensors(held, wanted)
    assert str(refused.value) == f"weights must be those of the model: {tmp_path}: 1 extra: inv_freq [3]: {REMEDY}"


def test_the_first_three_of_each_kind_are_named(tmp_path: Path) -> None:
    held = directory_of(tmp_path, **{f"x{n}": torch.ones(n + 1) for n in range(5)}, a=torch.ones(2, 3))
    wanted = [Stored("a", (3, 2)), *(Stored(f"y{n}", (n, 7)) for n in range(4))]
    with pytest.raises(ValueError) as refused:
        check_tensors(held, wanted)
    assert str(refused.value) == (
        f"weights must be those of the model: {tmp_path}: 4 missing: y0 [0, 7], y1 [1, 7], y2 [2, 7] and 1 more; "
        f"5 extra: x0 [1], x1 [2], x2 [3] and 2 more; 1 misshapen: a [2, 3] where [3, 2] is due: {REMEDY}"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    held = directory_of(tmp_path, a=torch.zeros(2, 3).to(dtype))
    with pytest.raises(ValueError, match=r"weights must not be quantized: .* has a as (I8|F8_E4M3): dequantize them"):
        check_tensors(held, [Stored("a", (2, 3))])
    # What is not read may be of any dtype: masks are.
    with pytest.raises(ValueError, match="1 missing: b"):
        check_tensors(held, [Stored("b", (1,))], ["a"])


def test_a_table_with_two_shapes_of_one_tensor_is_refused(tmp_path: Path) -> None:
    held = directory_of(tmp_path, a=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"a tensor must have one shape: a is \[2, 3\] and \[3, 2\]: correct"):
        check_tensors(held, [Stored("a", (2, 3)), Stored("a", (3, 2))])


def test_a_tied_head_must_be_the_table(tmp_path: Path) -> None:
    # More than one comparison takes.
    table = torch.arange(1_500_000.0)
    other = table.clone()
    other[-1] += 1
    held = directory_of(
        tmp_path, table=table, same=table.clone(), other=other, half=table.half(), short=table[:-1].clone()
    )
    with OpenFiles() as source:
        check_tied(held, source, "same", "table")
        assert source.bytes_read == 2 * 4 * 1_500_000
        # Shares compare the same bytes together, and one of them sees a difference.
        for i in range(3):
            check_tied(held, source, "same", "table", (i, 3))
        assert source.bytes_read == 4 * 4 * 1_500_000
        check_tied(held, source, "other", "table", (0, 2))
        with pytest.raises(ValueError, match="other differs from table"):
            check_tied(held, source, "other", "table", (1, 2))
        check_tied(held, source, "none", "table")
        for name in ("other", "half", "short"):
            with pytest.raises(ValueError) as refused:
                check_tied(held, source, name, "table")
            assert str(refused.value) == (
                f"a tied output head must be the embedding table: {tmp_path}: {name} differs from table: set "
                '"tie_word_embeddings": false in config.json'
            )
