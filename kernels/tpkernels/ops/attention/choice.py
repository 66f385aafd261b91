"""Whose attention a call takes, our kernels or torch's: by rule, unless a file of what was timed here says otherwise.

    ours    where it is asked for; where torch is to be deterministic; for dropout, whose mask is a function of position
    file    what was the fastest for these sizes on this kind of GPU, causal attention of whole sequences
    rule    torch's for 16 bits and sequences of at least 512 tokens on sm_90, sm_100 and sm_103: cuDNN's from 9.15 on
            where torch.backends.cuda.can_use_cudnn_attention agrees; for windows and packed documents varlen_attn

"torch" asks for torch's attention wherever it computes the same, on any GPU and for any length; where it does not, that
is an error, and nothing else is computed instead. Torch's attention rounds otherwise than ours, and its backward may
add in another order on each run.

Torch's takes operands as ours does: whole sequences by scaled_dot_product_attention; windows and packed documents by
torch.nn.attention.varlen, which calls FlashAttention 2, or 3 or 4 where
torch.nn.attention.activate_flash_attention_impl has put them in its place.

The decision a reader will question: torch is asked once for each kind of operands, when a layer is made or first
called, not for each call. What is switched off in torch.backends.cuda later is not noticed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from tpkernels.again import once
from tpkernels.launch import Target, constant_while_traced, target_of
from tpkernels.ops.matmul.tuned import OURS, path_for, tuned_attention

Whose = Literal["auto", "ours", "torch"]
WHOSE: tuple[Whose, ...] = ("auto", "ours", "torch")

# GPUs whose attention by torch is faster than ours: cuDNN 1.6 to 2.0 times on one H200 (benchmarks/README.md).
_FASTER_ON = (90, 100, 103)
_LEAST_CUDNN = 91500
_LEAST_TOKENS = 512
_NARROW = (torch.bfloat16, torch.float16)
# Of a head, for FlashAttention.
_MOST_COLUMNS = 256
# For which torch is asked: whether it takes a call does not depend on more tokens.
_ASKED_TOKENS = 512


class Problem(NamedTuple):
    """Causal attention, as far as the choice depends on it.

    Attributes:
        device, dtype: of the operands.
        seq: tokens of a sequence; of packed documents, of the longest that there may be.
        heads, kv_heads, head_size: H, G and E of this rank.
        windowed: whether a query sees a window of keys only.
        packed: whether documents are packed into one sequence.
        drops: whether probabilities are dropped.
    """

    device: torch.device
    dtype: torch.dtype
    seq: int
    heads: int
    kv_heads: int
    head_size: int
    windowed: bool = False
    packed: bool = False
    drops: bool = False


class Choice(NamedTuple):
    """Whose attention is taken, and why.

    Attributes:
        backend: "cudnn", "flash" or "math" of torch's scaled_dot_product_attention, "varlen" for varlen_attn; None for
            our kernels.
        reason: in words.
    """

    backend: str | None
    reason: str


class Gpu(NamedTuple):
    """A GPU of NVIDIA, and the version of cuDNN that torch has for it, 91500 for 9.15.0; 0 without."""

    name: str
    target: Target
    cudnn: int


def choose(problem: Problem, whose: Whose = "auto") -> Choice:
    """Return whose attention computes a problem.

    Args:
        problem: what is to be computed.
        whose: what was asked for.

    Raises:
        ValueError: "torch" was asked for, and does not compute this; or the file of this kind of GPU is wrong.
    """
    return _choose(whose, torch.are_deterministic_algorithms_enabled(), *problem)


def chosen_backend(problem: Problem, whose: Whose = "auto") -> str | None:
    """Return the backend of `choose`; in what is computed again that of the first time. Raises: as choose."""
    if torch.compiler.is_compiling():
        return _backend(whose, torch.are_deterministic_algorithms_enabled(), *problem)
    return once(lambda: choose(problem, whose).backend)


def forget() -> None:
    """Ask torch and look at the GPU again when it is next needed."""
    for known in (_choose, gpu_of, _torch_agrees):
        known.cache_clear()


@constant_while_traced
def _backend(
    whose: Whose,
    is_deterministic: bool,
    device: torch.device,
    dtype: torch.dtype,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    windowed: bool,
    packed: bool,
    drops: bool,
) -> str | None:
    """Choose while torch.compile traces: `_choose`, whose arguments are then constants."""
    sizes = seq, heads, kv_heads, head_size
    return _choose(whose, is_deterministic, device, dtype, *sizes, windowed, packed, drops).backend


@functools.cache
def _choose(whose: Whose, is_deterministic: bool, *of: object) -> Choice:
    problem = Problem(*of)  # type: ignore[arg-type]
    if whose == "ours":
        return Choice(None, "as asked for")
    refusal = "torch is to be deterministic" if is_deterministic else ""
    if whose == "torch":
        backend, refusal = (None, refusal) if refusal else _any_of_torchs(problem)
        if backend is None:
            raise ValueError(
                f"attention torch must be what torch computes alike: {refusal}: use attention auto, or ours"
            )
        return Choice(backend, "as asked for")
    if refusal:
        return Choice(None, refusal)
    return _timed(problem) or _by_rule(problem)


def _timed(problem: Problem) -> Choice | None:
    """Return what a file says of a problem, if there is one and torch's attention of it runs here."""
    if problem.windowed or problem.packed or problem.drops:
        return None
    found = tuned_attention(*problem[:6])
    if found is None:
        return None
    gpu = gpu_of(problem.device)
    where = f"{path_for(problem.device.type if gpu is None else gpu.name).name} of {found.date}"
    if found.winner == OURS:
        return Choice(None, f"the fastest by {where}")
    if found.winner != "math" and not (gpu and _torch_agrees(found.winner, *problem[:2], *problem[3:6])):
        return None
    return Choice(found.winner, f"{found.us:g} us instead of {found.ours_us:g} by {where}")


