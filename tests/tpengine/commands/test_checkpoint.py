"""Rung: pure. `tpengine checkpoint` says of real checkpoints, cut in two ways, what is in them and what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.checkpoint.storage import Blocks, SavedBlock, Writer
from tpengine.cli import main

TENSORS: Mapping[str, Tensor] = {
    "a.weight": torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4),
    "b.weight": torch.linspace(-3, 5, 12).bfloat16().view(4, 3),
    "optimizer.a.weight.exp_avg": torch.linspace(-1e-9, 1e9, 24).view(6, 4),
    "scalar": torch.tensor(7),
}
STATE = {
    "config": {"parallel": {"dp": 2, "tp": 1, "pp": 1}, "phases": "p.toml"},
    "data": {"phase": 1},
    "held_out_loss": 2.5,
}


def save(run: Path, step: int, tensors: Mapping[str, Tensor] = TENSORS, num_ranks: int = 1) -> Path:
    """Write a checkpoint, each tensor cut by rows among the ranks."""
    run.mkdir(exist_ok=True)
    (run / "config.toml").touch()
    writer = Writer(checkpoints_of(run), step, STATE, keep=9)
    written = []
    for rank in range(num_ranks):
        blocks = {}
        for name, tensor in tensors.items():
            rows = torch.arange(len(tensor) if tensor.dim() else 1).tensor_split(num_ranks)[rank]
            if tensor.dim() == 0:
                if rank == 0:
                    blocks[name] = Blocks((SavedBlock.whole(tensor),))
            elif len(rows):
                offset = (int(rows[0]), *(0,) * (tensor.dim() - 1))
                blocks[name] = Blocks((SavedBlock(tensor[rows].contiguous(), offset, tuple(tensor.shape)),))
        written.append(json.loads(json.dumps(writer.write(f"rank-{rank}.safetensors", blocks))))
    writer.finish(written)
    return checkpoints_of(run).of_step(step)


def changed(name: str, at: tuple[int, ...], value: Tensor) -> dict[str, Tensor]:
    tensor = TENSORS[name].clone()
    tensor[at] = value
    return {**TENSORS, name: tensor}


def asked(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_diff_of_two_layouts_with_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 4)
    save(tmp_path / "three", 5, num_ranks=3)
    assert asked(capsys, "diff", tmp_path / "one", tmp_path / "three") == (0, "identical: 4 tensors, every bit\n")


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "optimizer.a.weight.exp_avg"])
@pytest.mark.parametrize("at", [(0, 0), (3, 2)])
def test_diff_counts_ulps_and_measures_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, at: tuple[int, int]
) -> None:
    """Two numbers further, in every dtype, also of a negative number."""
    before = TENSORS[name][at]
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[before.element_size()]
    after = (before.view(integer) + 2).view(before.dtype)
    save(tmp_path / "one", 4)
    save(tmp_path / "two", 4, changed(name, at, after), num_ranks=2)
    code, said = asked(capsys, "diff", f"{tmp_path / 'one'}@4", tmp_path / "two", "--json")
    (found,) = json.loads(said)["differing"]
    assert (code, found["name"], found["num_differing"], found["ulps"]) == (1, name, 1, 2)
    assert found["value"] == abs(before.double() - after.double()).item()


@pytest.mark.parametrize(
    ("x", "y", "ulps", "value"),
    [(0.0, -0.0, 0, 0.0), (5e-324, -5e-324, 2, 1e-323), (1.0, float("nan"), None, None)],
)
def test_diff_across_zero_and_to_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], x: float, y: float, ulps: int | None, value: float | None
) -> None:
    for run, number in (("one", x), ("two", y)):
        save(tmp_path / run, 1, changed("a.weight", (1, 1), torch.tensor(number, dtype=torch.float64)))
    code, said = asked(capsys, "diff", tmp_path / "one", tmp_path / "two", "--json")
    (found,) = json.loads(said)["differing"]
    assert (code, found["num_differing"], found["value"]) == (1, 1, value)
    assert ulps is None or found["ulps"] == ulps


def test_diff_names_what_is_only_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 4)
    others = {**TENSORS, "a.weight": TENSORS["a.weight"].float(), "scalar": torch.tensor(-8)}
    del others["b.weight"]
    save(tmp_path / "two", 4, others)
    code, said = asked(capsys, "diff", tmp_path / "one", tmp_path / "two")
    assert code == 1
    assert "F64 [6, 4], F32 [6, 4]" in said and "BF16 [4, 3], missing" in said and "3 of 4 tensors differ" in said
    assert [line.split() for line in said.splitlines() if "scalar" in line] == [["scalar", "1", "1", "15", "15"]]


def test_verify_names_every_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    whole, hurt, blind = save(run, 1), save(run, 2, num_ranks=4), save(run, 3)
    code, said = asked(capsys, "verify", run)
    assert code == 0 and said.count("whole") == 3
    (hurt / "rank-0.safetensors").unlink()
    cut, altered = hurt / "rank-1.safetensors", hurt / "rank-2.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    altered.write_bytes(altered.read_bytes()[:-1] + bytes([altered.read_bytes()[-1] ^ 1]))
    (blind / "index.json").write_bytes((blind / "index.json").read_bytes()[:-9])
    code, said = asked(capsys, "verify", run)
    assert code == 1 and "step 1: whole" in said and "rank-3" not in said
    for name, problem in (("rank-0", "No such file"), ("rank-1", "has"), ("rank-2", "altered"), ("index", "cut")):
        assert [problem in line for line in said.splitlines() if f"/{name}" in line] == [True], said
    assert asked(capsys, "verify", f"{run}@1")[0] == 0
    code, said = asked(capsys, "diff", f"{run}@1", f"{run}@2")
    assert code == 2 and len(said.splitlines()) == 1 and str(whole) not in said


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    size = sum(path.stat().st_size for path in save(run, 1, num_ranks=2).glob("*.safetensors"))
    cut = save(run, 2) / "rank-0.safetensors"
    cut.write_bytes(b"")
    checkpoints = checkpoints_of(run)
    save(run, 3)
    checkpoints.set_aside(3)
    checkpoints.begin(4)
    code, said = asked(capsys, "ls", run, "--json")
    rows = {row["name"]: row for row in json.loads(said)["checkpoints"]}
    assert code == 0
    assert {name: row["state"] for name, row in rows.items()} == {
        "step-00000001": "complete",
        "step-00000002": "damaged",
        "step-00000003.damaged": "damaged",
        ".step-00000004.writing": "incomplete",
    }
    first = rows["step-00000001"]
    assert (first["step"], first["phase"], first["held_out_loss"]) == (1, 2, 2.5)
    assert (first["num_bytes"], first["layout"]) == (size, "dp 2 tp 1 pp 1")
    code, said = asked(capsys, "ls", run)
    assert code == 0 and said.splitlines()[1].split()[:3] == ["1", "2", "2.5000"]
    shutil.rmtree(checkpoints.path)
    assert asked(capsys, "ls", run) == (0, f"{run} has no checkpoints\n")


@pytest.mark.parametrize("verb", [("ls",), ("verify",), ("diff", "elsewhere")])
def test_what_is_no_run_or_no_checkpoint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    save(tmp_path / "run", 5)
    for wrong in (tmp_path / "nowhere", f"{tmp_path / 'run'}@4"):
        code, said = asked(capsys, verb[0], *verb[1:], wrong)
        assert code == 2 and len(said.splitlines()) == 1 and said.startswith("tpengine: error: "), said
