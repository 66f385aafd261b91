"""Rung: gloo ranks. What a step is trained on, who reads it, and what all ranks say of it; one wait for the device.

What only a GPU checks: pinned copies, and that nothing else waits for it.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import digests_of
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpengine.config import Config
from tpengine.data import Samples, open_corpus, open_tokens, write_tokens
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError
from tpengine.training.step_batch import BatchReader

CPU = torch.device("cpu")


def other_tokens(samples: Samples) -> Samples:
    """The text with one token of each window altered."""
    tokens = samples.tokens.copy()
    tokens[:: samples.seq_len] ^= 1
    return replace(samples, tokens=tokens)


def read_instead(trainer: Trainer, samples: Samples) -> None:
    """Let this rank read other samples than those that all ranks have agreed on."""
    ends = trainer.state.part.layout.ranks[0], trainer.state.part.layout.ranks[-1]
    trainer.step.reader = BatchReader(
        trainer.state.part.config, samples, trainer.state.rank.mesh, ends, trainer.state.rank.device
    )


def step_on_another_text(config: Config, rank: int) -> tuple[str, bool]:
    """One rank's file differs. Return the error, and whether anything has been updated."""
    trainer = Trainer(config, open_corpus(config), CPU)
    if dist.get_rank() == rank:
        read_instead(trainer, other_tokens(trainer.state.part.corpus.train))
    before = digests_of(trainer)
    try:
        trainer.step.run(6)
    except RunError as error:
        after = digests_of(trainer)
        return str(error), any(after[key] != before[key] for key in after if key[2] != "gradient")
    return "no error", True


@pytest.mark.by_default("layout1-1-ranks [1] read others than rank 0")
@pytest.mark.parametrize(
    ("layout", "rank", "named"),
    [
        ((1, 2, 1), 1, "ranks [1] read others than rank 0"),
        ((1, 1, 2), 1, "ranks [1] read others than rank 0"),
        ((2, 2, 1), 2, "ranks [3] read others than rank 2"),
    ],
)
def test_ranks_of_a_replica_that_read_other_tokens_end_the_run_before_an_update(
    ranks: RankPool, layout: tuple[int, int, int], rank: int, named: str
) -> None:
    dp, tp, pp = layout
    found = ranks.run(step_on_another_text, dp * tp * pp, config_of(dp, tp, pp, tied=False, kv_heads=2), rank)
    assert {is_updated for _, is_updated in found} == {False}
    (message,) = {error for error, _ in found}
    assert message.startswith(f"the ranks of a replica must read the same tokens: in step 7 {named}")


def step_on_a_bad_text(config: Config, path: str, bad: int) -> tuple[str, bool]:
    """One rank's file is cut short once it is open, or holds a token too many. Return the error, and whether anything
    has been updated.
    """
    trainer = Trainer(config, open_corpus(config), CPU)
    if dist.get_rank() == bad:
        read_instead(trainer, replace(trainer.state.part.corpus.train, tokens=open_tokens(path).tokens))
        if path.endswith("short"):
            os.truncate(path, 100)
    before = digests_of(trainer)
    try:
        trainer.step.run(6)
    except RunError as error:
        after = digests_of(trainer)
        return str(error), any(after[key] != before[key] for key in after if key[2] != "gradient")
    return "no error", True


