"""Rung: pure. Plans of real configurations: layers, buckets, ties, digests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpengine.config import Config, validate
from tpengine.plan import Kind, verify
from tpengine.step_plan import forward_plan, layer_ranges, layout_of, training_plan


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
    assert layer_ranges(model, 128, 2) == ((0, 4), (4, 8))
    # this head costs as much as three layers
    layer_flops = 3 * 128 * 384 + 4 * 128 * 128 + 128 * 128
    heavy = replace(model, vocab_size=3 * layer_flops // 128)
    assert layer_ranges(heavy, 128, 2) == ((0, 5), (5, 8)) or layer_ranges(heavy, 128, 2) == ((0, 6), (6, 8))
    assert layer_ranges(heavy, 128, 2)[0][1] > 4


def test_only_buckets_with_several_holders_are_reduced() -> None:
    for tp, dp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        settings = config(tp, 2, dp)
        layout = layout_of(settings)
        plan = training_plan(settings, layout)
        for stage, held in enumerate(layout.buckets):
            partial = {
                index
                for index, bucket in held.items()
                if dp > 1 or (tp > 1 and bucket.reduce_over in ("dp_tp", "dp_replica"))
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
    indices = [index for held in layout.buckets for index in held]
    assert indices == list(range(len(indices)))


def test_tied_embeddings_are_summed_between_first_and_last_stage_only() -> None:
    settings = config(1, 4, 1, tied=True)
    plan = training_plan(settings, layout_of(settings))
    assert [len(reduces(actions, Kind.TIE_REDUCE)) for actions in plan.actions] == [1, 0, 0, 1]
    untied = config(1, 4, 1)
    assert not any(reduces(a, Kind.TIE_REDUCE) for a in training_plan(untied, layout_of(untied)).actions)
    one_stage = config(2, 1, 1, tied=True)
    assert not any(reduces(a, Kind.TIE_REDUCE) for a in training_plan(one_stage, layout_of(one_stage)).actions)


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
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.EXCHANGE, Kind.WAIT}
