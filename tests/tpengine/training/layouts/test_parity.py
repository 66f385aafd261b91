"""Rung: gloo ranks. Every layout trains to the parameters of one process, in float64.

Three clipped steps on real text with ignored labels, 5 layers (uneven on 2 and 4 stages), tied and untied embeddings,
1 and 2 KV heads (replicated where tp is larger): loss, gradient norm and every parameter agree to 1e-9 of the largest
element of the tensor.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import Outcome, compare, config_of, outcome_of, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer

LAYOUTS = [(dp, tp, pp) for dp in (1, 2) for tp in (1, 2, 4) for pp in (1, 2, 4) if 1 < dp * tp * pp <= 8]


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[tuple[bool, int], Outcome]:
    """What one process trains to, by (tied, kv heads)."""
    return {
        (tied, kv_heads): ranks.run(train, 1, config_of(1, 1, 1, tied=tied, kv_heads=kv_heads))[0]
        for tied in (False, True)
        for kv_heads in (1, 2)
    }


def is_small(layout: tuple[int, int, int]) -> bool:
    return max(layout) == 2 and 1 in layout


# By default every axis of two ranks and every two such axes, each once, in turns of tied and untied embeddings, one and
# two KV heads; larger layouts and all four combinations are slow.
COMBINATIONS = [
    pytest.param(
        *layout,
        tied,
        kv_heads,
        marks=() if is_small(layout) and number % 4 == 2 * tied + kv_heads - 1 else pytest.mark.slow,
    )
    for number, layout in enumerate(LAYOUTS)
    for tied in (False, True)
    for kv_heads in (1, 2)
]
# An axis each; together they are slow.
SMALL_LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


@pytest.mark.by_default("2-1-1-True-2", "1-2-1-True-1", "2-1-2-False-1")
@pytest.mark.parametrize(("dp", "tp", "pp", "tied", "kv_heads"), COMBINATIONS)
def test_parity(
    ranks: RankPool,
    references: dict[tuple[bool, int], Outcome],
    dp: int,
    tp: int,
    pp: int,
    tied: bool,
    kv_heads: int,
) -> None:
    """On one host all exchanges go through memory."""
    config = config_of(dp, tp, pp, tied=tied, kv_heads=kv_heads)
    compare(ranks.run(train_through, dp * tp * pp, config, True), references[tied, kv_heads])


def train_through(config: Config, memory: bool) -> Outcome:
    """Train, and say first that all exchanges go through shared memory, or none."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    comms, shape = trainer.state.rank.comms, trainer.state.rank.mesh.shape
    assert (comms.tp.arena is not None) == (memory and shape.tp > 1 and config.parallel.tp_comm == "fused")
    assert (comms.dp.arena is not None) == (memory and shape.dp > 1)
    assert (trainer.state.rank.mailbox is not None) == (memory and shape.pp > 1)
    return outcome_of(trainer)


def train_on_a_host_each(config: Config) -> Outcome:
    def somewhere() -> int:
        return dist.get_rank()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpkernels.symmetric.memory.host_identity", somewhere)
        patch.setattr("tpengine.distributed.process.host_identity", somewhere)
        return train_through(config, memory=False)


@pytest.mark.by_default("1-1-2")
@pytest.mark.parametrize(
    ("dp", "tp", "pp"),
    [*SMALL_LAYOUTS, *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((2, 2, 2), (1, 4, 2)))],
)
def test_parity_by_collectives(
    ranks: RankPool, references: dict[tuple[bool, int], Outcome], dp: int, tp: int, pp: int
) -> None:
    """--parallel.tp-comm plain; and every rank on a host of its own, where nothing goes through memory."""
    config = config_of(dp, tp, pp, tied=True, kv_heads=1, tp_comm="plain")
    compare(ranks.run(train_through, dp * tp * pp, config, True), references[True, 1])
    config = config_of(dp, tp, pp, tied=True, kv_heads=1)
    compare(ranks.run(train_on_a_host_each, dp * tp * pp, config), references[True, 1])


@pytest.mark.slow  # test_schedule_training.py has it on two ranks
def test_parity_of_gpipe(ranks: RankPool, references: dict[tuple[bool, int], Outcome]) -> None:
    outcomes = ranks.run(train, 8, config_of(1, 2, 4, tied=True, kv_heads=1, schedule="gpipe"))
    compare(outcomes, references[True, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "pp"),
    [(1, 3, 1), *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((1, 6, 1), (1, 3, 2), (2, 3, 1)))],
)
def test_parity_where_padding_differs(ranks: RankPool, dp: int, tp: int, pp: int) -> None:
    """tp 3 and 6 pad the vocabulary of 250 to 264, one process to 256; 3 KV heads are shared by pairs at tp 6."""
    shape = {"tied": pp == 2, "kv_heads": 3, "heads": 6}
    (reference,) = ranks.run(train, 1, config_of(1, 1, 1, **shape))  # type: ignore[arg-type]
    compare(ranks.run(train, dp * tp * pp, config_of(dp, tp, pp, **shape)), reference)  # type: ignore[arg-type]


def test_three_ranks(ranks: RankPool, references: dict[tuple[bool, int], Outcome]) -> None:
    """A pipeline of 3, which divides neither the 5 layers nor the 4 micro-batches."""
    outcomes = ranks.run(train, 3, config_of(1, 1, 3, tied=True, kv_heads=2))
    compare(outcomes, references[True, 2])


def test_training_moves_the_parameters(references: dict[tuple[bool, int], Outcome]) -> None:
    """Parity of nothing would be parity too: losses fall and every tensor differs from its start."""
    numbers, parameters = references[False, 2]
    assert numbers[-1][0] < numbers[0][0] and all(norm > 0.5 for _, norm in numbers)
    for name, (_, tensor) in parameters.items():
        start = torch.ones_like(tensor) if tensor.dim() == 1 else torch.zeros_like(tensor)
        assert not torch.equal(tensor, start), name
