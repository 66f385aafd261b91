"""Rung: pure. Plans of real configurations: layers, buckets, ties, digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.layout.step_plan import forward_plan, layer_ranges, layout_of, training_plan
from tpengine.plan import Kind, Recompute, verify


def config(tp: int, pp: int, dp: int, *, tied: bool = False, layers: int = 8) -> Config:
    base = Config()
    return validate(
        replace(
            base,
            model=replace(base.model, num_layers=layers, tie_embeddings=tied, num_kv_heads=1),
            parallel=replace(base.parallel, tp=tp, pp=pp, dp=dp, bucket_bytes=200_000),
        ),
        tp * pp * dp,
    )


def reduces(plan_actions: tuple, kind: Kind) -> list[int | None]:  # type: ignore[type-arg]
    return [sub.index for action in plan_actions for sub in (action, *action.subs) if sub.kind is kind]


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    model = replace(Config().model, num_layers=8)
    assert layer_ranges(model, 128, (0, 1)) == ((0, 4), (4, 8))
    # this head costs as much as three layers
    layer_flops = 3 * 128 * 384 + 4 * 128 * 128 + 128 * 128
    heavy = replace(model, vocab_size=3 * layer_flops // 128)
    (_, cut), _ = layer_ranges(heavy, 128, (0, 1))
    assert cut in (5, 6)


def test_what_is_computed_again_counts() -> None:
    """A head a little heavier than a layer takes one from its stage, but not where layers alone are computed again."""
    model = replace(Config().model, num_layers=8)
    layer_flops = 3 * 128 * 384 + 4 * 128 * 128 + 128 * 128
    heavy = replace(model, vocab_size=11 * layer_flops // (10 * 128))
    cuts = {recompute: layer_ranges(heavy, 128, (0, 1), recompute)[0][1] for recompute in Recompute}
    assert cuts[Recompute.NONE] == cuts[Recompute.FULL] == 5
    assert cuts[Recompute.BLOCK] == cuts[Recompute.ATTENTION] == 4


def test_only_buckets_with_several_holders_are_reduced() -> None:
    for tp, dp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        settings = config(tp, 2, dp)
        layout = layout_of(settings)
        plan = training_plan(settings, layout)
        for stage in range(layout.pp):
            partial = {
                index
                for index, bucket in layout.buckets_of(stage).items()
                if dp > 1 or (tp > 1 and bucket.reduce_over != ("dp",))
            }
            started = [
                sub.index
                for action in plan.actions[stage]
                if action.kind is not Kind.WAIT
                for sub in action.subs
                if sub.kind is Kind.REDUCE
            ]
            assert set(started) == partial and len(started) == len(partial)


def test_bucket_indices_are_unique_over_stages() -> None:
    layout = layout_of(config(2, 4, 2))
    indices = [index for stage in range(layout.pp) for index in layout.buckets_of(stage)]
    assert indices == list(range(len(indices))) == list(layout.buckets)


def test_tied_embeddings_are_summed_between_first_and_last_stage_only() -> None:
    settings = config(1, 4, 1, tied=True)
    plan = training_plan(settings, layout_of(settings))
    assert [len(reduces(actions, Kind.TIE_REDUCE)) for actions in plan.actions] == [1, 0, 0, 1]
    untied = config(1, 4, 1)
    assert not any(reduces(a, Kind.TIE_REDUCE) for a in training_plan(untied, layout_of(untied)).actions)
    one_stage = config(2, 1, 1, tied=True)
    assert not any(reduces(a, Kind.TIE_REDUCE) for a in training_plan(one_stage, layout_of(one_stage)).actions)


def test_stages_with_experts_reduce_what_they_count_where_several_ranks_count() -> None:
    """Two stages of two replicas; one layer of each has experts, or only one of the last stage."""

    def counted(dp: int, pp: int, has_experts: tuple[bool, ...]) -> list[list[str]]:
        base = config(1, pp, dp, layers=4)
        details = ModelDetails(num_experts=4, experts_per_token=2, expert_ffn_size=64, has_experts=has_experts)
        model = replace(base.model, architecture="qwen3_moe", details=details)
        settings = validate(replace(base, model=model), dp * pp)
        layout = layout_of(settings)
        plan = training_plan(settings, layout)
        assert not {counts.index for counts in plan.counts} & set(layout.buckets)
        return [[str(action) for action in actions if action.kind is Kind.REDUCE] for actions in plan.actions]

    (first,), (second,) = counted(2, 2, (False, True, True, False))
    assert first != second
    assert [len(of) for of in counted(2, 2, (False, False, False, True))] == [0, 1]
    assert counted(1, 2, (True,) * 4) == [[], []]


def test_the_digest_tells_configurations_apart() -> None:
    settings = config(2, 2, 2)
    digest = training_plan(settings, layout_of(settings)).digest()
    assert digest == training_plan(settings, layout_of(settings)).digest()
    for other in (config(2, 2, 2, layers=9), config(4, 2, 1), config(2, 2, 2, tied=True)):
        assert training_plan(other, layout_of(other)).digest() != digest
    gpipe = replace(settings, parallel=replace(settings.parallel, schedule="gpipe"))
    assert training_plan(gpipe, layout_of(gpipe)).digest() != digest


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_forward_plans_verify_and_end_without_a_step(pp: int) -> None:
    settings = config(1, pp, 1)
    plan = forward_plan(settings, layout_of(settings), 5, 1)
    verify(plan)
    kinds = {action.kind for actions in plan.actions for action in actions}
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.WAIT}


def scheduled(schedule: str, *, tied: bool, reduction: Literal["fast", "exact"]) -> Config:
    base = config(1, 2, 2, tied=tied)
    parallel = replace(base.parallel, schedule=schedule, bucket_bytes=20_000)
    model = replace(base.model, num_layers=8)
    return validate(replace(base, model=model, parallel=parallel, train=replace(base.train, reduction=reduction)), 4)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_every_gradient_lies_in_one_bucket_of_its_rank(schedule: str, reduction: Literal["fast", "exact"]) -> None:
    for tied in (False, True):
        settings = scheduled(schedule, tied=tied, reduction=reduction)
        layout = layout_of(settings)
        for rank in range(2):
            names = [name for bucket in layout.buckets_of(rank).values() for name in bucket.names]
            assert len(names) == len(set(names))
            layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
            assert layers == {i for first, last in layout.layers_of(rank) for i in range(first, last)}
        training_plan(settings, layout)


def test_tied_ends_on_one_rank_share_a_bucket_that_both_chunks_fill() -> None:
    layout = layout_of(scheduled("zbv", tied=True, reduction="fast"))
    assert layout.ranks == (0, 1, 1, 0) and layout.ends_share_a_rank
    shared = [bucket for bucket in layout.buckets.values() if len(bucket.chunks) > 1]
    assert [(bucket.chunks, bucket.layout.names) for bucket in shared] == [((0, 3), ("embed_tokens.weight",))]
    plan = training_plan(scheduled("zbv", tied=True, reduction="fast"), layout)
    assert not plan.ties
    # In exact mode each use has buffers of its own, each filled by one chunk.
    exact = layout_of(scheduled("zbv", tied=True, reduction="exact"))
    assert all(len(bucket.chunks) == 1 for bucket in exact.buckets.values())
    of_chunk = {
        chunk: {name for b in exact.buckets.values() if b.chunks == (chunk,) for name in b.layout.names}
        for chunk in (0, 3)
    }
    assert any(name.startswith("embed_tokens") and not name.endswith("head") for name in of_chunk[0])
    assert all(name.endswith("head") for name in of_chunk[3] if name.startswith("embed_tokens"))


def test_the_chunk_without_slack_has_small_buckets_last() -> None:
    """On 1f1b stage 0 ends the step; its buckets taper, those of the stage that ends earlier do not."""
    base = config(1, 2, 2)
    model = replace(base.model, hidden_size=512, ffn_size=2048, num_layers=8)
    parallel = replace(base.parallel, bucket_bytes=20_000_000)
    layout = layout_of(validate(replace(base, model=model, parallel=parallel), 4))
    sizes = [[4 * bucket.numel for bucket in layout.buckets_of(rank).values()] for rank in range(2)]
    assert sizes[0][-1] < sizes[0][0] / 4 and len(sizes[0]) > len(sizes[1])
    full = [sum(size >= parallel.bucket_bytes for size in held) for held in sizes]
    assert full == [1, 2]


def refusal(settings: Config, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        validate(settings, world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_schedules_that_cannot_run_are_refused(tmp_path: Path) -> None:
    base = config(1, 2, 1)
    deep = replace(base, parallel=replace(base.parallel, schedule="interleaved", chunks_per_rank=5))
    assert "interleaved cuts the model into 10 chunks over pp 2, num_layers 8: use num_layers 10" in refusal(deep, 2)
    again = replace(base.parallel, gathered="again")
    exact = replace(base.train, reduction="exact")
    assert "parallel.gathered again is for train.reduction fast" in refusal(
        replace(base, parallel=again, train=exact), 2
    )
    path = tmp_path / "reversed.txt"
    num = base.train.num_micro_batches
    forward = [" ".join(f"{rank}F{mb}" for mb in range(num)) for rank in range(2)]
    backward = [" ".join(f"{rank}B{mb}" for mb in reversed(range(num))) for rank in range(2)]
    path.write_text("".join(f"rank {rank}: {forward[rank]} {backward[rank]}\n" for rank in range(2)))
    mine = replace(base.parallel, schedule=str(path))
    assert "in the order of the micro-batches" in refusal(replace(base, parallel=mine, train=exact), 2)
    fast = validate(replace(base, parallel=mine), 2)
    assert training_plan(fast, layout_of(fast)).schedule == "reversed"
