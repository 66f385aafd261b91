"""Rung: interpreter, pure (compiles). Turns at attention's dq: who waits for whom, and the same bits in any order.

That the order holds where programs run at the same time, and that they see each other's adds, only a GPU shows. That
every turn is the right one is also seen in test_attention.py: interpreted in order, a program whose turn has not come
raises.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.kernels.attention_cases import Case, attend, operands, outcome
from support.kernels.compiled import codes_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from tpkernels.launch import jit, run, tl
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.gradients import _place, await_turn, claim, pass_turn
from tpkernels.ops.attention.launch import Options, Sides, Tables


@jit
def _note_place_kernel(
    p_claims: tl.tensor,
    p_places: tl.tensor,
    num_blocks: tl.int32,
    num_columns: tl.int32,
    columns_at_a_time: tl.int32,
) -> None:
    """Note the block and the column of each item."""
    i_item = claim(p_claims)
    i_block, i_column = _place(i_item, num_blocks, num_columns, columns_at_a_time)
    tl.store(p_places + 2 * i_item, i_block)
    tl.store(p_places + 2 * i_item + 1, i_column)


def places(num_blocks: int, num_columns: int, columns_at_a_time: int) -> list[tuple[int, int]]:
    """(block, column) of each item, in the order of claims."""
    num_items = num_blocks * num_columns
    claims, noted = torch.zeros(1, dtype=torch.int32), torch.full((num_items, 2), -1, dtype=torch.int32)
    sizes = (num_blocks, num_columns, columns_at_a_time)
    run(_note_place_kernel, (num_items,), claims, noted, *sizes, num_warps=1)
    return [(block, column) for block, column in noted.tolist()]


SIZES = [(1, 1, 1), (4, 3, 1), (4, 3, 2), (3, 5, 5), (3, 5, 8), (5, 7, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_items_wait_for_lower_ones_only(interpreters: RankPool, sizes: tuple[int, int, int]) -> None:
    """Every block of every column is one item, behind the blocks before it; some columns are done before the next."""
    num_blocks, num_columns, at_a_time = sizes
    items = interpreters.run(places, 1, *sizes)[0]
    number = {item: i for i, item in enumerate(items)}
    assert sorted(number) == [(block, column) for block in range(num_blocks) for column in range(num_columns)]
    assert all(number[block, column] < number[block + 1, column] for block, column in items if block + 1 < num_blocks)
    groups = [column // at_a_time for _, column in items]
    assert groups == sorted(groups)


@jit
def _take_turn_kernel(p_counter: tl.tensor, turn: tl.int32) -> None:
    await_turn(p_counter, turn, 1)
    pass_turn(p_counter, 1)


def take_turns(*turns: int) -> int:
    """How many passed, if these programs run one after another."""
    counter = torch.zeros(1, dtype=torch.int32)
    for turn in turns:
        run(_take_turn_kernel, (1,), counter, turn, num_warps=1)
    return int(counter)


def test_a_turn_that_has_not_come_is_noticed(interpreters: RankPool) -> None:
    assert interpreters.run(take_turns, 1, 0, 1, 2)[0] == 3
    with pytest.raises(Exception, match="find that their turn has come"):
        interpreters.run(take_turns, 1, 0, 2)


def gradients() -> list[Tensor]:
    """dq, dk, dv of two heads that share keys, and of a window: in 16 bits, where dq is added up in memory."""
    found = []
    for case in (Case(400, 400, 2, 1, 16), Case(400, 400, 1, 1, 16, window=150)):
        given = operands(case, torch.float16, "cpu")
        dy = torch.randn(given["q"].shape, generator=torch.Generator().manual_seed(1)).half()
        found += outcome(lambda q, k, v, case=case: attend(case, q, k, v), dy, *given.values())[1:]
    return found


def errors_of_low_scores(window: int | None) -> tuple[list[float], list[float]]:
    """Of dq, dk, dv, ours and torch's, where every score is far below 0: keys that are not there would get 0."""
    case = Case(100, 100, 1, 1, 16, causal=False, window=window)
    given = operands(case, torch.float16, "cpu")
    q, k, v = (given["q"] / 4 + 3, given["k"] / 4 - 3, given["v"])
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).half()
    wide = [each.detach().double() for each in (q, k, v)]
    place = torch.arange(case.queries)
    mask = None if window is None else (place[:, None] - place).abs() < window

    def by_torch(*each: Tensor) -> Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in each), attn_mask=mask).transpose(1, 2)

    want = outcome(by_torch, dy.double(), *wide)[1:]
    ours, torchs = (
        [float((got - right).abs().max()) for got, right in zip(outcome(of, dy, q, k, v)[1:], want, strict=True)]
        for of in (lambda *each: attend(case, *each), by_torch)
    )
    return ours, torchs


