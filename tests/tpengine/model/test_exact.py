"""Rung: gloo ranks, and torchrun for whole runs. In exact mode every layout gives the bits of one process.

Loss, gradient norm, weights, summed gradients, moments and masters after three clipped steps with dropout, as one hash.
By default 2 layers train for 2 steps, on layouts that have every axis at 2; `pytest -m slow` runs all of up to 8 ranks,
tied and untied, with 1, 2 and 8 KV heads, as a covering array. What only a GPU checks: exact mode there.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.engine import parity
from support.engine.exactness import (
    CPU,
    WIDE,
    Bits,
    DType,
    Found,
    alone,
    assert_same_bits,
    digests_of,
    exact_config,
    merge,
    num_ranks,
    train,
    train_steps,
)
from support.kernels.mutations import survivors
from support.ranks.progress import run_program
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.matmul import host as host_gemm

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.data_parallel.buckets import BlockSums
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.norm import Norm
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer
from tpengine.training.step_loss import TrainingBatch

OneProcess = Callable[[Config], Bits]
# What the default run trains.
SMALL: dict[str, Any] = {"layers": 2, "steps": 2}


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> OneProcess:
    """What a configuration's training comes to in one process."""

    @functools.cache
    def bits(config: Config) -> Bits:
        return merge(config, ranks.run(train, 1, config))

    return lambda config: bits(alone(config))


def bits_of(ranks: RankPool, config: Config) -> Bits:
    return merge(config, ranks.run(train, num_ranks(config), config))


# (dp, tp, pp)
FLOAT32 = [
    *[(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)],
    *[(2, 2, 1), (1, 4, 2)],
]
BFLOAT16 = [(2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 2, 2)]
FLOAT64 = [(2, 1, 2), (1, 2, 2)]


# Every axis beside another, in the dtype whose master weights are apart too.
@pytest.mark.by_default("bfloat16-1-2-2")
@pytest.mark.parametrize(("dtype", "dp", "tp", "pp"), [("float32", 2, 2, 1), ("bfloat16", 1, 2, 2)])
def test_a_small_models_layout_gives_the_bits_of_one_process(
    ranks: RankPool, one_process: OneProcess, dtype: DType, dp: int, tp: int, pp: int
) -> None:
    config = exact_config(dp, tp, pp, dtype=dtype, **SMALL)
    assert_same_bits(bits_of(ranks, config), one_process(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dp", "tp", "pp"),
    [
        (dtype, *layout)
        for dtype, layouts in (("float32", FLOAT32), ("bfloat16", BFLOAT16), ("float64", FLOAT64))
        for layout in layouts
    ],
)
def test_a_layout_gives_the_bits_of_one_process(
    ranks: RankPool, one_process: OneProcess, dtype: DType, dp: int, tp: int, pp: int
) -> None:
    config = exact_config(dp, tp, pp, dtype=dtype)
    assert_same_bits(bits_of(ranks, config), one_process(config))


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (1, 8, 1), (8, 1, 1)])
def test_as_many_shards_and_blocks_as_there_can_be(
    ranks: RankPool, one_process: OneProcess, dp: int, tp: int, pp: int
) -> None:
    """Each of 8 ranks of an axis has one."""
    config = exact_config(dp, tp, pp, **WIDE, steps=2)
    assert_same_bits(bits_of(ranks, config), one_process(config))


