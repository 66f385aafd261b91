"""Rung: pure. A plan's text parses back to the plan, and only what a plan writes is a plan's text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    CountBucket,
    Gathered,
    Plan,
    Recompute,
    Reduced,
    TensorSpec,
    Tie,
    Weights,
    parse_actions,
    parse_plan,
    verify,
)

BuildPlan = Callable[..., Plan]

names = st.sampled_from([*sorted(SCHEDULES), "forward_only"])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(names, st.integers(1, 6), st.integers(1, 12), st.booleans(), st.booleans())
def test_lowered_plans_parse_back(
    build_plan: BuildPlan, name: str, p: int, m: int, has_buckets: bool, has_counts: bool
) -> None:
    plan = build_plan(name, p, m, has_buckets, has_counts=has_counts)
    parsed = parse_plan(plan.text())
    assert parsed == plan
    assert parsed.digest() == plan.digest()
    verify(parsed)


numbers = st.integers(-3, 10**6)
tuples = st.lists(numbers, max_size=4).map(tuple)
specs = st.none() | st.builds(TensorSpec, tuples, st.sampled_from(["float32", "none", "torch.int8", "a-b:c"]))
words = st.sampled_from(["0F0", "0B1[r1 r0]", "0SEND_F0", "0F1[g1 f0]", "g2 f2", "w[r1 g0]", "t2", "CLIP"])
actions = st.lists(words, max_size=5).map(" ".join).map(parse_actions)
plans = st.builds(
    Plan,
    schedule=st.text(st.characters(exclude_characters="\n")) | st.sampled_from(["a training microbatches 1", " "]),
    num_microbatches=numbers,
    num_layers=numbers,
    chunks=st.lists(
        st.builds(
            Chunk,
            numbers,
            st.tuples(numbers, numbers),
            specs,
            specs,
            st.sampled_from(Recompute),
            st.sampled_from(Gathered),
        ),
        max_size=3,
    ).map(tuple),
    buckets=st.lists(
        st.builds(Bucket, numbers, tuples, st.sampled_from(Weights), st.sampled_from(Reduced)), max_size=3
    ).map(tuple),
    ties=st.lists(st.builds(Tie, numbers, tuples), max_size=3).map(tuple),
    actions=st.lists(actions, max_size=3).map(tuple),
    training=st.booleans(),
    counts=st.lists(st.builds(CountBucket, numbers, tuples), max_size=2).map(tuple),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(plans)
def test_plans_that_are_wrong_parse_back(plan: Plan) -> None:
    assert parse_plan(plan.text()) == plan


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_any_other_text_is_refused_in_one_line(build_plan: BuildPlan, data: st.DataObject) -> None:
    """Replace, drop or insert a few characters: what still parses is what its plan writes."""
    text = build_plan(data.draw(names), 2, 2).text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 3, len(text))))
    damaged = text[:start] + data.draw(st.text("0-1 \n\t[]:,rFBtx\u0661\u2028", max_size=3)) + text[end:]
    try:
        parsed = parse_plan(damaged)
    except ValueError as error:
        assert str(error).startswith("line ")
        assert len(str(error).splitlines()) == 1
    else:
        assert parsed.text() == damaged


TEXT = """\
plan 1f1b training microbatches 1 layers 2
chunk 0 rank 0 layers 0:1 input none output float32[4,2] recompute none gathered keep
chunk 1 rank 1 layers 1:2 input float32[4,2] output none recompute block gathered again
bucket 0 chunks 0 weights sliced reduced microbatch
tie 0 chunks 0 1
rank 0: g0 w[g0] 0F0[f0] 0SEND_F0 0RECV_B0 w[0SEND_F0 0RECV_B0] 0B0[r0] w[r0] t0 CLIP STEP
rank 1: 1RECV_F0 w[1RECV_F0] 1F0 1B0 1SEND_B0 w[1SEND_B0] t0 CLIP STEP
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TEXT, "", "line 1: a plan's text starts with one line like 'plan 1f1b training .*: got the end"),
        ("plan 1f1b", "1f1b", "line 1: a plan's text starts with one line like .*: got '1f1b training"),
        ("layers 2\n", "layers 2\n" + TEXT.splitlines()[0] + "\n", "line 2: .* one line like .*: got 'plan 1f1b"),
        ("training", "eval", "line 1: a line of a plan reads like .*: got 'plan 1f1b eval"),
        ("layers 2\n", "layers two\n", "line 1: a line of a plan reads like .* layers two'"),
        ("layers 0:1", "layers 0-1", "line 2: a line of a chunk reads like .*: got 'chunk 0 rank 0 layers 0-1 "),
        ("chunk 1 rank", "chunk 2 rank", "line 3: the lines of the chunks count from 0: got chunk 2, where chunk 1 is"),
        ("float32[4,2] output", "float32[4, 2] output", "line 3: a line of a chunk reads like"),
        (
            "bucket 0",
            "bucket 00",
            "line 4: a line of a bucket reads like 'bucket 2 chunks 0 weights whole reduced step': got 'bucket 00 c",
        ),
        ("chunks 0 weights", "chunks 0  weights", "line 4: a line of a bucket reads like 'bucket 2 chunks 0 weights "),
        ("weights sliced", "weights halved", "line 4: a line of a bucket reads like 'bucket 2 chunks 0 weights whole "),
        (" reduced microbatch", "", "line 4: a line of a bucket reads like .* reduced step': got 'bucket 0 chunks 0 w"),
        (
            "recompute block",
            "recompute some",
            "line 3: a line of a chunk reads like .* keep': got 'chunk 1 .* some gath",
        ),
        (" gathered again", "", "line 3: a line of a chunk reads like .*: got 'chunk 1 rank 1 "),
        ("tie 0 chunks 0 1", "tie 0 chunks 0  1", "line 5: a line of a tie reads like 'tie 0 chunks 0 3': got"),
        ("rank 1:", "rank 0:", "line 7: the lines of the ranks count from 0: got rank 0, where rank 1 is next"),
        (" 0F0[f0] ", " 0G0 ", "line 6: an action reads like 2F0.*: got '0G0'"),
        (
            " g0 ",
            "  g0 ",
            "line 6: actions are separated by exactly one space: got ' g0 w.g0. .*",
        ),
        ("0B0[r0]", "0B0[r0", "line 6: brackets must be balanced and not nested: got '.*0B0.r0 w.'"),
        ("0B0[r0]", "0B0[t0]", "line 6: B takes sub-actions REDUCE, GATHER, FREE only: got t0, in '0B0.t0.'"),
        (
            "0B0[r0]",
            "w[" * 5000 + "r0" + "]" * 5000,
            "line 6: brackets must be balanced and not nested: got '.* w.w.'",
        ),
        ("tie 0 chunks 0 1\n", "", None),
        (
            "bucket 0 chunks 0 weights sliced reduced microbatch\ntie 0 chunks 0 1",
            "tie 0 chunks 0 1\nbucket 0 chunks 0 weights sliced reduced microbatch",
            "line 5: .* in this order: got 'b",
        ),
        ("\nrank 1", "\n\nrank 1", "line 7: a plan's text is its head, chunks, .*: got ''"),
        ("STEP\n", "STEP\r\n", "line 6: actions are separated by exactly one space"),
        (TEXT, TEXT[:-1], "line 7: each line ends in a newline, the last one too: got 'rank 1: 1RECV_F0"),
        (TEXT, TEXT + "\n", "line 8: a plan's text is its head, .*: got ''"),
    ],
)
def test_malformed_text_names_line_rule_and_text(old: str, new: str, message: str | None) -> None:
    assert parse_plan(TEXT).text() == TEXT
    assert old in TEXT
    damaged = TEXT.replace(old, new, 1)
    if message is None:
        assert parse_plan(damaged).text() == damaged
        return
    with pytest.raises(ValueError, match=message) as caught:
        parse_plan(damaged)
    assert len(str(caught.value).splitlines()) == 1


def test_numbers_too_long_for_python_are_refused_with_their_line() -> None:
    with pytest.raises(ValueError, match="line 4: "):
        parse_plan(TEXT.replace("bucket 0", "bucket " + "1" * 5000))
