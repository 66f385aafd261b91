"""Rung: gloo ranks. Every layout trains to the parameters of one process, in float64.

Three clipped steps on real text with ignored labels, 5 layers (uneven on 2 and 4 stages), tied and untied embeddings,
1 and 2 KV heads (replicated where tp is larger): loss, gradient norm and every parameter agree to 1e-9 of the largest
element of the tensor.
"""

from __future__ import annotations

import pytest
import torch
from parity import Outcome, compare, config_of, train
from rank_pool import RankPool

LAYOUTS = [(dp, tp, pp) for dp in (1, 2) for tp in (1, 2, 4) for pp in (1, 2, 4) if 1 < dp * tp * pp <= 8]


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[tuple[bool, int], Outcome]:
    """What one process trains to, by (tied, kv heads)."""
    return {
        (tied, kv_heads): ranks.run(train, 1, config_of(1, 1, 1, tied=tied, kv_heads=kv_heads))[0]
        for tied in (False, True)
        for kv_heads in (1, 2)
    }


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_parity(
    ranks: RankPool,
    references: dict[tuple[bool, int], Outcome],
    dp: int,
    tp: int,
    pp: int,
    tied: bool,
    kv_heads: int,
) -> None:
    outcomes = ranks.run(train, dp * tp * pp, config_of(dp, tp, pp, tied=tied, kv_heads=kv_heads))
    compare(outcomes, references[tied, kv_heads])


def test_parity_of_gpipe(ranks: RankPool, references: dict[tuple[bool, int], Outcome]) -> None:
    outcomes = ranks.run(train, 8, config_of(1, 2, 4, tied=True, kv_heads=1, schedule="gpipe"))
    compare(outcomes, references[True, 1])


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 3, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2)])
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
