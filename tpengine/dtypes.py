"""Dtypes by name: of runs, of safetensors files, and what else people call them (bf16, fp32, half). No torch.

torch's own dtypes for these names are in torch_dtypes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)

# Bits of an element, by safetensors' names, in the order in which its library lays tensors into a file.
FILE_BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
        **dict.fromkeys(("F32", "U32", "I32"), 32),
        **dict.fromkeys(("BF16", "F16", "U16", "I16"), 16),
        **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"), 8),
        **dict.fromkeys(("F6_E3M2", "F6_E2M3"), 6),
        "F4": 4,
        "BOOL": 8,
    }
)
# Safetensors' names of the dtypes that a run, and the weights of a model, may have.
FILE_NAMES: Mapping[str, str] = MappingProxyType(
    {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
)

# torch's and numpy's other names, and those of config files and papers.
_ALSO: Mapping[str, str] = {
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
}


def dtype_named(text: str) -> str:
    """Return the name that a dtype has here; a text that names none comes back as it is, to be refused by name."""
    word = text.strip().lower().removeprefix("torch.").removeprefix("np.").removeprefix("numpy.")
    name = _ALSO.get(word, word)
    return name if name in DTYPES else text


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of a run's dtype, given by name."""
    return FILE_BITS[FILE_NAMES[dtype]] // 8
