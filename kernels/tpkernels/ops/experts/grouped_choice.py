"""Whether torch's grouped_mm multiplies rows by their experts' weights, or our kernel does.

torch's (CUTLASS) is taken by rule: on sm_90, in bfloat16, one product, operands aligned as it wants them. It leaves
rows beyond the last expert's unwritten, by design (pytorch/pytorch issue 154557), so zeros are written behind it.
Ours is taken everywhere else, and always with `fixed` and where torch is to be deterministic, as exact mode makes it:
nobody promises the bits of a library.

Not by torch, whatever the sizes: on GPUs other than sm_90, where torch loops over experts and waits for the offsets, or
has no kernels or wrong ones for experts without rows (issues 172439, 193633); SwiGLU and sums of two products, which it
has not; and weight gradients: grouped_mm of two matrices returns 16 bits, adds to no buffer, and an expert without rows
gets what its memory held. What is taken is said once per device. The rule has run on no GPU yet.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.launch import refuse_while_captured, target_of
from tpkernels.ops.experts.grouped_kernel import launch_zero_rows

_TAKEN_ON = (90,)
_MOST_EXPERTS = 1024


def is_torchs(x: Tensor, w: Tensor, fixed: bool) -> bool:
    """Return whether torch's grouped_mm multiplies x[R, K] by w[E, ., .], and say once per device which it is."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or fixed or torch.are_deterministic_algorithms_enabled():
        return False
    if not x.numel() or not w.numel() or not w.is_contiguous() or x.stride(1) != 1:
        return False
    # It refuses rows that overlap, and more experts than a block of its first kernel has threads.
    if x.stride(0) < x.shape[1] or len(w) >= _MOST_EXPERTS:
        return False
    # TMA reads rows that begin at multiples of 16 bytes, and writes such.
    elements = 16 // x.element_size()
    if any(n % elements for n in (x.stride(0), *w.shape[1:])) or x.data_ptr() % 16 or w.data_ptr() % 16:
        return False
    refusal = refusal_of(x.device)
    _say(x.device, refusal)
    return not refusal


def multiply_by_torch(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Return y[R, N] by grouped_mm, rows beyond offsets[E] zeros; operands as is_torchs wants them."""
    y = F.grouped_mm(x, w if transposed else w.transpose(1, 2), offs=offsets[1:])
    launch_zero_rows(y, offsets)
    return y


@functools.cache
def refusal_of(device: torch.device) -> str:
    """Return why torch's grouped_mm is not taken on a device, in one line; empty if it is.

    Raises:
        RuntimeError: it is asked first while a CUDA graph is captured.

    Cost: once a product of 16 rows, where the kind of GPU is one of the rule's; the host waits for it.
    """
    target = target_of(torch.empty(0, device=device))
    if target.backend != "cuda" or target.arch not in _TAKEN_ON:
        return f"it is for {', '.join(f'sm_{arch}' for arch in _TAKEN_ON)}, and this is {target.arch}"
    if not hasattr(F, "grouped_mm"):
        return "it has none"
    refuse_while_captured(device, "whether torch multiplies by experts is not known yet")
    # Whole numbers, exact in 16 bits; the second of three experts has no rows.
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    w = torch.arange(1, 4, dtype=torch.bfloat16, device=device)[:, None, None].expand(3, 16, 16).contiguous()
    ends = torch.tensor([8, 8, 16], dtype=torch.int32, device=device)
    try:
        found = [F.grouped_mm(x, w_, offs=ends) for w_ in (w, w.transpose(1, 2))]
    except (TypeError, RuntimeError) as error:
        # Memory that is short now says nothing of what torch can.
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            raise
        return " ".join(str(error).split())[:160] or type(error).__name__
    right = torch.cat((x[:8] * 16, x[8:] * 48))
    return "" if all(bool((y == right).all()) for y in found) else "it is wrong where an expert has no rows"


def forget() -> None:
    """Choose again when next asked."""
    for known in (refusal_of, _say):
        known.cache_clear()


@functools.cache
def _say(device: torch.device, refusal: str) -> None:
    if refusal:
        words = f"by our kernel: torch {torch.__version__}'s grouped_mm is not taken: {refusal}"
    else:
        words = "by torch's grouped_mm; torch.use_deterministic_algorithms(True) takes our kernel"
    print(f"tpkernels: products of experts in bfloat16 on {device} are {words}", file=sys.stderr)
