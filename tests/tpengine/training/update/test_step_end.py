"""Rung: interpreter, gloo ranks. A step ends by kernels: norm, clipping, AdamW and clearing of all tensors at once.

What only a GPU shows: the launches' times. That they are right there is in test_optimizer.py and kernels/ops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parity import compare, config_of, train, whole_weights
from support.ranks.rank_pool import RankPool
from torch.utils._python_dispatch import TorchDispatchMode
from tpkernels.ops import clip, tensor_table

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer

pytest.importorskip("triton")

# What torch computes nothing in.
_FREE = {"view", "select", "slice", "detach", "alias", "empty", "_unsafe_view", "unbind", "new_empty", "as_strided"}
_FREE |= {"lift_fresh", "_to_copy", "_local_scalar_dense", "expand", "promote_types"}
# On a GPU these are the host's: rows of AdamW's numbers are gathered there.
_FREE |= {"index"}


def small(dp: int, **parallel: Any) -> Config:
    """One layer, in float64: kernels of its products are torch's, the rest is interpreted."""
    config = config_of(dp, 1, 1, tied=True, kv_heads=1, num_layers=1, num_micro_batches=2, **parallel)
    return replace(config, train=replace(config.train, seq_len=8, micro_batch_size=1))


@pytest.mark.by_default("0")
@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_kernels_end_a_step_as_torch_does(ranks: RankPool, interpreters: RankPool, zero: int) -> None:
    """Clipped in every step, with weights that do not decay and tied ones, also of slices that ZeRO cuts anywhere."""
    (reference,) = ranks.run(train, 1, small(1))
    assert all(norm > small(1).optim.clip_norm for _, norm in reference[0])
    config = small(2, zero=zero) if zero else small(1)
    compare(interpreters.run(train, config.parallel.dp, config), reference)


def overflow(config: Config) -> None:
    """A gradient that is not finite: nothing changes, and the next step is as if it had not been."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    trainer.step.run(0)
    with whole_weights(trainer):
        before = {name: weight.detach().clone() for name, weight in trainer.state.model.held.items()}
    moments = {
        name: {k: t.clone() for k, t in trainer.state.optimizer.state_of(name).items()}
        for name in trainer.state.weights
    }
    finish = trainer.state.gradients.finish

    def spoil() -> None:
        finish()
        next(iter(trainer.state.gradients.of.values())).view(-1)[-1] = math.inf

    trainer.state.gradients.finish = spoil  # type: ignore[method-assign]
    result = trainer.step.run(1)
    assert result.skipped and math.isinf(result.grad_norm) and trainer.state.num_updates == 1
    for name, weight in trainer.state.model.held.items():
        assert torch.equal(weight, before[name]), name
    for name, states in moments.items():
        assert all(torch.equal(trainer.state.optimizer.state_of(name)[kind], x) for kind, x in states.items()), name
    trainer.state.gradients.finish = finish  # type: ignore[method-assign]
    assert not trainer.step.run(1).skipped and trainer.state.num_updates == 2
    assert not any(torch.equal(weight, before[name]) for name, weight in trainer.state.model.held.items())


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing(interpreters: RankPool) -> None:
    interpreters.run(overflow, 1, small(1))


class _Operators(TorchDispatchMode):
    """Counts torch's operators that compute or copy: on a GPU a kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.is_interpreter = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _FREE and not self.is_interpreter:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def launches_of_an_end(config: Config) -> tuple[dict[str, int], dict[str, int]]:
    """Return the kernels of triton and the operators of torch of a step's end, by how often they are launched."""
    trainer, ours, operators = Trainer(config, open_corpus(config), torch.device("cpu")), Counter[str](), _Operators()
    trainer.step.run(0)
    is_end = False

    def at_the_end(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal is_end
            is_end = True
            try:
                with operators:
                    return function(*args)
            finally:
                is_end = False

        return counted

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        ours[kernel.fn.__name__] += is_end
        # What the interpreter copies no GPU does.
        operators.is_interpreter = True
        try:
            return launch(kernel, *args, **options)
        finally:
            operators.is_interpreter = False

    with pytest.MonkeyPatch.context() as patch:
        launch = tensor_table.run
        for module in (tensor_table, clip):
            patch.setattr(module, "run", run)
        for name in ("_begin", "_clip", "_update", "_result"):
            patch.setattr(trainer.step, name, at_the_end(getattr(trainer.step, name)))
        trainer.step.run(1)
    return {name: number for name, number in ours.items() if number}, dict(operators.found)


def test_a_step_ends_in_few_launches_whatever_the_number_of_weights(interpreters: RankPool) -> None:
    """All kernels and operators between the last backward and the host's reading, and those that clear."""
    of_one, of_three = (
        interpreters.run(launches_of_an_end, 1, replace(small(1), model=replace(small(1).model, num_layers=layers)))[0]
        for layers in (1, 3)
    )
    assert of_one == of_three
    kernels, operators = of_one
    assert kernels == {
        "_multiply_kernel": 1,
        "_squares_kernel": 1,
        "_figures_kernel": 1,
        "_judge_kernel": 1,
        "_adamw_kernel": 1,
    }
    # The losses are cleared, summed, scaled and put beside the figures; the numbers of AdamW are copied, and skipping
    # is told with its negative, for all ranks to compare.
    assert operators == {"zero_": 1, "sum": 1, "mul": 1, "copy_": 2, "neg": 1, "cat": 2}
