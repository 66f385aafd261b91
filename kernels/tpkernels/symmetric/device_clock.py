"""The clock by which waits inside kernels end: nanoseconds, of the GPU or, interpreted, of this host.

    NVIDIA        %globaltimer: ns, one clock for the whole GPU; by GPU it advances in steps of 32 ns to about 1 ms
    AMD           s_memrealtime: steps of 10 ns. Only GPUs of the gfx9 family (gfx942 is one) have this instruction; for
                  others a kernel that waits does not compile
    interpreted   time.monotonic_ns

Only differences have a meaning. 64 bits of nanoseconds do not wrap around. The clocks do not depend on the processors'
frequency, and go on while a program is not scheduled.

The threads of a program read for themselves, and so read different times. A branch must not depend on what they read:
signals_kernel.py shows how one thread decides for all.
"""

from __future__ import annotations

import time
from typing import Any

from tpkernels.launch import INTERPRETED, jit, tl

NS_PER_SECOND = 10**9


@jit
def _device_ns() -> tl.tensor:
    """Read the GPU's clock; not pure, or the compiler would read it once for all loops."""
    # Another target's branch is never compiled: each target is asked for its own instruction alone.
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        # The wait is part of the text, because LLVM does not wait for what it cannot see.
        steps = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        return steps * 10


def _host_ns() -> int:
    """Read this host's clock.

    The result never fits into 32 bits: the interpreter keeps the integer type of the first value of a wait.
    """
    return 2**40 + time.monotonic_ns()


# For kernels: `now = now_ns()`.
now_ns: Any = _host_ns if INTERPRETED else _device_ns