def _by_rule(problem: Problem) -> Choice:
    gpu = gpu_of(problem.device)
    if gpu is None:
        return Choice(None, f"on {problem.device.type}")
    if gpu.target.arch not in _FASTER_ON:
        sm = ", ".join(f"sm_{arch}" for arch in _FASTER_ON)
        return Choice(None, f"{gpu.name} is of another kind than {sm}")
    if problem.seq < _LEAST_TOKENS:
        return Choice(None, f"{problem.seq} tokens are fewer than {_LEAST_TOKENS}")
    if refusal := (_not_varlens(problem, gpu) if problem.windowed or problem.packed else _not_cudnns(problem, gpu)):
        return Choice(None, refusal)
    return Choice("varlen" if problem.windowed or problem.packed else "cudnn", f"by rule for sm_{gpu.target.arch}")


def _any_of_torchs(problem: Problem) -> tuple[str | None, str]:
    """Return a backend of torch's that computes a problem, or None and why there is none."""
    gpu = gpu_of(problem.device)
    if gpu is None:
        return None, f"it is for GPUs of NVIDIA, and the device is {problem.device.type}"
    if problem.windowed or problem.packed:
        refusal = _not_varlens(problem, gpu)
        return (None, refusal) if refusal else ("varlen", "")
    refusal = _not_cudnns(problem, gpu)
    if not refusal:
        return "cudnn", ""
    if problem.drops or not _torch_agrees("flash", *problem[:2], *problem[3:6]):
        return None, refusal
    return "flash", ""


def _not_torchs(problem: Problem) -> str:
    """Return why no attention of torch's computes a problem alike, as far as that is so for all; empty if it may."""
    if problem.drops:
        return "it drops probabilities by a mask of its own, not by position"
    if problem.dtype not in _NARROW:
        return f"it is for 16 bits, and the dtype is {str(problem.dtype).removeprefix('torch.')}"
    return ""


def _not_cudnns(problem: Problem, gpu: Gpu) -> str:
    """Return why cuDNN's attention does not compute a problem; empty if it does."""
    if refusal := _not_torchs(problem):
        return refusal
    if gpu.cudnn < _LEAST_CUDNN:
        return f"it needs cuDNN {_version(_LEAST_CUDNN)}, and torch has {_version(gpu.cudnn) if gpu.cudnn else 'none'}"
    if not _torch_agrees("cudnn", *problem[:2], *problem[3:6]):
        return f"torch.backends.cuda.can_use_cudnn_attention refuses heads of {problem.head_size} on {gpu.name}"
    return ""


