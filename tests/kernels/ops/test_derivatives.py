"""Rung: pure. Derivatives that operators do not have, second ones and those of forward mode: they raise.

Every registered operator with a backward is here, and the Functions that are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.activation import geglu, gelu, swiglu
from tpkernels.ops.attention import attention, attention_qkv
from tpkernels.ops.attention.host import causal_attention
from tpkernels.ops.cross_entropy.linear import linear_cross_entropy
from tpkernels.ops.cross_entropy.operator import cross_entropy, cross_entropy_partials
from tpkernels.ops.dropout import DropoutStream, dropout
from tpkernels.ops.embedding import embedding
from tpkernels.ops.experts.choose import choose
from tpkernels.ops.experts.grouped import grouped_matmul
from tpkernels.ops.experts.grouped_swiglu import grouped_swiglu
from tpkernels.ops.experts.rows import combine_rows, take_rows
from tpkernels.ops.matmul import matmul_swiglu
from tpkernels.ops.matmul.operator import matmul
from tpkernels.ops.norm.operator import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tpkernels.ops.rope import rope
from tpkernels.ops.rope_tables import rope_tables

ALONE = Communicator(None)
LABELS = torch.tensor([0, 3, 5])
ORDER = torch.tensor([1, 0, 2], dtype=torch.int32)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W, B = drawn(1, 4, 6), drawn(2, 6)
EXPERTS, OFFSETS = drawn(1, 2, 4, 6), torch.tensor([0, 1, 3], dtype=torch.int32)


class Operator(NamedTuple):
    """An operator as a function of one tensor.

    Attributes:
        of: input -> output.
        shape: of the input.
        is_twice: whether its gradient has a derivative.
        is_function: whether it is no registered operator: torch's own error is raised in forward mode.
    """

    of: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = (3, 6)
    is_twice: bool = False
    is_function: bool = False


COS, SIN = rope_tables(3, 6)
OPERATORS = {
    "rms_norm": Operator(lambda x: rms_norm(x, B)),
    "rms_norm's weight": Operator(lambda w: rms_norm(drawn(3, 3, 6), w), (6,)),
    "add_rms_norm": Operator(lambda x: add_rms_norm(x, drawn(3, 3, 6), B)[0]),
    "layer_norm": Operator(lambda x: layer_norm(x, B, B)),
    "layer_norm's bias": Operator(lambda b: layer_norm(drawn(3, 3, 6), B, b), (6,)),
    "add_layer_norm": Operator(lambda x: add_layer_norm(drawn(3, 3, 6), x, B)[0]),
    "swiglu": Operator(swiglu),
    "geglu": Operator(geglu),
    "gelu": Operator(gelu),
    "matmul_swiglu": Operator(lambda x: matmul_swiglu(x, W)),
    "matmul_swiglu, recomputed": Operator(lambda x: matmul_swiglu(x, W, recompute=True)),
    "matmul_swiglu's weight": Operator(lambda w: matmul_swiglu(drawn(3, 3, 6), w), (4, 6)),
    "grouped_matmul": Operator(lambda x: grouped_matmul(x, EXPERTS.to(x.dtype), OFFSETS)),
    "grouped_matmul's weight": Operator(lambda w: grouped_matmul(drawn(3, 3, 6), w, OFFSETS), (2, 4, 6)),
    "grouped_swiglu": Operator(lambda x: grouped_swiglu(x, EXPERTS, 2 * EXPERTS, OFFSETS)),
    "grouped_swiglu's weight": Operator(lambda w: grouped_swiglu(drawn(3, 3, 6), w, EXPERTS, OFFSETS), (2, 4, 6)),
    "attention": Operator(
        lambda q: attention(q, drawn(3, 1, 3, 2, 16), drawn(4, 1, 3, 2, 16), window=2), (1, 3, 2, 16)
    ),
    "attention's values": Operator(
        lambda v: attention(drawn(3, 1, 3, 2, 16), drawn(4, 1, 3, 2, 16), v, window=2), (1, 3, 2, 16)
    ),
    "attention_qkv": Operator(lambda qkv: attention_qkv(qkv, 2, 1, window=2), (3, 64)),
    "causal_attention": Operator(
        lambda q: causal_attention(q, drawn(3, 1, 2, 3, 8), drawn(4, 1, 2, 3, 8)), (1, 2, 3, 8), False, True
    ),
    "embedding": Operator(lambda w: embedding(LABELS, w), (6, 4)),
    "cross_entropy": Operator(lambda z: cross_entropy(1 * z, LABELS)),
    "cross_entropy of a leaf": Operator(lambda z: cross_entropy(z, LABELS)),
    "linear_cross_entropy": Operator(lambda x: linear_cross_entropy(x, drawn(3, 7, 6), LABELS), (3, 6), False, True),
    "choose": Operator(lambda z: choose(z, 2).weights),
    "take_rows": Operator(lambda x: take_rows(x, ORDER, 1)),
    "combine_rows": Operator(lambda x: combine_rows(x, ORDER, drawn(3, 3, 1))),
    "combine_rows's weights": Operator(lambda w: combine_rows(drawn(3, 3, 6), ORDER, w), (3, 1)),
    "all_gather_matmul": Operator(lambda x: all_gather_matmul(x, [W], ALONE)[0]),
    "all_gather_matmul's weight": Operator(lambda w: all_gather_matmul(drawn(3, 3, 6), [w], ALONE)[0], (4, 6)),
    "matmul_reduce_scatter": Operator(lambda x: matmul_reduce_scatter(x, W, ALONE)),
    "matmul_reduce_scatter's bias": Operator(lambda b: matmul_reduce_scatter(drawn(3, 3, 6), W, ALONE, bias=b), (4,)),
    "matmul_all_reduce": Operator(lambda x: matmul_all_reduce(x, W, ALONE)),
    "matmul": Operator(lambda x: matmul(x, W.T.to(x.dtype)), is_twice=True),
    "rope": Operator(lambda x: rope(x, COS.to(x.dtype), SIN.to(x.dtype)), (3, 2, 6), True),
    "dropout": Operator(lambda x: dropout(x, DropoutStream(0.5, 0, "here", 0, 0)), is_twice=True),
}
every_operator = pytest.mark.parametrize("name", OPERATORS)


@every_operator
def test_a_second_derivative_is_right_or_raises(name: str) -> None:
    """It raises even if the gradient of the output needs no gradient itself, as with a sum."""
    operator = OPERATORS[name]
    x = drawn(0, *operator.shape).requires_grad_()
    for reduce in (torch.sum, lambda y: y.square().sum()):
        (gradient,) = torch.autograd.grad(reduce(operator.of(x)), x, create_graph=True)
        if operator.is_twice:
            continue
        # Beside a term that has a derivative it would not be missed.
        with pytest.raises(RuntimeError, match="gradient has no derivative: the operator is differentiable once"):
            (gradient.sum() + x.sum()).backward()
    if operator.is_twice:
        assert gradient.requires_grad and torch.autograd.gradgradcheck(
            operator.of, x.detach().double().requires_grad_()
        )


@every_operator
def test_first_derivatives_are_the_same_with_a_graph(name: str) -> None:
    operator = OPERATORS[name]
    x = drawn(0, *operator.shape).requires_grad_()
    plain, *_ = torch.autograd.grad(operator.of(x).square().sum(), x)
    with_graph, *_ = torch.autograd.grad(operator.of(x).square().sum(), x, create_graph=True)
    assert torch.equal(plain, with_graph)


@every_operator
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_tangent_raises(name: str, needs_grad: bool) -> None:
    operator = OPERATORS[name]
    x = drawn(0, *operator.shape).requires_grad_(needs_grad)
    what = "jvp" if operator.is_function else "has no forward-mode derivative: got an input"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=what):
        operator.of(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(RuntimeError, match=what):
        torch.func.jvp(operator.of, (x.detach(),), (torch.ones_like(x),))


def test_inputs_without_a_tangent_pass() -> None:
    x = drawn(0, 3, 6)
    with forward_ad.dual_level():
        assert torch.equal(rms_norm(x, B), rms_norm(x, B))
    partials = pytest.raises(RuntimeError, match="cross_entropy_partials has no forward-mode derivative")
    with forward_ad.dual_level(), partials:
        cross_entropy_partials(forward_ad.make_dual(x, torch.ones_like(x)), LABELS)


def test_a_tangent_raises_in_what_is_compiled() -> None:
    """Traced inputs show no tangents; what was compiled before is not used where there may be some."""
    x = drawn(0, 3, 6)
    for fullgraph in (False, True):
        compiled = torch.compile(lambda x: rms_norm(2 * x, B), backend="aot_eager", fullgraph=fullgraph)
        want = compiled(x)
        said = "rms_norm has no forward-mode derivative: got an input"
        if fullgraph:
            said = "Observed exception|dual tensor input"  # torch 2.15 refuses it by itself
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=said):
            compiled(forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(compiled(x), want)
        if not fullgraph:
            with forward_ad.dual_level():
                assert torch.equal(compiled(x), want)
            with pytest.raises(RuntimeError, match=said):
                torch.func.jvp(compiled, (x,), (torch.ones_like(x),))
        torch._dynamo.reset()
