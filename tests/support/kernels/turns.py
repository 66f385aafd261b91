"""Programs of an interpreted launch in turns: at every step another may go on, where the interpreter runs one by one.

On a GPU the programs of a launch run at the same time. Here each is a thread, and one runs at a time. Whose turn it is
changes before and after what others could notice: numbers drawn, tiles stored, counted and announced, polls. A seed
decides, so every order of these steps can come up, and comes up again.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from support.ranks.standstill import Standstill

# The functions, as a kernel's module knows them, around which the turn changes: those of the fused kernels.
STEPS = ("claim", "count_done", "notify", "wait", "finish", "add_own")


class Turns:
    """Runs the programs of this rank's launches in turns.

    Args:
        seed: of the order, another for each rank. It also decides at what share of the steps the turn changes.
        standstill: entered. Time passes only while all programs of the rank that are left wait in vain. None where no
            kernel asks for the time.
        share: of the steps at which the turn changes; default by the seed.
    """

    def __init__(self, seed: int, standstill: Standstill | None, share: float | None = None) -> None:
        from tpkernels.symmetric import signals_kernel

        self._random = random.Random(seed)
        self._share = self._random.choice((0.1, 0.5, 0.9)) if share is None else share
        self._standstill, self._clock = standstill, signals_kernel._now_ns
        self._now: int = 2**40
        self._changed = threading.Condition()
        self._left: list[int] = []
        self._turn = -1
        # What each program has seen, and what it has polled in vain since.
        self._seen: dict[int, int] = {}
        self._in_vain: dict[int, int] = {}
        self._errors: list[BaseException] = []

    @contextlib.contextmanager
    def of(self, module: ModuleType, steps: Sequence[str] = STEPS) -> Iterator[None]:
        """Let the programs of a module's kernels take turns, around its functions of these names."""
        from tpkernels.symmetric import signals_kernel
        from triton.runtime import interpreter

        executor = interpreter.GridExecutor

        def executor_in_turns(kernel: Any, *rest: Any) -> Any:
            one = executor(kernel, *rest)
            if kernel.__globals__["__name__"] == module.__name__:
                one.fn = _Kernel(kernel, self)
            return one

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "GridExecutor", executor_in_turns)
            patch.setattr(signals_kernel, "_now_ns", self._time)
            for name in steps:
                patch.setattr(module, name, self._step(getattr(module, name)))
            yield

    def run(self, program: Callable[[], None], num_programs: int) -> None:
        """Run every program to its end; raise the first error of one."""
        self._left, self._turn, self._errors = list(range(num_programs)), -1, []
        self._seen, self._in_vain = {}, {}
        threads = [threading.Thread(target=self._whole, args=(i, program)) for i in self._left]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        self._turn = -1
        if self._errors:
            raise self._errors[0]

    def until_others_end(self) -> None:
        """Keep the program that calls this back until all others have ended."""
        while len(self._left) > 1:
            self._change(1.0)

    def until(self, holds: Callable[[], bool]) -> None:
        """Keep the program that calls this back until a condition holds, which another must bring about."""
        while not holds():
            assert len(self._left) > 1, "the last program waits, and nobody is left whom it could wait for"
            self._change(1.0)

    def _whole(self, i: int, program: Callable[[], None]) -> None:
        try:
            self._await(i)
            program()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._left.remove(i)
            self._pass_on()

    def _pass_on(self) -> None:
        with self._changed:
            self._turn = self._random.choice(self._left) if self._left else -1
            self._changed.notify_all()

    def _await(self, i: int) -> None:
        from triton.runtime.interpreter import interpreter_builder

        with self._changed:
            self._changed.wait_for(lambda: self._turn == i)
        if self._errors:
            raise RuntimeError("another program of the launch has failed")
        interpreter_builder.set_grid_idx(i, 0, 0)

    def _change(self, share: float) -> None:
        """Let another program go on, in this share of the cases."""
        me = self._turn
        if me >= 0 and self._random.random() < share:
            self._pass_on()
            self._await(me)

    def _step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._change(self._share)
            result = function(*args, **kwargs)
            self._change(self._share)
            return result

        return stepped

    def _time(self) -> int:
        """Return the time to a program that has polled in vain, after others have had their turn."""
        assert self._standstill is not None
        me, state = self._turn, self._standstill.state()
        if self._seen.get(me) == state:
            self._in_vain[me] = state
        self._seen[me] = state
        if all(self._in_vain.get(i) == state for i in self._left):
            self._now = max(self._now, self._clock())
        self._change(1.0)
        return self._now


class _Kernel:
    """A kernel whose first program runs all of them; it looks like the function that it stands for."""

    def __init__(self, kernel: Any, turns: Turns) -> None:
        self._kernel, self._turns = kernel, turns
        self.__signature__, self.__name__ = inspect.signature(kernel), kernel.__name__
        self.__globals__, self.__annotations__ = kernel.__globals__, kernel.__annotations__

    def __call__(self, **args: Any) -> None:
        from triton.runtime.interpreter import interpreter_builder

        if interpreter_builder.grid_idx == (0, 0, 0):
            self._turns.run(lambda: self._kernel(**args), interpreter_builder.grid_dim[0])
