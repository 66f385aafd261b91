"""Rung: interpreter, several processes; compiled in one. The worked example, tpengine/examples/swap.py.

It runs over hostile memory (kernel_ranks.py), tolerance zero. The messages that the README of tpkernels.fused shows are
those that ranks raise. In compiled code the order of signals is looked at (ptx_rules.py); only GPUs show that it works.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ROOT, CountMutations
from support.kernels.compiled import codes_of, modules_of
from support.kernels.precision import unwritten_is_nan
from support.kernels.ptx_rules import faults, faults_amd
from support.ranks.kernel_ranks import kernel_communicator
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from torch import Tensor

pytest.importorskip("triton")

from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.symmetric.cuda_memory import VirtualMemory
from tpkernels.symmetric.signals import PeerError

from benchmarks.launches.compile import TARGETS

README = (ROOT / "kernels/tpkernels/fused/README.md").read_text()
EXAMPLE = ROOT / "tpengine/examples/swap.py"
ARENA_BYTES = 1 << 18
# (rows per rank, columns per rank): nothing, one tile, several; the next call after nothing overwrites the one before.
SIZES = ((1, 1), (7, 5), (5, 1024), (0, 3))
# A rank's pause before each of its tiles, in which the others run ahead as far as the signals let them.
PAUSE_SECONDS = 2e-2


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example under a name of its own: triton reads the source of what it compiles from a file."""
    path = tmp_path / f"swap_{tmp_path.name}.py"
    path.write_text(EXAMPLE.read_text())
    return path


