"""Turns: programs of one launch add to the same tile one after another, in an order that depends on shapes only.

A tile has a counter, 0 before the launch. Whoever adds as number n waits until n have passed the turn on, adds, and
passes it on in turn:

    i_item = claim(p_claims)            which of the launch's items this program has
    if the_launch_has_work:             keeps the next three in order, behind the products (see below)
        await_turn(p_counter, n, ...)       what was added before is there
        atomic_add(p_tile, ...)             each element once
        pass_turn(p_counter, ...)           what this program has added before is there

Why it always goes on: items are numbered so that one waits only for lower ones, and programs claim numbers when they
begin to run. So whatever a program waits for is finished, or belongs to a program that runs; the one with the lowest
number waits for nobody. A GPU promises no order in which the programs of a grid begin, so their ids would not do.

Triton loads ahead in no loop that has a barrier or a loop inside. So on NVIDIA's GPUs each thread waits by itself, in
PTX, and each warp passes the turn on by itself: a turn counts as many arrivals as a program has warps. Elsewhere one
thread does both for all, behind a barrier. Where triton loads ahead it also reorders what does not depend on each
other, but nothing within a condition. The interpreter runs programs in order: there the turn must have come.
"""

from __future__ import annotations

from tpkernels.launch import INTERPRETED, Target, jit, tl

if tl is not None:
    _INTERPRETED = tl.constexpr(INTERPRETED)


def arrivals_per_turn(target: Target, num_warps: int) -> int:
    """Return how many arrivals pass a turn on: ARRIVALS of the kernels; 1 where one thread speaks for all."""
    return num_warps if target.backend == "cuda" and not INTERPRETED else 1


@jit
def claim(p_claims: tl.tensor) -> tl.tensor:
    """Return how many programs have claimed before this one."""
    return tl.atomic_add(p_claims, 1, sem="relaxed", scope="gpu")


@jit
def await_turn(p_counter: tl.tensor, turn: tl.tensor, ARRIVALS: tl.constexpr) -> None:
    """Wait until `turn` programs have passed the turn on."""
    if _INTERPRETED:
        assert tl.load(p_counter) == turn, "programs that run in order find that their turn has come"
    elif ARRIVALS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred early;
            await_turn:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.lt.s32 early, $0, $2;
            @early bra await_turn;
            bar.warp.sync 0xffffffff;
            }
            """,
            "=&r,l,r",
            [p_counter, turn * ARRIVALS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        while tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu") < turn:
            pass


@jit
def pass_turn(p_counter: tl.tensor, ARRIVALS: tl.constexpr) -> None:
    """Pass the turn on, and with it all that this program has added."""
    if ARRIVALS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            mov.u32 $0, %laneid;
            setp.eq.u32 first, $0, 0;
            bar.warp.sync 0xffffffff;
            @first red.release.gpu.global.add.s32 [$1], 1;
            }
            """,
            "=&r,l",
            [p_counter],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()
        tl.atomic_add(p_counter, 1, sem="release", scope="gpu")
