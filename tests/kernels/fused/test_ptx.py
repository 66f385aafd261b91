"""Rung: pure: compiles, runs nothing. The fused operators' kernels as compiled: signals in order, 16 bytes at a time.

What test_signals_ptx.py asks of the signals is asked here of every kernel that uses them (ptx_rules.py), of one shape
for each way to exchange; test_compile.py compiles all shapes. The sources are then broken, one way at a time, and the
rules and widths must notice. Only GPUs show that the kernels are right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.kernels.compiled import code_of, modules_of, pretend
from support.kernels.ptx_rules import Instruction, amd_instructions_of, faults, faults_amd, instructions_of
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from tpkernels.fused.kernels import counts_kernel, gather_kernel, rows_kernel, scatter_kernel, slots
from tpkernels.launch import observed
from tpkernels.symmetric import signals_kernel, wait_kernels

from benchmarks.launches.compile import TARGETS
from benchmarks.launches.operators import LAUNCHES

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "expert_rows")
SOURCES = (signals_kernel, wait_kernels, gather_kernel, slots, scatter_kernel, counts_kernel, rows_kernel)
HALVES = (
    "publish bfloat16",
    "fetch bfloat16",
    "gather_matmul pull bfloat16",
    "gather_matmul there bfloat16",
    "gather_matmul push bfloat16",
    "matmul_scatter one bf16",
    "matmul_scatter two bf16",
    "sum_slots bfloat16",
    "take bfloat16",
    "return bfloat16",
)
FLOATS = tuple(name.replace("bfloat16", "float32").replace("bf16", "fp32") for name in HALVES)
KINDS = ("wait", "counts int32", *HALVES)
# One of each: what waits, publishes, gathers, scatters and sums.
BY_DEFAULT = (
    "wait",
    "publish bfloat16",
    "fetch bfloat16",
    "gather_matmul push bfloat16",
    "matmul_scatter two bf16",
    "sum_slots bfloat16",
)


class Mutation(NamedTuple):
    """Where a source is broken.

    Attributes:
        kind: the kernel that must show it.
        old, new: what stands there, once in SOURCES together, and what replaces it.
        rule: how the message begins that notices it.
    """

    kind: str
    old: str
    new: str
    rule: str


FLAG = 'tl.atomic_xchg(p_flag, epoch, sem="release", scope="sys")'
COUNT = 'is_last = tl.atomic_add(p_done, 1, sem="acq_rel", scope="sys")'
POLL = 'seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")\n    if seen'
BARRIER = "tl.debug_barrier()\n    "
LATE = "releases what other threads"

MUTATIONS = {
    "rows are announced before all threads have pushed them": Mutation(
        "gather_matmul push bfloat16", BARRIER + FLAG, FLAG, LATE
    ),
    "a split is fetched without release": Mutation(
        "fetch bfloat16", FLAG, FLAG.replace("release", "relaxed"), "is relaxed"
    ),
    "a block is fetched before its flag": Mutation(
        "fetch bfloat16", POLL, POLL.replace("acquire", "relaxed"), "is relaxed"
    ),
    "a shard is published without release": Mutation(
        "publish bfloat16", FLAG, FLAG.replace("release", "relaxed"), "is relaxed"
    ),
    "tiles are counted without release": Mutation(
        "matmul_scatter one bf16", COUNT, COUNT.replace("acq_rel", "relaxed"), "is relaxed"
    ),
    "tiles are counted for this program": Mutation(
        "matmul_scatter two bf16", COUNT, COUNT.replace("sys", "cta"), "is not at scope sys"
    ),
    "a tile is not read after its flag": Mutation(
        "gather_matmul pull bfloat16", POLL, POLL.replace("acquire", "relaxed"), "is relaxed"
    ),
    "blocks are not read after their flags": Mutation("wait", POLL, POLL.replace("sys", "gpu"), "is not at scope sys"),
    "tokens are published without release": Mutation(
        "take bfloat16", COUNT, COUNT.replace("acq_rel", "relaxed"), "is relaxed"
    ),
    "rows are taken before their flag": Mutation(
        "take bfloat16", POLL, POLL.replace("acquire", "relaxed"), "is relaxed"
    ),
    "rows are returned without release": Mutation(
        "return bfloat16", FLAG, FLAG.replace("release", "relaxed"), "is relaxed"
    ),
    "counts are told before all threads have stored them": Mutation("counts int32", BARRIER + FLAG, FLAG, LATE),
    "slots are not added after their flags": Mutation(
        "matmul_scatter one bf16", POLL, POLL.replace("acquire", "relaxed"), "is relaxed"
    ),
}


def compile_kernels(target: str, kinds: Sequence[str], old: str = "", new: str = "") -> dict[str, str]:
    """The code by kind, of sources in which `old` is replaced."""
    broken = _broken_kernels(old, new) if old else {}
    found: dict[str, str] = {}

    def look(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kind = _kind(kernel, arguments, options)
        if kind in kinds and kind not in found:
            found[kind] = code_of(broken.get(kernel.fn.__name__, kernel), arguments, {"grid": grid, **options})

    with observed(pretend(target), look):
        for op in OPERATORS:
            LAUNCHES[op]()
    return found


def _kind(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Which kernel, how it exchanges or how many products it adds up, of what dtype; only the first shape is taken."""
    words = [kernel.fn.__name__.removesuffix("_kernel")]
    if "TWO_TERMS" in options:
        words.append("two" if options["TWO_TERMS"] else "one")
    words += [str(options[name]) for name in ("HOW", "DTYPE") if name in options]
    if isinstance(arguments[0], torch.Tensor):
        words.append(str(arguments[0].dtype).removeprefix("torch."))
    return " ".join(words)


