"""Rung: pure. How exact mode cuts a model and a batch: by powers of two that every legal layout divides."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig, num_shards_of, validate
from tpengine.config.exact_sizes import largest_dp, num_gradient_buffers, num_shards

POWERS = (1, 2, 4, 8)
SIZES = st.integers(1, 12).flatmap(lambda odd: st.sampled_from((1, 2, 4, 8, 16)).map(lambda power: odd * power))


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Query heads, KV heads that divide them, feed-forward width, tokens of a micro-batch."""
    heads = draw(SIZES)
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return heads, kv_heads, draw(SIZES), draw(SIZES)


def is_legal(tp: int, heads: int, kv_heads: int, ffn: int, tokens: int) -> bool:
    """The rules that config.validate has for every run."""
    divides = heads % tp == ffn % tp == tokens % tp == 0
    return divides and (kv_heads % tp == 0 or tp % kv_heads == 0)


@given(models())
@example((8, 8, 96, 48))
@example((6, 3, 48, 48))
@settings(derandomize=True, deadline=None)
def test_num_shards_is_the_largest_power_of_two_that_tp_could_be(model: tuple[int, int, int, int]) -> None:
    shards = num_shards(*model)
    assert shards in POWERS
    assert shards == max(tp for tp in POWERS if is_legal(tp, *model))


@given(models())
@settings(derandomize=True, deadline=None)
def test_the_powers_of_two_that_tp_may_be_are_the_divisors_of_num_shards(model: tuple[int, int, int, int]) -> None:
    shards = num_shards(*model)
    for tp in POWERS:
        assert (shards % tp == 0) == is_legal(tp, *model)


@given(models(), st.sampled_from(POWERS))
@settings(derandomize=True, deadline=None)
def test_configurations_agree(model: tuple[int, int, int, int], tp: int) -> None:
    """config.validate lets exact mode have the tp that fast mode has, up to 8 and where it is a power of two."""
    heads, kv_heads, ffn, tokens = model
    config = Config(
        model=ModelConfig(hidden_size=2 * heads, num_heads=heads, num_kv_heads=kv_heads, ffn_size=ffn),
        parallel=ParallelConfig(tp=tp, pp=1, dp=1),
        train=TrainConfig(seq_len=tokens, micro_batch_size=1, reduction="exact"),
    )
    assert num_shards_of(config) == num_shards(*model)
    if is_legal(tp, *model):
        assert validate(config, tp) == config
    else:
        with pytest.raises(ValueError, match="divi"):
            validate(config, tp)


@given(st.integers(1, 10_000))
@settings(derandomize=True, deadline=None)
def test_largest_dp_is_the_largest_power_of_two_up_to_8_that_divides(num_micro_batches: int) -> None:
    assert largest_dp(num_micro_batches) == max(n for n in POWERS if num_micro_batches % n == 0)


@given(st.integers(1, 1000), st.sampled_from(POWERS))
@settings(derandomize=True, deadline=None)
def test_replicas_have_whole_blocks(num_micro_batches: int, dp: int) -> None:
    """A power of two up to 8 always divides the blocks, and no block lies on two replicas."""
    blocks = largest_dp(num_micro_batches * dp)
    assert blocks % dp == 0
    assert num_micro_batches % (blocks // dp) == 0


@pytest.mark.parametrize(("num_blocks", "num_buffers"), [(1, 1), (2, 2), (4, 3), (8, 4)])
def test_gradient_buffers_are_one_and_a_level_each(num_blocks: int, num_buffers: int) -> None:
    assert num_gradient_buffers(num_blocks) == num_buffers == 1 + int(math.log2(num_blocks))
