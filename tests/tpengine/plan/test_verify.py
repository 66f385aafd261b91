"""Rung: pure. The verifier goes red for every way we know to break a plan, and names the rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest

from tpengine.plan import (
    Action,
    Bucket,
    Chunk,
    CountBucket,
    Plan,
    PlanError,
    Schedule,
    TensorSpec,
    Tie,
    format_actions,
    lower,
    parse_actions,
    receive_slots,
    verify,
)
from tpengine.plan.verify_transfers import check_blocking, check_channels, check_slots

BuildPlan = Callable[..., Plan]
CountMutations = Callable[[str, int, int], None]
ActionLists = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Edit:
    """Replace text in one rank's list, first occurrence only."""

    rank: int
    old: str
    new: str

    def __call__(self, plan: Plan) -> Plan:
        text = format_actions(plan.actions[self.rank])
        assert self.old in text, f"rank {self.rank} has no {self.old}: {text}"
        actions = list(plan.actions)
        actions[self.rank] = parse_actions(text.replace(self.old, self.new, 1))
        return replace(plan, actions=tuple(actions))


@dataclass(frozen=True)
class Swap:
    """Exchange the first occurrences of two words in one rank's list."""

    rank: int
    first: str
    second: str

    def __call__(self, plan: Plan) -> Plan:
        words = [str(action) for action in plan.actions[self.rank]]
        i, j = words.index(self.first), words.index(self.second)
        words[i], words[j] = words[j], words[i]
        actions = list(plan.actions)
        actions[self.rank] = parse_actions(" ".join(words))
        return replace(plan, actions=tuple(actions))


@dataclass(frozen=True)
class Both:
    first: Callable[[Plan], Plan]
    second: Callable[[Plan], Plan]

    def __call__(self, plan: Plan) -> Plan:
        return self.second(self.first(plan))


def chunk(index: int, **fields: object) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:
        chunks = list(plan.chunks)
        chunks[index] = replace(chunks[index], **fields)  # type: ignore[arg-type]
        return replace(plan, chunks=tuple(chunks))

    return edit


def boundary(index: int, tensor: TensorSpec) -> Callable[[Plan], Plan]:
    """Change the tensor before a chunk on both sides."""
    return Both(chunk(index - 1, output=tensor), chunk(index, input=tensor))


def move(word: str, before: str, *ranks: int) -> Callable[[Plan], Plan]:
    """Move a word of the ranks' lists to the place before another."""

    def edit(plan: Plan) -> Plan:
        for rank in ranks:
            plan = Edit(rank, f"{before} ", f"{word} {before} ")(Edit(rank, f" {word}", "")(plan))
        return plan

    return edit


def lists(edit: Callable[[ActionLists], ActionLists]) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, actions=edit(plan.actions))


def fields(**values: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **values)  # type: ignore[arg-type]


ONCE_EACH_WAY = "each kind of action occurs once per chunk and micro-batch"
COMPLETE = "every chunk and micro-batch has one F and one B"
PAIRED = "the k-th send is the k-th receive at the peer"
RECEIVED = "a remote input is received and waited for"
DEADLOCK = "no deadlock under blocking rendezvous"
ENDING = "a training plan ends with one CLIP and one STEP"
LAYERS = "the chunks hold layers 0 to 4, each once and in order"
AGREE = "sender and receiver agree on shape and dtype"
LAST = "a bucket is reduced after its last contribution"
OWN_BACKWARD = "a bucket is reduced inside its own chunk's backward"
TIE_LAST = "a tie is reduced after its last contribution"
ONE_RANK = "a bucket belongs to chunks of one rank, each once"
DEPENDS = "an action comes after what it depends on"
ORDER = "the buckets of a backward are reduced in listed order"
POSITIVE = "a tensor's dimensions are at least 1"
DTYPE = "a tensor's dtype is one of float64, float32, bfloat16, float16"
HOLDS = "every rank holds a chunk"
EXISTS = "chunks live on ranks 0 to 3"

