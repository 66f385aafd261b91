"""Rung: host, interpreter, GPU. The router chooses and weighs as transformers' routers; all operators together.

Together: route, sort_by_expert, take_rows and combine_rows are a mixture of experts, against a loop over the tokens.
"""

from __future__ import annotations

import pytest
import torch
from support.kernels.precision import unwritten_is_nan
from support.kernels.rungs import Rung, every_rung
from torch import Tensor
from tpkernels import Routing, combine_rows, route, sort_by_expert, take_rows
from tpkernels.ops.experts.choose import ChoiceRule
from tpkernels.ops.experts.route import route_reference


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_mixture(device: str) -> None:
    """Expert e multiplies by factors[e]; values and all gradients to 1e-10, forward and backward through every part."""
    for tokens, num_experts, k, normalize in ((13, 8, 3, True), (5, 5, 1, False), (0, 4, 2, True)):
        leaves = [drawn(tokens, 6), drawn(num_experts, 6, seed=1), drawn(num_experts, 6, seed=2)]
        leaves = [leaf.to(device).requires_grad_() for leaf in leaves]
        x, w, factors = leaves
        with unwritten_is_nan():
            routing = route(x, w, k, normalize=normalize)
            order, offsets = sort_by_expert(routing.experts, num_experts)
            xs = take_rows(x, order, k)
            of_row = torch.repeat_interleave(torch.arange(num_experts, device=device), offsets.diff())
            y = combine_rows(xs * factors[of_row], order, routing.weights)
            dy = drawn(tokens, 6, seed=3).to(device)
            got = [y, *torch.autograd.grad(y, leaves, dy)]

        p = (x @ w.T).softmax(1)
        rows = []
        for t in range(tokens):
            best = [expert for _, expert in sorted((-score, expert) for expert, score in enumerate(p[t].tolist()))[:k]]
            total = sum((p[t, e] for e in best), torch.zeros_like(p[t, 0])) if normalize else 1
            rows.append(sum((p[t, e] / total * factors[e] * x[t] for e in best), torch.zeros_like(x[t])))
        want_y = torch.stack(rows) if rows else x * 0
        want = [want_y, *torch.autograd.grad(want_y, leaves, dy, allow_unused=True, materialize_grads=True)]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert torch.equal(offsets.diff(), routing.counts)


@every_rung
def test_a_mixture_of_experts_is_a_loop_over_its_tokens(rung: Rung) -> None:
    rung(check_mixture)


@pytest.mark.parametrize("normalize", [False, True])
def test_as_the_router_of_qwen3_moe(normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=24, norm_topk_prob=normalize)
    router = modeling.Qwen3MoeTopKRouter(config)
    x, w = drawn(50, 24, dtype=torch.float32).requires_grad_(), drawn(16, 24, seed=1, dtype=torch.float32)
    with torch.no_grad():
        router.weight.copy_(w)
    w.requires_grad_()
    _, weights, experts = router(x)
    dweights = drawn(50, 4, seed=2, dtype=torch.float32)
    want = torch.autograd.grad(weights, (x, router.weight), dweights)
    ours = route(x, w, 4, normalize=normalize)
    assert torch.equal(ours.experts.long(), experts)
    torch.testing.assert_close(ours.weights, weights)
    torch.testing.assert_close(torch.autograd.grad(ours.weights, (x, w), dweights), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_as_the_router_of_deepseek_v3(groups: int, normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=24,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=max(1, groups // 2),
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    router = modeling.DeepseekV3TopkRouter(config)
    x, w = drawn(50, 24, dtype=torch.float32).requires_grad_(), drawn(16, 24, seed=1, dtype=torch.float32)
    bias = drawn(16, seed=3, dtype=torch.float32) / 10
    with torch.no_grad():
        router.weight.copy_(w)
        router.e_score_correction_bias.copy_(bias)
    w.requires_grad_()
    found = router(x)
    # Older releases return no logits.
    experts, weights = (found[-1], found[-2]) if found[-1].dtype == torch.int64 else found[:2]
    # transformers leaves the order of a token's experts open.
    experts, places = experts.sort(dim=1)
    weights = weights.gather(1, places)
    dweights = drawn(50, 4, seed=2, dtype=torch.float32)
    want = torch.autograd.grad(weights, (x, router.weight), dweights)
    ours = route(
        x,
        w,
        4,
        bias=bias,
        scoring="sigmoid",
        normalize=normalize,
        scale=2.5,
        num_groups=groups,
        top_groups=max(1, groups // 2),
    )
    our_experts, places = ours.experts.long().sort(dim=1)
    our_weights = ours.weights.gather(1, places)
    assert torch.equal(our_experts, experts)
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(torch.autograd.grad(our_weights, (x, w), dweights), want, rtol=1e-4, atol=1e-6)


def check_width(device: str) -> None:
    """In float32 whatever x is, under autocast too; in float64 for float64; gradients in the dtypes of x and w."""
    for dtype, wide in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        x = drawn(20, 8, dtype=dtype).to(device).requires_grad_()
        w = drawn(6, 8, seed=1, dtype=dtype).to(device).requires_grad_()
        ours = route(x, w, 2)
        assert isinstance(ours, Routing) and ours.logits.dtype == ours.weights.dtype == wide
        assert torch.equal(ours.logits, x.to(wide) @ w.to(wide).T)
        gradients = torch.autograd.grad(ours.weights.sum() + ours.logits.square().sum(), (x, w))
        assert [g.dtype for g in gradients] == [dtype, dtype]
        with torch.autocast(device, dtype=torch.bfloat16):
            under = route(x, w, 2)
        assert all(torch.equal(a, b) for a, b in zip(under, ours, strict=True))
    want = route_reference(x, w, None, ChoiceRule(2))
    torch.testing.assert_close(tuple(ours), tuple(want), rtol=1e-10, atol=1e-10)


@every_rung
def test_logits_are_in_float32(rung: Rung) -> None:
    rung(check_width)


def test_compiled_as_eager() -> None:
    x, w = drawn(9, 6, dtype=torch.float32).requires_grad_(), drawn(4, 6, seed=1, dtype=torch.float32).requires_grad_()

    def mixture(x: Tensor, w: Tensor) -> Tensor:
        routing = route(2 * x, w, 2, normalize=True)
        order, _ = sort_by_expert(routing.experts, 4)
        return combine_rows(take_rows(x, order, 2), order, routing.weights) + routing.counts.sum()

    outcomes = []
    for function in (mixture, torch.compile(mixture, backend="aot_eager", fullgraph=True)):
        y = function(x, w)
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.ones(3, 4), torch.ones(2, 5), r"x is \(3, 4\) .*, w \(2, 5\) .*: pass matrices with equally many"),
        (torch.ones(4), torch.ones(2, 4), r"route takes x\[T, D\]"),
        (torch.ones(3, 4).int(), torch.ones(2, 4), "floating-point numbers"),
        (torch.ones(3, 4), torch.ones(2, 4), "k is 3, E 2: pass a k of at most 2"),
    ],
)
def test_a_router_that_does_not_fit_is_refused(x: Tensor, w: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(x, w, 3)
