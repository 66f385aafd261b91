"""Rung: pure. A resumed run keeps its loss, and what is counted for it, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpengine.checkpoint.index import Index
from tpengine.checkpoint.resume import Checkpoint
from tpengine.runs.own_parts import check_same_loss, name_of_loss
from tpengine.training.objective import MicroBatch, NextToken, Objective


def sequences(batch: MicroBatch) -> float:
    return len(batch.tokens) / batch.seq


def tokens(batch: MicroBatch) -> float:
    return len(batch.tokens)


def saved_with(objective: Objective | None, step: int = 3) -> Checkpoint:
    return Checkpoint(Path("run"), Index(step, {}, {}, {"loss": name_of_loss(objective)}), {})


@pytest.mark.parametrize("objective", [None, Objective(), Objective(NextToken()), Objective(count=sequences)])
def test_the_same_loss_goes_on(objective: Objective | None) -> None:
    check_same_loss(saved_with(objective), objective)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Objective(count=sequences), None),
        (None, Objective(count=tokens)),
        (Objective(count=sequences), Objective(count=tokens)),
    ],
)
def test_another_count_is_another_loss(before: Objective | None, now: Objective | None) -> None:
    with pytest.raises(ValueError, match="a resumed run must keep its loss: run was saved with the loss of the next"):
        check_same_loss(saved_with(before), now)
    check_same_loss(saved_with(before, step=0), now)
