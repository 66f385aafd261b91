"""Parts of a user's own by their names: the same on all ranks, and a loss that a resumed run keeps.

A function has no other identity than its name: one of the same name that computes something else is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpengine.checkpoint.resume import Checkpoint
from tpengine.distributed.process import differing_ranks
from tpengine.runs.callbacks import Callback
from tpengine.training.elementwise import UpdateRule
from tpengine.training.objective import NextToken, Objective
from tpengine.training.planned_run import RunError


def name_of_loss(objective: Objective | None) -> str:
    """Return the name of a loss of the user's own, and of what counts for it; empty for the next token's."""
    if objective is None:
        return ""
    loss = "" if objective.loss is None or isinstance(objective.loss, NextToken) else _name_of(objective.loss)
    return loss if objective.count is None else f"{loss or 'of the next token'}, counted by {_name_of(objective.count)}"


def check_same_on_all_ranks(
    objective: Objective | None, optimizer: UpdateRule | None, callbacks: Sequence[Callback], device: torch.device
) -> None:
    """Compare what the user has given over all ranks; collective. With none there is one exchange too, once in a run.

    Raises:
        RunError: on all ranks alike.
    """
    own = [name_of_loss(objective), *(() if objective is None else sorted(objective.metrics))]
    own += [_name_of(part) for part in (optimizer, *callbacks)]
    if differing := differing_ranks("\n".join(own), device):
        raise RunError(
            f"all ranks must be given the same loss, metrics, optimizer and callbacks: ranks {differing} differ from "
            "rank 0: call tpengine.run alike on every rank; a callback's on_first_rank_only has rank 0 alone call it"
        )


def check_same_loss(checkpoint: Checkpoint | None, objective: Objective | None) -> None:
    """Raise ValueError if a checkpoint's run has trained with another loss."""
    if checkpoint is None or not checkpoint.index.step:
        return
    before, now = (
        f"the loss {name}" if name else "the loss of the next token"
        for name in (checkpoint.index.state.get("loss", ""), name_of_loss(objective))
    )
    if before != now:
        raise ValueError(
            f"a resumed run must keep its loss: {checkpoint.directory} was saved with {before}, this run has {now}: "
            "call tpengine.run with the loss of that name, or begin another run with its weights (--model.path)"
        )


def _name_of(part: object) -> str:
    return str(getattr(part, "__qualname__", type(part).__qualname__))