def _broken_kernels(old: str, new: str) -> dict[str, Any]:
    """Kernels by name, of copies of the sources."""
    sources = {module.__name__.rpartition(".")[2]: Path(str(module.__file__)).read_text() for module in SOURCES}
    assert sum(source.count(old) for source in sources.values()) == 1, f"not once in the sources: {old}"
    broken = {
        name: source.replace(old, new)
        .replace("tpkernels.symmetric.signals_kernel import", "{signals_kernel} import")
        .replace("tpkernels.fused.kernels.slots import", "{slots} import")
        for name, source in sources.items()
    }
    every = [item for module in modules_of(broken).values() for item in vars(module).items()]
    return {key: value for key, value in every if key.endswith("_kernel")}


class Code:
    """Code by kind, compiled when it is asked for: `code("sm_90", kinds)`."""

    def __init__(self, compilers: RankPool) -> None:
        self._compilers = compilers
        self._known: dict[str, dict[str, str]] = {target: {} for target in TARGETS}

    def __call__(self, target: str, kinds: Sequence[str]) -> dict[str, str]:
        known = self._known[target]
        if missing := [kind for kind in kinds if kind not in known]:
            half, other = self._compilers.run(compile_some_kinds, 2, target, missing)
            known |= half | other
        return {kind: known[kind] for kind in kinds}


@pytest.fixture(scope="module")
def code(compilers: RankPool) -> Code:
    return Code(compilers)


def compile_some_kinds(target: str, kinds: Sequence[str]) -> dict[str, str]:
    """This rank's."""
    return compile_kernels(target, kinds[dist.get_rank() :: dist.get_world_size()])


def each_target(kinds: Sequence[str], *others: str, targets: Sequence[str] = tuple(TARGETS)) -> pytest.MarkDecorator:
    """Targets with these kinds, all slow, and sm_90 with those of BY_DEFAULT among them; with `others` too for sm_90.

    The compiler's faults are seldom one target's alone, and CI runs the others in turns.
    """
    some = tuple(kind for kind in BY_DEFAULT if kind in kinds)
    every = [(target, (*kinds, *others) if target == "sm_90" else tuple(kinds)) for target in targets]
    slow = [pytest.param(target, of, marks=pytest.mark.slow, id=f"{target}-all") for target, of in every]
    return pytest.mark.parametrize(("target", "kinds"), [pytest.param("sm_90", some, id="sm_90-some"), *slow])


def every_kind(target: str) -> set[str]:
    """The kinds of all launches, compiled or not."""
    kinds: set[str] = set()
    with observed(TARGETS[target], lambda kernel, _, *rest: kinds.add(_kind(kernel, *rest))):
        for op in OPERATORS:
            LAUNCHES[op]()
    return kinds


