"""The auxiliary loss of a router, and what is counted: against autograd through loops, and transformers. Pure."""

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tpengine.layers.balance import Balance, Scoring
from tpengine.layers.dropout import Position

NUM_EXPERTS, TOP_K = 5, 2


def tables_of(scoring: Scoring = "softmax", *, has_loss: bool = True) -> Balance:
    """The tables of layers 1 and 3, of the second replica of two with two micro-batches each."""
    position = Position(training=True, microbatch=2)
    return Balance(
        (1, 3), NUM_EXPERTS, scoring, position, micro_batches=range(2, 4), num_micro_batches=4, has_loss=has_loss
    )


def routed(num_tokens: int = 12, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Scores, and how many tokens have chosen each expert; the last expert has none."""
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)).double()
    logits[:, -1] -= 50
    chosen = logits.topk(TOP_K, dim=1).indices
    return logits, torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).int()


def loop_loss(logits: Tensor, counts: Tensor, scoring: Scoring) -> Tensor:
    """E * sum over e of f[e] P[e], number by number."""
    num_tokens, total = len(logits), logits.new_zeros(())
    for expert in range(NUM_EXPERTS):
        mean = logits.new_zeros(())
        for token in range(num_tokens):
            scores = logits[token].exp() if scoring == "softmax" else 1 / (1 + (-logits[token]).exp())
            mean = mean + scores[expert] / scores.sum() / num_tokens
        total = total + NUM_EXPERTS * int(counts[expert]) / num_tokens * mean
    return total


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_gradient_is_autograds_of_a_loop_each_token_counted_once(scoring: Scoring, num_blocks: int) -> None:
    tables, (logits, counts) = tables_of(scoring), routed()
    layer = tables.of(3)
    fractions = layer.note(logits, counts)
    assert fractions is not None
    tables.scale = 0.7
    # Each of so many ranks adds that of its own rows; what they have is summed over them.
    size = len(logits) // num_blocks
    total = torch.zeros_like(logits)
    for block in range(num_blocks):
        own = torch.zeros_like(logits)
        layer.add_gradient_(own, logits, fractions, slice(block * size, (block + 1) * size))
        total += own
    leaf = logits.clone().requires_grad_()
    loss = loop_loss(leaf, counts, scoring)
    (0.7 * loss).backward()
    torch.testing.assert_close(total, leaf.grad, rtol=0, atol=1e-10)
    assert abs(tables.losses[1, 2].item() - loss.item()) < 1e-10
    assert tables.losses.count_nonzero() == 1


def test_of_one_layer_the_loss_is_hugging_faces() -> None:
    tables, (logits, counts) = tables_of(), routed()
    tables.of(1).note(logits, counts)
    theirs = load_balancing_loss_func((logits,), NUM_EXPERTS, TOP_K)
    # Theirs is in float32.
    assert tables.losses[0, 2].item() == pytest.approx(float(theirs), rel=1e-6)


def test_of_even_choices_the_loss_is_the_number_of_choices() -> None:
    tables = tables_of()
    tables.of(1).note(torch.zeros(10, NUM_EXPERTS), torch.full((NUM_EXPERTS,), 4, dtype=torch.int32))
    assert tables.losses[0, 2].item() == pytest.approx(TOP_K)


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_micro_batch_counts_once_and_only_in_training(has_loss: bool) -> None:
    tables, (logits, counts) = tables_of(has_loss=has_loss), routed()
    layer, other = tables.of(1), routed(seed=4)
    assert (layer.note(logits, counts) is None) == (not has_loss)
    # Computed again, as recompute does; then another micro-batch; then a pass of evaluation.
    layer.note(logits, counts)
    tables.position.microbatch = 3
    layer.note(*other)
    tables.position.training = False
    assert layer.note(logits, counts) is None
    assert tables.counts[0].tolist() == [counts.tolist(), other[1].tolist()]
    assert not tables.counts[1].any()
    tables.clear()
    assert not tables.counts.any() and not tables.losses.any()


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_score_that_is_no_number_makes_the_tables_loss_none(has_loss: bool) -> None:
    tables, (logits, counts) = tables_of(has_loss=has_loss), routed()
    logits[4, 2] = torch.nan
    tables.of(3).note(logits, counts)
    assert tables.losses.isnan().nonzero().tolist() == [[1, 2]]
