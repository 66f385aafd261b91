"""Rung: pure: compiles, runs nothing. What becomes of signals in compiled code: order, scopes, barriers (ptx_rules.py).

The sources are then broken, one way at a time, and so is the compiled code, and the rules must notice. Only GPUs show
that the signals work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.kernels.compiled import code_of, modules_of, pretend
from support.kernels.ptx_rules import amd_instructions_of, faults, faults_amd, instructions_of
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from tpkernels.symmetric import device_clock, signals_kernel

from benchmarks.launches.compile import TARGETS

SOURCES = (device_clock, signals_kernel)

# In modules of their own, whose signals may be broken.
KERNELS = '''\
from tpkernels.launch import jit, tl
from {signals_kernel} import *

@jit
def exchange_kernel(
    control: tl.int64, p_x, p_y, generation, call, num_items, stride, TMA: tl.constexpr, BLOCK: tl.constexpr
):
    """A call: items of a matrix are stored at the peers, counted, and read where they arrived."""
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    o_m, o_n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    item = claim(p_control)
    while item < num_items:
        peer = item % 4
        # [BLOCK, BLOCK]
        b_x = tl.load(p_x + (item * BLOCK + o_m).to(tl.int64) * stride + o_n)
        p_there = memory_of(p_control, peer).to(tl.pointer_type(p_x.dtype.element_ty)) + 8192
        if TMA:
            there = tl.make_tensor_descriptor(p_there, [num_items * BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
            there.store([item * BLOCK, 0], tl.trans(b_x))
        else:
            tl.store(p_there + (item * BLOCK + o_m) * BLOCK + o_n, tl.trans(b_x))
        if count_done(p_control, peer, num_items):
            notify(p_control, peer, arrived_line(rank, 0), epoch, call)
        item = claim(p_control)
    source = (rank + 1) % 4
    wait(p_control, source, arrived_line(source, 0), epoch, call)
    p_here = memory_of(p_control, rank).to(tl.pointer_type(p_x.dtype.element_ty)) + 8192
    # [BLOCK, BLOCK]
    b_y = tl.load(p_here + o_m * BLOCK + o_n)
    tl.store(p_y + o_m * BLOCK + o_n, b_y)
    if is_last_claim(item, num_items):
        end_launch(p_control, epoch, generation)

@jit
def push_kernel(control: tl.int64, p_x, peer, epoch, call, BLOCK: tl.constexpr):
    """One program stores a block at a peer, and says so at once."""
    p_control = control_at(control)
    o_m, o_n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    p_there = memory_of(p_control, peer).to(tl.pointer_type(p_x.dtype.element_ty)) + 8192
    tl.store(p_there + o_m * BLOCK + o_n, tl.load(p_x + o_m * BLOCK + o_n))
    notify(p_control, peer, arrived_line(rank_of(p_control), 0), epoch, call)

@jit
def count_kernel(control: tl.int64, peer, epoch, call, num_items, BLOCK: tl.constexpr):
    """A program stores an item and counts it. Nothing before gives triton a reason of its own for a barrier."""
    p_control = control_at(control)
    o_m, o_n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    p_there = memory_of(p_control, peer).to(tl.pointer_type(tl.int32)) + 8192
    tl.store(p_there + o_m * BLOCK + o_n, o_m * o_n)
    if count_done(p_control, peer, num_items):
        notify(p_control, peer, arrived_line(rank_of(p_control), 0), epoch, call)

@jit
def claims_kernel(control: tl.int64, p_y, num_items, BLOCK: tl.constexpr):
    """Items are stored where the program that draws the last number reads them; a barrier before, as above."""
    p_control = control_at(control)
    o_m, o_n = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(p_y + o_m * BLOCK + o_n - BLOCK * BLOCK, 0.0)
    item = claim(p_control)
    while item < num_items:
        tl.debug_barrier()
        tl.store(p_y + item.to(tl.int64) * BLOCK * BLOCK + o_m * BLOCK + o_n, (o_m * o_n).to(tl.float32))
        item = claim(p_control)
    if is_last_claim(item, num_items):
        # [BLOCK, BLOCK]
        b_y = tl.load(p_y + o_m * BLOCK + o_n)
        tl.store(p_y + o_m * BLOCK + o_n, b_y + 1)

@jit
def meet_kernel(control: tl.int64, call):
    """Only signals, and no data."""
    p_control = control_at(control)
    report(p_control)
    epoch = newest_epoch(p_control) + 1
    barrier(p_control, epoch, call, True)
    tl.store(p_control, epoch)
'''
NAMES = ("exchange", "push", "count", "claims", "meet")


class Mutation(NamedTuple):
    """Where a source is broken.

    Attributes:
        kernel: the kernel that must show it.
        old, new: what stands there, once in SOURCES and the kernels together, and what replaces it.
        rule: how the message begins that notices it.
        unseen: the targets whose code does not show it.
    """

    kernel: str
    old: str
    new: str
    rule: str
    unseen: tuple[str, ...] = ()


FLAG = 'tl.atomic_xchg(p_flag, epoch, sem="release", scope="sys")'
NUMBER = "tl.store(p_flag + 1 + (epoch & 1), call)"
POLL = '_rest()\n            seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")'
POISON = 'tl.atomic_xchg(p_poison, reason, sem="release", scope="sys")'
RECORD = 'tl.atomic_xchg(p_record, reason, sem="release", scope="sys")'
REASON = 'reason = tl.atomic_add(p_poison, 0, sem="acquire", scope="sys")'
LOCK = 'tl.atomic_cas(p_peer + _LOCK, 0, 1, sem="acq_rel", scope="sys")'
COUNT = 'tl.atomic_add(p_done, 1, sem="acq_rel", scope="sys")'
CLAIM = 'tl.atomic_add(p_control + _CLAIMS * _LINE, 1, sem="acq_rel", scope="gpu")'
COMPARED = 'tl.atomic_add(p_number, 0, sem="acquire", scope="sys")'
BARRIER = "tl.debug_barrier()"
LOOK = "_is_late(p_control, start, limit_ns)\n        if"
ANSWER = 'tl.atomic_add(p_answer, 0, sem="acquire", scope="sys") == 1'
PURE, AMD_PURE = ('"=l", [], dtype=tl.int64, is_pure=False', '"=s", [], dtype=tl.int64, is_pure=False')
# From 3.9 on triton puts a barrier before every atomic that releases, whatever the source says: what is LATE is unseen.
HAS_BARRIERS = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
LATE, RELAXED, SCOPE = "releases what other threads", "is relaxed", "is not at scope sys"
PARTS, ENDLESS = "may part the threads", "may poll for ever"

MUTATIONS = {
    "no barrier before a flag": Mutation("push", f"{BARRIER}\n    {FLAG}", FLAG, LATE),
    "the number of the call after the barrier": Mutation(
        "push", f"{BARRIER}\n    {FLAG}", f"{BARRIER}\n    {NUMBER}\n    {FLAG}", LATE
    ),
    "a relaxed flag": Mutation("push", FLAG, FLAG.replace("release", "relaxed"), RELAXED),
    "a flag for this GPU": Mutation("push", FLAG, FLAG.replace("sys", "gpu"), SCOPE),
    "a poll that is relaxed": Mutation("meet", POLL, POLL.replace("acquire", "relaxed"), RELAXED),
    "a poll of this GPU": Mutation("meet", POLL, POLL.replace("sys", "gpu"), SCOPE),
    "a poll that is a load": Mutation(
        "meet", POLL, "_rest()\n            seen = tl.load(p_flag, volatile=True)", "waits without acquire", ("gfx942",)
    ),
    "a number that each thread loads": Mutation(
        "meet", COMPARED, "tl.load(p_number, volatile=True)", PARTS, ("gfx942",)
    ),
    "a number that is relaxed": Mutation("meet", COMPARED, COMPARED.replace("acquire", "relaxed"), RELAXED),
    "no barrier before a count": Mutation("count", f"{BARRIER}\n    is_last = {COUNT}", f"is_last = {COUNT}", LATE),
    "a relaxed count": Mutation("count", COUNT, COUNT.replace("acq_rel", "relaxed"), RELAXED),
    "a count that does not acquire": Mutation("count", COUNT, COUNT.replace("acq_rel", "release"), "does not acquire"),
    "no barrier before a claim": Mutation("claims", f"{BARRIER}\n    return {CLAIM}", f"return {CLAIM}", LATE),
    "a relaxed claim": Mutation("claims", CLAIM, CLAIM.replace("acq_rel", "relaxed"), RELAXED),
    "a claim that does not acquire": Mutation("claims", CLAIM, CLAIM.replace("acq_rel", "release"), "does not acquire"),
    "a claim that does not release": Mutation("claims", CLAIM, CLAIM.replace("acq_rel", "acquire"), SCOPE),
    "a claim of one program": Mutation("claims", CLAIM, CLAIM.replace("gpu", "cta"), SCOPE),
    "no barrier before poison": Mutation("meet", f"{BARRIER}\n            {POISON}", POISON, LATE),
    "poison for this GPU": Mutation("meet", POISON, POISON.replace("sys", "gpu"), SCOPE),
    "a lock that is relaxed": Mutation("meet", LOCK, LOCK.replace("acq_rel", "relaxed"), RELAXED),
    "poison that is read relaxed": Mutation("meet", REASON, REASON.replace("acquire", "relaxed"), RELAXED),
    "no barrier before the record": Mutation("meet", f"{BARRIER}\n        {RECORD}", RECORD, LATE),
    "a record that this GPU sees": Mutation("meet", RECORD, RECORD.replace("sys", "gpu"), SCOPE),
    "a clock that is read once": Mutation("meet", PURE, PURE.replace("False", "True"), ENDLESS, ("gfx942",)),
    "AMD's clock that is read once": Mutation("meet", AMD_PURE, AMD_PURE.replace("False", "True"), ENDLESS, ("sm_90",)),
    "a clock that is never read again": Mutation("meet", LOOK, "False\n        if", ENDLESS),
    "a clock by which each thread ends for itself": Mutation("meet", ANSWER, "is_over", PARTS, ("gfx942",)),
    "an answer that each thread reads": Mutation(
        "meet", ANSWER, "tl.load(p_answer, volatile=True) == 1", PARTS, ("gfx942",)
    ),
}
BY_DEFAULT = ("a relaxed flag", "no barrier before a count", "a clock by which each thread ends for itself")


class Wanted(NamedTuple):
    """Kernels to compile, of sources in which `old` is replaced."""

    target: str
    names: tuple[str, ...]
    constants: dict[str, Any]
    old: str = ""
    new: str = ""


def compile_some(every: list[Wanted]) -> list[list[str]]:
    """The code of this rank's."""
    return [_compile(wanted) for wanted in every[dist.get_rank() :: dist.get_world_size()]]


