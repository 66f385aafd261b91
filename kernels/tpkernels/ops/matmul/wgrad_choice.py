"""Whether torch adds a weight gradient of 16 bits to a float32 buffer (cuBLAS), or our kernel does.

torch's is the default on CUDA where it can: `torch.addmm(dw, dy.T, x, out_dtype=float32, out=dw)`. Whether it can is
found by doing it once on the device, not by torch's version: the overload was there before it took a buffer wider than
the operands. Ours is taken where it was timed faster on this kind of GPU (tuned.py), and always where torch is to be
deterministic, as exact mode makes it: nobody promises the bits of a library. What is taken is said once per device.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from tpkernels.launch import refuse_while_captured
from tpkernels.ops.matmul.tuned import key_of, num_ours, ours_was_faster, path_for


def is_torchs(buffer: Tensor, dy: Tensor, x: Tensor) -> bool:
    """Return whether torch.addmm adds dy[T, out].T @ x[T, in] to buffer[out, in], and say once which it is.

    Raises:
        ValueError: the file of what was timed on this GPU is wrong.
    """
    if not x.is_cuda or x.dtype.itemsize != 2 or buffer.dtype != torch.float32:
        return False
    if torch.are_deterministic_algorithms_enabled() or not x.numel() or not dy.numel():
        return False
    return _chosen(x.device, x.dtype, buffer.shape[0], buffer.shape[1], len(x), dy.stride(0) == 1, x.stride(1) == 1)


@functools.lru_cache(maxsize=4096)
def _chosen(
    device: torch.device, dtype: torch.dtype, out: int, inner: int, tokens: int, a_by_rows: bool, b_by_rows: bool
) -> bool:
    refusal = refusal_of(device, dtype)
    _say(device, dtype, refusal)
    key = key_of(out, inner, tokens, str(dtype).removeprefix("torch."), a_by_rows, b_by_rows, True)
    return not refusal and not ours_was_faster(device, key)


@functools.cache
def refusal_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return why torch cannot add products of a dtype to float32 on a device, in one line; empty if it can.

    Raises:
        RuntimeError: there is no memory for it; or it is asked first while a CUDA graph is captured.

    Cost: a product of 16 x 16, once; the host waits for it.
    """
    refuse_while_captured(device, "whether torch adds weight gradients to float32 is not known yet")
    # A sum of 16 + 2^-7, and 2^-12 to add it to: 16 bits hold neither the product nor the result.
    dy, x = (torch.ones(16, 16, dtype=dtype, device=device) for _ in range(2))
    x[0] += 2.0**-7
    buffer = torch.full((16, 16), 2.0**-12, device=device)
    try:
        add_by_torch(buffer, dy, x)
    except (TypeError, RuntimeError) as error:  # no such overload, or one that wants another buffer
        # Memory that is short now says nothing of what torch can.
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            raise
        return " ".join(str(error).split())[:160] or type(error).__name__
    return "" if bool((buffer == 16 + 2.0**-7 + 2.0**-12).all()) else "it rounds sums to 16 bits"


def add_by_torch(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dy[T, out].T @ x[T, in], of 16 bits, to a float32 buffer by cuBLAS, without a product beside it."""
    torch.addmm(buffer, dy.T, x, out_dtype=buffer.dtype, out=buffer)


def forget() -> None:
    """Choose again when next asked."""
    for known in (_chosen, refusal_of, _say):
        known.cache_clear()


@functools.cache
def _say(device: torch.device, dtype: torch.dtype, refusal: str) -> None:
    name = str(dtype).removeprefix("torch.")
    if refusal:
        words = f"by our kernel: torch {torch.__version__} does not: {refusal}"
    else:
        faster = num_ours(device, name)
        ours = f" ({faster} that {path_for(_name_of(device)).name} has faster by our kernel)" if faster else ""
        words = f"by torch.addmm{ours}; torch.use_deterministic_algorithms(True) takes our kernel"
    print(f"tpkernels: weight gradients in {name} are added to float32 {words}", file=sys.stderr)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
