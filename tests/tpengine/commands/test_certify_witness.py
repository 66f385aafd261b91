"""Rung: gloo ranks. What certify sees of layouts that agree; that it names the culprit in engines broken on purpose.

The mutations are such as tolerances hide: each changes a few last bits, or a thousandth of one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.commands.certify import CertifiedLayout, CertifyOptions, config_of, verdict
from tpengine.commands.certify_compare import Observation, StepEvidence, StepPhase
from tpengine.commands.certify_witness import Witness
from tpengine.config import Config
from tpengine.layers.gradient_sink import WeightTerms
from tpengine.model.exact import Shards
from tpengine.plan import Kind
from tpengine.runs.trainer import Trainer

ONE = CertifiedLayout()


def config_in(layout: CertifiedLayout) -> Config:
    """The preset's features, smaller: 2 layers of hidden 64, 8 micro-batches of 128 tokens."""
    options = CertifyOptions(layout, None, "certify", None, "float32", "1f1b", "fused", seed=3, steps=1, fast=False)
    config = config_of(options, layout)
    return replace(
        config,
        model=replace(config.model, num_layers=2, hidden_size=64, ffn_size=96),
        train=replace(config.train, micro_batch_size=2, num_micro_batches=8 // layout.dp),
    )


def observe(config: Config, mutation: str = "no_mutation") -> list[Observation]:
    witness = Witness(config)
    globals()[mutation](witness.trainer)
    return witness.step(0)[0]


def evidence_of(ranks: RankPool, layout: CertifiedLayout, mutation: str = "no_mutation") -> StepEvidence:
    return StepEvidence(ranks.run(observe, layout.num_ranks, config_in(layout), mutation))


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> StepEvidence:
    return evidence_of(ranks, ONE)


def no_mutation(trainer: Trainer) -> None:
    """The engine as it is."""


def on_rank(number: int) -> bool:
    return dist.get_rank() == number


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return (tensor.double() * factor).to(tensor.dtype)


def relative_error_in_one_ranks_gradient(trainer: Trainer) -> None:
    if on_rank(1):
        mlp: Any = trainer.state.model.layers["1"].mlp
        sink, up = mlp.shards["4"].up_proj.sink, mlp.shards["4"].up_proj.weight
        weight_grads = sink.weight_grads

        def wrong(terms: WeightTerms, dy: Tensor, x: Tensor, **gathers: Any) -> Any:
            changed = dy.clone()
            for term in terms:
                if term.weight is up:
                    columns = slice(term.first, term.first + len(up))
                    changed[:, columns] = scaled(dy[:, columns], 1 + 1e-6)
            return weight_grads(terms, changed, x, **gathers)

        sink.weight_grads = wrong


def one_micro_batch_weighs_a_thousandth_more(trainer: Trainer) -> None:
    batch, weighted = trainer.step.batch, trainer.step.batch.loss
    batch.loss = lambda y, mb: weighted(y, mb) * (1.001 if batch.number_of(mb) == 5 else 1)  # type: ignore[method-assign]


def dropout_mask_off_by_one_token(trainer: Trainer) -> None:
    if on_rank(1):
        dropouts: Any = trainer.state.model.layers["1"].dropouts
        drop = dropouts.mlp_residual.__call__

        def shifted(x: Tensor, first_row: int, first_column: int, row_length: int) -> Tensor:
            return drop(x, first_row + 1, first_column, row_length)

        object.__setattr__(dropouts, "mlp_residual", shifted)


def attention_dropout_of_the_next_head(trainer: Trainer) -> None:
    if on_rank(1):
        attention: Any = trainer.state.model.layers["0"].self_attn
        dropout = attention.shards["4"].dropout
        of_heads = dropout.of_heads
        dropout.of_heads = lambda first, num: of_heads((first + 1) % num, num)


def two_chunks_added_in_the_other_order(trainer: Trainer) -> None:
    attention: Any = trainer.state.model.layers["1"].self_attn
    collect = attention.join

    def swapped(partials: Sequence[Tensor], shards: Shards) -> Tensor:
        return collect([partials[i] for i in (0, 2, 1, 3)], shards)

    attention.join = swapped


def blocks_added_one_after_the_other(trainer: Trainer) -> None:
    blocks: Any = trainer.state.buckets.blocks
    sums = {index: torch.zeros_like(flat) for index, flat in trainer.state.buckets.flat.items()}

    def end_block(index: int) -> None:
        flat = trainer.state.buckets.flat[index]
        sums[index].add_(flat)
        flat.copy_(sums[index]) if trainer.state.model.position.microbatch == 7 else flat.zero_()

    blocks.end_block = end_block


def one_shards_part_of_a_norm_lost(trainer: Trainer) -> None:
    if on_rank(0):
        gradients: Any = trainer.state.gradients
        finish = gradients.finish

        def without() -> None:
            trainer.state.buckets.gradients["layers.1.post_attention_layernorm.weight#2"].zero_()
            finish()

        gradients.finish = without


def after(trainer: Trainer, kind: Kind, change: Callable[[], object]) -> None:
    """Run `change` after each action of a kind, before what follows sees it."""
    inner = trainer.step.executor.handlers[kind]
    closure = inner.__closure__  # type: ignore[attr-defined]
    handlers: Any = next(cell.cell_contents for cell in closure if isinstance(cell.cell_contents, dict))
    handler = handlers[kind]

    def changed(action: Any) -> None:
        handler(action)
        change()

    handlers[kind] = changed


def one_moment_off_by_one_bit(trainer: Trainer) -> None:
    if on_rank(1):
        name = next(name for name in trainer.state.model.held if name.startswith("layers.1.mlp.down_proj.weight"))
        moment = functools.partial(trainer.state.optimizer.state_of, name)
        after(trainer, Kind.STEP, lambda: moment()["exp_avg"].view(torch.int32)[0, 0].bitwise_xor_(1))


def one_rank_does_not_clip(trainer: Trainer) -> None:
    if on_rank(1):
        before: dict[str, Tensor] = {}
        gradients: Any = trainer.state.gradients
        finish = gradients.finish

        def keep() -> None:
            finish()
            before.update({name: g.clone() for name, g in trainer.state.gradients.of.items()})

        gradients.finish = keep
        after(trainer, Kind.CLIP, lambda: [trainer.state.gradients.of[name].copy_(g) for name, g in before.items()])


def received_activation_off_by_one_bit(trainer: Trainer) -> None:
    stage = trainer.step.stages[trainer.state.rank.mesh.at.pp]
    receive = stage.receive_input

    def wrong(microbatch: int, x: Tensor) -> None:
        x[0, 0] = torch.nextafter(x[0, 0], x.new_tensor(torch.inf))
        receive(microbatch, x)

    stage.receive_input = wrong  # type: ignore[method-assign]


def weights_of_one_replica_differ(trainer: Trainer) -> None:
    if on_rank(1):
        norm: Any = trainer.state.model.layers["0"].input_layernorm
        after(trainer, Kind.STEP, lambda: norm.weight.data.mul_(1 + 2.0**-23))


def another_micro_batch_read(trainer: Trainer) -> None:
    tokens = trainer.step.batch.tokens
    trainer.step.batch.tokens = lambda mb: tokens(1 if mb == 2 else mb)  # type: ignore[method-assign]


# mutation -> the layout that can show it, and how the verdict begins
MUTATIONS: dict[Callable[[Trainer], None], tuple[CertifiedLayout, str]] = {
    relative_error_in_one_ranks_gradient: (
        CertifiedLayout(tp=2),
        "step 1: gradient of layers.1.mlp.up_proj.weight, micro-batch 0, shard 4; made by tp 2 x pp 1 x dp 1: "
        "0B0 on rank 1; one process: 0B0",
    ),
    one_micro_batch_weighs_a_thousandth_more: (
        CertifiedLayout(pp=2),
        "step 1: gradient of embed_tokens.weight as output head, micro-batch 5, shard 0; made by tp 1 x pp 2 x "
        "dp 1: 1B5 on rank 1",
    ),
    dropout_mask_off_by_one_token: (
        CertifiedLayout(tp=2),
        "step 1: output of layers.1, micro-batch 0, shard 4; made by tp 2 x pp 1 x dp 1: 0F0 on rank 1",
    ),
    attention_dropout_of_the_next_head: (CertifiedLayout(tp=2), "step 1: output of layers.0.self_attn, micro-batch 0"),
    two_chunks_added_in_the_other_order: (CertifiedLayout(tp=2), "step 1: output of layers.1.self_attn, micro-batch 0"),
    blocks_added_one_after_the_other: (CertifiedLayout(tp=2), "step 1: summed gradient of norm.weight; made by"),
    one_shards_part_of_a_norm_lost: (
        CertifiedLayout(tp=2),
        "step 1: summed gradient of layers.1.post_attention_layernorm.weight; made by tp 2 x pp 1 x dp 1: CLIP",
    ),
    one_moment_off_by_one_bit: (
        CertifiedLayout(tp=2),
        "step 1: optimizer's exp_avg of layers.1.mlp.down_proj.weight, shard 4; made by tp 2 x pp 1 x dp 1: "
        "STEP on rank 1",
    ),
    one_rank_does_not_clip: (CertifiedLayout(tp=2), "step 1: optimizer's exp_avg of "),
    received_activation_off_by_one_bit: (
        CertifiedLayout(pp=2),
        "step 1: input of layers.1, micro-batch 0, shard 0; made by tp 1 x pp 2 x dp 1: 1F0 on rank 1",
    ),
    weights_of_one_replica_differ: (
        CertifiedLayout(dp=2),
        "step 1: weight layers.0.input_layernorm.weight; made by tp 1 x pp 1 x dp 2: STEP on rank 0; tp 1 x pp 1 x "
        "dp 2: STEP on rank 1",
    ),
    another_micro_batch_read: (CertifiedLayout(pp=2), "step 1: output of embed_tokens, micro-batch 2, shard 0"),
}


# What each layout's ranks see unmutated is compared too.
@pytest.mark.slow
@pytest.mark.parametrize("mutations", [(relative_error_in_one_ranks_gradient,), tuple(MUTATIONS)], ids=["one", "all"])
def test_every_mutation_turns_certify_red_and_is_named(
    ranks: RankPool,
    one_process: StepEvidence,
    mutations: tuple[Callable[[Trainer], None], ...],
    count_mutations: Callable[[str, int, int], None],
) -> None:
    for layout in {MUTATIONS[mutation][0] for mutation in mutations}:
        assert verdict(evidence_of(ranks, layout), one_process, layout, ONE) == ""
    wrong = {}
    for mutation in mutations:
        layout, beginning = MUTATIONS[mutation]
        found = verdict(evidence_of(ranks, layout, mutation.__name__), one_process, layout, ONE)
        if not found.startswith(beginning):
            wrong[mutation.__name__] = found or "certified: identical"
    count_mutations("exact mode (certify)", len(mutations) - len(wrong), len(mutations))
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CertifiedLayout(tp=2, pp=2, dp=2), CertifiedLayout(tp=4, pp=2)])
def test_layouts_see_the_same(ranks: RankPool, one_process: StepEvidence, layout: CertifiedLayout) -> None:
    evidence = evidence_of(ranks, layout)
    assert verdict(evidence, one_process, layout, ONE) == ""
    assert evidence.groups() == one_process.groups()


@pytest.mark.slow
def test_everything_is_seen(one_process: StepEvidence) -> None:
    """Each micro-batch's outputs and gradients in each shard, each parameter's sums, weights and moments."""
    config = config_in(ONE)
    blocks = [place for place in one_process.seen if place.name == "output of layers.1"]
    assert sorted((p.microbatch, p.shard) for p in blocks) == [(m, v) for m in range(8) for v in range(8)]
    ups = [place for place in one_process.seen if place.name == "gradient of layers.1.mlp.up_proj.weight"]
    assert sorted((p.microbatch, p.shard) for p in ups) == [(m, v) for m in range(8) for v in range(8)]
    num_pieces = 1 + config.model.num_layers * (2 + 2 * 4 + 5 * 8) + 8
    updates = [place for place in one_process.seen if place.phase is StepPhase.UPDATE and place.name != "gradient norm"]
    assert len(updates) == 3 * num_pieces + 3, "and loss, norm and learning rate as reported"
    assert len([place for place in one_process.seen if place.phase is StepPhase.SUM]) == num_pieces