# Signals do not depend on the dtype of what they stand for: float32 is compiled for one target.
@pytest.mark.slow
@each_target(KINDS, *FLOATS)
def test_signals_are_sound_in_every_kernel(code: Code, target: str, kinds: Sequence[str]) -> None:
    assert every_kind(target) == {*KINDS, *FLOATS}
    for kind, text in code(target, kinds).items():
        is_amd = target == "gfx942"
        assert not (faults_amd if is_amd else faults)(text), kind
        # A loop of two entries, whose head is a switch: threads of one wave would take different ways to a barrier.
        assert "irr.guard" not in text, kind
        every = (amd_instructions_of if is_amd else instructions_of)(text)
        if kind.startswith("sum"):  # alone, it neither waits nor notifies
            continue
        # What the rules ask something of: of a kernel that neither waits nor notifies, its claims.
        heard, told = ([one for one in every if getattr(one, how)] for how in ("acquires", "releases"))
        assert heard and told, kind
        assert "there" in kind or any("sys" in one.words for one in heard), kind
        assert kind.startswith(("wait", "fetch")) or any("gpu" in one.words for one in told), kind


def widths(ptx: str) -> Counter[str]:
    """How often each kind of access to global memory comes: "st v4.b32", "cp.async 16", "TMA load", "matrix"."""
    found: Counter[str] = Counter()
    for space, vector, bits in re.findall(
        r"\b(ld|st)\.(?:relaxed\.|volatile\.)*global(?:\.\w+)*?((?:\.v\d)?)\.b(\d+)", ptx
    ):
        found[f"{space} {vector.removeprefix('.')}{'.' if vector else ''}b{bits}"] += 1
    for num_bytes in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx):
        found[f"cp.async {int(num_bytes, 0)}"] += 1
    for name, pattern in (
        ("TMA load", r"cp\.async\.bulk\.tensor\.2d\.shared"),
        ("TMA store", r"cp\.async\.bulk\.tensor\.2d\.global"),
        ("matrix", r"wgmma\.mma_async|tcgen05\.mma|mma\.sync"),
    ):
        found[name] += len(re.findall(pattern, ptx))
    return +found


def narrow(found: Counter[str]) -> set[str]:
    """Return accesses that move less than 16 bytes and do not belong to the control area."""
    control = {"ld b32", "ld b64", "st b32"}
    return {name for name in found if name[:2] in ("ld", "st") and "v4.b32" not in name} - control | (
        {name for name in found if name.startswith("cp.async")} - {"cp.async 16"}
    )


@each_target(HALVES, targets=tuple(TARGETS)[:3])
def test_data_moves_16_bytes_at_a_time(code: Code, target: str, kinds: Sequence[str]) -> None:
    """bfloat16 that is published, pushed, sent or summed moves 16 bytes at a time, and so do tiles.

    TMA loads the operands that do not arrive under a flag.
    """
    by_tma = target != "sm_80"
    of_kind = {kind: widths(text) for kind, text in code(target, kinds).items()}
    for kind, found in of_kind.items():
        assert not narrow(found), kind
        # Other threads' data, under a flag, neither comes nor goes by TMA.
        assert "TMA store" not in found, kind
        assert found["st v4.b32"], kind
        if kind.startswith(("publish", "fetch", "sum", "take", "return")):
            assert found["ld v4.b32"] and not found["matrix"], kind
            continue
        assert found["matrix"], kind
        if kind.startswith("gather"):
            assert found["cp.async 16"] and bool(found["TMA load"]) == by_tma, kind
        else:
            assert bool(found["TMA load"]) == by_tma != bool(found["cp.async 16"]), kind
            # A tile is stored in two places, at a peer or in y; for y each 16 bytes are loaded from 8 slots.
            assert found["ld v4.b32"] >= 8 * found["st v4.b32"] // 2, kind
    # A program of 4 warps copies 4096 elements; one of 8 warps sums 2048 of 8 slots, one masked, and what is own.
    published, summed = (of_kind[f"{name} bfloat16"] for name in ("publish", "sum_slots"))
    assert published["ld v4.b32"] == published["st v4.b32"] == 4096 * 2 // 16 // 128
    assert (summed["ld v4.b32"], summed["st v4.b32"]) == (9, 1)
    # Beside the tile's own stores, those to the peers.
    assert of_kind["gather_matmul push bfloat16"]["ld v4.b32"] >= published["ld v4.b32"]


@each_target([kind for kind in HALVES if kind.startswith(("gather", "matmul"))], targets=["sm_90"])
def test_hopper_multiplies_by_wgmma(code: Code, target: str, kinds: Sequence[str]) -> None:
    for kind, text in code(target, kinds).items():
        assert "wgmma.mma_async" in text, kind


