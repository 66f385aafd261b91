"""The clocks of the GPU, as its driver tells them: a GPU lowers them by power and heat, and two runs may differ by it.

The driver's library NVML is called directly: the packages that wrap it, which torch.cuda.clock_rate needs, may be
missing where the driver is not.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

_LIBRARY = "libnvidia-ml.so.1"
# Of nvmlClockType_t.
_PROCESSORS, _MEMORY = 1, 2


class Clocks(NamedTuple):
    """What the multiprocessors and the memory run at, in MHz; None where nobody tells."""

    processors_mhz: int | None
    memory_mhz: int | None


def clocks() -> Clocks:
    """Return the clocks of torch's current GPU now: just after work they are those of the work."""
    if not torch.cuda.is_available():
        return Clocks(None, None)
    # Builds of torch for other makers' GPUs have none.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
    found = _device(str(uuid))
    if found is None:
        return Clocks(None, None)
    return Clocks(_clock(*found, _PROCESSORS), _clock(*found, _MEMORY))


@functools.cache
def _device(uuid: str) -> tuple[Any, Any] | None:
    """Return the driver's library and its handle of a GPU; None if there is no library, or it knows no such GPU."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    handle, number = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlInit_v2() != 0:
        return None
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0:
        return library, handle
    # A virtual machine may name its GPU otherwise; where there is one only, it is that.
    is_alone = library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 and number.value == 1
    if is_alone and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0:
        return library, handle
    return None


def _clock(library: Any, handle: Any, kind: int) -> int | None:
    value = ctypes.c_uint()
    is_told = library.nvmlDeviceGetClockInfo(handle, kind, ctypes.byref(value)) == 0
    return value.value if is_told else None
