"""Rung: gloo ranks. Whole experts on several ranks against the layer of one process, in float64.

test_experts.py has that layer against loops. Two replicas of two tp ranks share experts too, so that each rank sends to
ranks of the other replica. Routing is skewed: most tokens go to one expert, and one expert has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tpkernels.again import same_choices
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule

from tpengine.layers import MixtureOfExperts, SpreadExperts, placements_of, spread_experts
from tpengine.layers.collectives import WholeRows
from tpengine.layers.experts import ExpertMixture
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves

# Of a replica.
T, D, FFN, E, SHARED = 12, 8, 12, 8, 24
RULE = ChoiceRule(3, "sigmoid", normalize=True, scale=2.5)
SIZES = dict(shared_size=SHARED, shared_gated=True, dtype=torch.float64)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(replica: int) -> Tensor:
    x = drawn(replica, T, D)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def fill(layer: ExpertMixture) -> None:
    """Write this rank's parts of weights that depend on their names alone."""
    held = placements_of(layer)
    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(layer.named_parameters())):
            weight.copy_(part_of(whole_weight(name, number, held[weight].dim, layer, weight), weight, layer))


def whole_weight(name: str, number: int, dim: int | None, layer: ExpertMixture, weight: Tensor) -> Tensor:
    shape = list(weight.shape)
    if dim is not None:
        shape[dim] *= placements_of(layer)[weight].num_ranks
    whole = 0.5 * drawn(100 + number, *shape)
    if name == "gate.weight":
        whole[:, 0] = torch.tensor([0.0, 6.0, 0.0, -40.0, 0.5, 0.0, 0.0, 0.0])
    return whole


def part_of(whole: Tensor, weight: Tensor, layer: ExpertMixture) -> Tensor:
    held = placements_of(layer)[weight]
    return whole if held.dim is None else whole.chunk(held.over.size, held.dim)[held.over.rank]


def one_process(num_replicas: int, frozen: str = "") -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """y and dx of all replicas' tokens, one behind the other, and the gradients of whole weights."""
    layer = MixtureOfExperts(D, FFN, E, RULE, Communicator(None), **SIZES)
    fill(layer)
    freeze(layer, frozen)
    x = torch.cat([tokens(replica) for replica in range(num_replicas)]).requires_grad_()
    counts = layer.gate(x.detach()).counts.tolist()
    assert counts[3] == 0 and counts[1] > 0.9 * len(x)
    y = layer(x)
    y.backward(drawn(50, *y.shape))
    assert x.grad is not None
    return y.detach(), x.grad, {name: weight.grad for name, weight in layer.named_parameters()}


def freeze(layer: ExpertMixture, frozen: str) -> None:
    for name, weight in layer.named_parameters():
        if frozen and name.startswith(frozen):
            weight.requires_grad_(False)