@pytest.mark.parametrize("window", [None, 70])
def test_keys_behind_the_last_one_add_nothing_to_dq(interpreters: RankPool, window: int | None) -> None:
    """Of a block of keys that is not full, where none is hidden by its place."""
    ours, torchs = interpreters.run(errors_of_low_scores, 1, window)[0]
    assert all(error <= 2 * allowed for error, allowed in zip(ours, torchs, strict=True)), (ours, torchs)


def same_bits_in_turns(seed: int, waits: bool) -> bool:
    """Whether gradients have the bits of programs that run in order, where a seed decides who goes on."""
    from support.kernels.turns import Turns
    from tpkernels.ops.attention import gradients as kernels

    expected = gradients()
    turns = Turns(seed, standstill=None)

    def await_in_turns(p_counter: Any, turn: Any, _: Any) -> None:
        turns.until(lambda: not waits or bool(tl.load(p_counter) >= turn))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "await_turn", await_in_turns)
        with turns.of(kernels, ("claim", "await_turn", "pass_turn")):
            got = gradients()
    return all(map(torch.equal, got, expected))


@pytest.mark.slow
def test_gradients_have_the_same_bits_in_any_order_of_programs(interpreters: RankPool) -> None:
    """And would not have without waiting."""
    assert all(interpreters.run(same_bits_in_turns, 1, seed, True)[0] for seed in range(2))
    assert not interpreters.run(same_bits_in_turns, 1, 0, False)[0]


def launch_backward() -> None:
    """Backward of heads of 64 columns in bfloat16, on tensors without memory."""
    q = torch.empty(1, 4096, 4, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 4, 4096, device="meta")
    options = Options(True, 0, 0.125, False, 0.0, ())
    launch_attention_backward(q, q, q, q, q, lse, (q, q, q), Tables(None, None), Sides(None, None), options)


TURN = ["await", "add", "pass"]


def order_of_turns(code: str) -> list[str]:
    """What a kernel's PTX does with turns and tiles, in order, repetitions left out."""
    names = {
        r"cp\.async\S*global": "load ahead",
        r"red\.release\.gpu": "pass",
        r"ld\.acquire\.gpu": "await",
        r"(?:atom|red)\.global\S*f32": "add",
    }
    found = re.findall("|".join(names), code)
    steps = [next(name for pattern, name in names.items() if re.fullmatch(pattern, text)) for text in found]
    return [step for step, before in zip(steps, ["", *steps], strict=False) if step != before]


@pytest.mark.by_default("sm_90")
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_turns_keep_their_order_where_loads_are_ahead(compilers: RankPool, target: str) -> None:
    """The compiler moves loads before the turn, and neither the turn nor the adds."""
    codes = compilers.run(codes_of, 1, target, launch_backward)[0]
    (code,) = [code for code in codes if "ld.acquire.gpu" in code]
    first, zeroed, *turns = order_of_turns(code)
    # For sm_100 the compiler takes the last round out of the loop.
    assert (first, zeroed) == ("load ahead", "pass") and turns in (TURN, TURN * 2), turns
