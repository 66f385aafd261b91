"""Rung: pure. A stage against autograd on the whole function, micro-batches in flight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from tpkernels.again import once

from tpengine.pipeline.stage import Stage


def none(*_: object) -> Tensor:
    raise AssertionError("a stage asks for what its chunk has no use for")


class Given:
    """A batch from functions, which notes what is begun."""

    def __init__(self, tokens: Callable[[int], Tensor] = none, loss: Callable[[Tensor, int], Tensor] = none) -> None:
        self.tokens, self.loss = tokens, loss
        self.begun: list[int] = []

    def begin(self, microbatch: int) -> None:
        self.begun.append(microbatch)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_stages_in_one_process_match_the_whole_function(recompute: bool) -> None:
    torch.manual_seed(0)
    w0, w1 = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]

    def first_loss(y: Tensor, microbatch: int) -> Tensor:
        return y.square().sum() * (microbatch + 1)

    batch = Given(lambda mb: inputs[mb], first_loss)
    first = Stage(lambda x: torch.tanh(x @ w0), batch, is_first=True, is_last=False, recompute=recompute)
    last = Stage(lambda x: torch.tanh(x @ w1), batch, is_first=False, is_last=True, recompute=recompute)
    for mb in range(3):
        first.forward(mb)
        last.receive_input(mb, first.take_output(mb).clone())
        last.forward(mb)
    for mb in (0, 2, 1):
        last.backward(mb)
        first.receive_output_grad(mb, last.take_input_grad(mb))
        first.backward(mb)
    got = w0.grad, w1.grad
    w0.grad = w1.grad = None
    whole = [first_loss(torch.tanh(torch.tanh(x @ w0) @ w1), mb) for mb, x in enumerate(inputs)]
    torch.stack(whole).sum().backward()
    for a, b in zip(got, (w0.grad, w1.grad), strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_a_first_stage_may_have_nothing_to_train() -> None:
    stage = Stage(lambda x: x.flatten(1), Given(lambda _: torch.ones(2, 2, 2)), is_first=True, is_last=False)
    stage.forward(0)
    dy = torch.ones(2, 4)
    received = weakref.ref(dy.untyped_storage())
    stage.receive_output_grad(0, dy)
    stage.backward(0)
    del dy
    gc.collect()
    assert received() is None
    with pytest.raises(KeyError):
        stage.take_output(0)


def test_a_loss_that_needs_no_gradient_is_an_error() -> None:
    stage = Stage(lambda x: x, Given(lambda _: torch.ones(2), lambda y, _: y.sum()), is_first=True, is_last=True)
    stage.forward(0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        stage.backward(0)


def saved_and_given(recompute: bool) -> tuple[set[int], int]:
    """Addresses of what forward has saved for backward, and that of the output, of a stage y = exp(x) + 1."""
    saved: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    stage = Stage(lambda x: x.exp() + 1, Given(), is_first=False, is_last=False, recompute=recompute)
    stage.receive_input(0, torch.ones(4))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(0)
    return saved, stage.take_output(0).untyped_storage().data_ptr()


def test_a_sent_output_is_let_go_of_while_its_graph_stays() -> None:
    """y = x + exp(x): addition saves neither term, exp saves its result: y's memory is nobody's once it is sent."""
    stage = Stage(lambda x: x + x.exp(), Given(), is_first=False, is_last=False)
    stage.receive_input(0, torch.zeros(1000))
    stage.forward(0)
    sent = stage.take_output(0)
    storage = weakref.ref(sent.untyped_storage())
    assert storage() is not None
    del sent
    gc.collect()
    assert storage() is None
    stage.receive_output_grad(0, torch.ones(1000))
    stage.backward(0)
    assert torch.equal(stage.take_input_grad(0), torch.full((1000,), 2.0))


def test_an_input_gradient_is_let_go_of_while_the_input_is_kept() -> None:
    """A weight half may keep the input, which must not keep the gradient that has been sent."""
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        kept.append(x)
        return x * 2

    stage = Stage(forward, Given(), is_first=False, is_last=False)
    stage.receive_input(0, torch.zeros(1000))
    stage.forward(0)
    stage.take_output(0)
    stage.receive_output_grad(0, torch.ones(1000))
    stage.backward(0)
    sent = stage.take_input_grad(0)
    assert torch.equal(sent, torch.full((1000,), 2.0)) and kept
    storage = weakref.ref(sent.untyped_storage())
    del sent
    gc.collect()
    assert storage() is None


def test_recomputation_keeps_the_input_alone() -> None:
    saved, given = saved_and_given(recompute=False)
    assert saved and given not in saved
    saved, _ = saved_and_given(recompute=True)
    assert not saved


def test_what_is_decided_once_stays_where_a_chunk_is_computed_again() -> None:
    """Of each micro-batch, whatever order their backward passes come in."""
    decisions, used = iter(range(9)), []

    def chunk(x: torch.Tensor) -> torch.Tensor:
        decided = once(lambda: next(decisions))
        used.append(decided)
        return x * decided

    stage = Stage(chunk, Given(), is_first=False, is_last=False, recompute=True)
    for microbatch in (0, 1, 2):
        stage.receive_input(microbatch, torch.ones(2))
        stage.forward(microbatch)
    for microbatch in (2, 0, 1):
        stage.receive_output_grad(microbatch, torch.ones(2))
        stage.backward(microbatch)
        assert stage.take_input_grad(microbatch).tolist() == [microbatch] * 2
    assert used == [0, 1, 2, 2, 0, 1]
    assert not stage._again


def test_what_a_forward_without_its_backward_decided_is_forgotten() -> None:
    """A step may end between the two. Neither evaluation nor the next step sees it: weights have changed since."""
    weight, used = torch.ones(()), []

    def chunk(x: torch.Tensor) -> torch.Tensor:
        decided = once(lambda: float(weight))
        used.append(decided)
        return x * decided

    stage = Stage(chunk, Given(), is_first=False, is_last=False, recompute=True)

    def give(pass_over: Callable[[int], None]) -> float:
        stage.receive_input(0, torch.ones(1))
        pass_over(0)
        return float(stage.take_output(0))

    assert give(stage.forward) == 1
    weight.fill_(2)
    assert give(stage.forward_only) == 2
    weight.fill_(3)
    assert give(stage.forward) == 3
    assert give(stage.forward_only) == 3
    weight.fill_(4)
    # Between a forward and its backward evaluation decides anew, and takes nothing away.
    stage.receive_input(0, torch.ones(1))
    stage.receive_output_grad(0, torch.ones(1))
    stage.backward(0)
    assert float(stage.take_input_grad(0)) == 3 and used == [1, 2, 3, 3, 3]
    assert not stage._again


def test_forward_only_keeps_nothing() -> None:
    first = Stage(lambda x: x + 1, Given(lambda mb: torch.full((2,), float(mb))), is_first=True, is_last=False)
    second = Stage(lambda x: x + 1, Given(), is_first=False, is_last=False)
    first.forward_only(5)
    x = first.take_output(5)
    received = weakref.ref(x.untyped_storage())
    second.receive_input(5, x)
    second.forward_only(5)
    assert (x.tolist(), second.take_output(5).tolist()) == ([6, 6], [7, 7])
    del x
    gc.collect()
    assert received() is None
    for stage in (first, second):
        with pytest.raises(KeyError):
            stage.take_output(5)


def test_the_batch_hears_of_a_micro_batch_before_each_pass_over_it() -> None:
    begun: list[list[int]] = []
    batch = Given(loss=lambda y, _: y.sum())

    def forward(x: Tensor) -> Tensor:
        begun.append(list(batch.begun))
        return x * 2

    stage = Stage(forward, batch, is_first=False, is_last=True, recompute=True)
    for mb in (3, 1):
        stage.receive_input(mb, torch.ones(2))
        stage.forward(mb)
    stage.backward(3)
    stage.begin(1)
    assert begun == [[3], [3, 1], [3, 1, 3]] and batch.begun == [3, 1, 3, 1]
