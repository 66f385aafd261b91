"""Rung: gloo ranks. What a pipeline of any modules refuses, and how it fails: in one line, on every rank alike."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankError, RankPool
from torch import Tensor, nn

from tpengine.modules import Pipeline, pipeline
from tpengine.plan import Plan


class Attention(nn.Module):
    """A module that has something else under the name of our sinks, as attention with a learned sink."""

    def __init__(self, sink: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.sink = sink

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def refused_for_its_sink(has_parameter: bool) -> str:
    model = nn.Sequential(*(Attention(nn.Parameter(torch.ones(1)) if has_parameter else None) for _ in range(4)))
    try:
        Pipeline(model, torch.randn(2, 3), nn.functional.mse_loss, num_micro_batches=2, schedule="zbv")
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("has_parameter", [False, True])
def test_something_else_called_a_sink_is_none(ranks: RankPool, has_parameter: bool) -> None:
    for said in ranks.run(refused_for_its_sink, 2, has_parameter):
        assert "schedule zbv, module 0 is Attention, whose halves autograd computes at once" in said, said


def refused_file(directory: str, second: str | None) -> str:
    """Read a schedule file that only rank 0 has, or that is another one on rank 1."""
    lists = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    path = Path(directory) / f"of-{dist.get_rank()}" / "mine.txt"
    path.parent.mkdir()
    text = lists if dist.get_rank() == 0 else second
    if text is not None:
        path.write_text(text)
    os.chdir(path.parent)
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        Pipeline(model, torch.randn(2, 3), nn.functional.mse_loss, num_micro_batches=2, schedule="./mine.txt")
    except ValueError as error:
        return str(error)
    finally:
        os.chdir("/")
    return "accepted"


def test_a_schedule_file_that_differs_stops_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = ranks.run(refused_file, 2, str(tmp_path / "a"), None)
    assert first == "every rank must be able to read schedule ./mine.txt: ranks [1] cannot" and "mine.txt" in second
    other = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"
    for said in ranks.run(refused_file, 2, str(tmp_path / "b"), other):
        assert "./mine.txt of ranks [1] differs from that of rank 0: give all ranks the same file" in said


class Integers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().long() % 4


class EndsGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + 1


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def refused(what: str) -> str:
    model, sample = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(2, 3)
    loss, rank = nn.functional.mse_loss, dist.get_rank()
    keywords: dict[str, Any] = {"num_micro_batches": 4}
    if what == "too few modules":
        model = nn.Sequential(nn.Linear(3, 3))
    if what == "schedule":
        keywords["schedule"] = "2f2b"
    if what == "split":
        model, keywords["schedule"] = nn.Sequential(*model, nn.Linear(2, 2)), "zbv"
    if what == "micro-batches":
        keywords["num_micro_batches"] = 0
    if what == "cut":
        keywords["cut"] = [1, 1]
    if what == "other model" and rank == 1:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    if what == "other schedule":
        keywords["schedule"] = ["gpipe", "1f1b"][rank]
    if what == "sample":
        sample = torch.randn(2, 5)
    if what == "shared":
        model, keywords["cut"] = nn.Sequential(model[0], nn.ReLU(), model[0]), [1, 2]
    if what == "integers":
        model, keywords["cut"] = nn.Sequential(nn.Linear(3, 3), Integers(), nn.Embedding(4, 2)), [2, 1]
    if what == "buffer":
        norm = nn.BatchNorm1d(3, affine=False)
        model, keywords["cut"] = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm), [2, 2]
    if what == "gradients end":
        model, keywords["cut"] = nn.Sequential(nn.Linear(3, 3), EndsGradients(), nn.Linear(3, 2)), [1, 2]
    if what == "own forward":
        model = Residual(nn.Linear(3, 3), nn.Linear(3, 3))
    if what == "no rows":
        sample = torch.tensor(1.0)
    if what == "no tensor":
        model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.Linear(3, 3))
    try:
        pipe = Pipeline(model, sample, loss, **keywords)
        if what == "rows":
            pipe.step(torch.randn(7, 3), torch.randn(7, 2))
        wide, long = torch.randn(8, 4), torch.randn(8, 3).double()
        if what in ("columns", "dtype"):
            pipe.step({"columns": wide, "dtype": long}[what] if rank == 0 else None, torch.randn(8, 2))
        if what == "missing":
            pipe.step(None, torch.randn(8, 2)) if rank == 0 else pipe.step(torch.randn(8, 3), None)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("too few modules", "every part of the model needs a module: 1 modules, 1f1b makes 2 parts for 2 ranks: use"),
        ("schedule", "schedule must be one of gpipe, 1f1b, interleaved, zb-h1, zbv"),
        ("split", "schedule zbv, module 0 is Linear, whose halves autograd computes at once: use modules of"),
        ("micro-batches", "num_micro_batches must be at least 1: got 0"),
        ("cut", "a cut gives every part at least one module and uses all: cut [1, 1], 2 parts, 3 modules"),
        ("other model", "all ranks must build the same model: ranks [1] differ from rank 0, rank 1 has 'Tanh()'"),
        ("other schedule", "rank 1 has 'schedule 1f1b 2' where rank 0 has 'schedule gpipe 2'"),
        ("sample", "the sample must run through the model: ... shapes cannot be multiplied (2x5 and 3x3): check the"),
        ("shared", "a parameter must belong to one rank: 2.weight of rank 1 is shared with rank 0"),
        ("integers", "the output of a part must be able to carry a gradient: module 1 returns int64[2,3]"),
        ("buffer", "a buffer must belong to one rank: 3.running_mean of rank 1 is shared with rank 0"),
        ("gradients end", "only the first part may stop gradients: module 1 of part 1 passes none to its input"),
        ("own forward", "a pipeline runs modules one after another: Residual has a forward of its own"),
        ("no rows", "a sample must have rows: got shape []"),
        ("no tensor", "module 1 returns tuple"),
        ("rows", "must hold num_micro_batches times the sample's rows: 4 * 2 = 8, got [7, "),
        ("missing", "must hold num_micro_batches times the sample's rows: 4 * 2 = 8, got None"),
    ],
)
def test_mistakes_are_one_line_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    for said in ranks.run(refused, 2, what):
        # What stands for dots are words of torch, which differ from version to version.
        assert all(part in said for part in message.split("...")) and "\n" not in said, said


@pytest.mark.parametrize("what", ["columns", "dtype"])
def test_a_batch_refused_on_one_rank_stops_all(ranks: RankPool, what: str) -> None:
    first, last = ranks.run(refused, 2, what)
    assert "a micro-batch must have the sample's shape and dtype: [2, 3] torch.float32" in first
    assert last == "every rank's batch must fit: ranks [0] refused theirs: see their message"


def another_version(_: int) -> str:
    lower = pipeline.lower

    def other(*arguments: Any, **keywords: Any) -> Plan:
        return dataclasses.replace(lower(*arguments, **keywords), schedule="another")

    try:
        if dist.get_rank() == 1:
            pipeline.lower = other
        Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2), nn.functional.mse_loss, num_micro_batches=2
        )
    except RuntimeError as error:
        return str(error)
    finally:
        pipeline.lower = lower
    return "accepted"


def test_ranks_with_different_plans_are_named(ranks: RankPool) -> None:
    for said in ranks.run(another_version, 2, 0):
        assert "all ranks must have the same plan: ranks [1] differ from rank 0" in said


def a_module_fails(_: int) -> None:
    class Broken(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if not x.requires_grad and dist.get_rank() == 1:
                raise OSError("cable cut")
            return x

    model = nn.Sequential(nn.Linear(3, 3), Broken())
    pipe = Pipeline(model, torch.randn(2, 3), nn.functional.mse_loss, num_micro_batches=2, cut=[1, 1])
    pipe.forward(torch.randn(4, 3))


def test_an_error_inside_a_step_names_the_action(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1: action 1F0 \(place \d+ of \d+\) failed: OSError\('cable cut'\)"):
        ranks.run(a_module_fails, 2, 0)