# Of 1f1b over 4 ranks and 4 micro-batches; conftest.py says which model.
MUTATIONS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a forward dropped": (Edit(0, "0F1 ", ""), COMPLETE),
    "a backward dropped": (Edit(0, "0B1 ", ""), COMPLETE),
    "a backward doubled": (Edit(3, "3B0", "3B0 3B0"), ONCE_EACH_WAY),
    "whole and split backward": (Edit(3, "3B0", "3B0 3I0 3W0"), COMPLETE),
    "a backward before its forward": (Swap(3, "3F0", "3B0"), DEPENDS),
    "a weight half before its input half": (
        Edit(3, "3B0", "3W0 3I0"),
        DEPENDS,
    ),
    "a chunk on another rank": (Edit(0, "0F0", "1F0"), "a chunk computes on its own rank"),
    "a micro-batch too many": (Edit(0, "0F3", "0F3 0F4"), "names an existing chunk and micro-batch"),
    "two receives swapped": (Swap(1, "1RECV_B2", "1RECV_B3"), PAIRED),
    "two sends swapped": (Swap(0, "0SEND_F0", "0SEND_F1"), PAIRED),
    "a send dropped with its wait": (
        Both(Edit(2, "2SEND_B3 ", ""), Edit(2, " 2SEND_B3]", "]")),
        PAIRED,
    ),
    "a receive dropped with its wait": (
        Both(Edit(3, "3RECV_F0 ", ""), Edit(3, "w[3RECV_F0] ", "")),
        PAIRED,
    ),
    "a transfer over the model's end": (Edit(3, "3F0", "3F0 3SEND_F0"), "a transfer has a peer"),
    "a transfer for another's chunk": (
        Edit(0, "0SEND_F0", "1SEND_F0"),
        "a rank transfers for its own chunks",
    ),
    "a transfer of no micro-batch": (
        Edit(0, "0SEND_F0", "0SEND_F9"),
        "a transfer names an existing chunk and micro-batch",
    ),
    "a shape that differs": (chunk(1, input=TensorSpec((64, 64), "float32")), AGREE),
    "a dtype that differs": (chunk(2, input=TensorSpec((128, 64), "bfloat16")), AGREE),
    "a send before its forward": (Swap(0, "0F0", "0SEND_F0"), "a tensor is sent after it is computed"),
    "a receive posted after its use": (
        Edit(3, "3RECV_F3 w[3RECV_F3] 3F3", "3F3 3RECV_F3 w[3RECV_F3]"),
        RECEIVED,
    ),
    "a receive not waited for": (Edit(3, "w[3RECV_F0] ", ""), RECEIVED),
    "a send not waited for": (Edit(3, "w[3SEND_B2] ", ""), "everything posted is waited for"),
    "a wait before its post": (
        Swap(3, "3RECV_F3", "w[3RECV_F3]"),
        "a wait names what was posted before",
    ),
    "a wait doubled": (
        Edit(3, "w[3SEND_B0]", "w[3SEND_B0] w[3SEND_B0]"),
        "each posted action is waited for once",
    ),
    "an activation let go of while it is sent": (
        Both(Edit(0, "w[0SEND_F3 0RECV_B3]", "w[0RECV_B3]"), Edit(0, "w[r1", "w[0SEND_F3 r1")),
        "an activation is sent and waited for before its backward lets go of it",
    ),
    "a reduce dropped": (Edit(1, "[r3 r2]", "[r3]"), "every bucket is reduced exactly once"),
    "a reduce doubled": (Edit(1, "[r3 r2]", "[r3 r2 r3]"), "every bucket is reduced exactly once"),
    "a reduce before its last contribution": (
        Both(Edit(1, "1B3[r3 r2]", "1B3[r2]"), Edit(1, "1B2", "1B2[r3]")),
        LAST,
    ),
    "a reduce on its own after its last contribution": (Edit(1, "1B3[r3 r2]", "1B3[r3] r2"), OWN_BACKWARD),
    "a reduce on its own before its last contribution": (Edit(1, "1B3[r3 r2]", "r3 1B3[r2]"), OWN_BACKWARD),
    "a reduce inside a forward": (
        Both(Edit(1, "1B3[r3 r2]", "1B3[r2]"), Edit(1, "1F3", "1F3[r3]")),
        OWN_BACKWARD,
    ),
    "two reduces swapped": (
        Edit(1, "[r3 r2]", "[r2 r3]"),
        ORDER,
    ),
    "a reduce of another rank's bucket": (
        Edit(1, "[r3 r2]", "[r3 r2 r0]"),
        "a rank reduces its own chunks' buckets",
    ),
    "a reduce that outlasts CLIP": (
        Edit(0, "w[r1 r0] t0 CLIP", "w[r1] t0 CLIP w[r0]"),
        "reductions end before ties and CLIP",
    ),
    "a tie before the reduces end": (
        Edit(0, "w[r1 r0] t0", "t0 w[r1 r0]"),
        "reductions end before ties and CLIP",
    ),
    "a tie forgotten on one rank": (
        Edit(0, "t0 ", ""),
        "every tie is reduced exactly once by each member",
    ),
    "a tie doubled": (Edit(0, "t0", "t0 t0"), "every tie is reduced exactly once by each member"),
    "a tie after CLIP": (Edit(0, "t0 CLIP", "CLIP t0"), "ties are reduced before CLIP"),
    "a tie on a rank that is no member": (
        Edit(0, "t0", "t0 t1"),
        "a rank reduces the ties it is a member of",
    ),
    "two ties swapped on one rank": (
        Edit(3, "t0 t1", "t1 t0"),
        "ties are reduced in the same order on all ranks",
    ),
    "a tie inside one rank": (fields(ties=(Tie(0, (0, 0)),)), "a tie has members on different ranks"),
    "STEP missing": (Edit(2, " STEP", ""), ENDING),
    "CLIP missing": (Edit(2, "CLIP ", ""), ENDING),
    "STEP before CLIP": (Edit(2, "CLIP STEP", "STEP CLIP"), ENDING),
    "CLIP doubled": (Edit(2, "CLIP", "CLIP CLIP"), ENDING),
    "an update in a forward plan": (fields(training=False), "one F and nothing else"),
    "a gather": (Edit(0, "0F0", "0F0[g0]"), "a whole bucket is never gathered or freed"),
    "what two ranks share in another order on one of them": (
        Edit(2, "2SEND_B1 2RECV_F3", "2RECV_F3 2SEND_B1"),
        DEADLOCK,
    ),
    "a receive that comes before the send it answers": (
        Both(Edit(0, "0RECV_B0 ", ""), Edit(0, "0SEND_F3", "0RECV_B0 0SEND_F3")),
        DEADLOCK,
    ),
    "a layer dropped": (chunk(3, layers=(4, 4)), LAYERS),
    "a layer between chunks": (chunk(1, layers=(2, 3)), LAYERS),
    "a layer twice": (chunk(2, layers=(1, 3)), LAYERS),
    "the last layer forgotten": (fields(num_layers=6), "layers 0 to 5, each once and in order"),
    "a chunk on a rank that is not there": (chunk(3, rank=4), EXISTS),
    "a chunk on a negative rank": (chunk(3, rank=-1), EXISTS),
    "a rank that holds no chunk": (lists(lambda ranks: (*ranks, parse_actions("CLIP STEP"))), HOLDS),
    "a rank whose chunk is another's": (chunk(3, rank=2), HOLDS),
    "no chunks": (fields(chunks=()), "a plan has at least one chunk"),
    "nothing at all": (
        fields(chunks=(), num_layers=0, buckets=(), ties=(), actions=(parse_actions("CLIP STEP"),)),
        "a plan has at least one chunk",
    ),
    "no ranks": (fields(actions=()), "a plan has at least one rank"),
    "a dimension of 0": (boundary(1, TensorSpec((128, 0), "float32")), POSITIVE),
    "a negative dimension": (boundary(3, TensorSpec((-1, 64), "float32")), POSITIVE),
    "an integer dtype": (boundary(1, TensorSpec((128, 64), "int64")), DTYPE),
    "a dtype by its qualified name": (boundary(2, TensorSpec((128, 64), "torch.float32")), DTYPE),
    "a boundary without a tensor": (chunk(1, input=None), "only the first chunk has no input"),
    "a bucket listed twice": (fields(buckets=(Bucket(0, (0,)), Bucket(0, (1,)))), "each bucket has its own index"),
    "a tie listed twice": (fields(ties=(Tie(0, (0, 3)), Tie(0, (1, 3)))), "each tie has its own index"),
    "a bucket of a chunk that is not there": (fields(buckets=(Bucket(0, (7,)),)), "chunks are 0 to 3"),
    "a bucket of no chunk": (fields(buckets=(Bucket(0, ()),)), ONE_RANK),
    "a bucket of a chunk twice": (fields(buckets=(Bucket(0, (1, 1)),)), ONE_RANK),
    "a bucket of chunks on two ranks": (fields(buckets=(Bucket(0, (0, 3)),)), ONE_RANK),
    "no micro-batches": (fields(num_microbatches=0), "a plan has at least one micro-batch"),
}


