"""Rung: host, interpreter, GPU. The router chooses and weighs as transformers' routers; all operators together.

Together: route, sort_by_expert, take_rows and combine_rows are a mixture of experts, against a loop over the tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.architectures.transformers_models import Widened
from support.kernels.precision import Operator, check_errors, unwritten_is_nan
from support.kernels.rungs import Rung, every_rung, every_rung_and_dtype
from torch import Tensor
from torch.func import functional_call
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


def check_as_theirs(what: str, ours: Operator, theirs: Operator, has_bias: bool = False) -> None:
    """Weights and gradients are at most twice as far from float64 as theirs, of some draws; the choices are equal."""

    def draw(seed: int) -> dict[str, Tensor]:
        found = {"x": drawn(50, 24, seed=seed, dtype=torch.float32), "w": drawn(16, 24, seed=99, dtype=torch.float32)}
        if has_bias:
            found["bias"] = drawn(16, seed=98, dtype=torch.float32) / 10
        return {name: t.requires_grad_(name != "bias") for name, t in found.items()}

    for seed in range(8):
        inputs = draw(seed)
        (_, got), (_, want) = ours(**inputs), theirs(**inputs)
        assert torch.equal(got.long(), want.long()), what
    check_errors(what, lambda **inputs: ours(**inputs)[0], lambda **inputs: theirs(**inputs)[0], draw, draws=8)


@pytest.mark.parametrize("normalize", [False, True])
def test_as_the_router_of_qwen3_moe(normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=24, norm_topk_prob=normalize)
    router = modeling.Qwen3MoeTopKRouter(config)

    def theirs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with Widened() if x.dtype == torch.float64 else nullcontext():
            _, weights, experts = functional_call(router, {"weight": w}, (x,))
        return weights, experts

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = route(x, w, 4, normalize=normalize)
        return found.weights, found.experts

    check_as_theirs(f"qwen3_moe, {normalize=}", ours, theirs)


def sorted_choice(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """A token's choices by number: transformers leaves their order open."""
    experts, places = experts.long().sort(dim=1)
    return weights.gather(1, places), experts


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

    def theirs(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        with Widened() if x.dtype == torch.float64 else nullcontext():
            found = functional_call(router, {"weight": w, "e_score_correction_bias": bias}, (x,))
        # Older releases return no logits.
        experts, weights = (found[-1], found[-2]) if found[-1].dtype == torch.int64 else found[:2]
        return sorted_choice(weights, experts)

    def ours(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rule: dict[str, Any] = {"num_groups": groups, "top_groups": max(1, groups // 2)}
        found = route(x, w, 4, bias=bias, scoring="sigmoid", normalize=normalize, scale=2.5, **rule)
        return sorted_choice(found.weights, found.experts)

    check_as_theirs(f"deepseek_v3, {groups=}, {normalize=}", ours, theirs, has_bias=True)


def check_errors_of_all(device: str, dtype: torch.dtype) -> None:
    """Logits, weights and gradients, with x and w in any dtype: at most twice as wrong as plain torch."""
    for rule in (ChoiceRule(3, normalize=True), ChoiceRule(2, "sigmoid", scale=2.5)):

        def draw(seed: int) -> dict[str, Tensor]:
            made = {"x": drawn(30, 24, seed=seed), "w": drawn(8, 24, seed=50 + seed)}
            return {name: t.to(device, dtype).requires_grad_() for name, t in made.items()}

        def ours(x: Tensor, w: Tensor, rule: ChoiceRule = rule) -> tuple[Tensor, Tensor]:
            found = route(x, w, **rule._asdict())
            return found.weights, found.logits

        def plainly(x: Tensor, w: Tensor, rule: ChoiceRule = rule) -> tuple[Tensor, Tensor]:
            wide = torch.promote_types(x.dtype, torch.float32)
            found = route_reference(x.to(wide), w.to(wide), None, rule)
            return found.weights, found.logits

        check_errors(f"{rule} {dtype}", ours, plainly, draw, draws=3)


@every_rung_and_dtype
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_errors_of_all, dtype)


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
