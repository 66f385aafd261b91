"""What the driver of NVIDIA's GPUs tells: its version, clocks, and what connects two GPUs.

The driver's library NVML is called directly: the packages that wrap it, which torch.cuda.clock_rate needs, may be
missing where the driver is not, and so may nvidia-smi. Nothing is changed on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

_LIBRARY = "libnvidia-ml.so.1"
# Of nvmlClockType_t.
_PROCESSORS, _MEMORY = 1, 2
# Of nvmlGpuP2PCapsIndex_t, and of nvmlGpuP2PStatus_t.
_NVLINK, _IS_OK = 2, 0
# Of nvmlGpuTopologyLevel_t: up to a host bridge two GPUs share PCIe switches, above it the way leads through the host.
_HOST_BRIDGE = 30
_TEXT_BYTES = 96


class Clocks(NamedTuple):
    """What the multiprocessors and the memory run at, in MHz; None where nobody tells."""

    processors_mhz: int | None
    memory_mhz: int | None


def clocks() -> Clocks:
    """Return the clocks of torch's current GPU now: just after work they are those of the work."""
    found = _current()
    if found is None:
        return Clocks(None, None)
    return Clocks(_clock(*found, _PROCESSORS), _clock(*found, _MEMORY))


def most_mhz() -> int | None:
    """Return the highest clock of the multiprocessors of torch's current GPU; None where nobody tells."""
    found = _current()
    if found is None:
        return None
    value = ctypes.c_uint()
    library, handle = found
    is_told = library.nvmlDeviceGetMaxClockInfo(handle, _PROCESSORS, ctypes.byref(value)) == 0
    return value.value if is_told else None


def driver_version() -> str:
    """Return the driver's version; empty where nobody tells."""
    library = _library()
    if library is None:
        return ""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    return text.value.decode("ascii", "replace") if library.nvmlSystemGetDriverVersion(text, _TEXT_BYTES) == 0 else ""


def link_between(uuid: str, other: str) -> str:
    """Return what connects two GPUs, by their UUIDs: NVLink, PCIe or host; empty where nobody tells."""
    handles = [_device(each) for each in (uuid, other)]
    if handles[0] is None or handles[1] is None:
        return ""
    (library, one), (_, two) = handles  # type: ignore[misc]
    status, level = ctypes.c_int(), ctypes.c_int()
    if library.nvmlDeviceGetP2PStatus(one, two, _NVLINK, ctypes.byref(status)) == 0 and status.value == _IS_OK:
        return "NVLink"
    if library.nvmlDeviceGetTopologyCommonAncestor(one, two, ctypes.byref(level)) != 0:
        return ""
    return "PCIe" if level.value < _HOST_BRIDGE else "host"


def _current() -> tuple[Any, Any] | None:
    if not torch.cuda.is_available():
        return None
    # Builds of torch for other makers' GPUs have none.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
    return _device(str(uuid))


@functools.cache
def _library() -> Any | None:
    """Return the driver's library, begun; None if there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@functools.cache
def _device(uuid: str) -> tuple[Any, Any] | None:
    """Return the driver's library and its handle of a GPU; None if there is no library, or it knows no such GPU."""
    library = _library()
    if library is None:
        return None
    handle, number = ctypes.c_void_p(), ctypes.c_uint()
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
