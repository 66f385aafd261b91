"""Rung: pure. Actions print and parse back; each kind takes its own fields and no others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import Action, Kind, counterpart, format_actions, parse_action, parse_actions
from tpengine.plan.actions import BUCKET, COMPUTE, TRANSFERS, peer_chunk

numbers = st.integers(0, 10**6)


def located(kinds: frozenset[Kind]) -> st.SearchStrategy[Action]:
    return st.builds(Action, st.sampled_from(sorted(kinds)), numbers, numbers)


def indexed(*kinds: Kind) -> st.SearchStrategy[Action]:
    return st.builds(Action, st.sampled_from(kinds), index=numbers)


def grouping(kind: Kind, members: st.SearchStrategy[Action]) -> st.SearchStrategy[Action]:
    subs = st.lists(members, min_size=1, max_size=6).map(tuple)
    return st.builds(Action, st.just(kind), subs=subs)


buckets = indexed(*sorted(BUCKET))
computes = st.builds(
    Action, st.sampled_from(sorted(COMPUTE)), numbers, numbers, subs=st.lists(buckets, max_size=6).map(tuple)
)
actions = st.one_of(
    computes,
    located(TRANSFERS),
    buckets,
    indexed(Kind.TIE_REDUCE),
    grouping(Kind.WAIT, located(TRANSFERS) | indexed(Kind.REDUCE, Kind.GATHER)),
    st.sampled_from([Action(Kind.CLIP), Action(Kind.STEP)]),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(actions, max_size=8))
def test_text_parses_back(listed: list[Action]) -> None:
    assert parse_actions(format_actions(listed)) == tuple(listed)
    for action in listed:
        assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "2F0",
        "0B7[r2 r1 r0]",
        "0I3 0W3",
        "1SEND_F3 2RECV_F3 1SEND_B3 0RECV_B3",
        "0F3[g1 f0] 0B2[g5 r1 r0 f1 f0]",
        "r2 g2 f2 t0",
        "w[1RECV_F3 r0 g1]",
        "CLIP STEP",
    ],
)
def test_documented_forms(text: str) -> None:
    assert format_actions(parse_actions(text)) == text


def test_fields_of_a_form() -> None:
    assert parse_action("2F0") == Action(Kind.F, chunk=2, microbatch=0)
    assert parse_action("0B7[r2 r0]").subs == (Action(Kind.REDUCE, index=2), Action(Kind.REDUCE, index=0))
    assert parse_action("t3") == Action(Kind.TIE_REDUCE, index=3)


def test_what_an_action_starts_and_frees() -> None:
    backward = parse_action("0B2[g5 g4 r1 f1 f0]")
    assert [format_actions(kind) for kind in (backward.gathers, backward.reduces, backward.frees)] == [
        "g5 g4",
        "r1",
        "f1 f0",
    ]
    assert format_actions(backward.posts) == "g5 g4 r1"
    assert [format_actions(parse_action(text).posts) for text in ("g1", "f1", "0SEND_F0", "w[g1]")] == [
        "g1",
        "",
        "0SEND_F0",
        "",
    ]


def test_white_space_between_actions_is_free() -> None:
    assert parse_actions("  0F0\n\t 0B0[r1   r0] ") == parse_actions("0F0 0B0[r1 r0]")
    assert parse_actions("") == ()


BAD_WORDS = "2G0 F0 2F -1F0 02F0 0F0x r r-1 clip X w 0B7[] X[0SEND_F0] w[0F0] w[f0] 0B7[r0 0B7r0] 0B7[r0][r1]"
BAD_NESTING = "0SEND_F0[r0] CLIP[r0] r0[r1] w[w[0SEND_F0]] 0B7[t0] ]0F0["


@pytest.mark.parametrize("text", ["", "0F0 0F1", "0B7 [r0]", *BAD_WORDS.split(), *BAD_NESTING.split()])
def test_malformed_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_action(text)
    assert "\n" not in str(caught.value)
    assert (text in str(caught.value)) or "[" in text


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"kind": Kind.F, "chunk": 0}, "F needs microbatch of 0 or more: got None"),
        ({"kind": Kind.F, "chunk": -1, "microbatch": 0}, "F needs chunk of 0 or more: got -1"),
        ({"kind": Kind.F, "chunk": 0, "microbatch": 0, "index": 0}, "F takes no index"),
        ({"kind": Kind.REDUCE}, "REDUCE needs index"),
        ({"kind": Kind.REDUCE, "index": 0, "chunk": 0}, "REDUCE takes no chunk"),
        ({"kind": Kind.CLIP, "microbatch": 0}, "CLIP takes no microbatch"),
        ({"kind": Kind.WAIT}, "WAIT takes at least one sub-action"),
        ({"kind": Kind.STEP, "subs": (Action(Kind.CLIP),)}, "STEP takes no sub-actions"),
        (
            {"kind": Kind.WAIT, "subs": (Action(Kind.CLIP),)},
            "WAIT takes sub-actions SEND_F, RECV_F, SEND_B, RECV_B, REDUCE, GATHER only: got CLIP",
        ),
    ],
)
def test_each_kind_takes_its_own_fields(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Action(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "other"), [("1SEND_F3", "2RECV_F3"), ("1SEND_B3", "0RECV_B3")])
def test_counterpart(text: str, other: str) -> None:
    assert str(counterpart(parse_action(text))) == other
    assert counterpart(parse_action(other)) == parse_action(text)
    assert peer_chunk(parse_action(text)) == parse_action(other).chunk
