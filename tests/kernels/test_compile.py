"""Rung: pure: compiles, runs nothing. Every kernel that operators launch builds for every target as it should.

As it should: nothing is spilled, shared memory suffices, and matrices of 16-bit numbers are multiplied by the target's
matrix instructions. What benchmarks/results/compile.jsonl knows of unchanged kernels is taken from there; a few, others
with every commit, are compiled again and must be as noted, and all of them when slow. That a fault is found is shown on
kernels made to have it. Only a GPU shows what is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks.rank_pool import RankPool
from support.slices import commit_number

pytest.importorskip("triton")

import tpkernels
import triton
from tpkernels.launch import jit, observed, run, tl

from benchmarks.launches import compile as benchmark
from benchmarks.launches import operators
from benchmarks.launches.compile import TARGETS, Compiled, compile_all, read_lock, source_key, specialised
from benchmarks.launches.operators import LAUNCHES
from benchmarks.run import main

# What products of 16-bit matrices must become. sm_80 has no other instruction than mma.sync.
MATRIX_UNITS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


# Of what is noted: about one kernel per commit.
NUM_PARTS = 1000
CompileFor = Callable[[str], list[Compiled]]


@pytest.fixture(scope="module")
def compiled(compile_cache: Path) -> CompileFor:
    """What becomes of all that operators launch, for a target."""
    part = commit_number() % NUM_PARTS
    known = {key: one for key, one in read_lock().items() if int(key, 16) % NUM_PARTS != part}
    pairs = [(op, target) for target in TARGETS for op in LAUNCHES]

    @functools.cache
    def everything() -> list[Compiled]:
        # One process: each spends seconds on imports.
        return compile_all(pairs, jobs=1, cache=compile_cache / "triton", known=known)

    return lambda target: [one for one in everything() if one.target == target]


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_again_is_as_noted(compiled: CompileFor, target: str) -> None:
    noted = read_lock()
    assert [one for one in compiled(target) if one.key in noted and one != noted[one.key]] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", LAUNCHES)
def test_everything_is_as_noted(op: str, target: str, compile_cache: Path) -> None:
    noted = read_lock()
    every = compile_all([(op, target)], jobs=2, cache=compile_cache / "triton")
    assert every and [one for one in every if one != noted.get(one.key)] == [], (
        "python -m benchmarks.run compile --lock"
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", LAUNCHES)
def test_nothing_is_wrong_with_a_kernel(compiled: CompileFor, op: str, target: str) -> None:
    of_these = [one for one in compiled(target) if one.op == op]
    assert of_these
    assert not [f"{one.kernel} {one.fault}: {one.config}" for one in of_these if one.fault]


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_is_left_out(compiled: CompileFor, target: str) -> None:
    """Those of the package's modules, whose names end in `_kernel`, are compiled."""
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(tpkernels.__path__, "tpkernels.")]
    jitted = [f.fn.__name__ for module in modules for f in vars(module).values() if isinstance(f, triton.JITFunction)]
    kernels = {name for name in jitted if name.endswith("_kernel")}
    assert {one.kernel for one in compiled(target)} == kernels


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_targets_matrix_units(compiled: CompileFor, target: str, head: int) -> None:
    """For the sizes that models have; larger heads take blocks too small for wgmma."""
    of_these = [one for one in compiled(target) if one.op == "attention" and one.has_dot]
    of_these = [one for one in of_these if f"HEAD={head}" in one.config.split()]
    assert {one.kernel for one in of_these} >= {"_attention_kernel", "gradient_kernel"}
    unit = MATRIX_UNITS[target]
    assert not [f"{one.kernel} {one.config}" for one in of_these if unit not in one.matrix_instructions]


