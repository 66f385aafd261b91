"""A user's own code in a run: what it is told, and how an error in it ends the run, by name and on all ranks alike.

A callback runs by itself: it exchanges nothing unless its author does, on all ranks alike. If it fails, its rank keeps
the error and goes on to the end of the step. There the ranks tell each other, with one number, whether a callback has
failed; the step is saved, and the run ends. A run without callbacks exchanges nothing for them.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from tpengine.distributed.agreement import all_gather_json
from tpengine.distributed.process import max_over_ranks
from tpengine.last_words import one_line
from tpengine.observe.activity import Activity


class Callback:
    """What a run calls while it goes on: derive from it and override what you need; its own methods do nothing.

    Give the same callbacks on all ranks, to `tpengine.run(callbacks=[...])`. They are called in their order, in the
    main thread. A method may take part in collectives (torch.distributed) unless it runs on the first rank alone. One
    that takes longer than train.timeout_seconds is taken for a hang.

    An exception in a method ends the run when its step is saved, on all ranks, with its name and rank in one line and
    exit code 2; its traceback is printed. No callback of that rank is called behind it.

    Attributes:
        on_first_rank_only: whether the methods are called on rank 0 alone instead of on all ranks.
    """

    on_first_rank_only: ClassVar[bool] = False

    def after_step(self, numbers: Mapping[str, Any]) -> None:
        """Take what a step came to: called once its row of metrics is written, before its evaluation and checkpoint.

        Args:
            numbers: the row of metrics.jsonl: step (1 for the first), loss (nats per valid target of the global step,
                or your own loss), grad_norm (before clipping), lr, step_seconds, tokens_per_second and so on, and
                metric/NAME of each metric of your own. All but wall_seconds and what follows from it are equal on all
                ranks. A leap that --train.spike skips has spike_loss and spike_grad_norm instead of loss and grad_norm;
                of a leap that the run goes back for, nothing is told.
        """

    def after_evaluation(self, numbers: Mapping[str, Any]) -> None:
        """Take a held-out loss.

        Args:
            numbers: step, how many are done; held_out_loss; evaluation_seconds; of a mixture also held_out_loss/NAME of
                each source; held_out_metric/NAME of each metric of your own.
        """

    def before_checkpoint(self, path: Path, step: int) -> None:
        """Do something before a checkpoint is copied aside: files that are to lie beside it, say.

        Args:
            path: the directory that the checkpoint will be, complete or not there.
            step: how many are done.
        """

    def after_checkpoint(self, path: Path, step: int) -> None:
        """Do something with a checkpoint that is on disk: at the end of the step in which the last rank has written it.

        Args:
            path: its directory; older ones are removed as train.keep_checkpoints says.
            step: how many were done when it was made, not how many are done now.
        """


class Callbacks:
    """The callbacks of one run, on one rank.

    Args:
        given: all of them, the same on all ranks.
        rank: of this process.
        activity: told what is called.
        device: where this rank computes.
    """

    def __init__(self, given: Sequence[Callback], rank: int, activity: Activity, device: torch.device) -> None:
        self.are_given = bool(given)
        self._called = [callback for callback in given if rank == 0 or not callback.on_first_rank_only]
        self._activity, self._device = activity, device
        self._failure: list[str] = []

    def after_step(self, numbers: Mapping[str, Any]) -> None:
        """See Callback; the others too."""
        self._call("after_step", dict(numbers))

    def after_evaluation(self, numbers: Mapping[str, Any]) -> None:
        self._call("after_evaluation", dict(numbers))

    def before_checkpoint(self, path: Path, step: int) -> None:
        self._call("before_checkpoint", path, step)

    def after_checkpoint(self, path: Path, step: int) -> None:
        self._call("after_checkpoint", path, step)

    def failure(self) -> str:
        """Return which callback has failed first, where and how, in one line; empty if none has; collective.

        Cost: without callbacks nothing, else the sum of one number.
        """
        if not self.are_given:
            return ""
        self._activity.begin("asking whether a callback has failed")
        (some_failed,) = max_over_ranks([float(bool(self._failure))], self._device)
        if not some_failed:
            return ""
        self._called = []
        everyone = all_gather_json(self._failure)
        failed = [rank for rank, failure in enumerate(everyone) if failure]
        name, error = everyone[failed[0]]
        alike = [rank for rank in failed if everyone[rank] == [name, error]]
        ranks = f"ranks {', '.join(map(str, alike))}" if len(alike) > 1 else f"rank {alike[0]}"
        return f"callback {name} failed on {ranks}: {error}"

    def _call(self, method: str, *arguments: object) -> None:
        for callback in self._called:
            name = f"{type(callback).__name__}.{method}"
            self._activity.begin(f"callback {name}")
            try:
                getattr(callback, method)(*arguments)
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                self._failure, self._called = [name, one_line(f"{type(error).__name__}: {error}")], []
                return
