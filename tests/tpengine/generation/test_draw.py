"""Rung: pure. Tokens are drawn from the softmax over what temperature, top-k and top-p leave, the same each time."""

from __future__ import annotations

import pytest
import torch

from tpengine.generation.decoder import _kept, draw
from tpengine.generation.text import Drawing

LOGITS = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


@pytest.mark.parametrize("how", [Drawing(1.0, 7), Drawing(1.0, 0, 0.6), Drawing(1.0, 9, 0.8), Drawing(1.0, 100, 1e-9)])
def test_what_may_be_drawn_is_what_transformers_leaves(how: Drawing) -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    want, none = LOGITS.clone(), torch.empty(0, dtype=torch.int64)
    if how.top_k:
        want = TopKLogitsWarper(how.top_k)(none, want)
    want = TopPLogitsWarper(how.top_p)(none, want) if how.top_p < 1 else want
    assert torch.equal(_kept(LOGITS, how), want)


def test_draws_have_the_probabilities_of_what_is_left() -> None:
    """1,000 draws: the standard deviation of a share is at most 0.016."""
    row, how = LOGITS[:1, :12], Drawing(1.3, top_k=8)
    drawn = torch.cat([draw(row, number, how) for number in range(1000)])
    shares = torch.bincount(drawn, minlength=12) / len(drawn)
    want = _kept(row / 1.3, how).softmax(-1)[0]
    assert (want == 0).sum() == 4
    assert (shares - want).abs().max() < 0.06


def test_a_draw_depends_on_seed_number_and_place_alone() -> None:
    how = Drawing(5.0)
    several = draw(LOGITS, 3, how)
    assert torch.equal(several, draw(LOGITS, 3, how))
    assert torch.equal(several[:2], draw(LOGITS[:2], 3, how)) and torch.equal(
        several, draw(LOGITS.float().double(), 3, how)
    )
    for other in (
        draw(LOGITS, 4, how),
        draw(LOGITS, 3, Drawing(5.0, seed=1)),
        draw(LOGITS.roll(1, 0), 3, how).roll(-1),
    ):
        assert not torch.equal(several, other)


def test_temperature_0_takes_the_likeliest() -> None:
    assert torch.equal(draw(LOGITS, 0, Drawing(0, top_k=3, top_p=0.1)), LOGITS.argmax(-1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Drawing(-0.1), "--temperature must be at least 0 and finite: got -0.1: use 0.8, or 0"),
        (Drawing(float("nan")), "--temperature must be at least 0 and finite: got nan: use 0.8, or 0"),
        (Drawing(top_k=-1), "--top-k must be at least 0, which keeps all: got -1: use 40"),
        (Drawing(top_p=0.0), "--top-p must be above 0 and at most 1: got 0: use 0.9"),
        (Drawing(top_p=1.5), "--top-p must be above 0 and at most 1: got 1.5: use 0.9"),
    ],
)
def test_numbers_that_say_nothing_are_refused(how: Drawing, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        how.check()
    assert str(refused.value) == said