def _not_varlens(problem: Problem, gpu: Gpu) -> str:
    """Return why varlen_attn does not compute a window or documents; empty if it does."""
    if refusal := _not_torchs(problem):
        return refusal
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    if problem.head_size % 8 or problem.head_size > _MOST_COLUMNS or int(gpu.target.arch) < 80:
        return (
            f"FlashAttention is for heads of 8, 16, ... {_MOST_COLUMNS} from sm_80 on: heads of {problem.head_size} on "
            f"sm_{gpu.target.arch}"
        )
    known = frozenset(inspect.signature(varlen_attn).parameters)
    needed = {"window_size", "scale"} | ({"enable_gqa"} if problem.heads != problem.kv_heads else set())
    if missing := sorted(needed - known):
        return f"varlen_attn of torch {torch.__version__} has no {' and no '.join(missing)}"
    return ""


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of NVIDIA that a device is; None if it is none."""
    if device.type != "cuda" or torch.version.hip:
        return None
    target = target_of(torch.empty(0, device=device))
    return Gpu(torch.cuda.get_device_name(device), target, torch.backends.cudnn.version() or 0)


@functools.cache
def _torch_agrees(
    backend: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int
) -> bool:
    """Return whether torch takes causal operands, as `attention_by_torch` passes them, for cuDNN's or flash."""
    # What torch may compute forward alone does not do.
    like: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    q, k = (torch.empty(1, _ASKED_TOKENS, number, head_size, **like).transpose(1, 2) for number in (heads, kv_heads))
    cuda = torch.backends.cuda
    ask = cuda.can_use_cudnn_attention if backend == "cudnn" else cuda.can_use_flash_attention
    # Torch looks at the current GPU, and at what backward needs only where gradients are recorded.
    with torch.cuda.device_of(q), torch.inference_mode(False), torch.enable_grad():
        return bool(ask(cuda.SDPAParams(q, k, k, None, 0.0, True, heads != kv_heads)))


def _version(number: int) -> str:
    """Return cuDNN's version, 91501 as 9.15.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Its signature differs between versions of torch: `_not_varlens` has looked at it.
_varlen: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    scale: float | None = None,
    *,
    window: int | None = None,
    starts: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Attend causally by one of torch's backends: y[B, S, H, E] of q[B, S, H, E] and k, v[B, S, G, E].

    Args:
        backend: what chosen_backend returned.
        scale: of the scores; default 1 / sqrt(E).
        window: how many keys back a query sees, its own included; None for all. For "varlen".
        starts: int32 [documents + 1] of packed documents, B = 1. For "varlen".
        longest: tokens of the longest document that there may be.

    Numerics: the backend's; backward may differ from run to run.
    """
    groups = q.shape[2] != k.shape[2]
    if backend == "varlen":
        if starts is None:
            # What a captured graph reads must be its own: others may replace what is kept here.
            is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
            starts_of = _starts_of.__wrapped__ if is_captured else _starts_of
            starts, longest = starts_of(q.shape[0], q.shape[1], q.device), q.shape[1]
        options = {"enable_gqa": True} if groups else {}
        y = _varlen(
            *(of.flatten(0, 1) for of in (q, k, v)),
            starts,
            starts,
            longest,
            longest,
            scale=scale,
            # Keys to the left and to the right of a query's own.
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )
        return y.view(q.shape)
    assert window is None and starts is None, backend
    q, k, v = (of.transpose(1, 2) for of in (q, k, v))
    # cuDNN refuses one token, which sees itself alone: any backend returns v.
    backends = [_BACKENDS[backend], SDPBackend.MATH] if q.shape[2] == 1 else [_BACKENDS[backend]]
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups)
    return y.transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _starts_of(batch: int, seq: int, device: torch.device) -> Tensor:
    """Return where whole sequences begin, as documents."""
    # They serve all modes: what is made under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)