def compile_kernels(compilers: RankPool, every: list[Wanted]) -> list[list[str]]:
    """The code of all."""
    halves = [iter(half) for half in compilers.run(compile_some, 2, every)]
    return [next(halves[i % 2]) for i in range(len(every))]


def _compile(wanted: Wanted) -> list[str]:
    pretend(wanted.target)
    sources = {module.__name__.rpartition(".")[2]: Path(str(module.__file__)).read_text() for module in SOURCES}
    sources["signals_kernel"] = sources["signals_kernel"].replace(
        f"{device_clock.__name__} import", "{device_clock} import"
    )
    sources["kernels"] = KERNELS
    old, new = wanted.old, wanted.new
    assert not old or sum(source.count(old) for source in sources.values()) == 1, f"not once in the sources: {old}"
    kernels = modules_of({name: source.replace(old, new) for name, source in sources.items()})["kernels"]
    return [_code(getattr(kernels, f"{name}_kernel"), wanted.constants) for name in wanted.names]


def _code(kernel: Any, constants: dict[str, Any]) -> str:
    data = torch.empty(1 << 14, device="meta")
    values: dict[str, Any] = {"control": 1 << 40, "p_x": data, "p_y": data, "TMA": False, "BLOCK": 32}
    # The others are numbers that triton makes nothing of: neither 1 nor multiples of 16.
    arguments = {name: (values | constants).get(name, 7) for name in kernel.arg_names}
    options = {"num_warps": constants.get("num_warps", 4), "num_stages": 1}
    return code_of(kernel, (), {**arguments, "grid": (4,), **options})