def before_a_claim(every: Sequence[Instruction], start: int) -> list[Instruction]:
    """Return what may come after an instruction and before the next number is drawn."""
    seen: set[int] = set()
    waiting = [*every[start].next]
    while waiting:
        i = waiting.pop()
        if i not in seen and not {"atom", "add", "gpu"} <= every[i].words:
            seen.add(i)
            waiting += every[i].next
    return [every[i] for i in seen]


def test_a_tile_is_counted_behind_the_next_ones_products(code: Code) -> None:
    """And the next number is drawn before the stores: no release waits for what was stored just before."""
    every = instructions_of(code("sm_90", ["matmul_scatter two bf16"])["matmul_scatter two bf16"])
    products = [i for i, one in enumerate(every) if "wgmma" in one.words and "mma_async" in one.words]
    behind = before_a_claim(every, products[-1])
    assert not [one.text for one in behind if one.kind == "store" and "v4" in one.words]
    assert [one for one in behind if {"atom", "add", "sys"} <= one.words and one.releases]


def compile_some_broken(every: Sequence[tuple[str, str, str]]) -> list[str]:
    """This rank's: a kind of kernel in which something is replaced each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return [compile_kernels("sm_90", [kind], old, new)[kind] for kind, old, new in every[rank::world]]


def compile_broken(compilers: RankPool, every: Sequence[tuple[str, str, str]]) -> list[str]:
    halves = [iter(half) for half in compilers.run(compile_some_broken, 2, every)]
    return [next(halves[i % 2]) for i in range(len(every))]


# By default those that compile fastest; the sound code is looked at above.
@pytest.mark.parametrize(
    "names",
    [
        ("a split is fetched without release", "a block is fetched before its flag"),
        pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_broken_signals_are_noticed(compilers: RankPool, count_mutations: CountMutations, names: Sequence[str]) -> None:
    survivors = []
    mutations = {name: MUTATIONS[name] for name in names}
    broken = compile_broken(compilers, [(each.kind, each.old, each.new) for each in mutations.values()])
    for (name, mutation), code in zip(mutations.items(), broken, strict=True):
        found = faults(code)
        if not any(fault.startswith(mutation.rule) for fault in found):
            survivors.append((name, found))
    count_mutations("the fused kernels' signals", len(mutations) - len(survivors), len(mutations))
    assert survivors == []


@pytest.mark.parametrize(
    "kind",
    [
        "fetch bfloat16",
        "publish bfloat16",
        # Whose code is the longest by far.
        pytest.param("matmul_scatter two bf16", marks=pytest.mark.slow),
        pytest.param("gather_matmul push bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_missing_barrier_before_a_release_is_noticed(code: Code, count_mutations: CountMutations, kind: str) -> None:
    """All barriers before a release are taken out of the compiled code, since triton's own may do the work of ours."""
    tried, survivors = 0, []
    lines = code("sm_90", [kind])[kind].splitlines()
    for i, line in enumerate(lines):
        if re.search(r"\batom\.\S*(release|acq_rel)", line):
            tried += 1
            broken = "\n".join(other for j, other in enumerate(lines) if j > i or other.split() != ["bar.sync", "0;"])
            text = " ".join(line.split()).removesuffix(";")
            if not any(found.startswith(f"{LATE} may not have stored yet: {text}") for found in faults(broken)):
                survivors.append(text)
    count_mutations("barriers in the fused kernels", tried - len(survivors), tried)
    # Claims before and within the loop, counts, flags, and those of poison.
    assert tried >= 5 and survivors == []


NOT_TOLD = (
    ("publish bfloat16", "return tl.multiple_of(p_block, 16)", "return p_block"),
    ("sum_slots bfloat16", "return tl.multiple_of(p_block, 16)", "return p_block"),
    ("gather_matmul pull bfloat16", "p_rows = tl.multiple_of(p_rows, 16)", "p_rows = p_rows"),
    ("matmul_scatter one bf16", "return tl.multiple_of(p_block, 16)", "return p_block"),
)


@pytest.mark.parametrize("every", [NOT_TOLD[:2], pytest.param(NOT_TOLD, marks=pytest.mark.slow)], ids=["two", "all"])
def test_narrow_accesses_are_noticed(compilers: RankPool, every: Sequence[tuple[str, str, str]]) -> None:
    """A compiler that is not told that addresses are multiples of 16 moves less at a time."""
    for (kind, _, _), code in zip(every, compile_broken(compilers, every), strict=True):
        assert narrow(widths(code)), kind