@pytest.mark.by_default("zb-h1")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        # Weight halves of one micro-batch run after input halves of the next; dropout masks are drawn again.
        ((1, 1, 2), {"schedule": "zb-h1", "recompute": "block"}),
        # Attention takes another way, the head has weights of its own, every shard has a KV head.
        ((1, 2, 1), {"dropout": 0.0, "tied": False, "kv_heads": 4}),
        # 2 blocks of 3 micro-batches, one per replica.
        ((2, 1, 1), {"micro_batches": 6, "kv_heads": 1, "steps": 1}),
    ],
    ids=["zb-h1", "plain model", "blocks of 3"],
)
def test_other_settings_of_a_small_model(
    ranks: RankPool, one_process: OneProcess, layout: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    config = exact_config(*layout, **SMALL | settings)
    assert_same_bits(bits_of(ranks, config), one_process(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ((1, 1, 2), {"schedule": "gpipe"}),
        ((1, 1, 2), {"schedule": "interleaved"}),
        # Both ends on one rank.
        ((2, 1, 2), {"schedule": "zbv"}),
        ((1, 2, 2), {"schedule": "zb-h1", "recompute": "block"}),
        # Attention's dropout masks are drawn again.
        ((1, 1, 2), {"schedule": "interleaved", "recompute": "full"}),
        ((1, 2, 1), {"recompute": "attention"}),
        ((2, 2, 1), {"dropout": 0.0, "tied": False, "kv_heads": 4}),
        ((2, 2, 1), {"micro_batches": 6, "kv_heads": 1, "steps": 2}),
    ],
    ids=["gpipe", "interleaved", "zbv", "zb-h1", "stages again", "attention again", "plain model", "blocks of 3"],
)
def test_other_settings(
    ranks: RankPool, one_process: OneProcess, layout: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    config = exact_config(*layout, **settings)
    assert_same_bits(bits_of(ranks, config), one_process(config))


def train_by_onednn(config: Config) -> Found:
    """Train with every product in float32 by oneDNN, where the processor has it: small ones go to MKL otherwise."""
    with patch.object(host_gemm, "FEWEST_MULTIPLICATIONS", 0):
        return train(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "pp"),
    [
        (1, 2, 1),
        pytest.param(2, 2, 1, marks=pytest.mark.slow),
        pytest.param(1, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_the_library_of_large_products_gives_the_same_bits_too(ranks: RankPool, dp: int, tp: int, pp: int) -> None:
    config = exact_config(dp, tp, pp, layers=2, steps=1)
    want = merge(alone(config), ranks.run(train_by_onednn, 1, alone(config)))
    assert_same_bits(merge(config, ranks.run(train_by_onednn, num_ranks(config), config)), want)
    if host_gemm.has_onednn():
        assert want.hash != merge(alone(config), ranks.run(train, 1, alone(config))).hash, "another library"


# Uneven on 2 and 4 stages, and no more; three steps of larger models are above.
NUM_LAYERS = {1: 2, 2: 3, 4: 5}
ALL_LAYOUTS = [(dp, tp, pp) for dp in (1, 2, 4) for tp in (1, 2, 4) for pp in (1, 2, 4) if 1 < dp * tp * pp <= 8]
# Any three of layout, KV heads, ties and dtype meet in every combination: half of the product.
EVERY_LAYOUT = [
    pytest.param(*layout, kv_heads, tied, dtype, id=f"{layout}-{kv_heads}-{'tied' if tied else 'untied'}-{dtype}")
    for i, layout in enumerate(ALL_LAYOUTS)
    for j, kv_heads in enumerate((1, 2, 8))
    for tied in (True, False)
    for dtype in (("float32", "bfloat16")[(i + j + tied) % 2],)
]


def train_and_clear(config: Config) -> Found:
    """A trainer lies in a cycle, with the text that it holds: some hundred of them would fill the memory."""
    found = train(config)
    gc.collect()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp", "pp", "kv_heads", "tied", "dtype"), EVERY_LAYOUT)
def test_every_layout_gives_the_bits_of_one_process(
    ranks: RankPool, one_process: OneProcess, dp: int, tp: int, pp: int, kv_heads: int, tied: bool, dtype: DType
) -> None:
    sizes = {"layers": NUM_LAYERS[pp], "steps": 2, **WIDE}
    config = exact_config(dp, tp, pp, dtype=dtype, tied=tied, kv_heads=kv_heads, **sizes)
    found = ranks.run(train_and_clear, num_ranks(config), config)
    assert_same_bits(merge(config, found), one_process(config))


def train_through(config: Config, memory: bool) -> Found:
    """Train, and say first which exchanges go through shared memory."""
    trainer = Trainer(config, open_corpus(config), CPU)
    comms, shape = trainer.state.rank.comms, trainer.state.rank.mesh.shape
    assert (comms.tp.arena is not None) == (memory and shape.tp > 1 and config.parallel.tp_comm == "fused")
    assert (comms.dp.arena is not None) == (memory and shape.dp > 1)
    assert (trainer.state.rank.mailbox is not None) == (memory and shape.pp > 1)
    return train_steps(trainer, 0, config.train.steps)


def train_on_a_host_each(config: Config) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpkernels.symmetric.memory.host_identity", dist.get_rank)
        patch.setattr("tpengine.distributed.process.host_identity", dist.get_rank)
        return train_through(config, memory=False)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 1), pytest.param(1, 4, 1, marks=pytest.mark.slow)])
def test_how_ranks_communicate_changes_no_bit(
    ranks: RankPool, one_process: OneProcess, dp: int, tp: int, pp: int
) -> None:
    """--parallel.tp-comm plain; and every rank on a host of its own, where nothing goes through memory."""
    config = exact_config(dp, tp, pp, tp_comm="plain", **SMALL)
    assert_same_bits(merge(config, ranks.run(train_through, num_ranks(config), config, True)), one_process(config))
    config = exact_config(dp, tp, pp, **SMALL)
    assert_same_bits(merge(config, ranks.run(train_on_a_host_each, num_ranks(config), config)), one_process(config))


def untrained(config: Config) -> Found:
    return [], digests_of(Trainer(config, open_corpus(config), CPU))


def test_exact_training_trains(ranks: RankPool, one_process: OneProcess) -> None:
    """Equal bits of nothing would be equal too: losses fall, every step is clipped, every shard moves."""
    for dtype in ("float32", "bfloat16"):
        config = exact_config(dtype=dtype, **SMALL)
        bits, start = one_process(config), merge(config, ranks.run(untrained, 1, config))
        losses, norms = zip(*((float.fromhex(x) for x in numbers) for numbers in bits.numbers), strict=True)
        assert list(losses) == sorted(losses, reverse=True) and len(set(losses)) == config.train.steps
        assert all(norm > config.optim.clip_norm for norm in norms)
        for key, value in bits.digests.items():
            assert value != start.digests[key] or key[2] == "gradient", f"{key} is what it was before training"


@pytest.mark.slow
def test_fast_layouts_differ_in_bits(ranks: RankPool, one_process: OneProcess) -> None:
    """Else equal bits would say nothing: this model's last bits depend on the order of sums."""
    layouts = [(1, 1, 1), (2, 1, 1), (1, 2, 1)]
    configs = [exact_config(*layout, reduction="fast", **SMALL) for layout in layouts]
    fast = [ranks.run(train, num_ranks(config), config)[0][0] for config in configs]
    exact = one_process(exact_config(**SMALL)).numbers
    assert len({tuple(numbers) for numbers in (*fast, exact)}) == len(layouts) + 1


@pytest.mark.slow
def test_exact_is_close_to_fast(ranks: RankPool) -> None:
    """In float64 only the order of sums differs: 1e-9 of the largest element of each tensor, dropout included."""
    (reference,) = ranks.run(parity.train, 1, exact_config(dtype="float64", reduction="fast", **SMALL))
    outcomes = ranks.run(parity.train, 2, exact_config(1, 2, 1, dtype="float64", **SMALL))
    parity.compare([by_parameter for outcome in outcomes for by_parameter in one_shard_each(outcome)], reference)
    shards = [shard for outcome in outcomes for _, shards in one_shard_each(outcome) for shard in shards.items()]
    # Not of norms, whose few weights of about 1 swallow a difference of 1e-16 of an update on some processors.
    equal = [
        name
        for name, (offset, tensor) in shards
        if tensor.dim() > 1 and torch.equal(tensor, cut(reference[1][name][1], offset, tensor))
    ]
    assert not equal, f"exact and fast have the same bits: {equal}"


def one_shard_each(outcome: parity.Outcome) -> list[parity.Outcome]:
    """Split an outcome that names shards as `weight[3]` into one per shard, under the parameter's name."""
    numbers, shards = outcome
    return [(numbers, {name.split("[")[0]: shard}) for name, shard in shards.items()]


def cut(whole: Tensor, offset: Sequence[int], part: Tensor) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))]