class Code(dict[tuple[str, int], dict[str, str]]):
    """Every kernel's code by target and number of warps, compiled when it is asked for."""

    def __init__(self, compilers: RankPool) -> None:
        super().__init__()
        self._compilers = compilers

    def __missing__(self, key: tuple[str, int]) -> dict[str, str]:
        target, warps = key
        every = [Wanted(target, (name,), {"num_warps": warps}) for name in NAMES]
        codes = compile_kernels(self._compilers, every)
        self[key] = {name: code for name, (code,) in zip(NAMES, codes, strict=True)}
        return self[key]


@pytest.fixture(scope="module")
def code(compilers: RankPool) -> Code:
    return Code(compilers)


def each(*targets: str, warps: Sequence[int] = (1, 4)) -> list[Any]:
    """Targets with numbers of warps: by default sm_90 with 4, and CI runs the others in turns."""
    return [
        pytest.param(target, num, marks=() if (target, num) == ("sm_90", 4) else pytest.mark.slow)
        for target in targets
        for num in warps
    ]


def faults_for(target: str, code: str) -> list[str]:
    return faults_amd(code) if target == "gfx942" else faults(code)


def flags_and_polls(target: str, code: str) -> tuple[int, int]:
    """How many releases at scope sys, and how many acquires there, that are no releases."""
    every = amd_instructions_of(code) if target == "gfx942" else instructions_of(code)
    ordered = [one for one in every if "sys" in one.words]
    return sum(one.releases for one in ordered), sum(one.acquires and not one.releases for one in ordered)