def communicators(arena_bytes: int) -> tuple[Communicator, Communicator, int, int]:
    """tp 2 and all ranks; the number of this replica, and how many there are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    tp = Communicator(replicas[rank // 2], arena_bytes=arena_bytes)
    return tp, tp if world == 2 else Communicator(dist.group.WORLD, arena_bytes=arena_bytes), rank // 2, world // 2


def assert_close(name: str, got: Tensor | None, want: Tensor | None) -> None:
    assert got is not None and want is not None and got.shape == want.shape, name
    assert (got - want).abs().max() <= 1e-12 * max(float(want.abs().max()), 1.0), name


def assert_gradients(layer: ExpertMixture, want: dict[str, Tensor | None], num_replicas: int) -> None:
    """Experts' gradients are whole; the others' are sums over the replicas still to be taken."""
    for name, weight in layer.named_parameters():
        if not weight.requires_grad:
            assert weight.grad is None and want[name] is None, name
            continue
        assert weight.grad is not None and want[name] is not None, name
        total = weight.grad
        if not name.startswith("experts.") and num_replicas > 1:
            everyone = [torch.empty_like(total) for _ in range(2 * num_replicas)]
            dist.all_gather(everyone, total)
            total = torch.stack(everyone[dist.get_rank() % 2 :: 2]).sum(0)
        assert_close(name, total, part_of(want[name], weight, layer))


def check_layer(arena_bytes: int, way: str) -> None:
    tp, experts_comm, replica, num_replicas = communicators(arena_bytes)
    halves = WeightHalves()
    sink = DeferringSink(GradientSink(), halves) if way == "deferred" else GradientSink()
    layer = SpreadExperts(D, FFN, E, RULE, tp, experts_comm, sink=sink, **SIZES)
    fill(layer)
    frozen = way if way in ("gate", "experts") else ""
    freeze(layer, frozen)
    assert layer.experts.up_proj.weight.shape == (E // experts_comm.size, FFN, D)
    x = tokens(replica).chunk(2)[tp.rank].requires_grad_()
    dy = drawn(50, num_replicas * T, D).view(num_replicas, 2, -1, D)[replica, tp.rank]
    if way == "recomputed":
        y = recomputed(layer, x, dy)
    elif way == "deferred":
        y = layer(x)
        with halves.of((0, 0)):
            y.backward(dy)
        assert layer.experts.up_proj.weight.grad is None
        halves.run((0, 0))
    else:
        y = layer(x)
        y.backward(dy)
    want, dx, gradients = one_process(num_replicas, frozen)
    mine = (num_replicas, 2, -1, D)
    assert_close("y", y.detach(), want.view(mine)[replica, tp.rank])
    assert_close("dx", x.grad, dx.view(mine)[replica, tp.rank])
    assert_gradients(layer, gradients, num_replicas)
    with torch.no_grad():
        assert torch.equal(layer(x), y), "without autograd the same bits"


def recomputed(layer: SpreadExperts, x: Tensor, dy: Tensor) -> Tensor:
    """Compute the layer again before its backward: counts are exchanged once."""
    num_exchanges, exchange = 0, spread_experts.exchange_counts

    def counted(*args: Any) -> Any:
        nonlocal num_exchanges
        num_exchanges += 1
        return exchange(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread_experts, "exchange_counts", counted)
        y: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=same_choices)
        y.backward(dy)
    assert num_exchanges == 1
    return y


@pytest.mark.parametrize(
    ("world", "arena_bytes", "way"),
    [
        (2, 1 << 16, "at once"),
        (4, 1 << 16, "at once"),
        (4, 0, "at once"),
        (2, 1 << 13, "deferred"),
        (2, 0, "recomputed"),
        (2, 1 << 16, "gate"),
        (2, 0, "experts"),
        *(
            pytest.param(4, 1 << 13, way, marks=pytest.mark.slow)
            for way in ("deferred", "recomputed", "gate", "experts")
        ),
    ],
)
def test_it_is_the_layer_of_one_process(ranks: RankPool, world: int, arena_bytes: int, way: str) -> None:
    ranks.run(check_layer, world, arena_bytes, way)


def check_whole_rows() -> None:
    """As in generation: every tp rank has all rows, and of few some ranks send none."""
    tp, experts_comm, _, _ = communicators(0)
    layer = SpreadExperts(D, FFN, E, RULE, WholeRows(tp), experts_comm, **SIZES)
    fill(layer)
    alone = MixtureOfExperts(D, FFN, E, RULE, Communicator(None), **SIZES)
    fill(alone)
    with torch.no_grad():
        for num_rows in (5, 1):
            x = tokens(0)[:num_rows]
            assert_close("y", layer(x), alone(x))


def test_where_every_rank_has_all_rows(ranks: RankPool) -> None:
    ranks.run(check_whole_rows, 2)


def check_refusal() -> None:
    tp, experts_comm, _, _ = communicators(0)
    with pytest.raises(ValueError, match="the number of experts 7 is not divisible by 2 shards: use 6 or 8"):
        SpreadExperts(D, FFN, 7, RULE, tp, experts_comm)


def test_experts_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    ranks.run(check_refusal, 2)
