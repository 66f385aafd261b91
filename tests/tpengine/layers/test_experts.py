"""Rung: gloo ranks. A mixture of experts against a loop over tokens, forward and every gradient, in float64.

Routing is skewed: the bias of one column sends most tokens to one expert, and one expert has none.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import CountMutations
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tpkernels.again import same_choices
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule

from tpengine.layers import MixtureOfExperts, experts, gradient_sink, routing
from tpengine.layers.collectives import ShardCommunicator, WholeRows
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layers.placement import placements_of

T, D, FFN, E, SHARED = 12, 8, 12, 5, 24
RULES = {
    "qwen3": ChoiceRule(2, normalize=True),
    "one": ChoiceRule(1),
    "all": ChoiceRule(E, scale=0.5),
    "sigmoid": ChoiceRule(3, "sigmoid", normalize=True, scale=2.5),
}
SHAPES = {
    "gate.weight": (E, D),
    "experts.gate_proj.weight": (E, FFN, D),
    "experts.up_proj.weight": (E, FFN, D),
    "experts.down_proj.weight": (E, D, FFN),
    "shared_expert.gate_proj.weight": (SHARED, D),
    "shared_expert.up_proj.weight": (SHARED, D),
    "shared_expert.down_proj.weight": (D, SHARED),
    "shared_expert_gate.weight": (1, D),
}


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> Tensor:
    """Tokens whose first element is large: a column of the router decides about most of them."""
    x = tensor(0, T, D)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def whole_weights() -> dict[str, Tensor]:
    weights = {name: tensor(i + 1, *shape) * 0.5 for i, (name, shape) in enumerate(SHAPES.items())}
    weights["gate.weight"][:, 0] = torch.tensor([0.0, 1.0, 0.0, -40.0, 0.5])
    return weights


def layer_of(comm: Communicator, rule: ChoiceRule, **options: Any) -> MixtureOfExperts:
    """A layer with this rank's parts of the whole weights."""
    layer = MixtureOfExperts(
        D, FFN, E, rule, comm, shared_size=SHARED, shared_gated=True, dtype=torch.float64, **options
    )
    held = placements_of(layer)
    assert set(SHAPES) == {name for name, _ in layer.named_parameters()}
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(own(whole_weights()[name], held[weight].dim, comm))
    return layer