@pytest.mark.parametrize(("target", "warps"), each(*TARGETS))
def test_signals_are_sound_in_compiled_code(code: Code, target: str, warps: int) -> None:
    kernels = code[target, warps]
    assert {name: found for name, kernel in kernels.items() if (found := faults_for(target, kernel))} == {}
    found = {name: flags_and_polls(target, kernel) for name, kernel in kernels.items()}
    assert found["push"] == (1, 0), "the flag is seen by the rules"
    assert found["count"] == (2, 0), "so are the count and its flag"
    assert found["claims"] == (0, 0)
    for name in ("exchange", "meet"):
        # Flags, locks, poison and records; first polls, polls of loops, polls of poison.
        assert found[name][0] >= 4 and found[name][1] >= 5, found


@pytest.mark.parametrize(("target", "warps"), each("sm_80", "sm_90", "sm_100", warps=[4]))
def test_every_poll_is_one_load_that_acquires(code: Code, target: str, warps: int) -> None:
    """A poll must not write: an atomic addition of 0 would take the line from a peer that is about to write it."""
    for name in ("exchange", "meet"):
        polls = [one for one in instructions_of(code[target, warps][name]) if one.acquires and not one.releases]
        assert polls and all({"ld", "acquire", "sys"} <= one.words for one in polls)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        pytest.param("sm_90", BY_DEFAULT, id="sm_90-two"),
        pytest.param("sm_90", tuple(MUTATIONS), marks=pytest.mark.slow, id="sm_90-all"),
        pytest.param("gfx942", tuple(MUTATIONS), marks=pytest.mark.slow, id="gfx942-all"),
    ],
)
def test_broken_signals_are_noticed(
    compilers: RankPool, count_mutations: CountMutations, target: str, names: tuple[str, ...]
) -> None:
    mutations = {
        name: MUTATIONS[name]
        for name in names
        if target not in MUTATIONS[name].unseen and not (HAS_BARRIERS and MUTATIONS[name].rule == LATE)
    }
    survivors = []
    every = [Wanted(target, (mutation.kernel,), {}, mutation.old, mutation.new) for mutation in mutations.values()]
    for (name, mutation), (broken,) in zip(mutations.items(), compile_kernels(compilers, every), strict=True):
        found = faults_for(target, broken)
        if not any(fault.startswith(mutation.rule) for fault in found):
            survivors.append((name, found))
    count_mutations("the device signals", len(mutations) - len(survivors), len(mutations))
    assert survivors == []


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
def test_data_that_tma_stores_is_noticed(compilers: RankPool, count_mutations: CountMutations, target: str) -> None:
    """The data is under a count and a flag. Without TMA the same kernel is sound."""
    ((broken,),) = compile_kernels(compilers, [Wanted(target, ("exchange",), {"TMA": True})])
    found = [fault for fault in faults(broken) if fault.startswith("may be overtaken by a flag")]
    count_mutations("the device signals", int(bool(found)), 1)
    assert found and all("cp.async.bulk.tensor.2d.global.shared" in fault for fault in found)


