"""all_gather_matmul: the column-parallel matmul; it gathers its token shards while it multiplies.

    y_i[T, F_i/tp] = all_gather_tp(x[T/tp, D]) @ w_i[F_i/tp, D].T + b_i
    dx[T/tp, D]    = reduce_scatter_tp(sum_i dy_i @ w_i)
    dw_i           = dy_i.T @ all_gather_tp(x);  db_i = sum over T of dy_i

Forward is `gather_matmul` (gather.py), and dx its dual `matmul_scatter` (scatter.py); the kernel whose tiles wait for
peers' rows is in kernels/gather_kernel.py. Here are the specification, the registration with torch.library and the
public function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import dtype_conflict, lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.fused.gather import dtype_problem, gather_matmul
from tpkernels.fused.ordered import exchanges
from tpkernels.fused.scatter import matmul_scatter, scatter_and_gather

_NAME = "all_gather_matmul"


def all_gather_matmul_reference(
    shards: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return one rank's outputs, from all ranks' shards and that rank's weights: the specification."""
    full = torch.cat(list(shards))
    outputs = [full @ weight.T for weight in weights]
    return [y + bias for y, bias in zip(outputs, biases, strict=True)] if biases else outputs


@torch.library.custom_op("tpkernels::all_gather_matmul", mutates_args=())
def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, num_tokens: int, keep_gathered: bool
) -> list[Tensor]:
    comm = communicator_named(group)
    matrices = [w.T for w in weights]
    outputs, full = gather_matmul(x, matrices, comm, num_tokens, _NAME, keep=keep_gathered, biases=biases)
    if full is None:
        return outputs
    return [*outputs, full.clone() if full is x else full]


@exchanges(_forward)
def _(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: str, num_tokens: int, keep_gathered: bool
) -> list[Tensor]:
    outputs = [x.new_empty(num_tokens, w.shape[0]) for w in weights]
    return [*outputs, x.new_empty(num_tokens, x.shape[1])] if keep_gathered else outputs


@torch.library.custom_op("tpkernels::all_gather_matmul_dgrad", mutates_args=())
def _dgrad(dys: Sequence[Tensor], weights: Sequence[Tensor], dgathered: Tensor | None, group: str) -> Tensor:
    comm = communicator_named(group)
    if not dys:
        assert dgathered is not None, "some output has a gradient"
        dx = comm.reduce_scatter(dgathered)
        return dx.clone() if dx is dgathered else dx
    return matmul_scatter(list(zip(dys, weights, strict=True)), comm, _NAME, dgathered)


@exchanges(_dgrad)
def _(dys: Sequence[Tensor], weights: Sequence[Tensor], dgathered: Tensor | None, group: str) -> Tensor:
    comm = communicator_named(group)
    gradient = dys[0] if dys else dgathered
    assert gradient is not None, "some output has a gradient"
    rows = shard_rows(gradient.shape[0], comm.size, comm.rank)
    return gradient.new_empty(rows.stop - rows.start, weights[0].shape[1] if dys else gradient.shape[1])


@torch.library.custom_op("tpkernels::all_gather_matmul_dgrad_and_gather", mutates_args=())
def _dgrad_and_gather(
    dys: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, group: str, num_tokens: int
) -> list[Tensor]:
    comm = communicator_named(group)
    terms = list(zip(dys, weights, strict=True))
    dx, full = scatter_and_gather(terms, x, comm, num_tokens, _NAME)
    return [dx, full.clone() if full is x else full]


@exchanges(_dgrad_and_gather)
def _(dys: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, group: str, num_tokens: int) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty(num_tokens, x.shape[1])]


