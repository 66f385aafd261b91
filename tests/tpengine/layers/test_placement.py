"""Rung: gloo ranks. What layers say of how their parameters lie over tp is true, and whoever asks believes it.

A model of every public layer, with every bias, is cut as its layers say; then its outputs, gradients, norm and steps
are one process's.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tpkernels.ops.experts.choose import ChoiceRule

import tpengine.layers
from tpengine.config import ModelConfig
from tpengine.layers import (
    Attention,
    ColumnParallelLinear,
    Communicator,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    OffsetRMSNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_replicated,
    clip_grad_norm_,
    placements_of,
    replicate,
    sharded,
    summed,
    vocab_parallel_cross_entropy,
)
from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.experts import ExpertNetworks
from tpengine.layers.placement import Placement, cut
from tpengine.layers.replicated import num_parallel
from tpengine.layers.routing import Router
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.modules import DataParallel, Pipeline

D, HEADS, HEAD_SIZE, WIDE, VOCAB, SEQ, BATCH = 12, 12, 4, 24, 24, 6, 8
DTYPE = torch.float64
Wrap = Callable[[nn.Module, Communicator], nn.Module]
WRAPS: dict[str, Wrap] = {
    "as it is": lambda model, _: model,
    "replicate": replicate,
    "sharded": sharded,
    "summed": summed,
    "each in turn": lambda model, tp: summed(sharded(replicate(model, tp), tp), tp),
}


class Beginning(nn.Module):
    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCAB, D, tp, dtype=DTYPE)
        self.positions = LearnedPositions(SEQ, D, tp, dtype=DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.positions(self.tokens(tokens.flatten()), SEQ)
        return x


class Block(nn.Module):
    """Layers with every bias; three kinds of norm, two of them of heads."""

    def __init__(self, tp: Communicator, kv_heads: int, replicas: Communicator | None) -> None:
        super().__init__()
        self.norm = LayerNorm(D, tp, dtype=DTYPE)
        self.attention = Attention(
            D,
            HEADS,
            kv_heads,
            tp,
            head_size=HEAD_SIZE,
            qkv_bias=True,
            output_bias=True,
            head_norm=lambda size, comm: LayerNorm(size, comm, dtype=DTYPE),
            replicas=replicas,
            dtype=DTYPE,
        )
        self.offset = OffsetRMSNorm(D, tp, dtype=DTYPE)
        self.mlp = FeedForward(D, WIDE, tp, bias=True, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), SEQ)
        y: Tensor = x + self.mlp(self.offset(x))
        return y


def shared_among(tp: Communicator, kv_heads: int) -> Communicator | None:
    """The consecutive ranks that hold the same KV head, or None."""
    share = tp.size // kv_heads
    if share < 2:
        return None
    members = dist.get_process_group_ranks(tp.group) if tp.group else [0]
    world = [list(range(first, first + share)) for first in range(0, dist.get_world_size(), share)]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in world}
    return Communicator(next(group for ranks, group in groups.items() if members[tp.rank] in ranks))


def model_of(tp: Communicator, kv_heads: int) -> nn.Sequential:
    replicas = shared_among(tp, kv_heads)
    model = nn.Sequential(
        Beginning(tp),
        Block(tp, kv_heads, replicas),
        RMSNorm(D, tp, dtype=DTYPE),
        ColumnParallelLinear(D, VOCAB, tp, bias=True, dtype=DTYPE),
    )
    placed = placements_of(model)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.named_parameters()):
            whole = torch.randn(whole_shape(parameter, placed[parameter]), dtype=DTYPE, generator=seeded(number))
            parameter.copy_(part_of(whole, placed[parameter]) * (0.3 if whole.dim() > 1 else 1.0))
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def num_parts(placement: Placement) -> int:
    return placement.num_ranks if placement.holders is None else placement.num_ranks // placement.num_holders


def whole_shape(parameter: Tensor, placement: Placement) -> list[int]:
    shape = list(parameter.shape)
    if not placement.is_whole:
        assert placement.dim is not None
        shape[placement.dim] *= num_parts(placement)
    return shape


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    """What this rank holds of a whole tensor, by what the layer says."""
    if placement.is_whole:
        return whole
    assert placement.dim is not None
    return whole.chunk(num_parts(placement), placement.dim)[placement.over.rank // placement.num_holders]


def tokens_of(seed: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ), generator=seeded(seed))


def loss_of(model: nn.Module, tokens: Tensor, tp: Communicator) -> Tensor:
    labels = (3 * tokens + 1) % VOCAB
    loss = vocab_parallel_cross_entropy(model(tokens), labels.flatten(), VOCAB, tp)
    return loss / labels.numel()


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def apart(got: nn.Module, want: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> float:
    """The largest difference of what `of` gives of each parameter, relative to the whole model's."""
    placed, wanted = placements_of(got), dict(want.named_parameters())
    errors = []
    for name, parameter in got.named_parameters():
        ours, whole = of(parameter), of(wanted[name])
        assert ours is not None and whole is not None, name
        errors.append(float((ours - part_of(whole, placed[parameter])).abs().max() / whole.abs().max()))
    return max(errors)