def loaded(path: str) -> Any:
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(shards: Tensor, scale: Tensor, rank: int) -> Tensor:
    """The specification: every rank's rows [world, rows, D] -> the columns of one."""
    world, _, columns = shards.shape
    mine = slice(rank * columns // world, (rank + 1) * columns // world)
    return torch.cat([shard[:, mine] * scale[mine] for shard in shards])


def first_wrong_swap(module: Any, arena: DeviceArena, dtype: torch.dtype, num_rounds: int) -> str:
    """Where the example differs from the specification; no barrier between calls, and in each round a rank is slow."""
    claim = module.claim
    generator = torch.Generator().manual_seed(0)  # every rank knows what all have
    try:
        for i in range(num_rounds):
            seconds = PAUSE_SECONDS if i % arena.world == arena.rank else 0.0
            module.claim = lambda control, seconds=seconds: (time.sleep(seconds), claim(control))[1]
            for rows, width in SIZES:
                shards = torch.randint(-9, 10, (arena.world, rows, arena.world * width), generator=generator).to(dtype)
                scale = torch.randint(-9, 10, (arena.world * width,), generator=generator).to(dtype)
                with unwritten_is_nan():
                    y = module.swap(shards[arena.rank].contiguous(), scale, arena)
                arena.check()
                if not torch.equal(y, reference(shards, scale, arena.rank)):
                    return f"round {i}: {rows} rows of {width} columns, {dtype}"
    finally:
        module.claim = claim
    return ""


def arena_of(**options: Any) -> DeviceArena:
    arena = kernel_communicator(dist.group.WORLD, "push", ARENA_BYTES, **options).device_arena
    assert arena is not None
    return arena


def check_example(path: str, dtypes: tuple[torch.dtype, ...]) -> None:
    module = loaded(path)
    for seed, dtype in enumerate(dtypes):
        wrong = first_wrong_swap(module, arena_of(seed=seed), dtype, num_rounds=3)
        assert not wrong, wrong


@pytest.mark.parametrize(
    ("world", "dtypes"),
    [
        (2, (torch.float32,)),
        pytest.param(2, (torch.float16,), marks=pytest.mark.slow),
        pytest.param(3, (torch.float32, torch.float16), marks=pytest.mark.slow),
    ],
)
def test_the_example_swaps(interpreters: RankPool, example: Path, world: int, dtypes: tuple[torch.dtype, ...]) -> None:
    interpreters.run(check_example, world, str(example), dtypes)


# Parts of the example without which it must fail.
WITHOUT = {
    "wait": "            wait(p_control, peer, arrived_line(peer, 0), epoch, call)\n",
    "notify": "                notify(p_control, peer, arrived_line(rank, 0), epoch, call)\n",
    "end_launch": "        end_launch(p_control, epoch, generation)\n",
    "at least one tile": "max(tl.cdiv(num_rows, ROWS), 1)",
    "every tile is counted": "count_done(p_control, peer, num_tiles)",
}
INSTEAD = {
    "at least one tile": "tl.cdiv(num_rows, ROWS)",
    "every tile is counted": "count_done(p_control, peer, 1)",
}


def keep_back(module: Any, standstill: Standstill) -> None:
    """Have this rank draw each item, and read what it has waited for, only when no other rank can go on."""
    claim, wait = module.claim, module.wait

    def late_claim(control: Any) -> Any:
        standstill.until_others_wait()
        return claim(control)

    def wait_and_dawdle(*args: Any) -> None:
        wait(*args)
        standstill.until_others_wait()

    module.claim, module.wait = late_claim, wait_and_dawdle


def noticed(path: str) -> str:
    """What this rank notices of a broken example: a wrong result, calls that differ, or that no rank can go on.

    Nothing else is a verdict: it leaves this function. Rank 0 is late everywhere.
    """
    arena, module = arena_of(), loaded(path)
    with Standstill(arena, dist.group.WORLD) as standstill:
        if arena.rank == 0:
            keep_back(module, standstill)
        try:
            said = first_wrong_swap(module, arena, torch.float32, num_rounds=2)
        except (PeerError, CallMismatch) as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            with contextlib.suppress(PeerError, CallMismatch):
                arena.leave()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("names", [("wait",), tuple(WITHOUT)], ids=["one", "all"])
def test_mutations_of_the_example(
    interpreters: RankPool, example: Path, count_mutations: CountMutations, names: tuple[str, ...]
) -> None:
    assert interpreters.run(noticed, 3, str(example)) == [""] * 3
    source, survivors = example.read_text(), []
    for i, name in enumerate(names):
        part = WITHOUT[name]
        assert source.count(part) == 1, f"{name} does not stand in the example as tested"
        indent = re.match(" *", part)
        assert indent is not None
        broken = example.with_name(f"{example.stem}_{i}.py")
        broken.write_text(source.replace(part, INSTEAD.get(name, f"{indent.group()}pass\n")))
        if not any(interpreters.run(noticed, 3, str(broken))):
            survivors.append(name)
    count_mutations("the worked example", len(names) - len(survivors), len(names))
    assert not survivors


def raised_by(call: Callable[[], Any], arena: DeviceArena) -> str:
    """What a call raises, or the check after it; then all ranks have made theirs."""
    try:
        call()
        arena.check()
        message = ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    dist.barrier()
    return message


def messages_of_failures(path: str) -> list[str]:
    """What this rank raises when rank 1 comes late, when sizes differ, and when rank 1's own call cannot be made."""
    swap, rank = loaded(path).swap, dist.get_rank()
    comm = kernel_communicator(dist.group.WORLD, "fused", ARENA_BYTES, timeout_seconds=2.0)
    arena = comm.device_arena
    assert arena is not None
    gather = lambda columns: all_gather_matmul(torch.ones(4, 6), [torch.ones(3, columns)], comm)  # noqa: E731
    gather(6)
    standstill = Standstill(arena, dist.group.WORLD)
    if rank == 1:
        standstill.leave()
        messages = [raised_by(lambda: None, arena)]
    else:
        with standstill:
            messages = [raised_by(lambda: gather(6), arena)]
    messages.append(raised_by(lambda: gather(6), arena))
    for call in (lambda: swap(torch.ones(4 + rank, 6), torch.ones(6), arena), lambda: gather(6 + rank)):
        arena.reset(dist.group.WORLD)
        messages.append(raised_by(call, arena))
    return messages


AWAITED = tuple(
    f"{what} of rank 1, which gave no signal for about 2 s: reset it on every rank, or start the ranks again"
    for what in ("shard", "copy of split 0")
)


def in_two(message: str) -> tuple[str, str]:
    """Who waited where, and for what."""
    said, _, awaited = message.partition(", for the ")
    return said, awaited


def test_the_messages_shown_are_the_messages_raised(interpreters: RankPool, example: Path) -> None:
    shown = " ".join(README.split())
    (late, _, mismatch, refused), (_, poisoned, _, wrong) = interpreters.run(messages_of_failures, 2, str(example))
    # Which of rank 0's two waits is over first, for the shard or for its copy, each area may be told otherwise.
    said, awaited = in_two(late)
    hears, also_awaited = in_two(poisoned)
    assert said.startswith("PeerTimeout: ") and f"{said}, for the {AWAITED[0]}" in shown
    assert hears == said.replace("PeerTimeout: rank 0", "GroupPoisoned: rank 1")
    assert awaited in AWAITED and also_awaited in AWAITED
    # Whoever of the two sees the other's number first.
    assert mismatch.replace("rank 1 and rank 0", "rank 0 and rank 1") in shown and "rank 0 calls swap" in mismatch
    assert refused.startswith("CallMismatch: ") and refused in shown
    assert wrong.startswith("ValueError: all_gather_matmul needs x[T/tp, D]")


def compile_example(source: str, target: str) -> list[str]:
    """The code of the example's kernel for a target."""
    module = modules_of({"swap": source})["swap"]
    memory = VirtualMemory.allocate(4, CONTROL_BYTES, "cpu")[0]
    record = torch.zeros(8, dtype=torch.int32)
    arena = DeviceArena(memory, record, HostCopies(), 1 << 30, "of no ranks", range(4), timeout_seconds=1.0)
    x, scale = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((256, 512), (512,)))
    return codes_of(target, lambda: module.swap(x, scale, arena))


@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=() if target == "sm_90" else pytest.mark.slow) for target in TARGETS]
)
def test_the_compiled_example_keeps_the_order_of_signals(compilers: RankPool, example: Path, target: str) -> None:
    (code,) = compilers.run(compile_example, 1, example.read_text(), target)[0]
    assert "swap_kernel" in code
    assert not (faults_amd(code) if target == "gfx942" else faults(code))