# The same plan without buckets: no reduction holds a tie back.
WITHOUT_BUCKETS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a tie at the front on all members": (lists(lambda ranks: move_to_front("t0", ranks, 0, 3)), TIE_LAST),
    "all ties at the front": (
        lists(lambda ranks: move_to_front("t0", move_to_front("t1", ranks, 1, 2, 3), 0, 3)),
        TIE_LAST,
    ),
    "a tie before the last backward on all members": (
        Both(move("t0", "0B3", 0), move("t0", "3B3", 3)),
        TIE_LAST,
    ),
    "a tie before the last backward on its last member": (move("t0", "3B3", 3), TIE_LAST),
    "a tie after CLIP": (Edit(0, "t0 CLIP", "CLIP t0"), "ties are reduced before CLIP"),
    "a reduce of a bucket that is not there": (
        Edit(1, "1B3", "1B3[r0]"),
        "a rank reduces its own chunks' buckets",
    ),
}

# Of 2 ranks with 2 chunks each, split backwards and 2 micro-batches; bucket k is that of chunk k, bucket 4 that of
# chunks 0 and 2.
TWO_CHUNKS_PER_RANK: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a reduce in a later backward of another chunk": (
        Both(Edit(0, "2W1[r2]", "2W1"), Edit(0, "0W1[r0 r4]", "0W1[r2 r0 r4]")),
        OWN_BACKWARD,
    ),
    "a reduce in an earlier backward of another chunk": (
        Both(Edit(0, "2W1[r2]", "2W1[r2 r0]"), Edit(0, "0W1[r0 r4]", "0W1[r4]")),
        OWN_BACKWARD,
    ),
    "a reduce in the input half": (
        Both(Edit(1, "1I1", "1I1[r1]"), Edit(1, "1W1[r1]", "1W1")),
        LAST,
    ),
    "a reduce on its own": (Edit(1, "3W1[r3]", "3W1 r3"), OWN_BACKWARD),
    "a shared bucket's reduce when one of its chunks is complete": (
        Both(Edit(0, "2W1[r2]", "2W1[r2 r4]"), Edit(0, "0W1[r0 r4]", "0W1[r0]")),
        LAST,
    ),
    "a shared bucket's reduce before one of its own chunk's": (Edit(0, "[r0 r4]", "[r4 r0]"), ORDER),
    "a shared bucket's reduce in each of its chunks": (
        Edit(0, "2W1[r2]", "2W1[r2 r4]"),
        "every bucket is reduced exactly once",
    ),
    "a tie between the halves": (move("t0", "0W1[r0 r4]", 0), "reductions end before ties and CLIP"),
}