def program_of_gradients(kv_heads: int) -> None:
    tp, alone = Communicator(dist.group.WORLD), Communicator(None)
    one = model_of(alone, kv_heads)
    wanted = loss_of(one, tokens_of(0), alone)
    wanted.backward()
    norm = torch.stack([p.grad.square().sum() for p in one.parameters() if p.grad is not None]).sum().sqrt()
    for what, wrap in WRAPS.items():
        model = wrap(model_of(tp, kv_heads), tp)
        assert said_by(lambda model=model: check_replicated(model, tp)) == "", what  # type: ignore[misc]
        assert apart(model, one, lambda p: p.detach()) == 0.0, what
        loss = loss_of(model, tokens_of(0), tp)
        loss.backward()
        assert float(abs(loss - wanted)) < 1e-12, what
        # A key's bias takes no part in a softmax but through its norm: its gradient is not zero here.
        assert apart(model, one, lambda p: p.grad) < 1e-9, what
        assert float(clip_grad_norm_(model, 1e9, tp)) == pytest.approx(float(norm), rel=1e-12), what


@pytest.mark.by_default("2-1")
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 1), (3, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_public_layer_has_one_process_gradients_and_norm(ranks: RankPool, tp: int, kv_heads: int) -> None:
    ranks.run(program_of_gradients, tp, kv_heads)


def steps_of_one(kv_heads: int) -> nn.Module:
    alone = Communicator(None)
    model = model_of(alone, kv_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, tokens_of(step), alone).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


def program_of_replicas(kv_heads: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("dp", "tp"))
    model = model_of(tp, kv_heads)
    replicas = DataParallel(model, dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(model, tokens_of(step).chunk(dp.size)[dp.rank], tp).backward()
        replicas.finish()
        replicas.clip_grad_norm_(0.1, tp)
        optimizer.step()
        optimizer.zero_grad()
    assert apart(model, steps_of_one(kv_heads), lambda p: p.detach()) < 1e-9


def program_of_stages(kv_heads: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "tp"))
    pp, tp = (Communicator(mesh.get_group(axis)) for axis in ("pp", "tp"))
    model = model_of(tp, kv_heads)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels.flatten(), VOCAB, tp) / labels.numel()

    pipe = Pipeline(model, tokens_of(0)[:2], loss, num_micro_batches=BATCH // 2, group=pp.group, schedule="zb-h1")
    optimizer = torch.optim.AdamW(pipe.stage.parameters(), lr=1e-2)
    for step in range(2):
        tokens = tokens_of(step)
        pipe.step(tokens, (3 * tokens + 1) % VOCAB)
        clip_grad_norm_(pipe.stage, 0.1, tp, pp)
        optimizer.step()
        optimizer.zero_grad()
    assert apart(pipe.stage, steps_of_one(kv_heads), lambda p: p.detach()) < 1e-9


@pytest.mark.by_default("replicas")
@pytest.mark.parametrize("program", [program_of_replicas, program_of_stages], ids=["replicas", "stages"])
def test_every_public_layer_trains_as_in_one_process(ranks: RankPool, program: Callable[[int], None]) -> None:
    ranks.run(program, 4, 1)


def program_of_a_thaw() -> None:
    """Unfreeze a norm in the second step, also one that was frozen on the meta device."""
    tp = Communicator(dist.group.WORLD)
    x = torch.randn(8, D, dtype=DTYPE, generator=seeded(0)).chunk(tp.size)[tp.rank]
    norm = nn.LayerNorm(D, dtype=DTYPE).requires_grad_(False)
    model = nn.Sequential(replicate(norm, tp), FeedForward(D, WIDE, tp, dtype=DTYPE))
    clip_grad_norm_(model, 1.0, tp)
    model(x).square().sum().backward()
    assert norm.weight.grad is None
    norm.requires_grad_(True)
    model(x).square().sum().backward()
    assert norm.bias.grad is not None
    first = tp.broadcast_(norm.bias.grad.clone())
    assert torch.equal(norm.bias.grad, first) and first.abs().max() > 0
    assert said_by(lambda: clip_grad_norm_(model, 1.0, tp)) == ""


def test_a_replicated_parameter_that_is_thawed_is_summed(ranks: RankPool) -> None:
    ranks.run(program_of_a_thaw, 2)


def program_of_a_thaw_without_replicate(look: str) -> list[str]:
    """What backward and the norm say of a norm that was accepted because it was frozen."""
    tp = Communicator(dist.group.WORLD)
    alone = Communicator([dist.new_group([rank]) for rank in range(tp.size)][tp.rank])
    x = torch.randn(4, D, dtype=DTYPE)
    with torch.device("meta" if look == "stage" else "cpu"):
        norm = nn.LayerNorm(D, dtype=DTYPE).requires_grad_(False)
        model = nn.Sequential(RMSNorm(D, tp, dtype=DTYPE), norm)
    if look == "check":
        check_replicated(model, tp)
    elif look == "replicas":
        DataParallel(model, alone).remove()
    else:
        init = lambda module, _: [nn.init.normal_(p) for p in module.parameters()]  # noqa: E731
        loss = lambda y, _: y.square().mean()  # noqa: E731
        model = Pipeline(model, x, loss, num_micro_batches=1, group=alone.group, init=init).stage
    # Frozen it stays silent, however often it is looked at.
    model(x).square().sum().backward()
    said = [said_by(lambda: clip_grad_norm_(model, 1.0, tp))]
    model.requires_grad_(True)
    said.append(said_by(lambda: model(x).square().sum().backward()))
    said.append(said_by(lambda: clip_grad_norm_(model, 1.0, tp)))
    replicate(model[1], tp)
    said.append(said_by(lambda: model(x).square().sum().backward()))
    return said


@pytest.mark.parametrize("look", ["check", "replicas", "stage"])
def test_what_was_accepted_because_it_was_frozen_is_refused_once_it_is_thawed(ranks: RankPool, look: str) -> None:
    for frozen, backward, norm, replicated in ranks.run(program_of_a_thaw_without_replicate, 2, look):
        assert frozen == "" and replicated == ""
        assert "tp 2, nothing sums 1.weight, 1.bias: wrap" in backward and backward == norm


def program_of_values_left_alone() -> None:
    tp = Communicator(dist.group.WORLD)
    torch.manual_seed(tp.rank)
    part = nn.BatchNorm1d(D, dtype=DTYPE)
    part.running_mean.fill_(tp.rank)
    nn.init.normal_(part.weight)
    model = nn.Sequential(
        FeedForward(D, WIDE, tp, bias=True, dtype=DTYPE), sharded(part, tp), nn.BatchNorm1d(D, dtype=DTYPE)
    )
    # Whatever a user has written: the row's bias is his to keep equal, the columns' are not equal at all.
    with torch.no_grad():
        for bias in (model[0].up_proj.bias, model[0].gate_proj.bias, model[0].down_proj.bias, model[2].weight):
            bias.fill_(tp.rank + 1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replicate(model, tp)
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == (set() if tp.rank == 0 else {"2.weight"}), changed


def test_replicate_writes_only_what_it_sums(ranks: RankPool) -> None:
    ranks.run(program_of_values_left_alone, 2)


def program_of_whole_values() -> None:
    """What is whole starts equal, whatever each rank draws: at construction, and off the meta device."""
    tp = Communicator(dist.group.WORLD)
    torch.manual_seed(tp.rank)
    assert_equal_on_all(LearnedPositions(SEQ, D, tp).weight, tp)
    with torch.device("meta"):
        model = nn.Sequential(
            ColumnParallelLinear(D, WIDE, tp, bias=True, replicas=tp),
            RowParallelLinear(WIDE * tp.size, D, tp, bias=True),
        )
    alone = [dist.new_group([rank]) for rank in range(tp.size)][tp.rank]
    pipe = Pipeline(
        model,
        torch.randn(4, D),
        lambda y, _: y.square().mean(),
        num_micro_batches=1,
        group=alone,
        init=lambda module, _: [nn.init.normal_(p) for p in module.parameters()],
    )
    for name, parameter in pipe.stage.named_parameters():
        is_cut = name == "1.weight"
        assert_equal_on_all(parameter, tp, not is_cut)


def assert_equal_on_all(parameter: Tensor, tp: Communicator, is_equal: bool = True) -> None:
    first = tp.broadcast_(parameter.detach().clone())
    differs = tp.all_reduce_max_(torch.tensor(float((parameter.detach() - first).abs().max())))
    assert first.std() > 0 and (float(differs) == 0.0) is is_equal


def test_what_is_whole_starts_equal(ranks: RankPool) -> None:
    ranks.run(program_of_whole_values, 2)


def program_of_contradictions() -> list[str]:
    tp = Communicator(dist.group.WORLD)
    shared = nn.Sequential(
        RMSNorm(D, tp), RowParallelLinear(2 * D, D, tp, bias=True), ColumnParallelLinear(D, 2 * D, tp, bias=True)
    )
    shared[2].bias = shared[1].bias
    mixed = nn.Sequential(FeedForward(D, WIDE, tp, bias=True), LayerNorm(D, Communicator(None)))
    mine = nn.Sequential(ColumnParallelLinear(D, WIDE, tp), sharded(nn.LayerNorm(WIDE // tp.size), tp))
    return [
        said_by(lambda: check_replicated(shared, tp)),
        said_by(lambda: check_replicated(mixed, tp)),
        said_by(lambda: replicate(mixed, tp)),
        said_by(lambda: check_replicated(mine, tp)) + str(num_parallel(mine)),
        said_by(lambda: clip_grad_norm_(mine, 1.0, Communicator(None))),
    ]


def test_contradictions_are_refused(ranks: RankPool) -> None:
    for shared, mixed, wrapped, mine, other_tp in ranks.run(program_of_contradictions, 2):
        assert shared == (
            "a parameter lies in one way over tp: 1.bias is whole on 2 ranks, and as 2.bias cut over 2 ranks along dim "
            "0: share it between layers that hold it alike"
        )
        assert "tp 2, nothing sums 1.weight, 1.bias: wrap" in mixed
        assert "1.weight is over 1 ranks, tp 2: make the layer with tp" in wrapped
        assert mine == "2"
        assert "it is over 2 tensor-parallel ranks, got tp 1: pass the communicator" in other_tp


def program_of_a_lie(layer: Any, name: str) -> str:
    """What is seen of a layer that says a wrong thing of one parameter, if the model is checked by `apart`."""
    truth = layer.tp_placements

    def lie(self: Any) -> dict[str, Placement]:
        return {**truth(self), name: cut(self.comm, 0)}

    tp = Communicator(dist.group.WORLD)
    with patch.object(layer, "tp_placements", lie):
        model = model_of(tp, 1)
        loss_of(model, tokens_of(0), tp).backward()
        norm = clip_grad_norm_(model, 1e9, tp)
    one = model_of(Communicator(None), 1)
    loss_of(one, tokens_of(0), Communicator(None)).backward()
    wanted = torch.stack([p.grad.square().sum() for p in one.parameters() if p.grad is not None]).sum().sqrt()
    return "" if float(abs(norm / wanted - 1)) < 1e-9 else "another norm"


@pytest.mark.parametrize(("layer", "name"), [(RowParallelLinear, "bias"), (LayerNorm, "weight")])
def test_a_layer_that_lies_is_seen(ranks: RankPool, layer: Any, name: str) -> None:
    assert set(ranks.run(program_of_a_lie, 2, layer, name)) == {"another norm"}


def test_a_transformer_whose_layers_and_table_differ_is_not_built() -> None:
    sizes = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_size=8)
    Transformer(FastParts(sizes, Communicator(None)))
    with (
        patch.object(RMSNorm, "tp_placements", lambda self: {"weight": cut(self.comm, 0)}),
        pytest.raises(AssertionError, match=r"modules and parameter table differ: .*norm\.weight"),
    ):
        Transformer(FastParts(sizes, Communicator(None)))


def modules_of_the_package() -> set[type[nn.Module]]:
    """The classes of modules that files of tpengine/layers define for others."""
    found: set[type[nn.Module]] = set()
    for info in pkgutil.walk_packages(tpengine.layers.__path__, "tpengine.layers."):
        module = importlib.import_module(info.name)
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, nn.Module) and kind.__module__ == info.name and not name.startswith("_"):
                found.add(kind)
    return found


# What a mixture of experts is made of, which no model takes by itself.
PARTS_OF_A_MIXTURE = {
    "ChunkedExperts",
    "ExpertMixture",
    "ExpertNetworks",
    "ExpertWeight",
    "Router",
    "TokenScores",
    "TokenWeight",
}


def test_every_layer_is_exported_and_says_how_its_own_parameters_lie() -> None:
    kinds, exported = modules_of_the_package(), set(tpengine.layers.__all__)
    assert len(kinds) >= 11
    assert {kind.__name__ for kind in kinds} - PARTS_OF_A_MIXTURE <= exported
    assert all(hasattr(tpengine.layers, name) for name in exported)
    alone, rule = Communicator(None), ChoiceRule(2)
    mixture = (D, Router(D, 4, rule, alone), ExpertNetworks(D, WIDE, 4, alone), alone)
    sizes: dict[str, tuple[Any, ...]] = {
        "Router": (D, 4, rule),
        "ExpertWeight": (4, WIDE, D, 1),
        "ExpertNetworks": (D, WIDE, 4),
        "ExpertMixture": mixture,
        "ChunkedExperts": ({"0": ExpertNetworks(D, WIDE, 4, ShardCommunicator(0, 1, alone))}, alone),
        "MixtureOfExperts": (D, WIDE, 4, rule),
        "SpreadExperts": (D, WIDE, 4, rule, alone),
        "Attention": (D, HEADS, 2),
        "RMSNorm": (D,),
        "LayerNorm": (D,),
        "OffsetRMSNorm": (D,),
        "Norm": (D,),
        "WidthNorm": (D,),
    }
    for kind in kinds:
        options = {name for name in inspect.signature(kind).parameters if name == "bias" or name.endswith("_bias")}
        made: Any = kind
        layer = made(*sizes.get(kind.__name__, (D, WIDE)), Communicator(None), **dict.fromkeys(options, True))
        assert placements_of(layer).keys() == set(layer.parameters()), kind