def evaluated(config: Config) -> tuple[str, list[int]]:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    loss = held_out_loss(trainer.state)
    assert loss is not None
    prompt = trainer.state.part.corpus.held_out.batch(0, 1)[0][0, :16].tolist()
    return loss.hex(), sample(trainer.state, prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_held_out_loss_and_sample_are_the_same(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    """3 micro-batches are held out, which 2 replicas cannot share evenly."""
    (want,) = ranks.run(evaluated, 1, exact_config(**SMALL))
    assert ranks.run(evaluated, 4, exact_config(*layout, **SMALL)) == [want] * 4
    assert len(set(want[1][16:])) > 1


# Broken on purpose: the right sums, in an order that depends on the layout, or dropout that does.


def blocks_in_order(patch: pytest.MonkeyPatch) -> None:
    """Micro-batches are added one after the other."""
    patch.setattr(BlockSums, "end_block", lambda self, index: None)


def shards_in_order(patch: pytest.MonkeyPatch) -> None:
    """The shards' gradients are."""
    patch.setattr("tpengine.data_parallel.gradients.tree_sum", in_order)


def partials_in_order(patch: pytest.MonkeyPatch) -> None:
    """The partial activations are."""
    in_tree = Communicator.reduce_scatter_in_tree
    patch.setattr(Communicator, "reduce_scatter_in_tree", lambda self, terms: in_tree(self, [in_order(terms)]))


def in_order(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    total = functools.reduce(torch.add, terms)
    return total if out is None else out.copy_(total)


def norm_in_one_block(patch: pytest.MonkeyPatch) -> None:
    """A norm weight's gradient is summed over all tokens of a rank at once, and the other shards add nothing."""

    class First:
        """Gives the whole sum to the first sink."""

        def __init__(self, sinks: Sequence[GradientSink]) -> None:
            self.sinks = sinks

        def add(self, param: Parameter, grad: Tensor, partial: Communicator | None) -> None:
            for sink, part in zip(self.sinks, [grad, *[0 * grad] * (len(self.sinks) - 1)], strict=True):
                sink.add(param, part, partial)

    in_blocks = Norm.in_blocks

    def in_one_block(norm: Norm, x: Tensor, sinks: Any) -> Tensor:
        return in_blocks(norm, x, [First(sinks)])  # type: ignore[list-item]

    patch.setattr(Norm, "in_blocks", in_one_block)


def local_dropout(patch: pytest.MonkeyPatch) -> None:
    """Each replica drops by its own count of micro-batches."""

    def begin(self: TrainingBatch, microbatch: int) -> None:
        self._model.position.microbatch = microbatch

    patch.setattr(TrainingBatch, "begin", begin)


MUTATIONS = (blocks_in_order, shards_in_order, partials_in_order, norm_in_one_block, local_dropout)


def train_broken(config: Config, mutation: str) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        if mutation:
            globals()[mutation](patch)
        return train(config)


@pytest.mark.parametrize(
    "mutations", [MUTATIONS[:2], pytest.param(MUTATIONS, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_mutation_of_exact_mode_changes_the_hash(
    ranks: RankPool,
    one_process: OneProcess,
    mutations: Sequence[Callable[[pytest.MonkeyPatch], None]],
    count_mutations: Callable[[str, int, int], None],
) -> None:
    """One process has 4 terms of each sum; two terms would have only one order."""
    reference = one_process(exact_config(layers=2, steps=1))

    def outcome_of(mutation: str) -> Bits:
        config = exact_config(2 if mutation == "local_dropout" else 1, layers=2, steps=1)
        return merge(config, ranks.run(train_broken, num_ranks(config), config, mutation))

    assert_same_bits(outcome_of(""), reference)
    names = [mutation.__name__ for mutation in mutations]
    unnoticed = survivors(names, outcome_of, lambda bits: assert_same_bits(bits, reference))
    count_mutations("exact mode (bits)", len(names) - len(unnoticed), len(names))
    assert not unnoticed


def test_a_shard_that_differs_or_is_missing_is_noticed(one_process: OneProcess) -> None:
    """The comparison itself."""
    config = exact_config(**SMALL)
    bits = one_process(config)
    key = ("layers.1.mlp.up_proj.weight", 3, "exp_avg")
    changed = {**bits.digests, key: "other"}
    with pytest.raises(AssertionError, match=r"1 of \d+ digests differ, the first .*up_proj"):
        assert_same_bits(replace(bits, digests=changed), bits)
    with pytest.raises(AssertionError, match="rank 1 holds another"):
        merge(config, [(bits.numbers, dict(bits.digests)), (bits.numbers, changed)])
    with pytest.raises(AssertionError, match="not what the table has"):
        merge(config, [(bits.numbers, {k: v for k, v in bits.digests.items() if k != key})])
    with pytest.raises(AssertionError, match="rank 1 differ from rank 0's"):
        merge(config, [(bits.numbers, dict(bits.digests)), (bits.numbers[1:], dict(bits.digests))])


RUN = (
    *("--train.reduction", "exact", "--train.steps", "5", "--train.micro-batch-size", "2", "--train.seq-len", "64"),
    *("--model.num-layers", "2"),
    *("--model.residual-dropout", "0.1", "--model.attention-dropout", "0.1", "--model.mlp-dropout", "0.1"),
    *("--train.eval-micro-batches", "3", "--train.sample-tokens", "4", "--train.checkpoint-every", "0"),
    *("--device", "cpu"),
)


def start_run(name: str, *arguments: str, num_processes: int, threads: str | None, cwd: Path) -> tuple[list, list[str]]:
    """Run as a user does; return losses and norms by step, and the lines about held-out loss and sample."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    launcher = torchrun if num_processes > 1 else []
    unset = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    environ = {key: value for key, value in os.environ.items() if key not in unset}
    done = run_program(
        [sys.executable, *launcher, "-m", "tpengine.train", *RUN, *arguments, "--run-dir", name],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**environ, **({"OMP_NUM_THREADS": threads} if threads else {}), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (cwd / name / "metrics.jsonl").read_text().splitlines()]
    ending = done.stdout[done.stdout.index("held-out loss") :].splitlines()
    return [(record["loss"], record["grad_norm"]) for record in records], ending


@pytest.mark.slow
def test_a_run_of_four_processes_repeats_a_run_of_one_to_the_last_digit(tmp_path: Path) -> None:
    """The one process may use as many threads as the machine has, and leaves that to the library."""
    one = start_run("one", "--train.num-micro-batches", "4", num_processes=1, threads=None, cwd=tmp_path)
    four = start_run(
        *("four", "--train.num-micro-batches", "2", "--parallel.tp", "2", "--parallel.dp", "2"),
        num_processes=4,
        threads="1",
        cwd=tmp_path,
    )
    assert len(one[0]) == 5
    assert four == one