TWO_CHUNKS_WITHOUT_BUCKETS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a tie between the halves": (move("t0", "0W1", 0), TIE_LAST),
    "a tie between the halves on all members": (Both(move("t0", "0W1", 0), move("t0", "3W1", 1)), TIE_LAST),
    "a tie after another chunk's last backward": (move("t0", "0I0", 0), TIE_LAST),
}


# Of 2 ranks with the chunks 0 1 1 0: those of rank 1 hand over without transfers.
NEIGHBOURS_ON_A_RANK: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a forward before the neighbour's": (Swap(1, "1F0", "2F0"), DEPENDS),
    "a backward before the neighbour's": (Swap(1, "1B0", "2B0"), DEPENDS),
    "an input half before the neighbour's": (Both(Edit(1, "1B0", "1W0"), Edit(1, "2B0", "1I0 2B0")), DEPENDS),
    "a transfer to itself": (Edit(1, "2F0", "1SEND_F0 2F0"), "chunks on one rank need no transfer"),
    "a boundary that differs inside a rank": (
        chunk(2, input=TensorSpec((2, 2), "float32")),
        "neighbouring chunks agree on shape and dtype",
    ),
}


def move_to_front(word: str, ranks: ActionLists, *members: int) -> ActionLists:
    moved = list(ranks)
    for rank in members:
        rest = [action for action in ranks[rank] if str(action) != word]
        assert len(rest) == len(ranks[rank]) - 1
        moved[rank] = (*parse_actions(word), *rest)
    return tuple(moved)