def _answers_the_clock(lines: list[str], i: int) -> bool:
    """Whether a load reads one of the two words by which one thread tells the others that a wait is over."""
    address = re.search(r"\[ (%rd\d+) \+ 0 \]", lines[i])
    words = signals_kernel.STATE * signals_kernel.LINE_WORDS + signals_kernel.NO_AND_YES
    return address is not None and any(
        re.search(rf"\badd\.s64\s+{address[1]}, %rd\d+, {4 * words};", line) for line in lines[max(0, i - 20) : i]
    )


@pytest.mark.parametrize(
    ("target", "warps", "names", "at_least"),
    [
        # A release and, within a loop, what releases and acquires.
        pytest.param("sm_90", 4, ("push", "claims"), 4, id="sm_90-4-two"),
        *(
            pytest.param(target, warps, NAMES, 51, marks=pytest.mark.slow, id=f"{target}-{warps}-all")
            for target in ("sm_80", "sm_90", "sm_100")
            for warps in (1, 4)
        ),
    ],
)
def test_a_missing_barrier_is_noticed(
    code: Code, count_mutations: CountMutations, target: str, warps: int, names: tuple[str, ...], at_least: int
) -> None:
    """All barriers before a release are taken out of the code, and all after an acquire, triton's own included.

    One barrier may do the work of another if there is no access between them. The answer of the clock is no signal: its
    word never changes, and the barriers behind it stand before it in the text of the loop.
    """
    tried, survivors = 0, []
    for name in names:
        lines = code[target, warps][name].splitlines()
        barriers = [i for i, line in enumerate(lines) if line.split() == ["bar.sync", "0;"]]
        for i, line in enumerate(lines):
            if not (ordered := re.search(r"\b(?:ld|atom)\.\S*(acquire|release|acq_rel)", line)):
                continue
            if _answers_the_clock(lines, i):
                continue
            text = " ".join(line.split()).removesuffix(";")
            without: dict[str, list[int]] = {}
            if ordered.group(1) != "acquire":
                without[f"{LATE} may not have stored yet: {text}"] = [j for j in barriers if j < i]
            if ordered.group(1) != "release":
                without[f"acquires what other threads may have read before: {text}"] = [j for j in barriers if j > i]
            for fault, missing in without.items():
                tried += 1
                broken = "\n".join(line for j, line in enumerate(lines) if j not in missing)
                if not any(found.startswith(fault) for found in faults(broken)):
                    survivors.append((name, fault, missing))
    count_mutations("barriers around signals", tried - len(survivors), tried)
    assert tried >= at_least and survivors == []
