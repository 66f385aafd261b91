"""Rung: pure: compiles, runs nothing. Launches that have been made before: the code they take, what the driver gets.

The driver is none (still_gpu.py) and notes what it is given. Only a GPU shows that it launches.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

import triton
from tpkernels import known_kernels, launch
from tpkernels.launch import jit, run, tl
from tpkernels.ops.matmul.kernel import launch_matmul

from benchmarks.harness.still_gpu import still_gpu, why_not_still

pytestmark = pytest.mark.skipif(why_not_still() is not None, reason=str(why_not_still()))

_SHIFT = tl.constexpr(1)


@jit(do_not_specialize=["count"])
def scale_kernel(
    p_y: tl.tensor,
    p_x: tl.tensor,
    p_mask: tl.tensor | None,
    size: tl.tensor,
    count: tl.int32,
    seed: tl.int64,
    scale: tl.float32,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write y = (x + KIND + ...) * scale where mask is set: an argument of each kind that triton knows."""
    o = tl.arange(0, BLOCK)
    b = tl.load(p_x + o, mask=o < size).to(tl.float32) * scale + KIND + count + seed + _SHIFT
    tl.store(p_y + o, b, mask=o < size if p_mask is None else tl.load(p_mask + o) != 0)


Y, X, MASK = (torch.zeros(65, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.int8))
ARGUMENTS = {"y": Y, "x": X, "mask": None, "size": 48, "count": 3, "seed": 5, "scale": 0.5}
OPTIONS = {"KIND": 0, "BLOCK": 64, "num_warps": 4}
# What triton compiles anew.
ANEW: dict[str, dict[str, Any]] = {
    "dtype": {"x": X.half()},
    "alignment": {"x": X[1:]},
    "tensor": {"mask": MASK},
    "one": {"size": 1},
    "divisible": {"size": 47},
    "wide": {"size": 48 << 32},
    "aligned number": {"seed": 16},
    "constant": {"KIND": 1},
    "warps": {"num_warps": 8},
    "stages": {"num_stages": 3},
    "registers": {"maxnreg": 64},
}
# What it does not; all of it may change from call to call.
SAME: dict[str, dict[str, Any]] = {
    "another tensor": {"x": torch.zeros(65)},
    "another number": {"size": 64},
    "unspecialised": {"count": 16},
    "annotated": {"seed": 7},
    "float": {"scale": 1.0},
}


def call_of(changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and options of a call of scale_kernel."""
    each = ARGUMENTS | OPTIONS | changes
    return [each.pop(name) for name in ARGUMENTS], each


def passed(arguments: Sequence[Any]) -> list[Any]:
    """What the driver is passed: addresses instead of tensors."""
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]


@contextmanager
def noted() -> Iterator[tuple[list[list[Any]], list[str]]]:
    """Launch on a still GPU; yield what the driver has been passed, and the launches that triton has bound itself."""
    triton.knobs.cache.dir = str(Path(os.environ[CACHE_VARIABLE]) / "triton")
    launched: list[list[Any]] = []
    bound: list[str] = []
    own = triton.JITFunction.run

    def run_of_triton(self: Any, *arguments: Any, **options: Any) -> Any:
        bound.append(self.fn.__name__)
        return own(self, *arguments, **options)

    with still_gpu(lambda *arguments: launched.append(passed(arguments))), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", run_of_triton)
        yield launched, bound


def on_device(number: int) -> None:
    """Make a device the current one."""
    triton.runtime.driver.active.get_current_device = lambda: number


def as_triton_does(changes: dict[str, Any], device: int, debug: bool, launched: list[list[Any]]) -> bool:
    """Launch twice; return whether our way and triton's take the same code and pass the same arguments."""
    arguments, options = call_of(changes)
    on_device(device)
    triton.knobs.runtime.debug = debug
    try:
        ours = run(scale_kernel, (7, 2), *arguments, **options)
        # Triton compiles anew for options in another order.
        last = {"num_warps": options.pop("num_warps"), "num_stages": options.pop("num_stages", 1)}
        theirs = scale_kernel[7, 2](*arguments, **options, **last)
    finally:
        triton.knobs.runtime.debug = False
    return ours is theirs and launched[-2] == launched[-1]


def differing(blind_to: str = "") -> list[str]:
    """Launch everything in turns; return what has been launched otherwise than by triton.

    Args:
        blind_to: an argument or option, "options" or "settings" that launches are not looked up by.
    """
    calls = [(name, changes, 0, False) for name, changes in (ANEW | SAME).items()]
    calls += [("base", {}, 0, False), ("device", {}, 1, False), ("debug", {}, 0, True)]
    wrong = set()
    with noted() as (launched, bound), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "known_kernels", {})
        if blind_to == "settings":
            patch.setattr(known_kernels, "_settings", lambda kernel: ())
        elif blind_to:
            patch.setattr(known_kernels.KnownKernel, "_key", blind(blind_to))
        # New, then found by its kinds.
        for (name, *call), _ in itertools.product(calls, range(2)):
            if not as_triton_does(*call, launched):
                wrong.add(name)
        # Found by its numbers, in the other order.
        bound.clear()
        for name, *call in reversed(calls):
            if not as_triton_does(*call, launched):
                wrong.add(name)
        assert len(bound) == len(calls), "of each two launches triton must have made one"
    return sorted(wrong)