# What is done to rank 0's list of a plan with counts, and the rule that it breaks.
WRONG_COUNTS = {
    "missing": ((" r5 w[r5]", ""), "counts are reduced exactly once: counts 5 of chunk 0 0 times (rank 0, action"),
    "twice": (("r5 w[r5]", "r5 w[r5] r5"), "counts are reduced exactly once: counts 5 of chunk 0 2 times"),
    "inside a backward": (("0B2 r5", "0B2[r5]"), "counts are reduced by an action of their own: r5 of counts 5 of"),
    "not waited for": ((" w[r5]", ""), "everything posted is waited for: r5 is not"),
    "waited for behind the tie": (("w[r5] t0", "t0 w[r5]"), "reductions end before ties and CLIP: r5 is not waited"),
    "of another rank": (("r5 w[r5]", "r6 w[r6]"), "a rank reduces its own chunks' buckets: r6 on rank 0, whose"),
}


@pytest.mark.parametrize("what", WRONG_COUNTS)
def test_counts_that_are_not_reduced_once_and_in_time_are_refused(build_plan: BuildPlan, what: str) -> None:
    """Each breaks one rule; the verifier names counts, chunk and place."""
    plan = build_plan("1f1b", 2, 3, False, has_counts=True)
    verify(plan)
    (old, new), message = WRONG_COUNTS[what]
    with pytest.raises(PlanError, match=re.escape(message)):
        verify(Edit(0, old, new)(plan))


