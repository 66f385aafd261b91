"""Dtypes of a run by name, and what else people call them: bf16, fp32, half. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)

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
