"""Rung: pure. Lengths in steps and tokens are read with their units, to the last digit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.config.amounts import Amount, amount_of, tokens_of


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        (2000, 2000, "steps"),
        ("2000", 2000, "steps"),
        ("2e3", 2000, "steps"),
        ("2k steps", 2000, "steps"),
        ("2e9 tokens", 2 * 10**9, "tokens"),
        ("500M tokens", 5 * 10**8, "tokens"),
        ("2B", 2 * 10**9, "tokens"),
        ("1.1b", 11 * 10**8, "tokens"),
        ("0.3T Tokens", 3 * 10**11, "tokens"),
        ("20 m", 2 * 10**7, "tokens"),
        ("1 token", 1, "tokens"),
        ("4611686018427387903 tokens", 2**62 - 1, "tokens"),
    ],
)
def test_a_length_is_read(text: int | str, number: int, unit: str) -> None:
    assert amount_of(text, "until") == Amount(number, unit)
    if unit == "tokens":
        assert tokens_of(text, "train.tokens") == number


@pytest.mark.parametrize(
    "wrong",
    [
        True,
        1.0,
        2.5,
        None,
        [2],
        {"a": 1},
        "",
        "many",
        "1.5",
        "1.0000001k tokens",
        "2e99",
        "-3",
        "3 epochs",
        "2 GB",
        "1e-3",
    ],
)
def test_what_is_no_length_is_one_line(wrong: object) -> None:
    for read in (amount_of, tokens_of):
        with pytest.raises(ValueError, match=r"^until must be .*: use 2000") as error:
            read(wrong, "until")
        assert "\n" not in str(error.value)


def test_thousands_must_say_of_what_they_are() -> None:
    """2k steps are a warm-up, 2k tokens are not one step; a million steps nobody trains."""
    with pytest.raises(ValueError, match='use "2k tokens" or "2k steps"'):
        amount_of("2k", "optim.warmup_steps")
    assert tokens_of("2k", "train.tokens") == 2000
    with pytest.raises(ValueError, match="number of tokens"):
        tokens_of("2000 steps", "train.tokens")


@given(st.integers(0, 2**62))
@settings(derandomize=True, deadline=None)
def test_every_digit_counts(number: int) -> None:
    assert amount_of(f"{number} tokens", "until") == Amount(number, "tokens")
    assert tokens_of(str(number), "train.tokens") == tokens_of(number, "train.tokens") == number
