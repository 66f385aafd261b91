"""The driver's memory operations on a stream: wait until a word of memory is large enough, and write one.

    wait    later work of the stream begins once (int32)(word - value) >= 0: epochs may wrap around
    write   after all earlier work of the stream, behind a fence of the whole system

Neither takes a processor or a kernel. They come from NVIDIA's `cuda.bindings`, which need not be installed, and every
device is asked. This is the only file that knows that interface; it was written for cuda.bindings 12 and 13.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch


class StreamMemory(Protocol):
    """Memory operations on streams, which are named by their handles."""

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let the stream wait until the int32 at an address is at least `value`, cyclically."""

    def write(self, stream: int, address: int, value: int) -> None:
        """Let the stream write an int32."""


class DriverMemory:
    """Memory operations of NVIDIA's driver.

    Args:
        driver: the module cuda.bindings.driver.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._fenced = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT

    def wait(self, stream: int, address: int, value: int) -> None:
        self._check("cuStreamWaitValue32", stream, address, value & 0xFFFFFFFF, self._at_least)

    def write(self, stream: int, address: int, value: int) -> None:
        self._check("cuStreamWriteValue32", stream, address, value & 0xFFFFFFFF, self._fenced)

    def _check(self, name: str, *arguments: Any) -> None:
        (result,) = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {result}: wait by kernels instead")


def driver_of(device: torch.device) -> tuple[Any, str]:
    """Return the driver's module, or why a device's streams cannot wait for memory; the other one is None, or empty."""
    if device.type != "cuda" or torch.version.hip:
        return None, "only NVIDIA's GPUs have streams that wait for memory"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None, "cuda.bindings is not installed: pip install cuda-bindings"
    from cuda.bindings import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
    failed, value = driver.cuDeviceGetAttribute(attribute, index)
    if failed != driver.CUresult.CUDA_SUCCESS or not value:
        return None, f"the streams of cuda:{index} cannot wait for memory"
    return driver, ""