@torch.library.custom_op("tpkernels::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str, num_tokens: int) -> Tensor:
    full = communicator_named(group).all_gather_rows(x, num_tokens, operation=_NAME)
    return full.clone() if full is x else full


@exchanges(_all_gather)
def _(x: Tensor, group: str, num_tokens: int) -> Tensor:
    return x.new_empty(num_tokens, *x.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, group, num_tokens, keep_gathered = inputs
    ctx.save_for_backward(output[-1] if keep_gathered else x, *weights)
    ctx.call = group, num_tokens, keep_gathered, len(biases)
    # An output that was not used has gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    group, num_tokens, keep_gathered, num_biases = ctx.call
    dys = list(grads[: len(weights)])
    dgathered = grads[-1] if keep_gathered else None
    used = [(dy, w) for dy, w in zip(dys, weights, strict=True) if dy is not None]
    needs_dx = ctx.needs_input_grad[0] and bool(used or dgathered is not None)
    needs_dweights = _any(ctx.needs_input_grad[1]) and bool(used)
    terms = [dy for dy, _ in used], [w for _, w in used]
    dx, full = None, kept if keep_gathered else None
    if needs_dx and needs_dweights and full is None:
        # dw needs the second gather, after dx; dx hides it.
        dx, full = _dgrad_and_gather(*terms, kept, group, num_tokens)
    elif needs_dx:
        dx = _dgrad(*terms, dgathered, group)
    elif needs_dweights and full is None:
        full = _all_gather(kept, group, num_tokens)
    dweights: list[Tensor | None] = [None] * len(weights)
    if needs_dweights:
        assert full is not None, "gathered above"
        dweights = [None if dy is None else dy.T @ full for dy in dys]
    dbiases = [None if dy is None else dy.sum(0) for dy in dys[:num_biases]]
    return dx, dweights, dbiases, None, None, None


def _any(needs: bool | Sequence[bool]) -> bool:
    return needs if isinstance(needs, bool) else any(needs)


_forward.register_autograd(_backward, setup_context=_setup_context)


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    comm: Communicator,
    *,
    biases: Sequence[Tensor] | None = None,
    num_tokens: int | None = None,
    keep_gathered: bool = True,
    return_gathered: bool = False,
) -> tuple[Tensor, ...]:
    """Gather the token shards and multiply them by one or more weights.

        y_i[T, F_i/tp] = all_gather_tp(x[T/tp, D]) @ w_i[F_i/tp, D].T + b_i[F_i/tp]
        dx[T/tp, D] = reduce_scatter_tp(sum_i dy_i @ w_i);  dw_i = dy_i.T @ all_gather_tp(x)

    Args:
        x: [T/tp, D] of float16, bfloat16, float32 or float64, this rank's rows: ceil(T/tp) of them, on the last ranks
            fewer or none. float64 uses no kernel.
        weights: w_i [F_i/tp, D]; one gather serves all of them.
        comm: the tp ranks. The caller keeps it alive until nothing is left to differentiate.
        biases: b_i [F_i/tp], one per weight.
        num_tokens: T, equal on all ranks; default comm.size * x.shape[0].
        keep_gathered: keep the gathered x for dw; else gather it again in backward, T*D elements less memory.
        return_gathered: also return the gathered x, which is differentiable too. It is a copy that no rank writes to;
            backward reads it, so it must not be changed before.

    Returns:
        (y_0, y_1, ...) of x's dtype, then the gathered x[T, D] if asked for; new tensors.

    Raises:
        ValueError: shapes or dtypes that do not fit; over an arena on every rank if they do not fit on one.
        PeerError: over an arena, a peer did not take part.

    Cost: 2*T*D*sum(F_i)/tp flops; (tp-1)/tp*T*D elements received. Order: starts with its own rows; returns when all
    peers have published theirs. Numerics: those of the GEMM on each rank's rows, the same bits on every run.
    Source: Shoeybi et al., arXiv 1909.08053 (column-parallel); Korthikanti et al., arXiv 2205.05198 (sequence shards);
    Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023.
    """
    x, *rest = lowered(x, *[*weights, *(biases or ())])
    weights, biases = rest[: len(weights)], None if biases is None else rest[len(weights) :]
    tokens = comm.size * len(x) if num_tokens is None and x.ndim else num_tokens or 0
    problem = gather_problem(x, weights, biases, comm, tokens)
    if problem:
        comm.refuse(x, problem)
    refuse_tangents(_NAME, x, *weights, *(biases or ()))
    keep = keep_gathered or return_gathered
    outputs = _forward(x, list(weights), list(biases or ()), comm.name, tokens, keep)
    return tuple(outputs) if return_gathered or not keep else tuple(outputs[:-1])


def gather_problem(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, comm: Communicator, num_tokens: int
) -> str:
    """Return what is wrong with the arguments of a column-parallel matmul; empty if nothing is."""

    def shapes() -> str:
        return f"x {tuple(x.shape)}, weights {[tuple(w.shape) for w in weights]}"

    if x.ndim != 2 or not weights or any(w.ndim != 2 or w.shape[1] != x.shape[-1] for w in weights):
        return f"{_NAME} needs x[T/tp, D] and weights [F/tp, D]: {shapes()}: give every weight x's last dim"
    if problem := dtype_conflict(_NAME, x, (*weights, *(biases or ()))):
        return problem
    if biases is not None and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        return f"{_NAME} needs one bias [F/tp] per weight: biases {[tuple(b.shape) for b in biases]}, {shapes()}"
    if problem := dtype_problem(_NAME, x):
        return problem
    rows = shard_rows(num_tokens, comm.size, comm.rank)
    if x.shape[0] != rows.stop - rows.start:
        return (
            f"rank {comm.rank} of {comm.size} holds {rows.stop - rows.start} of {num_tokens} tokens: {_NAME} got "
            f"{x.shape[0]}: pass rows {rows.start} to {rows.stop}, or another num_tokens"
        )
    return ""