@pytest.mark.parametrize("head", [64, 80, 128, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_every_architecture_is_compiled(compiled: CompileFor, target: str, head: int) -> None:
    """Of all tokens and of a window, forward and backward; in float32 as far as there is a kernel."""
    seen = set()
    for one in compiled(target):
        words = one.config.split()
        if one.op == "attention" and {f"HEAD={head}", "CAUSAL=True"} <= {*words}:
            seen.add((one.kernel, "bfloat16" if one.has_dot else "float32", "WINDOWED=True" in words))
    kernels = ("_attention_kernel", "gradient_kernel")
    dtypes = ("bfloat16", "float32") if head <= 128 else ("bfloat16",)
    assert {(kernel, dtype, window) for kernel in kernels for dtype in dtypes for window in (True, False)} <= seen


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("matmul", "matmul_kernel"),
        ("all_gather_matmul", "gather_matmul_kernel"),
        ("matmul_reduce_scatter", "matmul_scatter_kernel"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_matmuls_use_the_targets_matrix_units(compiled: CompileFor, target: str, op: str, kernel: str) -> None:
    """Whatever their tiles, also those of few tokens, and however their operands come."""
    of_these = [one for one in compiled(target) if (one.op, one.kernel) == (op, kernel) and one.has_dot]
    assert of_these
    unit = MATRIX_UNITS[target]
    assert not [f"{one.kernel} {one.config}" for one in of_these if unit not in one.matrix_instructions]


@jit
def _spilling_kernel(p_x: tl.tensor, p_y: tl.tensor, BLOCK: tl.constexpr) -> None:
    """All of a block is wanted again after its sum: more than a warp has registers for."""
    o_x = tl.arange(0, BLOCK)
    # [BLOCK]
    b_x = tl.load(p_x + o_x)
    tl.store(p_y + o_x, b_x - tl.sum(b_x, axis=0))


@jit
def _wide_kernel(p_x: tl.tensor, p_y: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A product's operands wait in shared memory, and take BLOCK * BLOCK * 4 bytes."""
    o_row, o_column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    # [BLOCK, BLOCK]
    b_x = tl.load(p_x + o_row * BLOCK + o_column)
    # [BLOCK, BLOCK]
    b_transposed = tl.load(p_x + o_column * BLOCK + o_row)
    tl.store(p_y + o_row * BLOCK + o_column, tl.dot(b_x, b_transposed).to(tl.float16))


@jit
def _sound_kernel(p_x: tl.tensor, p_y: tl.tensor, BLOCK: tl.constexpr) -> None:
    o_x = tl.arange(0, BLOCK)
    # [BLOCK]
    b_x = tl.load(p_x + o_x)
    tl.store(p_y + o_x, b_x)


def launch_spilling() -> None:
    x = torch.empty(1 << 15, device="meta")
    run(_spilling_kernel, (1,), x, x, BLOCK=1 << 15, num_warps=1)


def launch_wide() -> None:
    x = torch.empty(256, 256, dtype=torch.float16, device="meta")
    run(_wide_kernel, (1,), x, x, BLOCK=256, num_warps=8)


def launch_sound() -> None:
    """Twice the same, which is compiled once, and another block."""
    x = torch.empty(512, device="meta")
    for block in (256, 256, 512):
        run(_sound_kernel, (1,), x, x, BLOCK=block, num_warps=4)


@jit
def _broken_kernel(p_x: tl.tensor, p_y: tl.tensor, BLOCK: tl.constexpr) -> None:
    o_x = tl.arange(0, BLOCK)
    tl.store(p_y + o_x, tl.load(p_x + o_x))


def launch_broken() -> None:
    """A block that is no power of two, which triton refuses; and one that is."""
    x = torch.empty(512, device="meta")
    run(_broken_kernel, (1,), x, x, BLOCK=3, num_warps=4)
    launch_sound()


LAUNCHERS = {"spilling": launch_spilling, "wide": launch_wide, "sound": launch_sound, "broken": launch_broken}


def run_the_command(launcher: str, *arguments: str) -> tuple[int, str]:
    """The exit code and output of the command whose one operator, `ours`, launches this; compiled in this process."""

    def compile_here(pairs: list[tuple[str, str]], *_: object, **__: object) -> list[Compiled]:
        return [one for pair in pairs for one in benchmark._compile_one(*pair)]

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(benchmark, "LAUNCHES", {"ours": LAUNCHERS[launcher]})
        patch.setattr(benchmark, "compile_all", compile_here)  # whose processes would not know of ours
        code = main(["compile", "--op", "ours", *arguments])
    return code, printed.getvalue()


@pytest.mark.by_default("spilling-gfx942")
@pytest.mark.parametrize(
    ("launcher", "target", "message"),
    [
        ("spilling", "sm_90", r"_spilling_kernel for sm_90 spills \d+ bytes per thread: x:float32 y:float32 "),
        ("spilling", "gfx942", r"_spilling_kernel for gfx942 spills \d+ bytes per thread: x:float32 y:float32 "),
        # Whose code is long; of what the message consists is tested by itself below.
        pytest.param(
            "wide",
            "sm_80",
            r"_wide_kernel for sm_80 .*needs 262144 bytes of shared memory, the limit is 166912: x:",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["spilling-sm_90", "spilling-gfx942", "wide-sm_80"],
)
def test_a_fault_is_printed_stored_and_ends_in_1(
    compilers: RankPool, launcher: str, target: str, message: str, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    code, printed = compilers.run(run_the_command, 1, launcher, "--target", target, "--out", str(out))[0]
    (line,) = [line for line in printed.splitlines() if line.startswith("ours: ")]
    assert code == 1 and re.match("ours: " + message, line), line
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["fault"] and row["fault"] in line


def test_a_row_a_kernel_and_target(compilers: RankPool, tmp_path: Path) -> None:
    """Also to a file that has rows; one for two launches that compile alike."""
    out = tmp_path / "rows.jsonl"
    out.write_text('{"case": "before"}\n')
    options = ("--target", "sm_90", "gfx942", "--out", str(out))
    code, printed = compilers.run(run_the_command, 1, "sound", *options)[0]
    assert code == 0 and "_sound_kernel" in printed and "ours: " not in printed
    before, *rows = map(json.loads, out.read_text().splitlines())
    assert before == {"case": "before"}
    assert [(row["case"], row["kernel"], row["target"]) for row in rows] == [
        ("compile/ours", "_sound_kernel", target) for target in ("sm_90", "sm_90", "gfx942", "gfx942")
    ]
    assert [row["config"] for row in rows[:2]] == [
        f"x:float32 y:float32 BLOCK={block} num_warps=4 num_stages=1" for block in (256, 512)
    ]
    for row in rows:
        fields = {field.name for field in dataclasses.fields(Compiled)} - {"op", "key"}
        assert fields | {"fault", "commit"} <= row.keys()
        assert row["fault"] == "" and row["spilled_bytes"] == row["shared_bytes"] == 0 < row["registers"]
        assert row["has_dot"] is False and row["matrix_instructions"] == []
        assert row["shared_limit_bytes"] == TARGETS[row["target"]].shared_memory_bytes


def test_what_does_not_compile_costs_the_others_nothing(compilers: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    code, printed = compilers.run(run_the_command, 1, "broken", "--target", "sm_90", "--out", str(out))[0]
    faults = [json.loads(line)["fault"] for line in out.read_text().splitlines()]
    assert code == 1 and "_broken_kernel for sm_90 does not compile: CompilationError" in printed
    assert faults[0].startswith("does not compile: ") and faults[1:] == ["", ""]


@pytest.mark.parametrize("op", LAUNCHES)
def test_another_number_of_tokens_compiles_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: list[set[tuple[object, ...]]] = []
    for num_tokens in (4096, 4104, 4088, 4000):
        monkeypatch.setattr(operators, "SEQUENCES", (num_tokens,))
        seen: set[tuple[object, ...]] = set()
        with observed(TARGETS["sm_90"], lambda kernel, _, *rest, seen=seen: seen.add(specialised(kernel, *rest))):
            LAUNCHES[op]()
        variants.append(seen)
    assert variants[0] and all(seen == variants[0] for seen in variants)


ONE = tl.constexpr(1)


@jit
def _plus_one(x: tl.tensor) -> tl.tensor:
    return x + ONE


@jit
def _counting_kernel(p_x: tl.tensor) -> None:
    """Add one."""
    tl.store(p_x, _plus_one(tl.load(p_x)))  # in place


def test_a_key_is_that_of_the_code_whatever_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own key holds the constants of a function's callees only if they had been hashed before it."""
    kept = _counting_kernel._src

    def key_of(source: str, one: int) -> str:
        monkeypatch.setattr(benchmark, "_SOURCE_KEYS", {})
        monkeypatch.setitem(globals(), "ONE", tl.constexpr(one))
        _counting_kernel._unsafe_update_src(source)
        return source_key(_counting_kernel)

    key = key_of(kept, one=1)
    assert _plus_one.cache_key
    assert key_of(kept, one=1) == key
    assert key_of(kept.replace("Add one", "Count").replace("# in place", "# here"), one=1) == key
    assert key_of(kept.replace("p_x, _plus", "p_x + 0, _plus"), one=1) != key
    assert key_of(kept, one=2) != key


def test_what_counts_as_a_fault() -> None:
    sound = Compiled("op", "kernel", "sm_90", "", 8, 0, 4, 4, True, ("wgmma.mma_async",))
    assert sound.fault == dataclasses.replace(sound, has_dot=False, matrix_instructions=()).fault == ""
    assert dataclasses.replace(sound, spilled_bytes=8, shared_bytes=5, matrix_instructions=()).fault == (
        "spills 8 bytes per thread; needs 5 bytes of shared memory, the limit is 4; "
        "multiplies matrices without matrix instructions"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "norm", "nrom"], "--op must be of activation, .*: got nrom: leave it out for all"),
        (["--target", "sm_70"], "--target must be of sm_80, sm_90, sm_100, gfx942: got sm_70: leave it out for all"),
        (["--jobs", "0"], "--jobs must be at least 1: got 0: use 2"),
    ],
)
def test_unknown_names_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch("benchmarks: error: " + message, line), line