def test_counts_reduced_before_the_last_forward_that_adds_to_them_are_refused(build_plan: BuildPlan) -> None:
    early = Edit(0, "0F2", "r5 0F2")(Edit(0, " r5 w[r5]", " w[r5]")(build_plan("1f1b", 2, 3, False, has_counts=True)))
    rule = "counts are reduced after the last forward that adds to them: r5 of counts 5 of chunk 0 comes before 0F2"
    with pytest.raises(PlanError, match=re.escape(rule)):
        verify(early)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((CountBucket(0, (0,)),), "each bucket has its own index: bucket 0 is listed twice"),
        ((CountBucket(7, (0, 1)),), "counts belong to chunks of one rank, each once: counts 7 name chunks"),
        ((CountBucket(7, ()),), "counts belong to chunks of one rank, each once: counts 7 name chunks"),
        ((CountBucket(7, (9,)),), "chunks are 0 to 1: counts 7 names chunk 9"),
        ((CountBucket(7, (0,)), CountBucket(8, (0,))), "the chunks of a rank count together: counts"),
    ],
)
def test_counts_of_no_rank_are_refused(build_plan: BuildPlan, counts: tuple[CountBucket, ...], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        verify(replace(build_plan("1f1b", 2, 1), counts=counts))


def two_chunks_per_rank(has_buckets: bool) -> Plan:
    layers = [(chunk, chunk + 1) for chunk in range(4)]
    tensors = [None, *[TensorSpec((4, 2), "float32")] * 3, None]
    chunks = [Chunk(index % 2, layers[index], tensors[index], tensors[index + 1]) for index in range(4)]
    compute = (
        parse_actions("0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1"),
        parse_actions("1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1"),
    )
    buckets = [*(Bucket(k, (k,)) for k in range(4)), Bucket(4, (0, 2))] if has_buckets else []
    schedule = Schedule("two", (0, 1, 0, 1), compute)
    return lower(schedule, chunks, buckets, [Tie(0, (0, 3))], 2, 4, training=True)


def neighbours_on_a_rank() -> Plan:
    tensors = [None, *[TensorSpec((4, 2), "float32")] * 3, None]
    chunks = [Chunk(rank, (i, i + 1), tensors[i], tensors[i + 1]) for i, rank in enumerate((0, 1, 1, 0))]
    compute = (parse_actions("0F0 3F0 3B0 0B0"), parse_actions("1F0 2F0 2B0 1B0"))
    return lower(Schedule("vee", (0, 1, 1, 0), compute), chunks, [], [], 1, 4, training=True)


def test_every_mutation_is_killed(build_plan: BuildPlan, count_mutations: CountMutations) -> None:
    kill_all(build_plan("1f1b", 4, 4), MUTATIONS, count_mutations)


def test_every_mutation_without_buckets_is_killed(build_plan: BuildPlan, count_mutations: CountMutations) -> None:
    kill_all(build_plan("1f1b", 4, 4, has_buckets=False), WITHOUT_BUCKETS, count_mutations)


def test_every_mutation_of_two_chunks_per_rank_is_killed(count_mutations: CountMutations) -> None:
    kill_all(two_chunks_per_rank(has_buckets=True), TWO_CHUNKS_PER_RANK, count_mutations)
    kill_all(two_chunks_per_rank(has_buckets=False), TWO_CHUNKS_WITHOUT_BUCKETS, count_mutations)


def test_every_mutation_of_neighbours_on_a_rank_is_killed(count_mutations: CountMutations) -> None:
    kill_all(neighbours_on_a_rank(), NEIGHBOURS_ON_A_RANK, count_mutations)


def kill_all(
    plan: Plan, mutations: Mapping[str, tuple[Callable[[Plan], Plan], str]], count_mutations: CountMutations
) -> None:
    verify(plan)
    survivors = {}
    for name, (mutate, rule) in mutations.items():
        try:
            verify(mutate(plan))
            survivors[name] = "accepted"
        except PlanError as error:
            if rule not in str(error):
                survivors[name] = str(error)
            assert "\n" not in str(error)
    count_mutations("the plan (verifier)", len(mutations) - len(survivors), len(mutations))
    assert not survivors


@pytest.mark.parametrize("word", ["CLIP", "STEP", "t0", "r0"])
def test_a_forward_plan_updates_nothing(build_plan: BuildPlan, word: str) -> None:
    plan = build_plan("forward_only", 2, 2)
    verify(plan)
    with pytest.raises(PlanError, match="only a training plan updates weights"):
        verify(Edit(0, "0F0", f"0F0 {word}")(plan))


def test_error_shows_the_place(build_plan: BuildPlan) -> None:
    with pytest.raises(PlanError) as caught:
        verify(Edit(3, "3B0", "3B0 3B0")(build_plan("1f1b", 4, 4)))
    error = caught.value
    assert str(error) == f"{ONCE_EACH_WAY}: 3B0 twice (rank 3, action 5)"
    assert (error.rank, error.position) == (3, 5)
    listing, arrow = error.picture.splitlines()
    assert listing.startswith("rank 3: ... w[3RECV_F0] 3F0 3B0 3B0 3SEND_B0")
    assert listing[arrow.index("^") :].startswith("3B0 3SEND_B0")


def test_error_at_the_end_and_outside_the_lists(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 2, 1)
    with pytest.raises(PlanError) as at_end:
        verify(Edit(0, " STEP", "")(plan))
    assert at_end.value.position == len(plan.actions[0]) - 1
    assert "CLIP <end>" in at_end.value.picture
    with pytest.raises(PlanError) as outside:
        verify(replace(plan, num_layers=9))
    assert (outside.value.rank, outside.value.position, outside.value.picture) == (None, None, "")


def test_deadlock_names_who_waits_for_whom(build_plan: BuildPlan) -> None:
    mutate, _ = MUTATIONS["what two ranks share in another order on one of them"]
    deadlocked = mutate(build_plan("1f1b", 4, 4))
    with pytest.raises(PlanError) as blocking:
        check_blocking(deadlocked)
    assert "rank 1 waits in 1RECV_B1 for rank 2, which waits in 2RECV_F3 for rank 1" in str(blocking.value)
    assert blocking.value.rank == 1
    with pytest.raises(PlanError, match="no deadlock under one in-order channel per pair: rank 1 waits in w"):
        check_channels(deadlocked)


def test_waiting_for_a_rank_that_has_ended(build_plan: BuildPlan) -> None:
    plan = build_plan("forward_only", 2, 1)
    with pytest.raises(PlanError, match="rank 0 waits in 0SEND_F0 for rank 1, which has ended"):
        check_blocking(replace(plan, actions=(plan.actions[0], ())))


def test_ties_in_a_circle_are_a_deadlock(build_plan: BuildPlan) -> None:
    plan = Edit(3, "t0 t1", "t1 t0")(build_plan("1f1b", 4, 1))
    check_blocking(plan)
    plan = replace(plan, ties=(Tie(0, (0, 3)), Tie(1, (0, 3))))
    plan = Edit(0, "t0", "t0 t1")(plan)
    plan = Edit(1, "t1 ", "")(plan)
    plan = Edit(2, "t1 ", "")(plan)
    with pytest.raises(PlanError, match="rank 0 waits in t0 for rank 3, which waits in t1 for rank 0"):
        check_blocking(plan)


def test_receive_slot_overwritten(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 3, 4)
    slots = receive_slots(plan.actions[1])
    check_slots(plan, 1, slots)
    one_slot = replace(slots, forward=MappingProxyType(dict.fromkeys(slots.forward, 0)))
    with pytest.raises(PlanError, match="a receive slot is free when written: 1RECV_F1 writes slot 0 of"):
        check_slots(plan, 1, one_slot)