def blind(part: str) -> Callable[..., Any]:
    """`KnownKernel._key` without a part."""
    kept = known_kernels.KnownKernel._key

    def key(self: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seen = [None if name == part else x for name, x in zip(ARGUMENTS, arguments, strict=True)]
        shown = {} if part == "options" else {name: x for name, x in options.items() if name != part}
        return kept(self, tuple(seen), shown)

    return key


def test_a_launch_made_again_is_the_one_that_triton_makes(compilers: RankPool) -> None:
    assert compilers.run(differing, 1) == [[]]


def test_a_key_that_leaves_something_out_takes_the_wrong_code(
    compilers: RankPool, count_mutations: CountMutations
) -> None:
    parts = {"x": 2, "mask": 1, "size": 3, "seed": 1, "KIND": 1, "options": 3, "settings": 1}
    for part, least in parts.items():
        (found,) = compilers.run(differing, 1, part)
        count_mutations("launches made again", int(len(found) >= least), 1)
        assert len(found) >= least, (part, found)


def watched_launches() -> list[int]:
    """Of three launches, how many triton makes itself: unwatched, with each kind of hook, and unwatched again."""
    arguments, options = call_of({})
    runtime, made = triton.knobs.runtime, []

    def hook(*_: Any, **__: Any) -> tuple[str, str]:
        return "", ""

    with noted() as (_, bound), pytest.MonkeyPatch.context() as patch:
        run(scale_kernel, (1,), *arguments, **options)

        def count() -> None:
            bound.clear()
            for _ in range(3):
                run(scale_kernel, (1,), *arguments, **options)
            made.append(len(bound))

        count()
        for hooks in (scale_kernel.pre_run_hooks, runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls):
            hooks.append(hook)
            count()
            hooks.clear()
        patch.setattr(runtime, "add_stages_inspection_hook", hook)
        count()
        patch.undo()
        count()
    return made


def test_launches_that_somebody_watches_are_made_by_triton(compilers: RankPool) -> None:
    assert compilers.run(watched_launches, 1) == [[0, 3, 3, 3, 3, 0]]


def after_a_global_name_has_changed() -> str:
    """Launch, change a name that the kernel reads, launch; return what triton says."""
    arguments, options = call_of({})
    with noted(), pytest.MonkeyPatch.context() as patch:
        run(scale_kernel, (1,), *arguments, **options)
        run(scale_kernel, (1,), *arguments, **options)
        patch.setitem(scale_kernel.fn.__globals__, "_SHIFT", tl.constexpr(2))
        try:
            run(scale_kernel, (1,), *arguments, **options)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_global_name_that_has_changed_is_refused_as_triton_does(compilers: RankPool) -> None:
    (message,) = compilers.run(after_a_global_name_has_changed, 1)
    assert message.startswith("Global variable _SHIFT has changed since we compiled this kernel")


def kept_and_devices() -> tuple[bool, list[int]]:
    """Launch; return whether a tensor is kept alive, and the device that was current in each of three launches."""
    arguments, options = call_of({"x": torch.zeros(65)})
    devices: list[int] = []
    with noted(), pytest.MonkeyPatch.context() as patch:
        driver = triton.runtime.driver.active
        current = [0]
        driver.get_current_device = lambda: current[0]
        driver.launched = lambda *_: devices.append(current[0])

        @contextmanager
        def device(number: int) -> Iterator[None]:
            current[0], before = number, current[0]
            yield
            current[0] = before

        patch.setattr(torch.cuda, "device", device)
        run(scale_kernel, (1,), *arguments, **options)
        run(scale_kernel, (1,), *arguments, **options)
        last = weakref.ref(arguments[1])
        del arguments
        is_kept = last() is not None
        patch.setattr(torch.Tensor, "get_device", lambda _: 1)
        for _ in range(2):
            run(scale_kernel, (1,), *call_of({})[0], **options)
    return is_kept, devices


def test_no_tensor_is_kept_and_a_tensors_device_is_the_current_one(compilers: RankPool) -> None:
    assert compilers.run(kept_and_devices, 1) == [(False, [0, 0, 1, 1])]


def both_ways() -> list[tuple[list[Any], list[Any]]]:
    """What the driver is passed by the third and fourth launch of a product of descriptors: by us, and by triton."""
    x, y = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2))
    known = launch._launched

    def twice(kernel: Any, grid: Any, arguments: Any, options: dict[str, Any], *where: Any) -> Any:
        compiled = known(kernel, grid, arguments, options, *where)
        assert compiled is kernel[grid](*arguments, **options)
        return compiled

    with noted() as (launched, bound), pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            launch_matmul(x, x.T)
        patch.setattr(launch, "_launched", twice)
        num_before, num_bound = len(launched), len(bound)
        for left, right in ((x, x), (y, x)):
            launch_matmul(left, right.T)
        made = launched[num_before:]
        assert len(bound) - num_bound == 2
    return list(zip(made[::2], made[1::2], strict=True))


def test_descriptors_are_those_of_this_call(compilers: RankPool) -> None:
    ((*pairs,),) = compilers.run(both_ways, 1)
    assert len(pairs) == 2 and pairs[0] != pairs[1]
    for ours, theirs in pairs:
        assert ours == theirs
