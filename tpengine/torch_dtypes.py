"""torch's dtypes by their names in safetensors files, and the bytes of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# As wide as in dtypes.py, and in its order.
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "I64": torch.int64,
        "F64": torch.float64,
        "F32": torch.float32,
        "I32": torch.int32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
FILE_NAME_OF: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data