def own(value: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    return value if dim is None else value.chunk(comm.size, dim)[comm.rank]


def by_loops(x: Tensor, w: dict[str, Tensor], rule: ChoiceRule) -> Tensor:
    """Token by token, expert by expert."""
    outputs = []
    for row in x:
        logits = w["gate.weight"] @ row
        scores = logits.softmax(0) if rule.scoring == "softmax" else logits.sigmoid()
        chosen = scores.sort(descending=True).indices[: rule.k]
        weights = scores[chosen] / (scores[chosen].sum() if rule.normalize else 1) * rule.scale
        y = torch.zeros(D, dtype=torch.float64)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up, down = (w[f"experts.{name}_proj.weight"][e] for name in ("gate", "up", "down"))
            y = y + weight * (down @ (F.silu(gate @ row) * (up @ row)))
        gate, up, down = (w[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        shared = down @ (F.silu(gate @ row) * (up @ row))
        outputs.append(y + (w["shared_expert_gate.weight"] @ row).sigmoid() * shared)
    return torch.stack(outputs)


def expected(rule: ChoiceRule) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x, weights = inputs().requires_grad_(), {name: w.requires_grad_() for name, w in whole_weights().items()}
    y = by_loops(x, weights, rule)
    y.backward(tensor(20, T, D))
    assert x.grad is not None
    return (
        y.detach(),
        x.grad,
        {name: w.grad if w.grad is not None else torch.zeros_like(w) for name, w in weights.items()},
    )


def rows(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size)[comm.rank].contiguous()


def assert_same(name: str, got: Tensor | None, want: Tensor) -> None:
    assert got is not None and got.shape == want.shape, name
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * max(want.abs().max().item(), 1.0), f"{name}: error {error}"


def assert_gradients(layer: MixtureOfExperts, want: dict[str, Tensor], comm: Communicator) -> None:
    held = placements_of(layer)
    for name, weight in layer.named_parameters():
        assert_same(name, weight.grad, own(want[name], held[weight].dim, comm))


def check_layer(name: str) -> None:
    comm, rule = Communicator(dist.group.WORLD), RULES[name]
    layer = layer_of(comm, rule)
    counts = layer.gate(inputs()).counts.tolist()
    assert sum(counts) == T * rule.k and (rule.k == E or counts[3] == 0) and max(counts) >= T / 2
    x = rows(inputs(), comm).requires_grad_()
    y = layer(x)
    y.backward(rows(tensor(20, T, D), comm))
    want, dx, gradients = expected(rule)
    assert_same("y", y.detach(), rows(want, comm))
    assert_same("dx", x.grad, rows(dx, comm))
    assert_gradients(layer, gradients, comm)
    # Where every rank has all rows, a number of them that no rank count divides.
    few = MixtureOfExperts(D, FFN, E, rule, WholeRows(comm), shared_size=SHARED, shared_gated=True, dtype=x.dtype)
    few.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_same("few rows", few(inputs()[:3]), want[:3])


@pytest.mark.parametrize(("tp", "name"), [(1, "qwen3"), (2, "qwen3"), (2, "sigmoid"), (3, "one"), (4, "all")])
def test_it_is_a_loop_over_tokens_and_experts(ranks: RankPool, tp: int, name: str) -> None:
    ranks.run(check_layer, tp, name)


def backward(layer: MixtureOfExperts, comm: Communicator) -> Tensor:
    """Run the layer forward and backward; return dx."""
    x = rows(inputs(), comm).requires_grad_()
    layer(x).backward(rows(tensor(20, T, D), comm))
    assert x.grad is not None
    return x.grad


def check_halves() -> None:
    """The input half adds nothing; the weight half computes the experts' three products alone, and no exchange."""
    comm, rule = Communicator(dist.group.WORLD), RULES["qwen3"]
    whole = layer_of(comm, rule)
    dx = backward(whole, comm)
    inner, halves, counted = GradientSink(), WeightHalves(), []
    layer = layer_of(comm, rule, sink=DeferringSink(inner, halves))
    buffers = {p: torch.zeros_like(p) for p in layer.parameters()}
    places = {p: (buffer, i) for i, (p, buffer) in enumerate(buffers.items())}
    inner.attach(places, SimpleNamespace(contributed=counted.append))
    with pytest.MonkeyPatch.context() as patch:
        seen = noted(patch)
        with halves.of((0, 0)):
            assert torch.equal(backward(layer, comm), dx)
        assert not counted and not any(buffer.any() for buffer in buffers.values()) and "grouped wgrad" not in seen
        seen.clear()
        halves.run((0, 0))
    assert seen == ["grouped wgrad"] * 3 and sorted(counted) == list(range(len(buffers)))
    for (name, buffer), weight in zip(zip(SHAPES, buffers.values(), strict=True), whole.parameters(), strict=True):
        assert weight.grad is not None
        if placements_of(whole)[weight].is_whole:
            # A buffer is summed over the ranks later, by its bucket.
            assert_same(name, comm.all_reduce_(buffer), weight.grad)
        else:
            assert torch.equal(buffer, weight.grad), name


def noted(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every product of experts and every exchange is added by name."""
    seen: list[str] = []

    def note(place: Any, name: str, what: str) -> None:
        run = getattr(place, name)

        def noting(*given: Any, **named: Any) -> Any:
            seen.append(what)
            return run(*given, **named)

        patch.setattr(place, name, noting)

    note(gradient_sink, "accumulate_grouped_wgrad", "grouped wgrad")
    note(experts, "grouped_matmul_forward", "product")
    note(experts, "grouped_swiglu_backward", "product")
    note(Communicator, "all_gather", "exchange")
    note(Communicator, "reduce_scatter", "exchange")
    return seen


@pytest.mark.parametrize("tp", [1, 2])
def test_a_weight_half_computes_the_weight_gradients_alone(ranks: RankPool, tp: int) -> None:
    ranks.run(check_halves, tp)


def test_what_is_frozen_has_no_gradient_and_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    _, dx, want = expected(RULES["qwen3"])
    layer, comm = layer_of(Communicator(None), RULES["qwen3"]), Communicator(None)
    frozen = {"gate.weight", "experts.up_proj.weight"}
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    seen = noted(monkeypatch)
    assert_same("dx", backward(layer, comm), dx)
    assert seen.count("grouped wgrad") == 2
    for name, weight in layer.named_parameters():
        if name in frozen:
            assert weight.grad is None, name
        else:
            assert_same(name, weight.grad, want[name])
    # Nothing before needs a gradient, and of the experts down alone is trained: one product.
    layer.requires_grad_(False)
    layer.experts.down_proj.weight.requires_grad_(True)
    seen.clear()
    layer.zero_grad()
    layer(inputs()).backward(tensor(20, T, D))
    assert [what for what in seen if what != "exchange"] == ["product", "grouped wgrad"]
    assert_same("down", layer.experts.down_proj.weight.grad, want["experts.down_proj.weight"])


def gradients_again(context_fn: Any) -> dict[str, Tensor]:
    """Gradients of a layer that is computed again from other scores than the first time."""
    layer = layer_of(Communicator(None), RULES["one"])
    y = checkpoint(layer, inputs().requires_grad_(), use_reentrant=False, context_fn=context_fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "router_logits", lambda x, w: (x @ w.T).roll(1, 1))
        y.backward(tensor(20, T, D))
    return {name: weight.grad for name, weight in layer.named_parameters() if ".experts." in f".{name}"}


def test_what_is_computed_again_goes_to_the_experts_of_the_first_time() -> None:
    _, _, want = expected(RULES["one"])
    for name, gradient in gradients_again(same_choices).items():
        assert_same(name, gradient, want[name])


def test_copies_and_prepared_weights() -> None:
    comm = Communicator(None)
    sink = GradientSink()
    layer = layer_of(comm, RULES["qwen3"], sink=sink)
    sink.attach({p: (torch.zeros_like(p), 0) for p in layer.parameters()}, SimpleNamespace(contributed=lambda _: None))
    with torch.no_grad():
        want = layer(inputs())
        layer.prepare(T)
        assert_same("prepared", layer(inputs()), want)
    copied = copy.deepcopy(layer)
    layer.release()
    backward(copied, comm)
    assert all(p.grad is not None for p in copied.parameters()) and all(p.grad is None for p in layer.parameters())
    assert_gradients(copied, expected(RULES["qwen3"])[2], comm)


def test_a_tokens_terms_are_added_in_the_order_of_its_choice() -> None:
    """In float32, whose sums tell one order from another."""
    assert sums_in_order()


def sums_in_order() -> bool:
    router = layer_of(Communicator(None), RULES["all"]).float().gate
    routed = router(inputs().float())
    # Products that float32 holds, so that only the sums round.
    weights = 2.0 ** -routed.experts.float()
    ys = tensor(30, T * E, D).bfloat16().float() * 2.0 ** (torch.arange(T * E) % 23)[:, None]
    want = torch.zeros(T, D)
    for j in range(E):
        want += weights[:, j, None] * ys[routed.places.view(T, E)[:, j].long()]
    return torch.equal(experts.combined(ys, routed._replace(weights=weights)), want)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 5, 16), torch.float32), ((5, 12), torch.float32), ((5, 16), torch.bfloat16)]
)
def test_what_does_not_fit_is_said_before_anything_is_routed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = MixtureOfExperts(16, 8, 4, ChoiceRule(2), Communicator(None))
    with pytest.raises(ValueError, match=r"experts take x\[T, 16\] of torch.float32: got .*: flatten"):
        layer(torch.zeros(shape, dtype=dtype))


def test_a_gate_of_the_shared_network_has_the_bits_of_its_token() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 8, 4, ChoiceRule(2), Communicator(None), shared_size=8, shared_gated=True)
    x = torch.randn(333, 16)
    scores = layer.shared_expert_gate(x) if layer.shared_expert_gate else x
    layer.shared_expert = torch.nn.Identity()  # type: ignore[assignment]
    gated = layer.shared(x)
    for token in (0, 100, 332):
        assert torch.equal(gated[token], (scores[token : token + 1].sigmoid() * x[token])[0])


@pytest.mark.parametrize(
    ("width", "rule", "message"),
    [
        (7, ChoiceRule(2), r"an expert's width 7 is not divisible by 2 shards: use 6 or 8"),
        (8, ChoiceRule(6), r"k is 6, E 5: pass a k of at most 5"),
        (8, ChoiceRule(2, num_groups=2), r"5 experts in 2 groups"),
    ],
)
def test_what_cannot_be_is_refused(width: int, rule: ChoiceRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(D, width, E, rule, ShardCommunicator(0, 2, Communicator(None)))


def times_two(add: Any) -> Any:
    return lambda buffer, dy, x, offsets, **options: add(buffer, 2 * dy, x, offsets, **options)


# What is broken, where, and how: of two ranks, or of one.
OF_RANKS: dict[str, tuple[Any, str, Any]] = {
    "experts' gradients times tp": (gradient_sink, "accumulate_grouped_wgrad", times_two),
    "the router's gradient not summed": (GradientSink, "add", lambda add: lambda of, p, g, _: add(of, p, g)),
    "rows of another expert": (experts, "take_forward", lambda take: lambda x, order, k: take(x, order.roll(1), k)),
}


def is_noticed(name: str) -> bool:
    place, function, breaking = OF_RANKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, function, breaking(getattr(place, function)))
        try:
            check_layer("qwen3")
        except AssertionError:
            # All ranks or none: a rank that goes on alone would wait.
            return True
    return False


def test_mutations_are_noticed(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, count_mutations: CountMutations
) -> None:
    noticed = {name: any(ranks.run(is_noticed, 2, name)) for name in OF_RANKS}
    # Computed again from other scores, and nobody keeps the first choice.
    again, (_, _, want) = gradients_again(lambda: (nullcontext(), nullcontext())), expected(RULES["one"])
    noticed["routing computed again"] = any(not torch.allclose(again[name], want[name]) for name in again)
    forward = experts.combine_forward
    backwards = lambda ys, places, w: forward(ys, places.view_as(w).flip(1).reshape(-1), w.flip(1))  # noqa: E731
    monkeypatch.setattr(experts, "combine_forward", backwards)
    noticed["terms in another order"] = not sums_in_order()
    count_mutations("a mixture of experts", sum(noticed.values()), len(noticed))
    assert all(noticed.values()), noticed