@pytest.mark.by_default("short-words0")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("short", ("must not be cut short while it is read: ", " has 100 bytes now and needs ", ": restore it and")),
        ("other", ("tokens must be at least 0 and below model.vocab_size: got 255, ",)),
    ],
)
def test_what_one_replica_cannot_read_is_said_by_all_ranks(
    ranks: RankPool, tmp_path: Path, kind: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / kind
    write_tokens(path, np.full(9_000, 255), 256)
    config = config_of(2, 1, 2, tied=False, kv_heads=2)
    found = ranks.run(step_on_a_bad_text, 4, config, str(path), 3)
    assert {is_updated for _, is_updated in found} == {False}
    (message,) = {error for error, _ in found}
    assert all(word in message for word in words), message
    assert message.endswith(" (in step 7, ranks [3] alone found this)") and "\n" not in message


def steps_read(config: Config) -> tuple[int, int, bool]:
    """Train all steps but one; return how many steps' samples were read, and whether a thread is left at the end."""
    others = set(threading.enumerate())
    trainer = Trainer(config, open_corpus(config), CPU)
    original = Samples.read_with_starts
    with patch.object(Samples, "read_with_starts", autospec=True, side_effect=original) as read:
        for step in range(config.train.steps - 1):
            trainer.step.run(step)
        trainer.close()
    is_left = any(thread.name == "tpengine-read-ahead" for thread in set(threading.enumerate()) - others)
    return len({tuple(call.args[1].tolist()) for call in read.call_args_list}), read.call_count, is_left


def test_only_the_first_and_the_last_stage_read_and_nothing_behind_the_last_step(ranks: RankPool) -> None:
    config = config_of(1, 1, 4, tied=False, kv_heads=2)
    config = replace(config, train=replace(config.train, steps=2))
    found = ranks.run(steps_read, 4, config)
    assert found[1] == found[2] == (0, 0, False)
    # The one step, and maybe that behind it, but for the thread's end; each once.
    for num_steps, num_reads, is_left in (found[0], found[3]):
        assert 1 <= num_steps == num_reads <= 2 and not is_left


_READS = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__")
_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor", "barrier")


class _Waits(TorchDispatchMode):
    """Counts what waits for a device inside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal")
        if waits and not _is_on_the_host_path():
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _is_on_the_host_path() -> bool:
    """Whether a kernel's stand-in for a CPU asks: a GPU's kernel is another one."""
    callers = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return any("tpkernels" in code.co_filename and "_host" in code.co_name for code in callers)


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str], Counter[str]]]:
    """Count what the host reads, by the function that asks for it, waits inside torch, and collectives by name."""
    reads: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    with ExitStack() as patches:
        for name in _READS:
            method = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
                frame = inspect.currentframe()
                assert frame is not None and frame.f_back is not None
                asks = frame.f_back.f_code
                # Kernels of the host have their operands there; those of a GPU are other ones.
                if "tpkernels" not in asks.co_filename:
                    reads[f"{Path(asks.co_filename).name}:{asks.co_name}"] += 1
                return _method(self, *args, **kwargs)

            patches.enter_context(patch.object(Tensor, name, read))
        for name in _COLLECTIVES:
            function = getattr(dist, name)

            def call(*args: Any, _function: Any = function, _name: str = name, **kwargs: Any) -> Any:
                collectives[_name] += 1
                return _function(*args, **kwargs)

            patches.enter_context(patch.object(dist, name, call))
        waits = patches.enter_context(_Waits())
        yield reads, waits.counts, collectives


def await_the_next(trainer: Trainer, step: int) -> None:
    """Wait until the samples of a step are there, as between slower steps."""
    reader = trainer.step.reader
    while reader._ahead.num_asked and reader.needs_samples and not reader._ahead.is_there(reader._numbers(step)):
        time.sleep(0.001)


def counts_of_a_step(config: Config) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    trainer = Trainer(config, open_corpus(config), CPU)
    step = trainer.step
    # The first step reads those of the next one beside its own.
    with patch.object(
        step, "_result", lambda *given, result=step._result: await_the_next(trainer, 1) or result(*given)
    ):
        step.run(0)
    with counted() as (reads, waits, collectives):
        trainer.step.run(1, lambda: [1.0, 2.0])
    return dict(reads), dict(waits), dict(collectives)


# Each layout once, in turns of dtypes; the others are slow.
@pytest.mark.by_default("layout0-float32")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=() if i % 2 == j else pytest.mark.slow)
        for i, layout in enumerate([(1, 1, 1), (1, 2, 1), (2, 1, 2)])
        for j, dtype in enumerate(["float32", "bfloat16"])
    ],
)
def test_a_step_waits_for_the_device_once(ranks: RankPool, layout: tuple[int, int, int], dtype: str) -> None:
    """And makes one collective over all ranks, one over a pipeline besides those of layers, stages and buckets."""
    dp, tp, pp = layout
    config = config_of(dp, tp, pp, tied=True, kv_heads=2)
    config = replace(config, train=replace(config.train, dtype=dtype))  # type: ignore[arg-type]
    for reads, waits, collectives in ranks.run(counts_of_a_step, dp * tp * pp, config):
        # Labels are compared with the vocabulary where that waits for nothing: on a CPU.
        num_compared = reads.pop("vocabulary.py:<genexpr>", 0)
        assert reads == {"process.py:read_with_largest": 1}
        assert sum(waits.values()) == num_compared == waits.get("_local_scalar_dense", 0)
        # Figures of the step, reports on the next; over a pipeline the norm, which tp ranks exchange through memory.
        over_pipeline = {"all_reduce": 1} if pp > 1 else {}
        assert collectives == ({"all_gather": 1, **over_pipeline} if dp * tp * pp > 1 else {})


def collectives_of_steps(config: Config, elsewhere: bool) -> list[int]:
    """The gathers over all ranks in each step: samples are there in time, or one rank's are not, or leave some out."""
    trainer, counts = Trainer(config, open_corpus(config), CPU), []
    step, position, result = trainer.step, trainer.position, trainer.step._result
    for number in range(3):
        with counted() as (_, _, collectives):

            def ended(*given: Any, number: int = number) -> Any:
                if elsewhere or dist.get_rank() != 1 or number != 1:
                    await_the_next(trainer, number + 1)
                    return result(*given)
                with patch.object(step.reader._ahead, "is_there", lambda _: False):
                    return result(*given)

            with patch.object(step, "_result", ended):
                step.run(number)
        counts.append(collectives["all_gather"])
        if elsewhere and number == 1:
            # As after a rollback, behind this step: on all ranks alike.
            step.reader._position = lambda at: replace(position(at), left_out=((1000, 1001),))
    trainer.close()
    return counts


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranks_meet_once_unless_samples_are_late_or_others_than_it_seemed(ranks: RankPool, elsewhere: bool) -> None:
    """In the first step; and in the third, since one rank's samples were late, or the run went on elsewhere."""
    assert ranks.run(collectives_of_steps, 2, config_of(2, 1, 1, tied=True, kv_heads=2), elsewhere) == [[2, 1, 2]] * 2


def batches_after(config: Config, is_heard: bool) -> list[bool]:
    """Whether a step has its samples though the thread that read them ahead has ended since they were reported."""
    trainer = Trainer(config, open_corpus(config), CPU)
    step = trainer.step
    step.run(0)
    await_the_next(trainer, 1)
    reported = step.reader.report_ahead(1)
    assert reported is not None
    if is_heard:
        everyone = [torch.empty_like(reported) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, reported)
        step.reader.hear(torch.stack(everyone))
    step.reader.close()
    batch = step.reader.read(1)
    again = BatchReader(config, trainer.state.part.corpus.train, step.reader._mesh, (0, 0), CPU).read(1)
    trainer.close()
    assert torch.equal(batch.reports, again.reports)
    return [torch.equal(*pair) for pair in zip(batch.given.tokens, again.given.tokens, strict=True)]


@pytest.mark.parametrize("is_heard", [True, False])
def test_what_was_reported_ahead_is_read_again_where_others_had_no_report(ranks: RankPool, is_heard: bool) -> None:
    """A rank whose samples were late has all ranks report at the step's beginning: of samples, not of none."""
    for same in ranks.run(batches_after, 2, config_of(2, 1, 1, tied=True, kv_heads=2), is_heard):
        assert same and all(same)
